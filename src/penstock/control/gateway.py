"""Admits: validates, de-duplicates, accepts; and ends what a user wants ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from msgspec.structs import replace

from penstock.control.dependencies import check_cycles
from penstock.control.ledger import Committed, Ledger
from penstock.control.open_jobs import OpenJobs
from penstock.core.check import check_request
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    TooMany,
    UnknownTopic,
    UnreadablePointer,
    did_you_mean,
)
from penstock.core.job import (
    IdSource,
    Job,
    JobRequest,
    JobResult,
    chain_of,
    completed,
    difference,
    has_child_key,
    next_child_key,
)
from penstock.core.ledger import Accept, Answer, ChangeOutcome, Move
from penstock.core.pointer import check_size, decode_data
from penstock.core.trace import attempt_span
from penstock.lifecycles.canonical import HELD, TERMINAL, JobEvent, JobState, Role
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.engine_api import OWNER, Bulk, Submitted
from penstock.ports.store import JobQuery

_GATEWAY = Role.GATEWAY.value
_READ = 1_000
"""Parents that are looked up at once."""
_BREATH = 1000
"""Requests of a batch that are checked before others get the event loop."""
_LAST = (1 << 62) - 1
"""Beyond every job's `seq`."""
_PAGE = 500
"""Jobs that a bulk operation changes in one commit."""
_TOLD = 100
"""Refusals that a bulk operation reports."""
_FULL_RETRY = 5.0
_FREE = nullcontext()


