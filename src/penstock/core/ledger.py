"""What changes need to know, and what follows from them. Pure: every store asks it, none decides.

A commit is decided in three steps. `wanted` says which records and keys the changes of a
commit need that are not at hand; a store reads them; `Decider` applies the changes in order
and collects what is to be written: new records, changed records, journal pages, steps.

Records are immutable: a move makes a new one, which replaces the old one after the commit.
The row of a job that is with a worker may lag behind the journal: a move that only the
worker's side concerns (dispatch, start) is written to the journal alone (`replay`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from penstock.core import artifact
from penstock.core.artifact import Artifact
from penstock.core.job import Job, JobRequest, JobResult, difference, keeps_out
from penstock.core.journal import BIRTH, PAGE_EVENTS, Page, Path, Plan, Stride, Transition, plan_of
from penstock.core.verdict import Hold, SafetyVerdict
from penstock.lifecycles.canonical import HELD, JobEvent, JobState, Role


class Accept(Struct, frozen=True, gc=False):
    """Make this request a durable PENDING job."""

    request: JobRequest
    at: float
    actor: str = Role.GATEWAY.value
    reason: str = ""
    fresh: bool = False
    """The id was just generated here, so it can't be in use yet."""
    unless_cancelled: bool = False
    """Where it follows a move: not if that job was asked to end in the meantime."""
    all_or_none: bool = False
    """Refuse every change of the batch if a different request has this one's id or key."""


class Move(Struct, frozen=True, gc=False):
    """Let these events happen to one job, all or none, if the guards hold."""

    job_id: str
    events: tuple[JobEvent, ...]
    actor: str
    at: float
    reason: str = ""
    version: int | None = None
    """Refuse unless the record still has this version."""
    attempt: int | None = None
    """Refuse unless this is still the live attempt (the fence)."""
    worker_id: str | None = None
    pool: str | None = None
    result: JobResult | None = None
    verdict: SafetyVerdict | None = None
    """What the safety kernel said, where this is the move that follows from it."""
    hold: Hold | None = None
    """With PARK and APPROVE: the hold as it is from now on."""
    uncharged: bool = False
    """With REDISPATCH: the attempt that was lost is not charged to the job."""
    then: tuple[Accept, ...] = ()
    """Accepted in the same commit if, and only if, this moves: a retry, say."""


class Step(Struct, frozen=True, gc=False, omit_defaults=True):
    """One durable row that a running job wrote: a checkpoint of its progress.

    `name` and `n` identify it: writing the same again replaces it.
    """

    name: str
    """The stage, or whatever the rows of one kind are called."""
    n: int
    """Its place among the rows of that name."""
    key: str = ""
    outcome: str = ""
    input: str = ""
    """An inline text or a pointer; and so is the output."""
    output: str = ""
    error: str = ""
    at: float = 0.0
    attempt: int = 0
    """The attempt that wrote it; said by the engine."""
    info: str = ""
    """What else the executor keeps with it, in a format of its own."""


def artifact_row(left: Artifact) -> Step:
    """The row by which a job refers to an artifact: it keeps the blob as long as the job."""
    info = artifact.encode(left).decode()
    return Step(
        artifact.row_name(left.name), 0, key=left.name, outcome="ok", output=left.pointer, info=info
    )


def artifact_of(row: Step) -> Artifact:
    return artifact.decode(row.info)


class Checkpoint(Struct, frozen=True, gc=False):
    """Keep these rows of a job, if this is still its live attempt.

    A checkpoint of a DISPATCHED job also moves it to RUNNING: its attempt has started.
    """

    job_id: str
    attempt: int
    rows: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    """Entries of the job's history; dropped when it has more than `MAX_HISTORY`."""
    actor: str = Role.WORKER.value
    at: float = 0.0


_NOTES = (JobEvent.NOTE,)
MAX_HISTORY = 5000
"""Entries of a job's history after which a worker's notes are dropped."""


Change = Accept | Move | Checkpoint


