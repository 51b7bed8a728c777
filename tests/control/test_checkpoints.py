"""The checkpoints of workers and the engine's service for them, by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from penstock.adapters.memory.store import MemoryBackend
from penstock.control.checkpoints import CheckpointService
from penstock.control.ledger import Ledger
from penstock.core.errors import (
    InvalidRequest,
    Misconfigured,
    StoreFailed,
    Superseded,
    TooLarge,
    Unstorable,
)
from penstock.core.job import Cancelled
from penstock.core.ledger import Commit, Step
from penstock.core.steps import MAX_BYTES, MAX_NOTE, MAX_NOTES, MAX_ROWS
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.bus import (
    CHECKPOINT,
    AnyMessage,
    Checkpointed,
    CheckpointKept,
    MemoryBus,
    StepsRead,
    jobs_of,
)
from penstock.ports.executor import CancelToken
from penstock.ports.store import Extras, StepQuery
from penstock.testing.aio import run_async
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.testing.samples import accept, move
from penstock.worker import checkpoints
from penstock.worker.checkpoints import Checkpoints


def timed(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """In made-up time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


class Backend(MemoryBackend):
    """Fails on demand, and keeps the sizes of commits."""

    failing = 0
    unstorable = ""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    async def write(self, commit: Commit, extras: Extras, epoch: int) -> None:
        if self.failing:
            self.failing -= 1
            raise StoreFailed("no")
        if self.unstorable and any(step.key == self.unstorable for _, step in commit.steps):
            raise Unstorable("rows", "no")
        await super().write(commit, extras, epoch)
        if commit.steps:
            self.sizes.append(len(commit.steps))


class Bench:
    """A service, a worker's end, and jobs that worker `w` has."""

    def __init__(self, **limits: int) -> None:
        self.bus, self.backend = MemoryBus(), Backend()
        self.store = Ledger(self.backend)
        self.clock = LoopClock(asyncio.get_running_loop())
        self.service = CheckpointService(self.store, self.bus, self.clock, **limits)
        self.worker = Checkpoints(self.bus, "w")
        self.answers: list[AnyMessage] = []
        self.bus.subscribe(jobs_of("w"), self._receive)
        self.sent: list[AnyMessage] = []
        self.bus.subscribe(CHECKPOINT, self._watch)
        self.deaf = False

    async def _receive(self, messages: list[AnyMessage]) -> None:
        self.answers.extend(messages)
        for message in messages:
            if isinstance(message, CheckpointKept) and not self.deaf:
                self.worker.kept(message)
            elif isinstance(message, StepsRead) and not self.deaf:
                self.worker.read_back(message)

    async def _watch(self, messages: list[AnyMessage]) -> None:
        self.sent.extend(messages)

    async def start(self, *job_ids: str) -> None:
        for job_id in job_ids:
            await self.store.apply([accept(job_id), move(job_id, JobEvent.SCHEDULE)])
            await self.store.apply([move(job_id, JobEvent.DISPATCH, worker_id="w")])
        self.running = asyncio.ensure_future(self.service.run())
        await asyncio.sleep(0)

    async def rows(self, job_id: str) -> list[tuple[str, int]]:
        return [(row.name, row.n) for row in (await self.store.read_steps(job_id)).steps]

    async def notes(self, job_id: str) -> list[tuple[str, str]]:
        """Who noted what in the job's history."""
        entries = await self.store.history(job_id)
        return [(one.actor, one.reason) for one in entries if one.event is JobEvent.NOTE]

    async def count(self, job_id: str) -> int:
        return sum(count.rows for count in await self.store.count_steps(job_id))


def some(count: int, name: str = "page", **fields: Any) -> list[Step]:
    return [Step(name, n, **fields) for n in range(count)]


@timed
async def test_rows_are_durable_when_the_call_returns() -> None:
    bench = Bench()
    await bench.start("a")
    await bench.worker.write("a", 1, some(3, output="x"))
    assert await bench.rows("a") == [("page", 0), ("page", 1), ("page", 2)]
    (first, *_) = (await bench.store.read_steps("a")).steps
    assert (first.attempt, first.output) == (1, "x")
    assert first.at == pytest.approx(bench.clock.now(), abs=1)


