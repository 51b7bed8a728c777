"""An honest store that forgets: the same promises as any other, but for durability."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from operator import itemgetter

from msgspec.structs import replace

from penstock.adapters.memory.matching import matches, matches_audit
from penstock.core.errors import NotFound, Unavailable
from penstock.core.job import Job
from penstock.core.policy import difference, keeps_out
from penstock.core.transition import (
    Accept,
    Answer,
    BrokenLog,
    Change,
    Folded,
    Move,
    Transition,
    Verdict,
    admit,
    advance,
    fold,
    followers,
    refusal,
)
from penstock.lifecycles.canonical import JobState
from penstock.ports.listeners import Listeners
from penstock.ports.store import (
    AuditEntry,
    AuditQuery,
    Durability,
    JobQuery,
    JournalEvent,
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
        self._uniques: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._counts: dict[str | None, Counter[JobState]] = defaultdict(Counter)
        self._journal: list[tuple[int, list[JournalEvent]]] = []
        self._audit: list[AuditEntry] = []
        self._logs: dict[str, list[Transition]] = defaultdict(list)
        self._lines: dict[str, list[LogLine]] = defaultdict(list)
        self._facts: dict[str, bytes] = {}
        self.listeners: Listeners[Sequence[Answer]] = Listeners()
        self._next_seq = 1
        self._last_row = self._last_event = 0
        self._closed = False

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        await asyncio.sleep(0)
        if self._closed:
            raise Unavailable("the store is closed")
        moved: list[Answer] = []
        answers = self._refusal(changes) or [self._decide(change, moved) for change in changes]
        if moved:
            self.listeners.tell(moved)
        return answers

    def _refusal(self, changes: Sequence[Change]) -> list[Answer]:
        """The answers to a batch that must be accepted whole and can't be; else none."""
        for change in changes:
            if isinstance(change, Accept) and change.all_or_none:
                held = self._holder(change)
                if held is not None and difference(change.request, held.request) is not None:
                    return refusal(changes, change, held)
        return []

    def _decide(self, change: Change, moved: list[Answer]) -> Answer:
        if isinstance(change, Accept):
            return self._accept(change, moved)
        job = self._jobs.get(change.job_id)
        if job is None:
            return Answer(Verdict.REFUSED, None, why=f"no job {change.job_id}")
        answer = advance(job, change)
        return self._follow(job, change, answer, moved) if answer.moved else answer

    def _follow(self, job: Job, move: Move, answer: Answer, moved: list[Answer]) -> Answer:
        """Keep a move with what it brings.

        The retry of a job that ends now has its unique key from it. If it ended before,
        another job may have the key by now, and then there is no retry.
        """
        accepts = followers(job, move)
        if job.is_final:
            for accept in accepts:
                keeper = self._keeper(accept)
                if keeper is not None and keeper.job_id != job.job_id:
                    why = f"job {keeper.job_id} has its unique key now"
                    return Answer(Verdict.REFUSED, job, why=why)
        self._keep(answer, moved)
        for accept in accepts:
            self._accept(accept, moved, follows=True)
        return answer

    def _accept(self, accept: Accept, moved: list[Answer], *, follows: bool = False) -> Answer:
        request = accept.request
        held = self._holder(accept)
        if held is None and not follows:
            held = self._keeper(accept)
        if held is not None:
            return Answer(Verdict.REPEATED, held)
        answer = admit(accept, self._next_seq)
        self._ids[self._next_seq] = request.job_id
        self._next_seq += 1
        if request.idempotency_key is not None:
            self._keys[request.tenant, request.idempotency_key] = request.job_id
        if request.unique is not None:
            self._uniques[request.tenant, request.unique.key].append(request.job_id)
        self._keep(answer, moved)
        return answer

    def _holder(self, accept: Accept) -> Job | None:
        """The job that has this one's id or idempotency key."""
        request = accept.request
        key = (request.tenant, request.idempotency_key or "")
        return self._jobs.get(request.job_id) or self._jobs.get(self._keys.get(key, ""))

    def _keeper(self, accept: Accept) -> Job | None:
        """The newest job that keeps this one out by its unique key."""
        unique = accept.request.unique
        if unique is None:
            return None
        sharing = self._uniques.get((accept.request.tenant, unique.key), ())
        held = (self._jobs[job_id] for job_id in reversed(sharing))
        return next((job for job in held if keeps_out(job, accept.at)), None)

    def _keep(self, answer: Answer, moved: list[Answer]) -> None:
        job, steps = answer.job, answer.transitions
        assert job is not None
        if (before := self._jobs.get(job.job_id)) is not None:
            self._count(before, -1)
        self._count(job, 1)
        self._jobs[job.job_id] = job
        self._logs[job.job_id].extend(steps)
        self._last_row += 1
        tenant, topic, row = job.request.tenant, job.request.topic, self._last_row << 4
        events = [JournalEvent(row | n, tenant, topic, step) for n, step in enumerate(steps, 1)]
        self._journal.append((self._last_row, events))
        self._last_event = events[-1].cursor
        moved.append(answer)

    def _count(self, job: Job, change: int) -> None:
        for tenant in (None, job.request.tenant):
            self._counts[tenant][job.state] += change

    def listen(self, listener: Listener) -> Callable[[], None]:
        return self.listeners.add(listener)

    async def get(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        return [self._jobs[self._ids[seq]] for seq in seqs if seq in self._ids]

    async def find(self, query: JobQuery) -> list[Job]:
        found = [job for job in self._jobs.values() if matches(query, job)]
        if query.by_step:
            found.sort(key=lambda job: (_step(job), job.seq))
        else:
            found.sort(key=lambda job: job.seq, reverse=not query.oldest_first)
        return found[: max(query.limit, 0)]

    async def unfinished(self) -> list[Job]:
        return [job for job in self._jobs.values() if not job.is_final]

    async def history(self, job_id: str) -> list[Transition]:
        if job_id not in self._jobs:
            raise NotFound(f"no job {job_id}")
        return list(self._logs[job_id])

    async def events(self, after: int, limit: int = 1000) -> list[JournalEvent]:
        found: list[JournalEvent] = []
        start = bisect_left(self._journal, after >> 4, key=itemgetter(0))
        for index in range(start, len(self._journal)):
            if len(found) >= limit:
                break
            found.extend(event for event in self._journal[index][1] if event.cursor > after)
        return found

    async def last_event(self) -> int:
        return self._last_event

    async def tally(self, tenant: str | None = None) -> dict[JobState, int]:
        counts = self._counts.get(tenant, Counter())
        return {state: count for state in JobState if (count := counts[state])}

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
        if self._counts[None] != Counter(job.state for job in self._jobs.values()):
            mismatches.append(Mismatch("the tally", "it does not count what there is"))
        transitions = sum(len(log) for log in self._logs.values())
        return Verified(len(self._jobs), transitions, tuple(mismatches))

    async def prune(
        self, finished_before: float, limit: int, awaited: Container[str] = ()
    ) -> Pruned:
        kept = set(self._with_retries(awaited))
        old = [
            job
            for job in self._jobs.values()
            if job.finished_at is not None
            and job.finished_at < finished_before
            and job.job_id not in kept
        ][:limit]
        transitions = lines = 0
        for job in old:
            del self._jobs[job.job_id], self._ids[job.seq]
            transitions += len(self._logs.pop(job.job_id))
            lines += len(self._lines.pop(job.job_id, ()))
            self._forget_keys(job)
            self._count(job, -1)
        gone = {job.job_id for job in old}
        self._journal = [row for row in self._journal if row[1][0].transition.job_id not in gone]
        return Pruned(len(old), transitions, lines)

    def _with_retries(self, awaited: Container[str]) -> Iterator[str]:
        for job in self._jobs.values():
            if job.job_id in awaited:
                yield job.job_id
                while job.successor is not None and job.successor in self._jobs:
                    job = self._jobs[job.successor]
                    yield job.job_id

    def _forget_keys(self, job: Job) -> None:
        request = job.request
        self._keys.pop((request.tenant, request.idempotency_key or ""), None)
        if request.unique is not None:
            key = (request.tenant, request.unique.key)
            self._uniques[key].remove(job.job_id)
            if not self._uniques[key]:
                del self._uniques[key]

    async def pointers(self) -> Iterable[str]:
        pointers = {pointer for job in self._jobs.values() for pointer in _pointers(job)}
        return {pointer for pointer in pointers if pointer.startswith("blob:")}

    async def refers(self, tenant: str, pointer: str) -> bool:
        """A blob is the same under each of its media types."""
        name = pointer.partition(";")[0]
        return name.startswith("blob:") and any(
            job.request.tenant == tenant and held.partition(";")[0] == name
            for job in self._jobs.values()
            for held in _pointers(job)
        )

    async def remember(self, name: str, value: bytes) -> None:
        self._facts[name] = value

    async def recall(self, name: str) -> bytes | None:
        return self._facts.get(name)

    async def recall_all(self, prefix: str) -> dict[str, bytes]:
        return {name: self._facts[name] for name in sorted(self._facts) if name.startswith(prefix)}

    async def forget(self, name: str) -> bool:
        return self._facts.pop(name, None) is not None

    def write_audit(self, entries: Sequence[AuditEntry]) -> None:
        for entry in entries:
            self._audit.append(replace(entry, n=len(self._audit) + 1))

    async def read_audit(self, query: AuditQuery) -> list[AuditEntry]:
        found = [entry for entry in reversed(self._audit) if matches_audit(query, entry)]
        return found[: max(query.limit, 0)]

    async def close(self) -> None:
        self._closed = True


def _pointers(job: Job) -> tuple[str, str]:
    result = job.result
    return job.request.context_ptr, (result.result_ptr if result is not None else None) or ""


def _step(job: Job) -> int:
    return -1 if job.request.step_index is None else job.request.step_index