class BulkMove(Struct, frozen=True, gc=False, kw_only=True):
    """One move that many jobs make, each under its own guard."""

    job_ids: list[str]
    events: tuple[JobEvent, ...]
    actor: str
    at: float
    versions: list[int] | None = None
    """By job: refuse unless its record still has this version."""
    attempts: list[int] | None = None
    """By job: refuse unless this is still its live attempt."""
    worker_id: str | None = None
    pool: str | None = None
    results: list[JobResult] | None = None
    follows: bool = False
    """Whether the same commit has moved all of these jobs before."""

    def one(self, index: int) -> Move:
        """The move of one of its jobs."""
        return Move(
            self.job_ids[index],
            self.events,
            self.actor,
            self.at,
            version=None if self.versions is None else self.versions[index],
            attempt=None if self.attempts is None else self.attempts[index],
            worker_id=self.worker_id,
            pool=self.pool,
            result=None if self.results is None else self.results[index],
        )


class ChangeOutcome(Enum):
    MOVED = "moved"
    REPEATED = "repeated"
    REFUSED = "refused"


class Answer(Struct, frozen=True, gc=False):
    """What became of one change, and the record as it now is."""

    verdict: ChangeOutcome
    job: Job | None
    stride: Stride | None = None
    why: str = ""

    @property
    def moved(self) -> bool:
        return self.verdict is ChangeOutcome.MOVED

    @property
    def transitions(self) -> tuple[Transition, ...]:
        if self.stride is None or self.job is None:
            return ()
        return self.stride.transitions(self.job)


class BulkAnswer(Struct, frozen=True, gc=False):
    """What became of a BulkMove."""

    moved: list[Job]
    """The records of the jobs that moved, in the order given."""
    others: list[tuple[int, Answer]]
    """The place of each job that did not, and why."""


_MOVED, _REPEATED, _REFUSED = ChangeOutcome.MOVED, ChangeOutcome.REPEATED, ChangeOutcome.REFUSED
Key = tuple[str, str]
"""(tenant, key)"""


class Wanted(Struct, frozen=True):
    """What must be read before changes can be decided."""

    ids: set[str]
    keys: set[Key]
    """Idempotency keys."""
    uniques: set[Key]
    """Unique keys: the newest job that has each. (Which open jobs have it, the ledger knows.)"""

    def __bool__(self) -> bool:
        return bool(self.ids or self.keys or self.uniques)


class Known(Struct, frozen=True):
    """What was read."""

    jobs: dict[str, Job] = {}
    keys: dict[Key, Job] = {}
    uniques: dict[Key, list[Job]] = {}
    """Jobs with a unique key, the newest first; at least the newest and those that are open."""


def wanted(changes: Iterable[Change], bulk: Iterable[BulkMove], at_hand: Collection[str]) -> Wanted:
    """Which records and keys these changes need, but for the jobs that are at hand."""
    ids: set[str] = set()
    keys: set[Key] = set()
    uniques: set[Key] = set()
    for change in changes:
        if isinstance(change, Accept):
            _want(change, ids, keys, uniques, at_hand)
            continue
        if change.job_id not in at_hand:
            ids.add(change.job_id)
        if isinstance(change, Move):
            for accept in change.then:
                _want(accept, ids, keys, uniques, at_hand)
    for move in bulk:
        ids.update(job_id for job_id in move.job_ids if job_id not in at_hand)
    return Wanted(ids, keys, uniques)


def _want(
    accept: Accept, ids: set[str], keys: set[Key], uniques: set[Key], at_hand: Collection[str]
) -> None:
    request = accept.request
    if not accept.fresh and request.job_id not in at_hand:
        ids.add(request.job_id)
    if request.idempotency_key is not None:
        keys.add((request.tenant, request.idempotency_key))
    if request.unique is not None:
        uniques.add((request.tenant, request.unique.key))


Counts = Mapping[tuple[str, JobState | None], int]
"""By tenant and state: how many jobs. A job and its retries are one, in the state of its newest
try; tries that were retried since are counted apart, under None."""


def counted_as(state: JobState, successor: str | None) -> JobState | None:
    """Under what a try is counted."""
    return state if successor is None else None


