"""What comes in, what comes in twice, and how a user ends it or tries it again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.ledgers import MemoryLedger

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.control.gateway import Gateway, check_batch
from penstock.control.ledger import Ledger
from penstock.control.open_jobs import OpenJobs
from penstock.control.workers import Pool, Roster
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    StoreFull,
    TooMany,
    UnknownTopic,
    UnreadablePointer,
)
from penstock.core.job import (
    JobRequest,
    JobResult,
    Priority,
    RetryPolicy,
    Unique,
    UniqueScope,
    child_key,
)
from penstock.core.ledger import Answer, Change
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.engine_api import Limit
from penstock.ports.store import Durability, JobQuery
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, a_request, accept, failed, move, succeeded

_E, _S = JobEvent, JobState


class GatewayBench:
    """A gateway with everything that it needs."""

    def __init__(self, store: Ledger | None = None, **options: Any) -> None:
        self.store: Ledger = store or MemoryLedger()
        self.blobs = MemoryBlobs()
        self.clock = VirtualClock(T0)
        self.open_jobs = OpenJobs(Roster({"p": Pool("p", topics=("job.test*",))}), self.clock.now)
        self.store.listen(self.open_jobs.observe)
        self.gateway = Gateway(self.store, self.blobs, self.open_jobs, self.clock, **options)

    async def submit(self, *requests: JobRequest) -> list[str]:
        return [job.job_id for job in await self.gateway.submit(requests)]

    async def apply(self, *changes: Change) -> None:
        assert all(answer.moved for answer in await self.store.apply(changes))

    async def states(self, *job_ids: str) -> list[JobState]:
        return [(await self.gateway.find(job_id)).state for job_id in job_ids]

    async def stored(self) -> list[str]:
        return [job.job_id for job in await self.store.find(JobQuery())]


# -- in ---------------------------------------------------------------------------


@pytest.mark.seed("001", "4.1")
@run_async
async def test_a_submission_is_acknowledged_with_its_pending_job() -> None:
    bench = GatewayBench()
    (job,) = await bench.gateway.submit([a_request("a")])
    assert (job.job_id, job.state, job.accepted_at) == ("a", _S.PENDING, T0)
    assert await bench.store.get("a") == job


@run_async
async def test_an_empty_id_is_given_one_that_sorts() -> None:
    bench = GatewayBench()
    ids = await bench.submit(*[a_request("") for _ in range(5)])
    assert ids == sorted(set(ids))


@run_async
async def test_the_same_request_again_is_answered_with_the_same_job() -> None:
    bench = GatewayBench()
    request = a_request("a", labels={"k": "v"})
    assert await bench.submit(request) == await bench.submit(request) == ["a"]
    assert await bench.submit(request, request) == ["a", "a"]
    assert await bench.stored() == ["a"]


@run_async
async def test_the_same_key_again_is_answered_with_the_job_that_has_it() -> None:
    bench = GatewayBench()
    (first,) = await bench.submit(a_request("", idempotency_key="k"))
    bench.clock.jump(60)
    assert await bench.submit(a_request("", idempotency_key="k", deadline=T0 + 99)) == [first]
    (other,) = await bench.submit(a_request("", idempotency_key="k", tenant="other"))
    assert other != first


@pytest.mark.parametrize(
    "different",
    [
        {"topic": "job.test.other"},
        {"priority": Priority.CRITICAL},
        {"env": {"k": "v"}},
        {"labels": {"k": "v"}},
        {"timeout": 5.0},
        {"idempotent": True},
        {"retry": RetryPolicy(retries=1)},
        {"context_ptr": "data:,x"},
        {"workflow_id": "w"},
        {"parent_job_id": "p"},
        {"child_of": "p"},
        {"detached": True},
    ],
)
@run_async
async def test_an_id_taken_by_a_different_request_is_a_conflict(different: dict[str, Any]) -> None:
    bench = GatewayBench()
    await bench.submit(a_request("a"))
    with pytest.raises(Conflict, match=next(iter(different))):
        await bench.submit(a_request("a", **different))
    assert await bench.stored() == ["a"]


@run_async
async def test_a_key_taken_by_a_different_request_is_a_conflict() -> None:
    bench = GatewayBench()
    await bench.submit(a_request("", idempotency_key="k"))
    with pytest.raises(Conflict, match="idempotency_key 'k'"):
        await bench.submit(a_request("", idempotency_key="k", env={"a": "b"}))


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
    bench = GatewayBench()
    await bench.submit(a_request("taken", idempotency_key="taken"))
    with pytest.raises(error):
        await bench.submit(*batch)
    assert await bench.stored() == ["taken"]


class SmallDisk(MemoryLedger):
    """Has room for 1,000 jobs."""

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        if len(await self.unfinished()) + len(changes) > 1000:
            raise StoreFull("no space left", hint="nothing was stored")
        return await super().apply(changes)


@run_async
async def test_of_a_large_batch_that_the_disk_cannot_take_nothing_is_stored() -> None:
    bench = GatewayBench(store=SmallDisk())
    with pytest.raises(StoreFull):
        await bench.submit(*(a_request("") for _ in range(1500)))
    assert await bench.stored() == []


@pytest.mark.parametrize("taken", [a_request("same"), a_request("", idempotency_key="same")])
@run_async
async def test_a_batch_that_loses_a_race_for_an_id_or_key_stores_nothing(taken: JobRequest) -> None:
    bench = GatewayBench()
    batch = [a_request("x1"), replace(taken, env={"k": "v"}), a_request("x2")]
    first, second = await asyncio.gather(
        bench.submit(taken), bench.submit(*batch), return_exceptions=True
    )
    assert isinstance(second, Conflict)
    assert await bench.stored() == first


@run_async
async def test_a_batch_sent_twice_at_once_is_stored_once() -> None:
    bench = GatewayBench()
    batch = [a_request(f"x{n}", idempotency_key=f"k{n}") for n in range(3)]
    first, second = await asyncio.gather(bench.submit(*batch), bench.submit(*batch))
    assert first == second == ["x0", "x1", "x2"]
    assert sorted(await bench.stored()) == first


@run_async
async def test_an_unknown_topic_is_refused_with_the_nearest_known_one() -> None:
    bench = GatewayBench()
    bench.open_jobs.topics.add("job.image.resize")
    with pytest.raises(UnknownTopic, match=r"did you mean job\.image\.resize"):
        await bench.submit(a_request("a", topic="job.image.resise"))
    await bench.submit(a_request("b", topic="job.image.resize"))


@run_async
async def test_an_unknown_topic_may_be_held_instead() -> None:
    bench = GatewayBench(refuse_unknown=False)
    assert await bench.submit(a_request("a", topic="job.nobody.serves")) == ["a"]


def test_a_batch_has_a_limit() -> None:
    check_batch([a_request()] * 10, 10)
    with pytest.raises(InvalidRequest, match="11 at once"):
        check_batch([a_request()] * 11, 10)


# -- out --------------------------------------------------------------------------


@pytest.mark.parametrize("events", [(), (_E.SCHEDULE,)])
@run_async
async def test_a_waiting_job_is_cancelled_at_once(events: tuple[JobEvent, ...]) -> None:
    bench = GatewayBench()
    await bench.apply(accept("a"), *(move("a", event) for event in events))
    job = await bench.gateway.cancel("a", reason="enough", children=False)
    assert job.state is _S.CANCELLED
    assert job.result is not None
    assert job.result.error_message == "enough"


@pytest.mark.parametrize("events", [(), (_E.START,)])
@run_async
async def test_a_held_job_is_asked_to_end_once(events: tuple[JobEvent, ...]) -> None:
    bench = GatewayBench()
    await bench.apply(accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH))
    await bench.apply(*(move("a", event) for event in events))
    for _ in range(2):
        job = await bench.gateway.cancel("a", reason="", children=False)
        assert job.cancel_requested
        assert not job.is_final
    log = await bench.store.history("a")
    assert sum(entry.event is _E.REQUEST_CANCEL for entry in log) == 1


@run_async
async def test_an_ended_job_stays_as_it_ended() -> None:
    bench = GatewayBench()
    await bench.apply(accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH))
    await bench.apply(move("a", _E.SUCCEED, result=succeeded("a")))
    assert (await bench.gateway.cancel("a", reason="", children=False)).state is _S.SUCCEEDED


@run_async
async def test_a_cancel_that_lost_a_race_looks_again() -> None:
    bench = GatewayBench()
    await bench.apply(accept("a"))
    apply = bench.store.apply
    raced: list[Any] = []

    async def racing(changes: Sequence[Change]) -> Any:
        if not raced:
            raced.append(True)
            await apply([move("a", _E.SCHEDULE, _E.DISPATCH)])
        return await apply(changes)

    bench.store.apply = racing  # type: ignore[method-assign]
    job = await bench.gateway.cancel("a", reason="", children=False)
    assert (job.state, job.cancel_requested) == (_S.DISPATCHED, True)


@run_async
async def test_a_cancel_follows_the_retries_of_a_job() -> None:
    bench = GatewayBench()
    await bench.apply(accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH))
    retry = accept("b", parent_job_id="a", retry_number=1)
    await bench.apply(move("a", _E.FAIL, result=failed("a"), then=(retry,)))
    assert (await bench.gateway.cancel("a", reason="", children=False)).job_id == "b"
    assert await bench.states("a", "b") == [_S.FAILED, _S.CANCELLED]


@run_async
async def test_children_are_spared_unless_asked_for() -> None:
    bench = GatewayBench()
    await bench.apply(accept("p"), accept("c", parent_job_id="p"))
    await bench.gateway.cancel("p", reason="", children=False)
    assert await bench.states("p", "c") == [_S.CANCELLED, _S.PENDING]


@run_async
async def test_children_and_their_children_are_cancelled_with_their_parent() -> None:
    bench = GatewayBench()
    await bench.apply(
        accept("p"), accept("c", parent_job_id="p"), accept("g", parent_job_id="c"), accept("x")
    )
    await bench.gateway.cancel("p", reason="", children=True)
    assert await bench.states("p", "c", "g", "x") == [_S.CANCELLED] * 3 + [_S.PENDING]


@run_async
async def test_the_retry_of_a_child_is_cancelled_with_the_childs_parent() -> None:
    bench = GatewayBench()
    await bench.apply(accept("p"), accept("c", parent_job_id="p"))
    await bench.apply(move("c", _E.SCHEDULE, _E.DISPATCH))
    retry = accept("c2", parent_job_id="c", retry_number=1)
    await bench.apply(move("c", _E.FAIL, result=failed("c"), then=(retry,)))
    await bench.gateway.cancel("p", reason="", children=True)
    assert await bench.states("p", "c", "c2") == [_S.CANCELLED, _S.FAILED, _S.CANCELLED]


@run_async
async def test_a_child_that_ended_does_not_shield_its_own_children() -> None:
    bench = GatewayBench()
    await bench.apply(accept("p"), accept("c", parent_job_id="p"), accept("g", parent_job_id="c"))
    await bench.apply(move("c", _E.SCHEDULE, _E.DISPATCH))
    await bench.apply(move("c", _E.SUCCEED, result=succeeded("c")))
    await bench.gateway.cancel("p", reason="", children=True)
    assert await bench.states("p", "g") == [_S.CANCELLED, _S.CANCELLED]


@pytest.mark.parametrize("named", ["a", "b"])
@run_async
async def test_children_of_every_try_are_cancelled_with_their_parent(named: str) -> None:
    bench = GatewayBench()
    await bench.apply(accept("a"), accept("child", parent_job_id="a"))
    await bench.apply(move("a", _E.SCHEDULE, _E.DISPATCH))
    retry = accept("b", parent_job_id="a", retry_number=1)
    await bench.apply(move("a", _E.FAIL, result=failed("a"), then=(retry,)))
    await bench.apply(accept("late", parent_job_id="b"))
    await bench.gateway.cancel(named, reason="", children=True)
    assert await bench.states("b", "child", "late") == [_S.CANCELLED] * 3


@run_async
async def test_jobs_that_are_each_others_parents_are_all_cancelled() -> None:
    bench = GatewayBench()
    await bench.apply(*(accept(a, parent_job_id=b) for a, b in ("ac", "ba", "cb", "xx")))
    for named in "ax":
        await bench.gateway.cancel(named, reason="", children=True)
    assert await bench.states(*"abcx") == [_S.CANCELLED] * 4


@run_async
async def test_children_are_cancelled_however_many_and_however_deep(tmp_path: Path) -> None:
    store = Ledger(SqliteBackend(tmp_path / "penstock.db", durability=Durability.OS))
    bench = GatewayBench(store)
    deep = [a_request(f"deep{n}", parent_job_id=f"deep{n - 1}") for n in range(1, 1500)]
    wide = [a_request("", parent_job_id="deep0") for _ in range(10_100)]
    await bench.submit(a_request("deep0"), *deep, *wide, a_request("other"))
    await bench.gateway.cancel("deep0", reason="", children=True)
    assert await store.tally() == {_S.CANCELLED: 11_600, _S.PENDING: 1}
    await store.close()


@run_async
async def test_a_job_that_fails_and_is_retried_while_it_is_cancelled_is_not_retried() -> None:
    bench = GatewayBench()
    await bench.apply(accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH))
    apply = bench.store.apply

    async def racing(changes: Sequence[Change]) -> Any:
        bench.store.apply = apply  # type: ignore[method-assign]
        retry = accept("b", parent_job_id="a", retry_number=1)
        await bench.apply(move("a", _E.FAIL, result=failed("a"), then=(retry,)))
        return await apply(changes)

    bench.store.apply = racing  # type: ignore[method-assign]
    assert (await bench.gateway.cancel("a", reason="", children=False)).job_id == "b"
    assert await bench.states("a", "b") == [_S.FAILED, _S.CANCELLED]


@run_async
async def test_an_unknown_job_is_not_found() -> None:
    bench = GatewayBench()
    for ask in (bench.gateway.find("x"), bench.gateway.retry("x")):
        with pytest.raises(NotFound):
            await ask
    with pytest.raises(NotFound):
        await bench.gateway.cancel("x", reason="", children=True)


# -- again ------------------------------------------------------------------------


@run_async
async def test_a_job_that_ended_badly_is_retried_as_a_new_one_linked_both_ways() -> None:
    bench = GatewayBench()
    await bench.apply(
        accept("a", labels={"k": "v"}, idempotency_key="key", run_at=T0, deadline=T0 + 1)
    )
    await bench.apply(move("a", _E.CANCEL))
    again = await bench.gateway.retry("a")
    assert (again.request.parent_job_id, again.request.first_try) == ("a", "a")
    assert (await bench.gateway.find("a")).successor == again.job_id
    assert again.request.labels == {"k": "v"}
    assert (again.request.idempotency_key, again.request.deadline) == (None, None)


@run_async
async def test_what_runs_or_succeeded_or_whose_retry_runs_is_not_retried() -> None:
    bench = GatewayBench()
    await bench.apply(accept("runs"), accept("good"), accept("bad"))
    await bench.apply(move("good", _E.SCHEDULE, _E.DISPATCH), move("bad", _E.CANCEL))
    await bench.apply(move("good", _E.SUCCEED, result=succeeded("good")))
    again = await bench.gateway.retry("bad")
    for job_id, why in (
        ("runs", "job runs is PENDING: it has not ended"),
        ("good", "nothing to retry"),
        ("bad", f"job bad, now {again.job_id}, is PENDING: it has not ended"),
    ):
        with pytest.raises(Conflict, match=why):
            await bench.gateway.retry(job_id)


@run_async
async def test_a_retry_is_of_the_newest_try_whichever_is_named() -> None:
    bench = GatewayBench()
    await bench.apply(accept("a"), move("a", _E.CANCEL))
    second = await bench.gateway.retry("a")
    await bench.apply(move(second.job_id, _E.CANCEL))
    third = await bench.gateway.retry("a")
    assert third.request.parent_job_id == second.job_id
    assert (third.request.first_try, third.request.try_number) == ("a", 3)
    await bench.apply(move(third.job_id, _E.CANCEL))
    fourth = await bench.gateway.retry(second.job_id)
    assert (fourth.request.first_try, fourth.request.try_number) == ("a", 4)


# -- whose it is --------------------------------------------------------------------


@run_async
async def test_who_submits_is_said_by_the_door_and_not_by_the_caller() -> None:
    bench = GatewayBench()
    (job,) = await bench.gateway.submit([a_request("a", principal="bob")], by="alice")
    assert job.request.principal == "alice"
    assert (await bench.store.history("a"))[0].actor == "gateway:alice"


@run_async
async def test_the_owner_may_submit_on_behalf_of_somebody() -> None:
    bench = GatewayBench()
    (theirs,) = await bench.gateway.submit([a_request("a", principal="bob")], by="owner")
    (own,) = await bench.gateway.submit([a_request("b")], by="owner")
    assert (theirs.request.principal, own.request.principal) == ("bob", "owner")


@run_async
async def test_an_id_that_another_tenant_has_is_taken_and_that_is_all_that_is_said() -> None:
    bench = GatewayBench()
    await bench.submit(a_request("a", tenant="acme", labels={"secret": "plan"}))
    with pytest.raises(Conflict) as refused:
        await bench.submit(a_request("a"))
    assert str(refused.value) == "job_id 'a' is taken (leave it out to be given one)"


@run_async
async def test_ending_a_job_with_its_children_leaves_other_tenants_jobs_alone() -> None:
    bench = GatewayBench()
    await bench.submit(a_request("a"), a_request("mine", parent_job_id="a"))
    await bench.submit(a_request("theirs", tenant="acme", parent_job_id="a"))
    await bench.gateway.cancel("a", reason="", children=True)
    assert await bench.states("a", "mine", "theirs") == [_S.CANCELLED, _S.CANCELLED, _S.PENDING]


# -- waiting for others -------------------------------------------------------------


@run_async
async def test_a_job_may_wait_for_one_that_is_there_or_comes_with_it() -> None:
    bench = GatewayBench()
    await bench.submit(a_request("a"))
    ids = await bench.submit(a_request("c", after=("b", "a")), a_request("b", after=("a",)))
    assert ids == ["c", "b"]


@run_async
async def test_a_job_can_not_wait_for_one_that_is_not_there() -> None:
    bench = GatewayBench()
    with pytest.raises(InvalidRequest, match=r"after\[1\]: there is no job 'nobody'"):
        await bench.submit(a_request("a"), a_request("b", after=("a", "nobody")))
    assert await bench.stored() == []


@run_async
async def test_a_parent_is_not_pruned_while_its_child_is_being_accepted() -> None:
    bench = GatewayBench()
    await bench.apply(accept("p"), move("p", _E.CANCEL))
    apply = bench.store.apply

    async def pruning(changes: Sequence[Change]) -> Any:
        await bench.store.prune(T0 + 1, 10, bench.open_jobs.awaited)
        return await apply(changes)

    bench.store.apply = pruning  # type: ignore[method-assign]
    await bench.submit(a_request("c", after=("p",)))
    assert sorted(await bench.stored()) == ["c", "p"]
    await bench.gateway.cancel("c", reason="", children=False)
    await bench.store.prune(T0 + 1, 10, bench.open_jobs.awaited)
    assert await bench.stored() == []


@run_async
async def test_a_job_of_another_tenant_is_not_there_to_wait_for() -> None:
    bench = GatewayBench()
    await bench.submit(a_request("a", tenant="acme"))
    with pytest.raises(InvalidRequest, match="there is no job 'a'"):
        await bench.submit(a_request("b", after=("a",)))


@pytest.mark.seed("001", "6.5")
@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"a": ("a",)}, "can't wait for itself"),
        ({"a": ("b",), "b": ("a",)}, "dependency cycle: a waits for b waits for a"),
        ({"a": ("b", "d"), "b": ("c",), "c": ("a",), "d": ()}, "dependency cycle: a waits for b"),
    ],
)
@run_async
async def test_jobs_that_wait_in_a_circle_are_refused_whole(
    after: dict[str, tuple[str, ...]], said: str
) -> None:
    bench = GatewayBench()
    with pytest.raises(InvalidRequest, match=said):
        await bench.submit(*(a_request(job_id, after=parents) for job_id, parents in after.items()))
    assert await bench.stored() == []


@run_async
async def test_a_long_chain_is_no_circle() -> None:
    bench = GatewayBench()
    chain = [a_request("j0")] + [a_request(f"j{n}", after=(f"j{n - 1}",)) for n in range(1, 3000)]
    assert len(await bench.submit(*reversed(chain))) == 3000


# -- one at a time ------------------------------------------------------------------


@run_async
async def test_a_unique_job_is_answered_for_by_the_one_that_is_active() -> None:
    bench = GatewayBench()
    await bench.submit(a_request("a", unique=Unique("nightly")))
    assert await bench.submit(a_request("b", labels={"x": "y"}, unique=Unique("nightly"))) == ["a"]
    await bench.apply(move("a", _E.SCHEDULE, _E.DISPATCH), move("a", _E.START))
    assert await bench.submit(a_request("c", unique=Unique("nightly"))) == ["a"]
    await bench.apply(move("a", _E.SUCCEED, result=succeeded("a")))
    assert await bench.submit(a_request("d", unique=Unique("nightly"))) == ["d"]


@run_async
async def test_a_unique_key_keeps_out_only_its_own_tenant() -> None:
    bench = GatewayBench()
    await bench.submit(a_request("a", unique=Unique("k")))
    assert await bench.submit(a_request("b", tenant="acme", unique=Unique("k"))) == ["b"]


@run_async
async def test_a_key_that_is_unique_while_waiting_is_free_once_the_job_is_with_a_worker() -> None:
    bench = GatewayBench()
    unique = Unique("k", UniqueScope.WAITING)
    await bench.submit(a_request("a", unique=unique))
    await bench.apply(move("a", _E.SCHEDULE, _E.DISPATCH))
    assert await bench.submit(a_request("b", unique=unique)) == ["b"]


@run_async
async def test_a_key_that_is_unique_for_a_time_outlives_its_job() -> None:
    bench = GatewayBench()
    unique = Unique("k", period=60)
    await bench.submit(a_request("a", unique=unique))
    await bench.apply(move("a", _E.CANCEL))
    bench.clock.advance(59)
    assert await bench.submit(a_request("b", unique=unique)) == ["a"]
    bench.clock.advance(1)
    assert await bench.submit(a_request("c", unique=unique)) == ["c"]


# -- room ---------------------------------------------------------------------------


@run_async
async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    bench = GatewayBench(max_waiting=2)
    await bench.submit(a_request("a"))
    with pytest.raises(TooMany, match=r"queue is full \(max_waiting=2, 1 waiting\)") as refused:
        await bench.submit(a_request("b"), a_request("c"))
    assert refused.value.retry_after > 0
    assert await bench.stored() == ["a"]
    await bench.submit(a_request("b"))


@pytest.mark.parametrize("limit", ["max_waiting", "limit"])
@run_async
async def test_of_many_submissions_at_once_no_more_are_accepted_than_may_wait(limit: str) -> None:
    bench = GatewayBench(max_waiting=10 if limit == "max_waiting" else 0)
    if limit == "limit":
        bench.open_jobs.limiter.use([Limit(name="few", key=("tenant",), max_waiting=10)])
    submissions = [bench.submit(a_request("", env={"n": str(n)})) for n in range(100)]
    ends = await asyncio.gather(*submissions, return_exceptions=True)
    assert sum(isinstance(end, list) for end in ends) == 10
    assert sum(isinstance(end, TooMany) for end in ends) == 90
    assert len(await bench.stored()) == 10


@run_async
async def test_a_submission_that_failed_gives_its_room_back() -> None:
    bench = GatewayBench(max_waiting=2)
    bench.open_jobs.limiter.use([Limit(name="few", max_waiting=2)])
    with pytest.raises(InvalidRequest, match="after"):
        await bench.submit(a_request("a"), a_request("b", after=("nobody",)))
    await bench.submit(a_request("a"), a_request("b"))
    with pytest.raises(TooMany):
        await bench.submit(a_request("c"))


# -- one plain request --------------------------------------------------------------


@run_async
async def test_a_plain_request_is_begun_and_durable_when_its_future_is_done() -> None:
    bench = GatewayBench()
    committed = bench.gateway.begin(a_request("", context_ptr="data:application/json,{}"), by="x")
    assert committed is not None
    (answer,), _ = await committed
    assert answer.job is not None
    assert answer.job.request.principal == "x"
    assert await bench.stored() == [answer.job.job_id]


@pytest.mark.parametrize(
    "fields",
    [
        {"job_id": "named"},
        {"idempotency_key": "k"},
        {"unique": Unique("u")},
        {"after": ("parent",)},
        {"context_ptr": "blob:sha256-" + "0" * 64},
    ],
)
@run_async
async def test_what_may_be_a_repeat_or_must_be_looked_up_is_not_begun(
    fields: dict[str, Any],
) -> None:
    bench = GatewayBench()
    assert bench.gateway.begin(replace(a_request(""), **fields)) is None
    assert await bench.stored() == []


@run_async
async def test_a_plain_request_that_is_wrong_is_refused_before_anything_is_begun() -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        GatewayBench().gateway.begin(a_request("", timeout=-1.0))


@run_async
async def test_no_more_plain_requests_are_begun_than_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = GatewayBench(max_waiting=10)
    write, failures = bench.store.backend.write, [StoreFull("the disk is full")]

    async def full_once(*args: Any) -> None:
        if failures:
            raise failures.pop()
        await write(*args)

    monkeypatch.setattr(bench.store.backend, "write", full_once)
    for outcome in (StoreFull, tuple):  # the second time, the room of the first is free again
        begun = [bench.gateway.begin(a_request("")) for _ in range(10)]
        with pytest.raises(TooMany):
            bench.gateway.begin(a_request(""))
        ends = await asyncio.gather(*filter(None, begun), return_exceptions=True)
        assert [isinstance(end, outcome) for end in ends] == [True] * 10
        await asyncio.sleep(0)
    assert len(await bench.stored()) == 10


# -- many at once -------------------------------------------------------------------


@pytest.mark.seed("001", "6.14")
@run_async
async def test_a_bulk_cancel_ends_what_waits_and_asks_what_runs() -> None:
    bench = GatewayBench()
    await bench.submit(*(a_request(f"j{n}", labels={"batch": "7"}) for n in range(1200)))
    await bench.submit(a_request("other"))
    await bench.apply(move("j0", _E.SCHEDULE, _E.DISPATCH), move("j1", _E.CANCEL))
    bulk = await bench.gateway.cancel_many(
        JobQuery(labels={"batch": "7"}), reason="wrong batch", by="ops"
    )
    assert (bulk.matched, bulk.done) == (1199, 1199)
    assert await bench.states("j2", "j1199", "other") == [_S.CANCELLED, _S.CANCELLED, _S.PENDING]
    running = await bench.gateway.find("j0")
    assert (running.state, running.cancel_requested) == (_S.DISPATCHED, True)
    assert (await bench.store.history("j2"))[-1].actor == "gateway:ops"


@run_async
async def test_a_bulk_cancel_of_ended_states_touches_nothing() -> None:
    bench = GatewayBench()
    await bench.submit(a_request("a"))
    bulk = await bench.gateway.cancel_many(JobQuery(states=(_S.FAILED,)), reason="")
    assert (bulk.matched, await bench.states("a")) == (0, [_S.PENDING])


@pytest.mark.seed("001", "6.7")
@run_async
async def test_a_bulk_retry_keeps_every_field_and_begins_before_the_rules_again() -> None:
    bench = GatewayBench()
    fields: dict[str, Any] = {
        "priority": Priority.CRITICAL,
        "env": {"locale": "de"},
        "labels": {"batch": "7"},
        "risk_tags": ("writes",),
        "capability": "repo.write",
        "tenant": "acme",
        "principal": "alice",
        "timeout": 5.0,
        "retry": RetryPolicy(2),
        "estimated_cost": 3.0,
    }
    await bench.submit(*(a_request(f"j{n}", **fields) for n in range(3)))
    for n in range(3):
        job_id = f"j{n}"
        await bench.apply(move(job_id, _E.SCHEDULE, _E.DISPATCH), move(job_id, _E.START))
        await bench.apply(move(job_id, _E.FAIL, result=failed(job_id)))
    bulk = await bench.gateway.retry_many(JobQuery(topic="job.test"), by="ops")
    assert (bulk.matched, bulk.done, bulk.refused) == (3, 3, ())
    successor = (await bench.gateway.find("j0")).successor
    again = await bench.gateway.find(successor or "")
    assert again.state is _S.PENDING
    assert {name: getattr(again.request, name) for name in fields} == fields
    assert (await bench.gateway.retry_many(JobQuery())).matched == 0


@run_async
async def test_a_whole_workflow_is_cancelled_however_long_it_is() -> None:
    bench = GatewayBench()
    await bench.submit(
        *(a_request(f"s{n:04}", workflow_id="flow", step_index=2000 - n) for n in range(1200))
    )
    bulk = await bench.gateway.cancel_many(JobQuery(workflow_id="flow"), reason="enough")
    assert (bulk.matched, bulk.done) == (1200, 1200)


@run_async
async def test_a_child_is_known_by_the_first_try_of_its_parent() -> None:
    bench = GatewayBench()
    await bench.apply(accept("p"), move("p", _E.CANCEL))
    again = await bench.gateway.retry("p")
    await bench.submit(a_request("c", parent_job_id=again.job_id, child_of=again.job_id))
    assert [job.job_id for job in await bench.store.find(JobQuery(child_of="p"))] == ["c"]
    tries = await bench.store.find(JobQuery(first_try="p", oldest_first=True))
    assert [job.job_id for job in tries] == ["p", again.job_id]


class Family(GatewayBench):
    """A parent that runs, and what it asks for in each of its tries."""

    async def begin(self, job_id: str) -> None:
        await self.apply(move(job_id, _E.SCHEDULE, _E.DISPATCH), move(job_id, _E.START))

    async def fail(self, job_id: str) -> None:
        now = self.clock.now()
        await self.apply(move(job_id, _E.FAIL, at=now, result=failed(job_id)))

    async def ask(self, parent_id: str) -> str:
        """The child that a try of the parent is given."""
        key = child_key("p", b"digest", 1)
        asked = a_request("", child_of="p", parent_job_id=parent_id, idempotency_key=key)
        (job_id,) = await self.submit(asked)
        return job_id

    async def retry_parent(self) -> str:
        again = (await self.gateway.retry("p")).job_id
        await self.begin(again)
        return again


async def a_family() -> tuple[Family, str]:
    """A parent, and its child; both run."""
    family = Family()
    await family.submit(a_request("p"))
    await family.begin("p")
    child_id = await family.ask("p")
    await family.begin(child_id)
    return family, child_id


@pytest.mark.parametrize("with_note", [False, True])
@run_async
async def test_a_retry_runs_again_what_failed_although_the_clock_was_set_back(
    with_note: bool,
) -> None:
    family, child_id = await a_family()
    await family.fail(child_id)
    family.clock.jump(-60)
    await family.fail("p")
    again = await family.retry_parent()
    if with_note:  # as of a result that came too late
        await family.apply(move(child_id, _E.NOTE))
    assert await family.ask(again) != child_id


@pytest.mark.parametrize("when", ["about to be cancelled", "asked to end", "cancelled"])
@run_async
async def test_a_retry_by_hand_is_not_given_children_that_end_with_the_try_before(
    when: str,
) -> None:
    family, child_id = await a_family()
    await family.fail("p")
    again = await family.retry_parent()
    if when != "about to be cancelled":
        await family.apply(move(child_id, _E.REQUEST_CANCEL))
    if when == "cancelled":
        family.clock.jump(1)
        ended = JobResult(job_id=child_id, status=_S.CANCELLED)
        await family.apply(
            move(child_id, _E.CANCEL, actor="reconciler", at=family.clock.now(), result=ended)
        )
    other = await family.ask(again)
    assert other != child_id
    assert await family.ask(again) == other


@run_async
async def test_a_retry_that_runs_again_keeps_its_child_while_a_user_cancels_that() -> None:
    family, first = await a_family()
    await family.fail(first)
    await family.fail("p")
    again = await family.retry_parent()
    child_id = await family.ask(again)
    await family.begin(child_id)
    await family.gateway.cancel(child_id, reason="", children=False)
    assert await family.ask(again) == child_id


@run_async
async def test_a_retry_that_runs_again_keeps_its_child_when_a_user_retries_the_one_before() -> None:
    family, first = await a_family()
    await family.fail(first)
    await family.fail("p")
    again = await family.retry_parent()
    child_id = await family.ask(again)
    family.clock.jump(1)
    await family.gateway.retry(first)
    assert await family.ask(again) == child_id != first