@timed
async def test_the_checkpoint_of_an_attempt_that_is_not_live_changes_nothing() -> None:
    bench = Bench()
    await bench.start("a")
    await bench.worker.write("a", 1, some(1))
    await bench.store.apply([move("a", JobEvent.REDISPATCH, worker_id="v")])
    with pytest.raises(Superseded, match="attempt 1 of job a is not live"):
        await bench.worker.write("a", 1, [Step("page", 0, output="stale"), Step("page", 1)])
    with pytest.raises(Superseded):
        await bench.worker.write("nobody", 1, some(1))
    (kept,) = (await bench.store.read_steps("a")).steps
    assert kept.output == ""


@timed
async def test_calls_at_the_same_time_share_messages_of_limited_size() -> None:
    bench = Bench()
    await bench.start("a")
    await asyncio.gather(
        *(bench.worker.write("a", 1, [Step("page", n)]) for n in range(MAX_ROWS + 50)),
        bench.worker.write("a", 1, some(2 * MAX_ROWS + 1, "bulk")),
        bench.worker.write("a", 1, some(20, "large", output="x" * 60_000)),
    )
    sizes = [len(message.rows) for message in bench.sent if isinstance(message, Checkpointed)]
    assert max(sizes) == MAX_ROWS
    assert len(sizes) < 20
    assert max(bench.backend.sizes) <= MAX_ROWS
    assert await bench.count("a") == 3 * MAX_ROWS + 71


@timed
async def test_one_commit_takes_a_limited_number_of_rows_of_all_jobs() -> None:
    bench = Bench()
    jobs = [f"j{n}" for n in range(10)]
    await bench.start(*jobs)
    await asyncio.gather(*(bench.worker.write(job_id, 1, some(100)) for job_id in jobs))
    assert sorted(bench.backend.sizes) == [200] * 5


@timed
async def test_a_job_with_many_rows_waits_for_its_turn() -> None:
    bench = Bench()
    await bench.start("greedy", "modest")
    greedy = asyncio.ensure_future(bench.worker.write("greedy", 1, some(100 * MAX_ROWS)))
    await asyncio.sleep(0)
    await bench.worker.write("modest", 1, some(1))
    assert await bench.count("greedy") <= 3 * MAX_ROWS
    assert not greedy.done()
    greedy.cancel()


@timed
async def test_a_store_that_fails_is_asked_again() -> None:
    bench = Bench()
    await bench.start("a")
    bench.backend.failing = 3
    await bench.worker.write("a", 1, some(1))
    assert await bench.rows("a") == [("page", 0)]


@timed
async def test_rows_that_can_not_be_stored_fail_their_own_call_only() -> None:
    bench = Bench()
    await bench.start("a", "b")
    bench.backend.unstorable = "bad"
    ends = await asyncio.gather(
        bench.worker.write("a", 1, [Step("page", 0)]),
        bench.worker.write("a", 1, [Step("page", 1)]),
        bench.worker.write("a", 1, [Step("page", 2, key="bad")]),
        bench.worker.write("a", 1, [Step("page", 3)]),
        bench.worker.write("b", 1, [Step("page", 4)]),
        return_exceptions=True,
    )
    assert [type(end) for end in ends] == [*[type(None)] * 2, Unstorable, *[type(None)] * 2]
    assert await bench.rows("a") == [("page", 0), ("page", 1), ("page", 3)]


@timed
async def test_what_has_no_answer_is_sent_again_after_a_lost_connection() -> None:
    bench = Bench()
    await bench.start("a")
    bench.deaf = True
    writing = asyncio.ensure_future(bench.worker.write("a", 1, some(1)))
    reading = asyncio.ensure_future(bench.worker.read("a", 1, StepQuery()))
    await asyncio.sleep(1)
    assert not writing.done()
    assert not reading.done()
    bench.deaf = False
    bench.worker.send_again()
    await writing
    assert [row.n for row in (await reading).rows] == [0]
    assert await bench.rows("a") == [("page", 0)]


@timed
async def test_a_late_copy_of_a_message_changes_nothing() -> None:
    bench = Bench()
    await bench.start("a")
    await bench.worker.write("a", 1, [Step("cursor", 0, output="one")])
    await bench.worker.write("a", 1, [Step("cursor", 0, output="two")])
    bench.bus.publish(CHECKPOINT, bench.sent[:1])
    await asyncio.sleep(1)
    (cursor,) = (await bench.store.read_steps("a")).steps
    assert cursor.output == "two"