class Commit(Struct, frozen=True, kw_only=True):
    """What one commit writes. All of it or nothing."""

    pages: list[Page] = []
    accepted: list[Job] = []
    """New records."""
    changed: list[Job] = []
    """Records whose rows are to be written anew."""
    lagging: list[Job] = []
    """Records whose rows stay behind: the journal alone has their last move."""
    steps: list[tuple[int, Step]] = []
    """Checkpointed rows, each with the `seq` of its job."""
    counts: Counts = {}
    """How many jobs more, or fewer, there are."""

    @property
    def strides(self) -> list[Stride]:
        return [stride for page in self.pages for stride in page.strides]


def followers(job: Job, move: Move) -> tuple[Accept, ...]:
    """What is accepted with a move if it moves `job` as it is now."""
    if not (move.then and job.cancel_requested):
        return move.then
    return tuple(accept for accept in move.then if not accept.unless_cancelled)


def judge(job: Job, move: Move) -> tuple[Plan, str]:
    """What a move would do to a record, and why it must be refused, if it must."""
    if move.version is not None and move.version != job.version:
        return _NO_PLAN, f"the job has moved on to version {job.version}"
    if move.attempt is not None and move.attempt != job.attempt:
        return _NO_PLAN, f"attempt {move.attempt} is not live: {job.attempt} is"
    plan = plan_of(job.state, move.events, move.actor.partition(":")[0])
    return plan, plan.refusal


_NO_PLAN = Plan(BIRTH)


def advance(job: Job, move: Move, page: int = 0) -> Answer:
    """Apply a move to a record, or say why not."""
    plan, why = judge(job, move)
    if why:
        return Answer(_REFUSED, job, why=why)
    if plan.is_empty or (plan.asks and job.cancel_requested):
        return Answer(_REPEATED, job)
    at = max(move.at, job.updated_at)
    then = followers(job, move) if move.then else ()
    reason = move.reason
    attempt, worker_id, pool = job.attempt, job.worker_id, job.pool
    dispatched_at, started_at, finished_at = job.dispatched_at, job.started_at, job.finished_at
    result = job.result
    if plan.gives:
        attempt += 1
        worker_id, pool = move.worker_id, move.pool
        dispatched_at = at
        started_at = at if plan.restarts else None
    if plan.starts:
        started_at = at
    if plan.ends:
        finished_at = at
        result = move.result
        if then:
            reason = f"{reason} (retried as {then[0].request.job_id})".lstrip()
    changed = replace(
        job,
        state=plan.after,
        version=job.version + plan.length,
        updated_at=at,
        attempt=attempt,
        worker_id=worker_id,
        pool=pool,
        dispatched_at=dispatched_at,
        started_at=started_at,
        finished_at=finished_at,
        cancel_requested=job.cancel_requested or plan.asks,
        result=result,
        successor=then[0].request.job_id if then else job.successor,
        verdict=job.verdict if move.verdict is None else move.verdict,
        hold=job.hold if move.hold is None else move.hold,
        uncharged=job.uncharged + move.uncharged,
        pages=_with_page(job.pages, page),
    )
    given = (worker_id, pool) if plan.gives else (None, None)
    return Answer(_MOVED, changed, Stride(plan.path, move.actor, at, reason, *given, [changed]))


def _with_page(pages: tuple[int, ...], page: int) -> tuple[int, ...]:
    return pages if pages and pages[-1] == page else (*pages, page)


_AT_ONCE = 0.005
"""Seconds within which the acceptances of one commit count as one moment: they share a stride."""
_StrideKey = tuple[int, str, float, str, str | None]