class Gateway:
    """The one way in."""

    def __init__(
        self,
        store: Ledger,
        blobs: Blobs,
        open_jobs: OpenJobs,
        clock: Clock,
        *,
        checks: Mapping[str, Callable[[str, bytes], None]] | None = None,
        refuse_unknown: bool = True,
        max_input: int = 64 << 20,
        max_waiting: int = 0,
        ids: IdSource | None = None,
        traces: bool = False,
    ) -> None:
        """`traces`: children join the trace of their parent, also where that has none of a
        caller's."""
        self.store, self.blobs, self.open_jobs, self.clock = store, blobs, open_jobs, clock
        self._checks, self._max_input = checks or {}, max_input
        self._max_waiting = max_waiting
        self._refuse_unknown = refuse_unknown
        self._ids = ids or IdSource()
        self._known: set[str] = set()
        self._traces = traces

    # -- in -----------------------------------------------------------------------

    def begin(
        self, request: JobRequest, *, by: str = "", fresh: bool = False, repeats: bool = False
    ) -> Committed | None:
        """Admit one plain request: the future is done when it is a durable job.

        `fresh`: its id is new, so it is not looked up. `repeats`: the caller goes on with `submit`
        if a job has the request's id already.

        None for a request that needs more than one commit, as one that may have been accepted
        before, waits for others, or has its input elsewhere: that is for `submit`.
        """
        pointer, limiter = request.context_ptr, self.open_jobs.limiter
        if (
            (request.job_id and not (fresh or repeats))
            or request.idempotency_key is not None
            or request.after
            or request.child_of is not None
            or (pointer and not pointer.startswith("data:"))
            or (limiter.limits and limiter.limits_queues)
        ):
            return None
        accept = self._admissible(request, self.clock.now(), by, fresh=fresh)
        if accept.request.unique is not None:
            return None
        if not self._max_waiting:
            return self.store.begin((accept,))
        self._check_room(1)
        job_id, coming = accept.request.job_id, self.open_jobs.coming
        committed = self.store.begin((accept,))
        coming[job_id] = accept.request
        committed.add_done_callback(lambda done: coming.pop(job_id, None))
        return committed

    async def submit(
        self, requests: Sequence[JobRequest], *, by: str = "", fresh: bool = False
    ) -> Submitted:
        """Accept all durably, or none. See `penstock.ports.engine_api.EngineApi.submit`."""
        now = self.clock.now()
        many = len(requests) > 1
        accepts: list[Accept] = []
        elsewhere: list[str] = []
        for request in requests:
            accepts.append(self._admissible(request, now, by, fresh=fresh, all_or_none=many))
            if (pointer := request.context_ptr) and not pointer.startswith("data:"):
                elsewhere.append(pointer)
            if len(accepts) % _BREATH == 0:
                await asyncio.sleep(0)
        for pointer in elsewhere:
            await self._check_elsewhere(pointer)
        await self._resolve_parents(accepts)
        admitted = [accept.request for accept in accepts]
        if many:
            _check_batch_conflicts(admitted)
        children = [request for request in admitted if request.after]
        parents = self.open_jobs.keeping_parents(children) if children else _FREE
        with self._room_for(admitted), parents:
            if children:
                await self._check_parents(admitted)
            # One commit: a failure leaves nothing, and a child never precedes its parents.
            answers = await self.store.apply(accepts)
        jobs: list[Job] = []
        new: set[str] = set()
        for answer, accept in zip(answers, accepts, strict=True):
            if answer.job is not None and not answer.moved:
                _check_repeat(accept.request, answer.job.request)
                answer = await self._run_again(accept, answer)
            if (job := answer.job) is None:
                continue  # another one of the batch is in conflict
            if answer.verdict is ChangeOutcome.MOVED:
                new.add(job.request.job_id)
            jobs.append(job)
        assert len(jobs) == len(admitted)
        return Submitted(jobs, frozenset(new))

    async def _run_again(self, accept: Accept, answer: Answer) -> Answer:
        """What a child that was submitted before is answered with.

        The same job; but a retry of the parent runs anew, under the next key, what an earlier try
        submitted and what had ended without success before that retry was made, or was cancelled.
        """
        request = accept.request
        parent = self.open_jobs.held.get(request.parent_job_id or "")
        if parent is None or parent.request.first_try is None or not has_child_key(request):
            return answer
        key = request.idempotency_key or ""
        while not answer.moved and await self._is_spent(answer.job, parent):
            key = next_child_key(key)
            request = replace(request, job_id=self._ids.next(accept.at), idempotency_key=key)
            (answer,) = await self.store.apply([replace(accept, request=request, fresh=True)])
        return answer

    async def _is_spent(self, child: Job | None, parent: Job) -> bool:
        """Whether a retry of its parent must not be given this child: by how it was when that retry
        was made, and not by what users retried since. Each attempt gets the same answer."""
        if child is None or child.request.parent_job_id == parent.job_id:
            return False
        while child.successor is not None:
            later = await self.store.get(child.successor)
            if later is None or (
                later.seq > parent.seq and await self._ended_before(child, parent)
            ):
                break
            child = later
        if child.state is JobState.SUCCEEDED:
            return False
        if child.state is JobState.CANCELLED or child.cancel_requested:
            return True  # as the children of a parent that is retried by hand after its end
        if not child.is_final:
            return child.seq in self.open_jobs.families.doomed
        return await self._ended_before(child, parent)

    async def _ended_before(self, job: Job, other: Job) -> bool:
        """Whether a job ended before another was accepted, by the order of commits: the clock may
        have been set back."""
        accepted = other.pages[0]
        return job.is_final and (
            job.pages[-1] <= accepted or await self.store.had_ended(job, accepted)
        )

    def _admissible(
        self,
        request: JobRequest,
        now: float,
        by: str,
        *,
        fresh: bool = False,
        all_or_none: bool = False,
    ) -> Accept:
        principal = by
        if not by or (by == OWNER.principal and request.principal):
            principal = request.principal  # the owner may submit on somebody's behalf
        if not request.job_id:
            fresh = True
            request = replace(request, job_id=self._ids.next(now), principal=principal)
        elif request.principal != principal:
            request = replace(request, principal=principal)
        request = completed(request, self.open_jobs.topic_defaults.get(request.topic))
        check_request(request, now)
        self.store.shard.check(request.tenant)
        if request.topic not in self._known:
            self._check_topic(request.topic)
        self._check_payload(request)
        return Accept(request, now, actor_for(by), fresh=fresh, all_or_none=all_or_none)

    async def _resolve_parents(self, accepts: list[Accept]) -> None:
        """Name the job that each is a child of by its first try; refuse it if that has failed."""
        resolved: dict[tuple[str, str | None], Job | None] = {}
        for index, accept in enumerate(accepts):
            request = accept.request
            if (child_of := request.child_of) is None:
                continue
            named = (child_of, request.parent_job_id)
            if named not in resolved:
                resolved[named] = await self._parent(*named)
            if (parent := resolved[named]) is None or parent.request.tenant != request.tenant:
                continue  # of another engine, or another's: nothing follows from it
            if not request.detached and parent.is_final:
                _check_succeeded(parent)
            if (chain := chain_of(parent.request)) != child_of:
                request = replace(request, child_of=chain)
            if request.traceparent is None and (self._traces or parent.request.traceparent):
                span = attempt_span(parent.request, parent.attempt)
                request = replace(request, traceparent=str(span))
            if request is not accept.request:
                accepts[index] = replace(accept, request=request)

    async def _parent(self, child_of: str, parent_id: str | None) -> Job | None:
        """The try of a job in which another is submitted."""
        parent = self.open_jobs.held.get(parent_id or child_of)
        if parent is None and parent_id is not None:
            parent = await self.store.get(parent_id)
        if parent is None or child_of not in (parent.job_id, chain_of(parent.request)):
            parent = await self.store.get(child_of)
        return parent

    async def _check_parents(self, requests: Sequence[JobRequest]) -> None:
        """What a job waits for must be there, or come with it, and lead nowhere back."""
        batch = {request.job_id: request for request in requests}
        tenants: dict[str, str] = {}
        others = {one: None for request in requests for one in request.after if one not in batch}
        wanted = list(others)
        for begin in range(0, len(wanted), _READ):
            found = await self.store.get_many(wanted[begin : begin + _READ])
            tenants |= {parent_id: job.request.tenant for parent_id, job in found.items()}
        tenants |= {parent_id: parent.tenant for parent_id, parent in batch.items()}
        for request in requests:
            for index, parent_id in enumerate(request.after):
                if tenants.get(parent_id) != request.tenant:
                    raise InvalidRequest(f"after[{index}]", f"there is no job {parent_id!r}")
        # A circle leads through jobs that come together.
        check_cycles({one: tuple(p for p in batch[one].after if p in batch) for one in batch})

    def _room_for(self, requests: Sequence[JobRequest]) -> AbstractContextManager[None]:
        """Refuse what would make a queue too long; keep its room until it is stored."""
        if not (self._max_waiting or self.open_jobs.limiter.limits_queues):
            return _FREE
        self._check_room(len(requests))
        self.open_jobs.limiter.check_waiting(requests)
        return self.open_jobs.expecting(requests)

    def _check_room(self, more: int) -> None:
        waiting = self.open_jobs.waiting() + len(self.open_jobs.coming)
        if waiting + more > self._max_waiting > 0:
            raise TooMany(
                f"queue is full (max_waiting={self._max_waiting}, {waiting} waiting)",
                retry_after=_FULL_RETRY,
                hint="try again when some have run, or raise limits.max_waiting",
            )

    def _check_payload(self, request: JobRequest) -> None:
        """What is at hand is checked now."""
        topic, pointer = request.topic, request.context_ptr
        if pointer and not pointer.startswith("data:"):
            return
        try:
            payload = decode_data(pointer) if pointer else b""
        except UnreadablePointer as error:
            raise _in_field("context_ptr", error) from error
        if (check := self._checks.get(topic)) is not None and not request.takes_results:
            check(topic, payload)

    async def _check_elsewhere(self, pointer: str) -> None:
        """What is elsewhere must at least be readable."""
        try:
            stat = await self.blobs.stat(pointer)
        except UnreadablePointer as error:
            raise _in_field("context_ptr", error) from error
        check_size("input", stat.size, self._max_input)

    def _check_topic(self, topic: str) -> None:
        if self._refuse_unknown and not self.open_jobs.knows(topic):
            meant = did_you_mean(topic, self.open_jobs.topics, "")
            raise UnknownTopic(
                "topic",
                f"no worker serves {topic!r}",
                hint=f"{meant} start a worker that does, or set unknown_topics to 'hold'".lstrip(),
            )
        self._known.add(topic)

    # -- out ----------------------------------------------------------------------

    async def cancel(self, job_id: str, *, reason: str, children: bool, by: str = "") -> Job:
        """Ask for the end of a job; a waiting one ends at once. Follows retries."""
        job = await self._latest(job_id)
        while not job.is_final:
            move = _cancel_move(job, reason, self.clock.now(), by)
            (answer,) = await self.store.apply([move])
            assert answer.job is not None
            job = answer.job
            if answer.verdict is not ChangeOutcome.REFUSED:
                break
            job = await self._latest(job.job_id)  # it may have failed and be retried
        if children:
            await self._cancel_children(job, reason, by)
        return job

    async def _cancel_children(self, job: Job, reason: str, by: str) -> None:
        """Cancel what a job and its earlier tries submitted, and what those submitted.

        The retry of a job is among its children, and so are those of the retry in turn.
        """
        tenant = job.request.tenant  # another's job is not ours to end, whatever it says
        seen = {job.job_id, await self._first_try(job)}
        parents = list(seen)
        while parents:
            parent_id = parents.pop()
            why = reason or f"its parent {parent_id} was cancelled"
            async for page in self._pages(JobQuery(parent_job_id=parent_id, tenant=tenant)):
                new = [child for child in page if child.job_id not in seen]
                seen.update(child.job_id for child in new)
                parents.extend(child.job_id for child in new)
                await self._cancel_page([child for child in new if not child.is_final], why, by)
            await asyncio.sleep(0)  # others get a turn

    async def _first_try(self, job: Job) -> str:
        while (parent_id := job.request.parent_job_id) is not None:
            parent = await self.store.get(parent_id)
            if parent is None or parent.successor != job.job_id:
                break
            job = parent
        return job.job_id

    async def _cancel_page(self, page: Sequence[Job], reason: str, by: str) -> int:
        """Cancel unfinished jobs in one commit; returns how many end, or are asked to."""
        if not page:
            return 0
        now = self.clock.now()
        answers = await self.store.apply([_cancel_move(job, reason, now, by) for job in page])
        done = 0
        for job, answer in zip(page, answers, strict=True):
            if answer.verdict is ChangeOutcome.REFUSED:  # it moved meanwhile: look again
                final = await self.cancel(job.job_id, reason=reason, children=False, by=by)
                done += final.state is JobState.CANCELLED or final.cancel_requested
            else:
                done += 1
        return done

    async def cancel_many(self, query: JobQuery, *, reason: str, by: str = "") -> Bulk:
        """Cancel every unfinished job that matches, a page a commit."""
        wanted = tuple(s for s in query.states or JobState if s not in TERMINAL)
        if not wanted:
            return Bulk(0, 0)
        matched = done = 0
        async for page in self._pages(replace(query, states=wanted)):
            matched += len(page)
            done += await self._cancel_page(page, reason, by)
        return Bulk(matched, done)

    async def _pages(self, query: JobQuery) -> AsyncIterator[list[Job]]:
        """Every job that matches now, newest first; what comes meanwhile is left out."""
        query = replace(query, limit=_PAGE, oldest_first=False, before=query.before or _LAST)
        while page := await self.store.find(query):
            before = min(job.seq for job in page)
            yield page
            if len(page) < _PAGE:
                return
            query = replace(query, before=before)

    async def _latest(self, job_id: str) -> Job:
        job = await self.find(job_id)
        while job.successor is not None:
            job = await self.find(job.successor)
        return job

    async def find(self, job_id: str) -> Job:
        job = await self.store.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        return job

    async def retry(self, job_id: str, *, by: str = "") -> Job:
        """Emit a new try of a job whose newest try ended badly, linked both ways in one commit."""
        job = await self._latest(job_id)
        which = f"job {job_id}" if job.job_id == job_id else f"job {job_id}, now {job.job_id},"
        if not job.is_final:
            raise Conflict(f"{which} is {job.state}: it has not ended yet")
        if job.state is JobState.SUCCEEDED:
            raise Conflict(f"{which} SUCCEEDED: there is nothing to retry")
        move = self._retry_move(job, self.clock.now(), by)
        (answer,) = await self.store.apply([move])
        if not answer.moved:
            raise Conflict(f"job {job_id} was changed by another caller: {answer.why}")
        return await self.find(move.then[0].request.job_id)

    async def retry_many(self, query: JobQuery, *, by: str = "") -> Bulk:
        """Retry every dead letter that matches, a page a commit."""
        matched = done = 0
        refused: list[tuple[str, str]] = []
        async for page in self._pages(replace(query, dead=True)):
            now = self.clock.now()
            answers = await self.store.apply([self._retry_move(job, now, by) for job in page])
            for job, answer in zip(page, answers, strict=True):
                matched += 1
                done += answer.moved
                if not answer.moved and len(refused) < _TOLD:
                    refused.append((job.job_id, answer.why))
        return Bulk(matched, done, tuple(refused))

    def _retry_move(self, job: Job, now: float, by: str) -> Move:
        """Every field is kept, so that the same rules apply; only id, link and times differ."""
        again = replace(
            job.request,
            job_id=self._ids.next(now),
            parent_job_id=job.job_id,
            first_try=chain_of(job.request),
            try_number=job.request.try_number + 1,
            idempotency_key=None,
            run_at=None,
            deadline=None,
            retry_number=0,
        )
        who, actor = by or "a user", actor_for(by)
        accept = Accept(again, now, actor, f"retry of {job.job_id} by {who}", fresh=True)
        return Move(
            job.job_id,
            (JobEvent.NOTE,),
            actor,
            now,
            f"retried as {again.job_id} by {who}",
            version=job.version,
            then=(accept,),
        )