@timed
async def test_rows_are_counted_again_by_the_next_engine_and_replaced_ones_once() -> None:
    bench = Bench(max_rows=10)
    await bench.start("a")
    await bench.worker.write("a", 1, some(8))
    for _ in range(5):
        await bench.worker.write("a", 1, [Step("page", 0)])
    bench.running.cancel()
    await asyncio.gather(bench.running, return_exceptions=True)
    bench.service = CheckpointService(bench.store, bench.bus, bench.clock, max_rows=10)
    await bench.start()
    await bench.worker.write("a", 1, some(2, "more"))
    with pytest.raises(TooLarge, match="max_steps = 10"):
        await bench.worker.write("a", 1, [Step("page", 8)])
    assert len(await bench.rows("a")) == 10


@timed
async def test_rows_of_a_job_that_began_under_this_engine_are_not_read_to_be_counted() -> None:
    bench = Bench()
    await bench.start()
    await bench.store.apply([accept("a"), move("a", JobEvent.SCHEDULE)])
    await bench.store.apply([move("a", JobEvent.DISPATCH, worker_id="w")])
    await bench.store.apply([move("a", JobEvent.START, actor="worker:w")])
    bench.store.count_steps = None  # type: ignore[assignment, method-assign]
    await bench.worker.write("a", 1, some(3))
    assert len(await bench.rows("a")) == 3


