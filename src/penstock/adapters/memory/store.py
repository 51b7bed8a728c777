"""An honest store that forgets: the same promises as any other, but for durability."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from msgspec.structs import replace

from penstock.core.errors import NotFound, Unavailable
from penstock.core.job import Job
from penstock.core.transition import (
    Accept,
    Answer,
    BrokenLog,
    Change,
    Folded,
    Transition,
    Verdict,
    admit,
    advance,
    fold,
    followers,
)
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import (
    Durability,
    JobQuery,
    Listener,
    LogLine,
    Mismatch,
    Pruned,
    Verified,
)


class MemoryStore:
    """See `penstock.ports.store.Store`."""

    durability = Durability.MEMORY

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._ids: dict[int, str] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._logs: dict[str, list[Transition]] = defaultdict(list)
        self._lines: dict[str, list[LogLine]] = defaultdict(list)
        self._facts: dict[str, bytes] = {}
        self._listeners: list[Listener] = []
        self._next_seq = 1
        self._closed = False

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        await asyncio.sleep(0)
        if self._closed:
            raise Unavailable("the store is closed")
        moved: list[Answer] = []
        answers = [self._decide(change, moved) for change in changes]
        if moved:
            for listener in tuple(self._listeners):
                listener(moved)
        return answers

    def _decide(self, change: Change, moved: list[Answer]) -> Answer:
        if isinstance(change, Accept):
            return self._accept(change, moved)
        job = self._jobs.get(change.job_id)
        if job is None:
            return Answer(Verdict.REFUSED, None, why=f"no job {change.job_id}")
        answer = advance(job, change)
        if answer.moved:
            self._keep(answer, moved)
            for follower in followers(job, change):
                self._accept(follower, moved)
        return answer

    def _accept(self, accept: Accept, moved: list[Answer]) -> Answer:
        request = accept.request
        key = (request.tenant, request.idempotency_key or "")
        held = self._jobs.get(request.job_id) or self._jobs.get(self._keys.get(key, ""))
        if held is not None:
            return Answer(Verdict.REPEATED, held)
        answer = admit(accept, self._next_seq)
        self._ids[self._next_seq] = request.job_id
        self._next_seq += 1
        if request.idempotency_key is not None:
            self._keys[key] = request.job_id
        self._keep(answer, moved)
        return answer

    def _keep(self, answer: Answer, moved: list[Answer]) -> None:
        assert answer.job is not None
        self._jobs[answer.job.job_id] = answer.job
        self._logs[answer.job.job_id].extend(answer.transitions)
        moved.append(answer)

    def listen(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def get(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        return [self._jobs[self._ids[seq]] for seq in seqs if seq in self._ids]

    async def find(self, query: JobQuery) -> list[Job]:
        found = [job for job in self._jobs.values() if _matches(query, job)]
        if query.workflow_id is not None:
            found.sort(key=lambda job: (_step(job), job.seq))
        else:
            found.sort(key=lambda job: job.seq, reverse=not query.oldest_first)
        return found[: query.limit]

    async def unfinished(self) -> list[Job]:
        return [job for job in self._jobs.values() if not job.is_final]

    async def history(self, job_id: str) -> list[Transition]:
        if job_id not in self._jobs:
            raise NotFound(f"no job {job_id}")
        return list(self._logs[job_id])

    async def tally(self) -> dict[JobState, int]:
        return dict(Counter(job.state for job in self._jobs.values()))

    def write_log(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            if line.job_id in self._jobs:
                kept = self._lines[line.job_id]
                kept.append(replace(line, n=len(kept) + 1))

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        return self._lines.get(job_id, [])[after : after + limit]

    async def verify(self) -> Verified:
        mismatches = []
        for job in self._jobs.values():
            try:
                folded = fold(self._logs[job.job_id])
            except BrokenLog as error:
                mismatches.append(Mismatch(job.job_id, str(error)))
                continue
            if folded != Folded.of(job):
                mismatches.append(Mismatch(job.job_id, "the record is not the fold of its log"))
        transitions = sum(len(log) for log in self._logs.values())
        return Verified(len(self._jobs), transitions, tuple(mismatches))

    async def prune(self, finished_before: float, limit: int) -> Pruned:
        old = [
            job
            for job in self._jobs.values()
            if job.finished_at is not None and job.finished_at < finished_before
        ][:limit]
        transitions = lines = 0
        for job in old:
            del self._jobs[job.job_id], self._ids[job.seq]
            transitions += len(self._logs.pop(job.job_id))
            lines += len(self._lines.pop(job.job_id, ()))
            self._keys.pop((job.request.tenant, job.request.idempotency_key or ""), None)
        return Pruned(len(old), transitions, lines)

    async def pointers(self) -> Iterable[str]:
        pointers = {job.request.context_ptr for job in self._jobs.values()}
        pointers |= {job.result.result_ptr or "" for job in self._jobs.values() if job.result}
        return {pointer for pointer in pointers if pointer.startswith("blob:")}

    async def remember(self, name: str, value: bytes) -> None:
        self._facts[name] = value

    async def recall(self, name: str) -> bytes | None:
        return self._facts.get(name)

    async def close(self) -> None:
        self._closed = True


def _matches(query: JobQuery, job: Job) -> bool:
    request = job.request
    return (
        (query.job_id is None or fnmatchcase(request.job_id, query.job_id))
        and (not query.states or job.state in query.states)
        and (query.topic is None or fnmatchcase(request.topic, query.topic))
        and (query.tenant is None or request.tenant == query.tenant)
        and (query.parent_job_id is None or request.parent_job_id == query.parent_job_id)
        and (query.workflow_id is None or request.workflow_id == query.workflow_id)
        and query.idempotency_key in (None, request.idempotency_key)
        and (query.before is None or job.seq < query.before)
        and query.labels.items() <= request.labels.items()
    )


def _step(job: Job) -> int:
    return -1 if job.request.step_index is None else job.request.step_index
