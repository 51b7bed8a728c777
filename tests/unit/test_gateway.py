"""What comes in, what comes in twice, and how a user ends it or tries it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.adapters.memory.store import MemoryStore
from penstock.control.board import Board
from penstock.control.gateway import Gateway, check_batch
from penstock.control.roster import Pool, Roster
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    UnknownTopic,
    UnreadablePointer,
)
from penstock.core.job import JobRequest, Priority, RetryPolicy
from penstock.core.transition import Change
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, a_request, accept, failed, move, succeeded

_E, _S = JobEvent, JobState


class Desk:
    """A gateway with everything that it needs."""

    def __init__(self, **options: Any) -> None:
        self.store, self.blobs = MemoryStore(), MemoryBlobs()
        self.clock = VirtualClock(T0)
        self.board = Board(Roster({"p": Pool("p", topics=("job.test*",))}), self.clock.now)
        self.store.listen(self.board.observe)
        self.gateway = Gateway(self.store, self.blobs, self.board, self.clock, **options)

    async def submit(self, *requests: JobRequest) -> list[str]:
        return [job.job_id for job in await self.gateway.submit(requests)]

    async def apply(self, *changes: Change) -> None:
        assert all(answer.moved for answer in await self.store.apply(changes))

    async def states(self, *job_ids: str) -> list[JobState]:
        return [(await self.gateway.find(job_id)).state for job_id in job_ids]

    async def stored(self) -> list[str]:
        return [job.job_id for job in await self.store.find(JobQuery())]


# -- in ---------------------------------------------------------------------------


@run_async
async def test_a_submission_is_acknowledged_with_its_pending_job() -> None:
    desk = Desk()
    (job,) = await desk.gateway.submit([a_request("a")])
    assert (job.job_id, job.state, job.accepted_at) == ("a", _S.PENDING, T0)
    assert await desk.store.get("a") == job


@run_async
async def test_an_empty_id_is_given_one_that_sorts() -> None:
    desk = Desk()
    ids = await desk.submit(*[a_request("") for _ in range(5)])
    assert ids == sorted(set(ids))


@run_async
async def test_the_same_request_again_is_answered_with_the_same_job() -> None:
    desk = Desk()
    request = a_request("a", labels={"k": "v"})
    assert await desk.submit(request) == await desk.submit(request) == ["a"]
    assert await desk.submit(request, request) == ["a", "a"]
    assert await desk.stored() == ["a"]


@run_async
async def test_the_same_key_again_is_answered_with_the_job_that_has_it() -> None:
    desk = Desk()
    (first,) = await desk.submit(a_request("", idempotency_key="k"))
    desk.clock.jump(60)
    assert await desk.submit(a_request("", idempotency_key="k", deadline=T0 + 99)) == [first]
    (other,) = await desk.submit(a_request("", idempotency_key="k", tenant="other"))
    assert other != first


@pytest.mark.parametrize(
    "different",
    [
        {"topic": "job.test.other"},
        {"priority": Priority.CRITICAL},
        {"env": {"k": "v"}},
        {"labels": {"k": "v"}},
        {"tenant": "other"},
        {"timeout": 5.0},
        {"idempotent": True},
        {"retry": RetryPolicy(retries=1)},
        {"context_ptr": "data:,x"},
        {"workflow_id": "w"},
        {"parent_job_id": "p"},
    ],
)
@run_async
async def test_an_id_taken_by_a_different_request_is_a_conflict(different: dict[str, Any]) -> None:
    desk = Desk()
    await desk.submit(a_request("a"))
    with pytest.raises(Conflict, match=next(iter(different))):
        await desk.submit(a_request("a", **different))
    assert await desk.stored() == ["a"]


@run_async
async def test_a_key_taken_by_a_different_request_is_a_conflict() -> None:
    desk = Desk()
    await desk.submit(a_request("", idempotency_key="k"))
    with pytest.raises(Conflict, match="idempotency_key 'k'"):
        await desk.submit(a_request("", idempotency_key="k", env={"a": "b"}))


BATCHES: list[tuple[type[Exception], Sequence[JobRequest]]] = [
    (InvalidRequest, [a_request("good"), a_request("bad id")]),
    (InvalidRequest, [a_request("good"), a_request("b", timeout=-1)]),
    (UnknownTopic, [a_request("good"), a_request("b", topic="job.unknown")]),
    (UnreadablePointer, [a_request("good"), a_request("b", context_ptr="file:///etc/passwd")]),
    (Conflict, [a_request("good"), a_request("taken", env={"k": "v"})]),
    (Conflict, [a_request("good"), a_request("", idempotency_key="taken", env={"k": "v"})]),
    (Conflict, [a_request("good"), a_request("good", env={"k": "v"})]),
    (
        Conflict,
        [
            a_request("good", idempotency_key="k"),
            a_request("b", idempotency_key="k", env={"k": "v"}),
        ],
    ),
]


@pytest.mark.parametrize(("error", "batch"), BATCHES)
@run_async
async def test_of_a_batch_with_one_bad_request_nothing_is_stored(
    error: type[Exception], batch: Sequence[JobRequest]
) -> None:
    desk = Desk()
    await desk.submit(a_request("taken", idempotency_key="taken"))
    with pytest.raises(error):
        await desk.submit(*batch)
    assert await desk.stored() == ["taken"]


@run_async
async def test_an_unknown_topic_is_refused_with_the_nearest_known_one() -> None:
    desk = Desk()
    desk.board.topics.add("job.image.resize")
    with pytest.raises(UnknownTopic, match=r"did you mean job\.image\.resize"):
        await desk.submit(a_request("a", topic="job.image.resise"))
    await desk.submit(a_request("b", topic="job.image.resize"))


@run_async
async def test_an_unknown_topic_may_be_held_instead() -> None:
    desk = Desk(refuse_unknown=False)
    assert await desk.submit(a_request("a", topic="job.nobody.serves")) == ["a"]


def test_a_batch_has_a_limit() -> None:
    check_batch([a_request()] * 10, 10)
    with pytest.raises(InvalidRequest, match="11 at once"):
        check_batch([a_request()] * 11, 10)


# -- out --------------------------------------------------------------------------


@pytest.mark.parametrize("events", [(), (_E.SCHEDULE,)])
@run_async
async def test_a_waiting_job_is_cancelled_at_once(events: tuple[JobEvent, ...]) -> None:
    desk = Desk()
    await desk.apply(accept("a"), *(move("a", event) for event in events))
    job = await desk.gateway.cancel("a", reason="enough", children=False)
    assert job.state is _S.CANCELLED
    assert job.result is not None
    assert job.result.error_message == "enough"


@pytest.mark.parametrize("events", [(), (_E.START,)])
@run_async
async def test_a_held_job_is_asked_to_end_once(events: tuple[JobEvent, ...]) -> None:
    desk = Desk()
    await desk.apply(accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH))
    await desk.apply(*(move("a", event) for event in events))
    for _ in range(2):
        job = await desk.gateway.cancel("a", reason="", children=False)
        assert job.cancel_requested
        assert not job.is_final
    log = await desk.store.history("a")
    assert sum(entry.event is _E.REQUEST_CANCEL for entry in log) == 1


@run_async
async def test_an_ended_job_stays_as_it_ended() -> None:
    desk = Desk()
    await desk.apply(accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH))
    await desk.apply(move("a", _E.SUCCEED, result=succeeded("a")))
    assert (await desk.gateway.cancel("a", reason="", children=False)).state is _S.SUCCEEDED


@run_async
async def test_a_cancel_that_lost_a_race_looks_again() -> None:
    desk = Desk()
    await desk.apply(accept("a"))
    apply, raced = desk.store.apply, []

    async def racing(changes: Sequence[Change]) -> Any:
        if not raced:
            raced.append(True)
            await apply([move("a", _E.SCHEDULE, _E.DISPATCH)])
        return await apply(changes)

    desk.store.apply = racing  # type: ignore[method-assign]
    job = await desk.gateway.cancel("a", reason="", children=False)
    assert (job.state, job.cancel_requested) == (_S.DISPATCHED, True)


@run_async
async def test_a_cancel_follows_the_retries_of_a_job() -> None:
    desk = Desk()
    await desk.apply(accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH))
    retry = accept("b", parent_job_id="a", retry_number=1)
    await desk.apply(move("a", _E.FAIL, result=failed("a"), then=(retry,)))
    assert (await desk.gateway.cancel("a", reason="", children=False)).job_id == "b"
    assert await desk.states("a", "b") == [_S.FAILED, _S.CANCELLED]


@run_async
async def test_children_are_spared_unless_asked_for() -> None:
    desk = Desk()
    await desk.apply(accept("p"), accept("c", parent_job_id="p"))
    await desk.gateway.cancel("p", reason="", children=False)
    assert await desk.states("p", "c") == [_S.CANCELLED, _S.PENDING]


@run_async
async def test_children_and_their_children_are_cancelled_with_their_parent() -> None:
    desk = Desk()
    await desk.apply(
        accept("p"), accept("c", parent_job_id="p"), accept("g", parent_job_id="c"), accept("x")
    )
    await desk.gateway.cancel("p", reason="", children=True)
    assert await desk.states("p", "c", "g", "x") == [_S.CANCELLED] * 3 + [_S.PENDING]


@run_async
async def test_the_retry_of_a_child_is_cancelled_with_the_childs_parent() -> None:
    desk = Desk()
    await desk.apply(accept("p"), accept("c", parent_job_id="p"))
    await desk.apply(move("c", _E.SCHEDULE, _E.DISPATCH))
    retry = accept("c2", parent_job_id="c", retry_number=1)
    await desk.apply(move("c", _E.FAIL, result=failed("c"), then=(retry,)))
    await desk.gateway.cancel("p", reason="", children=True)
    assert await desk.states("p", "c", "c2") == [_S.CANCELLED, _S.FAILED, _S.CANCELLED]


@run_async
async def test_a_child_that_ended_does_not_shield_its_own_children() -> None:
    desk = Desk()
    await desk.apply(accept("p"), accept("c", parent_job_id="p"), accept("g", parent_job_id="c"))
    await desk.apply(move("c", _E.SCHEDULE, _E.DISPATCH))
    await desk.apply(move("c", _E.SUCCEED, result=succeeded("c")))
    await desk.gateway.cancel("p", reason="", children=True)
    assert await desk.states("p", "g") == [_S.CANCELLED, _S.CANCELLED]


@run_async
async def test_an_unknown_job_is_not_found() -> None:
    desk = Desk()
    for ask in (desk.gateway.find("x"), desk.gateway.retry("x")):
        with pytest.raises(NotFound):
            await ask
    with pytest.raises(NotFound):
        await desk.gateway.cancel("x", reason="", children=True)


# -- again ------------------------------------------------------------------------


@run_async
async def test_a_job_that_ended_badly_is_retried_as_a_new_one_linked_both_ways() -> None:
    desk = Desk()
    await desk.apply(
        accept("a", labels={"k": "v"}, idempotency_key="key", run_at=T0, deadline=T0 + 1)
    )
    await desk.apply(move("a", _E.CANCEL))
    again = await desk.gateway.retry("a")
    assert again.request.parent_job_id == "a"
    assert (await desk.gateway.find("a")).successor == again.job_id
    assert again.request.labels == {"k": "v"}
    assert (again.request.idempotency_key, again.request.deadline) == (None, None)


@run_async
async def test_what_runs_or_succeeded_or_was_retried_is_not_retried() -> None:
    desk = Desk()
    await desk.apply(accept("runs"), accept("good"), accept("bad"))
    await desk.apply(move("good", _E.SCHEDULE, _E.DISPATCH), move("bad", _E.CANCEL))
    await desk.apply(move("good", _E.SUCCEED, result=succeeded("good")))
    await desk.gateway.retry("bad")
    for job_id, why in (("runs", "not ended"), ("good", "nothing to retry"), ("bad", "already")):
        with pytest.raises(Conflict, match=why):
            await desk.gateway.retry(job_id)
