"""A backend that keeps everything in memory: the same promises as any other, but durability.

It may be opened again after its owner died: rows that lag behind the journal lag here, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence

from msgspec.structs import replace

from penstock.core.errors import StoreFailed, Unstorable
from penstock.core.job import Job
from penstock.core.journal import (
    LoggedStride,
    catch_up,
    decode_page,
    encode_page,
    last_cursor,
    page_of,
)
from penstock.core.ledger import Commit, Counts, Key, Known, Step, Wanted, counted_as
from penstock.core.steps import size_of
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.query import (
    Name,
    compare_counts,
    matches,
    matches_audit,
    order,
    read_events,
)
from penstock.ports.store import (
    AuditEntry,
    AuditQuery,
    Durability,
    Extras,
    JobQuery,
    JournalEvent,
    JournalPages,
    LogLine,
    Mismatch,
    Opened,
    Pruned,
    StepCount,
    StepPage,
    StepQuery,
)


class MemoryBackend:
    """See `penstock.ports.store.Backend`."""

    durability = Durability.MEMORY

    def __init__(self) -> None:
        self._rows: dict[int, Job] = {}
        self._ids: dict[str, int] = {}
        self._keys: dict[Key, int] = {}
        self._uniques: dict[Key, list[int]] = {}
        self._pages: dict[int, list[LoggedStride]] = {}
        self._counts: Counter[tuple[str, JobState | None]] = Counter()
        self._steps: dict[int, dict[tuple[str, int], Step]] = {}
        self._lines: dict[int, list[LogLine]] = {}
        self._audit: list[AuditEntry] = []
        self._facts: dict[str, bytes] = {}
        self._epoch = self._replayed = self._last_seq = self._last_page = self._last_event = 0

    async def open(self, *, own: bool = True) -> Opened:
        if own:
            self._epoch += 1
        jobs = {seq: job for seq, job in self._rows.items() if not job.is_final}
        newer = ((page, self._pages[page]) for page in self._pages if page > self._replayed)
        lagging = catch_up(jobs, newer)
        return Opened(
            self._epoch,
            self._last_seq + 1,
            self._last_page + 1,
            list(jobs.values()),
            lagging,
            dict(self._counts),
        )

    async def load(self, wanted: Wanted) -> Known:
        rows, ids = self._rows, self._ids
        return Known(
            {job_id: rows[ids[job_id]] for job_id in wanted.ids if job_id in ids},
            {key: rows[self._keys[key]] for key in wanted.keys if key in self._keys},
            {key: [rows[self._uniques[key][-1]]] for key in wanted.uniques if key in self._uniques},
        )

    # -- writing ------------------------------------------------------------------

    async def write(self, commit: Commit, extras: Extras, epoch: int) -> None:
        self._check(epoch)
        try:
            pages = [(page.number, decode_page(encode_page(page.strides))) for page in commit.pages]
        except (ValueError, TypeError, OverflowError) as error:
            raise Unstorable("job", f"holds a value that can't be stored: {error}") from error
        for number, strides in pages:
            self._pages[number] = strides
            self._last_page, self._last_event = number, last_cursor(number, strides)
        for job in commit.accepted:
            self._add(job)
        for job in commit.changed:
            self._rows[job.seq] = job
        for (tenant, state), count in commit.counts.items():
            if state is None or state in TERMINAL:
                self._counts[tenant, state] += count
        for seq, step in commit.steps:
            self._steps.setdefault(seq, {})[step.name, step.n] = step
        self._write_extras(extras)

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StoreFailed("another engine owns the store now")

    def _add(self, job: Job) -> None:
        request, seq = job.request, job.seq
        self._rows[seq] = job
        self._ids[request.job_id] = seq
        self._last_seq = seq
        if request.idempotency_key is not None:
            self._keys[request.tenant, request.idempotency_key] = seq
        if request.unique is not None:
            self._uniques.setdefault((request.tenant, request.unique.key), []).append(seq)

    def _write_extras(self, extras: Extras) -> None:
        for line in extras.lines:
            seq = self._ids.get(line.job_id)
            if seq is not None:
                kept = self._lines.setdefault(seq, [])
                kept.append(replace(line, n=len(kept) + 1))
        for entry in extras.audit:
            self._audit.append(replace(entry, n=len(self._audit) + 1))
        for name, value in extras.facts.items():
            if value is None:
                self._facts.pop(name, None)
            else:
                self._facts[name] = value
        if extras.replayed is not None:
            self._replayed = extras.replayed

    # -- reading ------------------------------------------------------------------

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        return [self._rows[seq] for seq in seqs if seq in self._rows]

    async def find(self, query: JobQuery, skip: Collection[int] = ()) -> list[Job]:
        found = [job for job in self._rows.values() if job.seq not in skip and matches(query, job)]
        return sorted(found, key=order(query))[: max(query.limit, 0)]

    async def journal(self, pages: Sequence[int]) -> JournalPages:
        return [(page, self._pages[page]) for page in sorted(pages) if page in self._pages]

    async def events(self, after: int, limit: int) -> list[JournalEvent]:
        first = page_of(after)
        newer = ((page, self._pages[page]) for page in self._pages if page >= first)
        return read_events(newer, self._names, after, limit)

    def _names(self, seqs: Sequence[int]) -> dict[int, Name]:
        jobs = (self._rows[seq] for seq in seqs if seq in self._rows)
        return {job.seq: (job.job_id, job.request.tenant, job.request.topic) for job in jobs}

    async def last_event(self) -> int:
        return self._last_event

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        return self._lines.get(self._ids.get(job_id, 0), [])[after : after + limit]

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        steps = self._steps.get(self._ids.get(job_id, 0), {})
        found = (
            (size_of(steps[place]), steps[place])
            for place in sorted(steps)
            if query.name in (None, place[0])
            and (query.after is None or place > query.after)
            and (not query.outcomes or steps[place].outcome in query.outcomes)
        )
        return StepPage.of(found, query.limit)

    async def count_steps(self, job_id: str) -> list[StepCount]:
        rows: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for step in self._steps.get(self._ids.get(job_id, 0), {}).values():
            rows[step.name, step.outcome] += 1
            sizes[step.name, step.outcome] += size_of(step)
        return [StepCount(*kind, rows[kind], sizes[kind]) for kind in sorted(rows)]

    async def count_children(
        self, first_try: str, tenant: str | None, skip: Collection[int]
    ) -> dict[JobState, int]:
        query = JobQuery(child_of=first_try, tenant=tenant)
        found = (job for job in self._rows.values() if matches(query, job))
        return dict(Counter(job.state for job in found if job.seq not in skip))

    async def read_audit(self, query: AuditQuery) -> list[AuditEntry]:
        found = [entry for entry in reversed(self._audit) if matches_audit(query, entry)]
        return found[: max(query.limit, 0)]

    async def facts(self, prefix: str) -> dict[str, bytes]:
        return {name: self._facts[name] for name in sorted(self._facts) if name.startswith(prefix)}

    async def pointers(self) -> set[str]:
        return {
            pointer
            for job in self._rows.values()
            for pointer in self._pointers(job)
            if pointer.startswith("blob:")
        }

    async def refers(self, tenant: str, pointer: str) -> bool:
        name = pointer.partition(";")[0]
        return name.startswith("blob:") and any(
            held.partition(";")[0] == name
            for job in self._rows.values()
            if job.request.tenant == tenant
            for held in self._pointers(job)
        )

    def _pointers(self, job: Job) -> Iterator[str]:
        yield job.request.context_ptr
        if job.result is not None and job.result.result_ptr is not None:
            yield job.result.result_ptr
        for step in self._steps.get(job.seq, {}).values():
            yield step.input
            yield step.output

    async def miscounted(self) -> list[Mismatch]:
        final = (job for job in self._rows.values() if job.is_final)
        counted = Counter(map(_counted, final))
        return compare_counts(self._counts, counted)

    # -- forgetting ---------------------------------------------------------------

    async def prune(
        self, finished_before: float, limit: int, awaited: Container[str], epoch: int
    ) -> tuple[Pruned, Counts]:
        self._check(epoch)
        kept = set(self._with_retries(awaited))
        old = [
            job
            for job in self._rows.values()
            if job.finished_at is not None
            and job.finished_at < finished_before
            and job.job_id not in kept
        ][:limit]
        lines = steps = 0
        gone: Counter[tuple[str, JobState | None]] = Counter()
        for job in old:
            self._remove(job)
            steps += len(self._steps.pop(job.seq, ()))
            lines += len(self._lines.pop(job.seq, ()))
            gone[_counted(job)] -= 1
        self._counts.update(gone)
        oldest = next(iter(self._rows.values()), None)
        for page in [*self._pages]:
            if oldest is None or page < oldest.pages[0]:
                del self._pages[page]
        return Pruned(len(old), sum(job.version for job in old), lines, steps), dict(gone)

    def _with_retries(self, awaited: Container[str]) -> Iterator[str]:
        for job in self._rows.values():
            if job.job_id in awaited:
                yield job.job_id
                while (successor := self._ids.get(job.successor or "")) is not None:
                    job = self._rows[successor]
                    yield job.job_id

    def _remove(self, job: Job) -> None:
        request = job.request
        del self._rows[job.seq], self._ids[request.job_id]
        if request.idempotency_key is not None:
            del self._keys[request.tenant, request.idempotency_key]
        if request.unique is not None:
            key = (request.tenant, request.unique.key)
            self._uniques[key].remove(job.seq)
            if not self._uniques[key]:
                del self._uniques[key]

    async def close(self) -> None:
        """Nothing: it can be opened again."""


def _counted(job: Job) -> tuple[str, JobState | None]:
    return job.request.tenant, counted_as(job.state, job.successor)
