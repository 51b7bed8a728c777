"""Admits: validates, de-duplicates, accepts; and ends what a user wants ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import get_close_matches

from msgspec.structs import replace

from penstock.control.board import Board
from penstock.control.parents import check_cycles
from penstock.core.caller import OWNER
from penstock.core.check import check_request
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    TooMany,
    UnknownTopic,
    UnreadablePointer,
)
from penstock.core.ids import IdSource
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.pointer import check_size, decode_data
from penstock.core.policy import completed, difference
from penstock.core.transition import Accept, Move, Verdict
from penstock.lifecycles.canonical import HELD, TERMINAL, JobEvent, JobState, Role
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.desk import Bulk, Submitted
from penstock.ports.store import JobQuery, Store

_GATEWAY = Role.GATEWAY.value
_BREATH = 1000
"""Requests of a batch that are checked before others get the event loop."""
_LAST = (1 << 62) - 1
"""Beyond every job's `seq`."""
_PAGE = 500
"""Jobs that a bulk operation changes in one commit."""
_TOLD = 100
"""Refusals that a bulk operation tells of."""
_FULL_RETRY = 5.0
_FREE = nullcontext()


class Gateway:
    """The one way in."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        board: Board,
        clock: Clock,
        *,
        check_input: Callable[[str, bytes], None] = lambda topic, payload: None,
        refuse_unknown: bool = True,
        max_input: int = 64 << 20,
        max_waiting: int = 0,
        ids: IdSource | None = None,
    ) -> None:
        self.store, self.blobs, self.board, self.clock = store, blobs, board, clock
        self._check_input, self._max_input = check_input, max_input
        self._max_waiting = max_waiting
        self._refuse_unknown = refuse_unknown
        self._ids = ids or IdSource()
        self._known: set[str] = set()

    # -- in -----------------------------------------------------------------------

    async def submit(self, requests: Sequence[JobRequest], *, by: str = "") -> Submitted:
        """Accept all durably, or none. See `penstock.ports.desk.Desk.submit`."""
        now = self.clock.now()
        many = len(requests) > 1
        accepts: list[Accept] = []
        for request in requests:
            accepts.append(self._admissible(request, now, by, all_or_none=many))
            if len(accepts) % _BREATH == 0:
                await asyncio.sleep(0)
        for request in requests:
            if (pointer := request.context_ptr) and not pointer.startswith("data:"):
                await self._check_elsewhere(pointer)
        admitted = [accept.request for accept in accepts]
        if many:
            _check_batch_conflicts(admitted)
        children = [request for request in admitted if request.after]
        parents = self.board.keeping_parents(children) if children else _FREE
        with self._room_for(admitted), parents:
            if children:
                await self._check_parents(admitted)
            # One commit: a failure leaves nothing, and a child never precedes its parents.
            answers = await self.store.apply(accepts)
        jobs: list[Job] = []
        new: set[str] = set()
        for answer, request in zip(answers, admitted, strict=True):
            if answer.job is None:
                continue  # another one of the batch is in conflict
            if not answer.moved:
                _check_repeat(request, answer.job.request)
            else:
                new.add(answer.job.job_id)
            jobs.append(answer.job)
        assert len(jobs) == len(admitted)
        return Submitted(jobs, frozenset(new))

    def _admissible(self, request: JobRequest, now: float, by: str, *, all_or_none: bool) -> Accept:
        fresh = not request.job_id
        principal = by
        if not by or (by == OWNER.principal and request.principal):
            principal = request.principal  # the owner may submit on somebody's behalf
        if fresh:
            request = replace(request, job_id=self._ids.next(now), principal=principal)
        elif request.principal != principal:
            request = replace(request, principal=principal)
        request = completed(request, self.board.offers.get(request.topic))
        check_request(request, now)
        if request.topic not in self._known:
            self._check_topic(request.topic)
        self._check_payload(request.topic, request.context_ptr)
        return Accept(request, now, actor_for(by), fresh=fresh, all_or_none=all_or_none)

    async def _check_parents(self, requests: Sequence[JobRequest]) -> None:
        """What a job waits for must be there, or come with it, and lead nowhere back."""
        batch = {request.job_id: request for request in requests}
        for request in requests:
            for index, parent_id in enumerate(request.after):
                parent = batch.get(parent_id)
                if parent is None:
                    job = await self.store.get(parent_id)
                    parent = None if job is None else job.request
                if parent is None or parent.tenant != request.tenant:
                    raise InvalidRequest(f"after[{index}]", f"there is no job {parent_id!r}")
        check_cycles({request.job_id: request.after for request in requests})

    def _room_for(self, requests: Sequence[JobRequest]) -> AbstractContextManager[None]:
        """Refuse what would make a queue too long; keep its room until it is stored."""
        if not (self._max_waiting or self.board.limiter.limits_queues):
            return _FREE
        if self._max_waiting:
            waiting = self.board.waiting() + len(self.board.coming)
            if waiting + len(requests) > self._max_waiting:
                raise TooMany(
                    f"{waiting} jobs are waiting already; at most {self._max_waiting} may",
                    retry_after=_FULL_RETRY,
                    hint="try again when some have run, or raise max_waiting",
                )
        self.board.limiter.check_waiting(requests)
        return self.board.expecting(requests)

    def _check_payload(self, topic: str, pointer: str) -> None:
        """What is at hand is checked now."""
        if not pointer:
            self._check_input(topic, b"")
        elif pointer.startswith("data:"):
            with _named("context_ptr"):
                payload = decode_data(pointer)
            self._check_input(topic, payload)

    async def _check_elsewhere(self, pointer: str) -> None:
        """What is elsewhere must at least be readable."""
        with _named("context_ptr"):
            stat = await self.blobs.stat(pointer)
        check_size("input", stat.size, self._max_input)

    def _check_topic(self, topic: str) -> None:
        if self._refuse_unknown and not self.board.knows(topic):
            near = get_close_matches(topic, sorted(self.board.topics), 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UnknownTopic(
                "topic",
                f"nothing here serves {topic!r}",
                hint=meant + "start a worker that does, or set unknown_topics to 'hold'",
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
            if answer.verdict is not Verdict.REFUSED:
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
            if answer.verdict is Verdict.REFUSED:  # it moved meanwhile: look again
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
        """Emit a new job for one that ended badly, linked both ways in one commit."""
        job = await self.find(job_id)
        if not job.is_final:
            raise Conflict(f"job {job_id} is {job.state}: it has not ended yet")
        if job.state is JobState.SUCCEEDED:
            raise Conflict(f"job {job_id} SUCCEEDED: there is nothing to retry")
        if job.successor is not None:
            raise Conflict(f"job {job_id} was already retried as {job.successor}")
        move = self._retry_move(job, self.clock.now(), by)
        (answer,) = await self.store.apply([move])
        if not answer.moved:
            raise Conflict(f"job {job_id} was just changed by somebody else: {answer.why}")
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


@contextmanager
def _named(field: str) -> Generator[None]:
    """A pointer that can't be read is blamed on the field that has it."""
    try:
        yield
    except UnreadablePointer as error:
        raise UnreadablePointer(field, error.problem, hint=error.hint) from error


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