def _in_field(field: str, error: UnreadablePointer) -> UnreadablePointer:
    """A pointer that can't be read is blamed on the field that has it."""
    return UnreadablePointer(field, error.problem, hint=error.hint)


def actor_for(by: str) -> str:
    """The gateway, and on whose word; its owner needs no name."""
    return _GATEWAY if by in ("", OWNER.principal) else f"{_GATEWAY}:{by}"


def _cancel_move(job: Job, reason: str, now: float, by: str) -> Move:
    reason = reason or "cancelled by a user"
    if job.state in HELD:
        event, result = JobEvent.REQUEST_CANCEL, None
    else:
        event = JobEvent.CANCEL
        result = JobResult(
            job_id=job.job_id,
            status=JobState.CANCELLED,
            error_code="CANCELLED",
            error_message=reason,
        )
    return Move(
        job.job_id, (event,), actor_for(by), now, reason, version=job.version, result=result
    )


def _check_repeat(request: JobRequest, held: JobRequest) -> None:
    """A job that is there already answers for the same request, or for its unique key."""
    same_id = request.job_id == held.job_id
    same_key = request.idempotency_key is not None and (
        request.idempotency_key == held.idempotency_key
    )
    if same_id or same_key:
        _check_same(request, held)


def _check_same(request: JobRequest, held: JobRequest) -> None:
    field = difference(request, held)
    if field == "tenant":
        raise Conflict(f"job_id {held.job_id!r} is taken", hint="leave it out to be given one")
    if field is not None:
        taken = (
            f"job_id {held.job_id!r}"
            if request.job_id == held.job_id
            else f"idempotency_key {request.idempotency_key!r}"
        )
        raise Conflict(
            f"{taken} is taken by a different request: {field} differs",
            hint="use another id or key, or submit exactly the same request",
        )


def _check_succeeded(parent: Job) -> None:
    if parent.state is not JobState.SUCCEEDED:
        raise Conflict(
            f"its parent {parent.job_id} ended {parent.state} and can have no more children",
            hint="submit it with detached=True, or without a parent",
        )


def _check_batch_conflicts(requests: Sequence[JobRequest]) -> None:
    """Two different requests of one batch must not have the same id or key."""
    taken: dict[tuple[str, str | None], JobRequest] = {}
    for request in requests:
        by_id, by_key = (request.job_id, None), (request.tenant, request.idempotency_key)
        held = taken.setdefault(by_id, request)
        if held is request and request.idempotency_key is not None:
            held = taken.setdefault(by_key, request)
        if held is not request:
            _check_same(request, held)


def check_batch(requests: Sequence[JobRequest], most: int) -> None:
    if len(requests) > most:
        raise InvalidRequest("requests", f"{len(requests)} at once; at most {most} are allowed")