@timed
async def test_the_engine_checks_what_a_worker_sends() -> None:
    bench = Bench()
    await bench.start("a")
    row = Step("page", 0, output="x" * 60_000)
    too_many = tuple(some(MAX_ROWS + 1))
    too_large = (row,) * (2 * MAX_BYTES // 60_000)
    one_large = (Step("page", 0, output="x" * 70_000),)
    for n, rows in enumerate((too_many, too_large, one_large), 1):
        bench.bus.publish(CHECKPOINT, [Checkpointed("a", 1, "w", n, rows)])
    await asyncio.sleep(1)
    refused = [answer.refusal for answer in bench.answers if isinstance(answer, CheckpointKept)]
    assert [each and each.code for each in refused] == [TooLarge.code] * 3
    assert await bench.rows("a") == []


@timed
async def test_pages_are_limited_in_rows_and_bytes() -> None:
    bench = Bench()
    await bench.start("a")
    await bench.worker.write("a", 1, some(1500, "small"))
    await bench.worker.write("a", 1, some(40, "large", output="x" * 60_000))
    small = await bench.worker.read("a", 1, StepQuery(name="small"))
    assert (len(small.rows), small.more) == (1000, True)
    large = await bench.worker.read("a", 1, StepQuery(name="large"))
    assert (len(large.rows), large.more) == (17, True)
    rest = await bench.worker.read("a", 1, StepQuery(name="small", after=("small", 999)))
    assert (len(rest.rows), rest.more) == (500, False)


@run_async
async def test_a_thread_of_a_cancelled_job_waits_for_its_last_checkpoint_and_not_for_ever() -> None:
    bench, cancel = Bench(), CancelToken()
    await bench.start("a")
    bench.deaf = True
    waiting = asyncio.ensure_future(
        asyncio.to_thread(bench.worker.checkpoint_sync, ("a", 1), some(1), (), cancel)
    )
    await asyncio.sleep(0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "_CANCEL_GRACE", 0.05)
        cancel.request("enough")
        await asyncio.sleep(0.01)
        assert not waiting.done()
        with pytest.raises(Cancelled, match="enough"):
            await waiting
    bench.deaf = False
    bench.worker.send_again()
    await asyncio.to_thread(bench.worker.checkpoint_sync, ("a", 1), some(2), (), cancel)
    assert await bench.count("a") == 2
    bench.running.cancel()


@run_async
async def test_blocking_the_event_loop_is_refused() -> None:
    bench = Bench()
    with pytest.raises(Misconfigured, match="would block the event loop"):
        bench.worker.checkpoint_sync(("a", 1), some(1), (), CancelToken())


# -- notes ------------------------------------------------------------------------


@timed
async def test_notes_are_entries_of_the_history_in_the_commit_of_their_rows() -> None:
    bench = Bench()
    await bench.start("a")
    await bench.worker.write("a", 1, [], ["begun"])
    bench.backend.failing = 1
    writing = asyncio.ensure_future(bench.worker.write("a", 1, some(2), ["half", "way"]))
    await asyncio.sleep(0.001)
    assert await bench.notes("a") == [("worker:w", "begun")]
    assert await bench.rows("a") == []
    await writing
    assert await bench.notes("a") == [("worker:w", text) for text in ("begun", "half", "way")]
    assert await bench.rows("a") == [("page", 0), ("page", 1)]


@timed
async def test_an_attempt_that_checkpoints_has_started() -> None:
    bench = Bench()
    await bench.start("a")
    await bench.worker.write("a", 1, some(1))
    job = await bench.store.get("a")
    assert job is not None
    assert (job.state, job.started_at is not None) == (JobState.RUNNING, True)
    started = move("a", JobEvent.START, attempt=1, actor="worker:w")
    (answer,) = await bench.store.apply([started])  # the worker's own word comes later
    assert not answer.moved
    events = [entry.event for entry in await bench.store.history("a")]
    assert events.count(JobEvent.START) == 1


@timed
async def test_an_attempt_that_is_not_live_any_more_can_note_nothing() -> None:
    bench = Bench()
    await bench.start("a")
    await bench.worker.write("a", 1, [], ["mine"])
    await bench.store.apply([move("a", JobEvent.REDISPATCH, worker_id="v")])
    with pytest.raises(Superseded):
        await bench.worker.write("a", 1, some(1), ["too late"])
    assert await bench.notes("a") == [("worker:w", "mine")]
    await bench.worker.write("a", 2, [], ["next"])
    assert [text for _, text in await bench.notes("a")] == ["mine", "next"]
    await bench.store.apply([move("a", JobEvent.CANCEL)])
    with pytest.raises(Superseded):
        await bench.worker.write("a", 2, some(1), ["after the end"])
    assert [text for _, text in await bench.notes("a")] == ["mine", "next"]


@timed
async def test_notes_that_a_worker_sends_again_are_kept_once() -> None:
    bench = Bench()
    await bench.start("a")
    bench.deaf = True  # the answer is lost with the connection
    writing = asyncio.ensure_future(bench.worker.write("a", 1, some(1), ["once"]))
    await asyncio.sleep(1)
    bench.deaf = False
    bench.worker.send_again()
    await writing
    assert [text for _, text in await bench.notes("a")] == ["once"]


@timed
async def test_a_history_that_is_full_takes_no_more_notes_but_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.core.ledger.MAX_HISTORY", 10)
    bench = Bench()
    await bench.start("a")
    for n in range(20):
        await bench.worker.write("a", 1, [Step("page", n)], [str(n)])
    assert len(await bench.rows("a")) == 20
    assert len(await bench.store.history("a")) == 10
    assert [text for _, text in await bench.notes("a")] == [str(n) for n in range(6)]


@timed
async def test_notes_that_cannot_be_kept_are_refused_by_name() -> None:
    bench = Bench()
    await bench.start("a")
    for notes, why in (
        (["x"] * (MAX_NOTES + 1), "notes"),
        (["good", "x" * (MAX_NOTE + 1)], r"notes\[1\]"),
        ([""], r"notes\[0\]"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            await bench.worker.write("a", 1, some(1), notes)
    too_many = Checkpointed("a", 1, "w", 90, (), ("x",) * (MAX_NOTES + 1))
    too_long = Checkpointed("a", 1, "w", 91, (), ("x" * (MAX_NOTE + 1),))
    bench.bus.publish(CHECKPOINT, [too_many, too_long])  # a worker that does not check
    await asyncio.sleep(1)
    refused = [answer.refusal for answer in bench.answers if isinstance(answer, CheckpointKept)]
    assert [each and each.code for each in refused] == [TooLarge.code] * 2
    assert await bench.notes("a") == []
    await bench.worker.write("a", 1, [], ["\ud800 is no character"])
    assert [text for _, text in await bench.notes("a")] == ["? is no character"]


@timed
async def test_notes_of_many_checkpoints_at_once_keep_their_order() -> None:
    bench = Bench()
    await bench.start("a")
    writes = [bench.worker.write("a", 1, [], [f"{n}.{m}" for m in range(60)]) for n in range(5)]
    await asyncio.gather(*writes)
    told = [text for _, text in await bench.notes("a")]
    assert told == [f"{n}.{m}" for n in range(5) for m in range(60)]