class Decider:
    """The changes of one commit, decided in order, each against what those before it made."""

    def __init__(
        self, open_jobs: Mapping[str, Job], known: Known, next_seq: int, next_page: int
    ) -> None:
        self._open, self._known = open_jobs, known
        self.next_seq = next_seq
        self._page = next_page
        self.heads: dict[str, Job] = {}
        """Records as this commit leaves them, by id."""
        self._new: dict[str, Job] = {}
        """Records as this commit accepts them, by id."""
        self._rows: dict[str, None] = {}
        """Jobs whose rows must be written, by id."""
        self._keys: dict[Key, str] = {}
        self._uniques: dict[Key, list[str]] = {}
        self._pages: list[Page] = []
        self._strides: dict[_StrideKey, Stride] = {}
        """Strides of the present page that more jobs may join."""
        self._events = PAGE_EVENTS
        self._steps: list[tuple[int, Step]] = []
        self._accepted_at = float("-inf")

    @property
    def next_page(self) -> int:
        """The number of the first page of the commit after this one."""
        return self._page + 1 if self._pages else self._page

    # -- deciding -----------------------------------------------------------------

    def decide(self, batch: Sequence[Change]) -> list[Answer]:
        """One caller's changes, in order."""
        for change in batch:
            if type(change) is Accept and change.all_or_none:
                held = self._holder(change)
                if held is not None and difference(change.request, held.request) is not None:
                    return _refusal(batch, change, held)
        return [self._one(change) for change in batch]

    def _one(self, change: Change) -> Answer:
        if type(change) is Accept:
            return self._accept(change)
        if type(change) is Checkpoint:
            return self._checkpoint(change)
        assert type(change) is Move
        job = self.find(change.job_id)
        if job is None:
            return Answer(_REFUSED, None, why=f"no job {change.job_id}")
        answer = advance(job, change, self._begin_page())
        if answer.verdict is not _MOVED:
            return answer
        accepts = followers(job, change)
        if accepts and job.is_final and (why := self._key_taken(job, accepts)):
            return Answer(_REFUSED, job, why=why)
        writes_row = (
            answer.job is None
            or answer.job.state not in HELD
            or change.verdict is not None
            or change.hold is not None
            or change.uncharged
            or bool(accepts)
        )
        answer = self._keep(answer, writes_row=writes_row)
        if change.result is not None and change.result.artifacts and answer.job is not None:
            self._refer(answer.job)
        for accept in accepts:
            self._accept(accept, follows=True)
        return answer

    @property
    def accepted(self) -> list[Job]:
        """What this commit accepts and has not moved any further so far."""
        heads = self.heads
        return [job for job_id, job in self._new.items() if heads[job_id] is job]

    def bulk(self, move: BulkMove) -> BulkAnswer:
        """One move of many jobs, planned once for all that are in the same state."""
        moved: list[Job] = []
        others: list[tuple[int, Answer]] = []
        heads, open_jobs, known, at = self.heads, self._open, self._known.jobs, move.at
        role = move.actor.partition(":")[0]
        page = 0
        versions, attempts, results = move.versions, move.attempts, move.results
        worker_id, pool, follows = move.worker_id, move.pool, move.follows
        state: JobState | None = None
        plan = _NO_PLAN
        joined: list[Job] = []
        for index, job_id in enumerate(move.job_ids):
            if follows:
                job = heads.get(job_id)
            else:
                job = None if job_id in heads else open_jobs.get(job_id) or known.get(job_id)
            if job is not None and (job.state is not state or self._events >= PAGE_EVENTS):
                state = job.state
                plan = plan_of(state, move.events, role)
                page = self._begin_page()
                joined = self._join(plan, move)
            if (
                job is None
                or not plan.is_plain
                or at < job.updated_at
                or (versions is not None and versions[index] != job.version)
                or (attempts is not None and attempts[index] != job.attempt)
            ):
                answer = self._one(move.one(index))
                if answer.moved and answer.job is not None:
                    moved.append(answer.job)
                else:
                    others.append((index, answer))
                continue
            pages = job.pages
            if pages[-1:] != (page,):
                pages = (*pages, page)
            if plan.gives:
                changed = replace(
                    job,
                    state=plan.after,
                    version=job.version + plan.length,
                    updated_at=at,
                    attempt=job.attempt + 1,
                    worker_id=worker_id,
                    pool=pool,
                    dispatched_at=at,
                    started_at=at if plan.restarts else None,
                    pages=pages,
                )
            elif plan.ends:
                changed = replace(
                    job,
                    state=plan.after,
                    version=job.version + plan.length,
                    updated_at=at,
                    started_at=at if plan.starts else job.started_at,
                    finished_at=at,
                    result=None if results is None else results[index],
                    pages=pages,
                )
                self._rows[job_id] = None
                if results is not None and results[index].artifacts:
                    self._refer(changed)
            elif plan.starts:
                changed = replace(
                    job,
                    state=plan.after,
                    version=job.version + plan.length,
                    updated_at=at,
                    started_at=at,
                    pages=pages,
                )
            else:
                changed = replace(
                    job,
                    state=plan.after,
                    version=job.version + plan.length,
                    updated_at=at,
                    pages=pages,
                )
                self._rows[job_id] = None
            heads[job_id] = changed
            joined.append(changed)
            moved.append(changed)
            self._events += plan.length
        return BulkAnswer(moved, others)

    def _accept(self, accept: Accept, *, follows: bool = False) -> Answer:
        request, at = accept.request, accept.at
        held = self._holder(accept)
        if held is None and request.unique is not None and not follows:
            held = self._keeper(accept)
        if held is not None:
            return Answer(_REPEATED, held)
        if 0 <= at - self._accepted_at < _AT_ONCE:
            at = self._accepted_at
        self._accepted_at = at
        job = Job(
            seq=self.next_seq,
            request=request,
            state=JobState.PENDING,
            version=1,
            accepted_at=at,
            updated_at=at,
            pages=(self._begin_page(),),
        )
        self.next_seq += 1
        self._new[request.job_id] = job
        if request.idempotency_key is not None:
            self._keys[request.tenant, request.idempotency_key] = request.job_id
        if request.unique is not None:
            key = (request.tenant, request.unique.key)
            self._uniques.setdefault(key, []).append(request.job_id)
        self.heads[request.job_id] = job
        stride = self._stride(BIRTH, accept.actor, at, accept.reason, None, None)
        stride.jobs.append(job)
        self._events += 1
        return Answer(_MOVED, job, stride)

    def _checkpoint(self, change: Checkpoint) -> Answer:
        job = self.find(change.job_id)
        if job is None:
            return Answer(_REFUSED, None, why=f"no job {change.job_id}")
        if job.attempt != change.attempt or job.state not in HELD:
            return Answer(_REFUSED, job, why=f"attempt {change.attempt} is not live")
        seq, attempt, now = job.seq, change.attempt, change.at
        self._steps += [
            (seq, replace(row, attempt=attempt, at=row.at or now)) for row in change.rows
        ]
        if job.state is JobState.DISPATCHED:
            start = self._one(Move(change.job_id, (JobEvent.START,), change.actor, change.at))
            assert start.job is not None
            job = start.job
        if not change.notes or job.version >= MAX_HISTORY:
            return Answer(_MOVED, job)
        # As a move with one event for each note would do it, but with much less to weigh.
        plan = plan_of(job.state, _NOTES, change.actor.partition(":")[0])
        pages, at = _with_page(job.pages, self._begin_page()), max(change.at, job.updated_at)
        strides = self._pages[-1].strides
        for note in change.notes:
            job = replace(job, version=job.version + 1, updated_at=at, pages=pages)
            strides.append(Stride(plan.path, change.actor, at, note, None, None, [job]))
        self._events += len(change.notes)
        self.heads[job.job_id] = job
        return Answer(_MOVED, job)

    def _refer(self, job: Job) -> None:
        """Write rows that refer to the artifacts of a job that ends."""
        if job.result is None:
            return
        for left in job.result.artifacts:
            row = replace(artifact_row(left), at=job.updated_at, attempt=job.attempt)
            self._steps.append((job.seq, row))

    # -- looking up ---------------------------------------------------------------

    def find(self, job_id: str) -> Job | None:
        return self.heads.get(job_id) or self._open.get(job_id) or self._known.jobs.get(job_id)

    def _holder(self, accept: Accept) -> Job | None:
        """The job that has this one's id or idempotency key."""
        request = accept.request
        held = self.find(request.job_id)
        if held is None and request.idempotency_key is not None:
            key = (request.tenant, request.idempotency_key)
            if (job_id := self._keys.get(key)) is not None:
                return self.heads[job_id]
            held = self._known.keys.get(key)
            if held is not None:
                held = self.find(held.job_id) or held
        return held

    def _keeper(self, accept: Accept) -> Job | None:
        """The newest job that keeps this one out by its unique key."""
        unique = accept.request.unique
        if unique is None:
            return None
        key = (accept.request.tenant, unique.key)
        candidates = [self.heads[job_id] for job_id in reversed(self._uniques.get(key, ()))]
        candidates.extend(self.find(job.job_id) or job for job in self._known.uniques.get(key, ()))
        return next((job for job in candidates if keeps_out(job, accept.at)), None)

    def _key_taken(self, job: Job, accepts: Iterable[Accept]) -> str:
        """Why a job that ended before may not be retried: another has its unique key by now.

        The retry of a job that ends in this very commit has the key from it.
        """
        for accept in accepts:
            keeper = self._keeper(accept)
            if keeper is not None and keeper.job_id != job.job_id:
                return f"job {keeper.job_id} has its unique key now"
        return ""

    # -- collecting ---------------------------------------------------------------

    def _begin_page(self) -> int:
        """The page for the next move: another one when the present one is full."""
        if self._events >= PAGE_EVENTS:
            if self._pages:
                self._page += 1
            self._pages.append(Page(self._page, []))
            self._strides = {}
            self._events = 0
        return self._page

    def _stride(
        self,
        path: Path,
        actor: str,
        at: float,
        reason: str,
        worker_id: str | None,
        pool: str | None,
        *,
        apart: bool = False,
    ) -> Stride:
        """The stride that a move joins; a new one if there is none, or if it must be `apart`."""
        key = (id(path), actor, at, reason, worker_id)
        stride = None if apart else self._strides.get(key)
        if stride is None:
            stride = Stride(path, actor, at, reason, worker_id, pool, [])
            self._strides[key] = stride
            self._pages[-1].strides.append(stride)
        return stride

    def _join(self, plan: Plan, move: BulkMove) -> list[Job]:
        if not plan.is_plain:
            return []
        given = (move.worker_id, move.pool) if plan.gives else (None, None)
        stride = self._stride(plan.path, move.actor, move.at, "", *given, apart=move.follows)
        return stride.jobs

    def _keep(self, answer: Answer, *, writes_row: bool) -> Answer:
        job, own = answer.job, answer.stride
        assert job is not None
        assert own is not None
        # A job's second move in a commit must come after its first: it can't join a stride
        # that may have been begun before that.
        stride = self._stride(
            own.path,
            own.actor,
            own.at,
            own.reason,
            own.worker_id,
            own.pool,
            apart=job.job_id in self.heads,
        )
        stride.jobs.append(job)
        self._events += len(own.path.steps)
        self.heads[job.job_id] = job
        if writes_row:
            self._rows[job.job_id] = None
        return Answer(_MOVED, job, stride)

    def commit(self) -> Commit:
        """All that is to be written."""
        for page in self._pages:
            page.strides[:] = [stride for stride in page.strides if stride.jobs]
        pages = [page for page in self._pages if page.strides]
        heads, new, rows = self.heads, self._new, self._rows
        counts: dict[tuple[str, JobState | None], int] = {}
        open_jobs, known = self._open, self._known.jobs
        for job_id, job in heads.items():
            tenant, now = job.request.tenant, counted_as(job.state, job.successor)
            if job_id not in new:
                before = open_jobs.get(job_id) or known[job_id]
                if (was := counted_as(before.state, before.successor)) is now:
                    continue
                counts[tenant, was] = counts.get((tenant, was), 0) - 1
            counts[tenant, now] = counts.get((tenant, now), 0) + 1
        lagging = [
            job
            for job_id, job in heads.items()
            if job_id not in rows and new.get(job_id) is not job
        ]
        return Commit(
            pages=pages,
            accepted=[heads[job_id] if job_id in rows else job for job_id, job in new.items()],
            changed=[heads[job_id] for job_id in rows if job_id not in new],
            lagging=lagging,
            steps=self._steps,
            counts={key: count for key, count in counts.items() if count},
        )


def _refusal(batch: Sequence[Change], conflict: Accept, held: Job) -> list[Answer]:
    """The answers to a batch of which nothing is done, because `held` has the id or key of one."""
    why = f"job {held.job_id} has the id or key of {conflict.request.job_id}"
    return [Answer(_REFUSED, held if one is conflict else None, why=why) for one in batch]
