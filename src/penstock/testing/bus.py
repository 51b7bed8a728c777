"""What every `Bus` must do, as tests. Subclass, make the bus, and run pytest:

class TestMyBus(BusContract):
    @asynccontextmanager
    async def make(self, folder):
        bus = MyBus(folder)
        yield bus, bus
        await bus.close()
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from penstock.core.job import JobRequest, JobResult, RetryPolicy
from penstock.lifecycles.canonical import JobState
from penstock.ports.bus import (
    AnyMessage,
    Bus,
    Credit,
    Dispatch,
    Farewell,
    Finished,
    Handshake,
    Heartbeat,
    JobCancel,
    JobLog,
    JobProgress,
    Returned,
    Settled,
    Started,
    WorkerFacts,
)
from penstock.testing.aio import run_async

ONE_OF_EACH: tuple[AnyMessage, ...] = (
    Handshake("w", "p", ("job.*",), 2, {"gpu": "yes"}, (("a", 1),), "host", 7, True),
    Heartbeat("w", 3),
    WorkerFacts("w", "s", {"pipes": {"nodes": [{"node_id": "a", "busy": 0.5}]}}),
    Credit("w", 5),
    Farewell("w", lost=True),
    Dispatch(
        JobRequest(job_id="a", topic="job.a", env={"k": "ü"}, retry=RetryPolicy(retries=1)),
        2,
        1.5,
        9.75,
    ),
    JobCancel("a", 2, "enough", "scheduler"),
    Started("a", 2, "w"),
    Returned("a", 2, "w", "busy"),
    Finished(JobResult(job_id="a", status=JobState.FAILED, attempt=2, error_kinds=("E",))),
    Settled((("a", 2),)),
    JobProgress("a", 2, 0.5, "half"),
    JobLog("a", 2, 1.0, "info", "hello"),
)


class Inbox:
    """A handler that keeps what it is given, and can be waited upon."""

    def __init__(self, *, slow: bool = False, failing: int = 0) -> None:
        self.messages: list[AnyMessage] = []
        self.batches = 0
        self.running = self.most_running = 0
        self._slow, self._failing = slow, failing
        self._came = asyncio.Condition()

    async def __call__(self, messages: list[AnyMessage]) -> None:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            if self._slow:
                await asyncio.sleep(0.001)
            self.batches += 1
            async with self._came:
                self.messages.extend(messages)
                self._came.notify_all()
            if self.batches <= self._failing:
                raise RuntimeError("by design")
        finally:
            self.running -= 1

    async def until(self, count: int) -> list[AnyMessage]:
        async with asyncio.timeout(10), self._came:
            await self._came.wait_for(lambda: len(self.messages) >= count)
        return self.messages


def beats(count: int, worker_id: str = "w") -> list[AnyMessage]:
    return [Heartbeat(worker_id, n) for n in range(count)]


class BusContract(ABC):
    """The promises of `penstock.ports.bus.Bus`."""

    @abstractmethod
    def make(self, folder: Path) -> AbstractAsyncContextManager[tuple[Bus, Bus]]:
        """Two ends of one bus (or the same end twice), closed when the context ends."""

    async def settle(self, near: Bus, far: Bus) -> None:
        """Return when every subscription so far, at either end, takes effect."""
        for here, there in ((near, far), (far, near)):
            inbox = Inbox()
            subscription = there.subscribe("test.settle", inbox)
            async with asyncio.timeout(10):
                while not inbox.messages:
                    here.publish("test.settle", beats(1))
                    await asyncio.sleep(0.001)
            await subscription.close()

    @run_async
    async def test_every_kind_of_message_arrives_as_it_was_sent(self, tmp_path: Path) -> None:
        async with self.make(tmp_path) as (near, far):
            for here, there, subject in ((near, far, "test.a"), (far, near, "test.b")):
                inbox = Inbox()
                there.subscribe(subject, inbox)
                await self.settle(near, far)
                here.publish(subject, ONE_OF_EACH)
                assert await inbox.until(len(ONE_OF_EACH)) == list(ONE_OF_EACH)

    @pytest.mark.parametrize("slow", [False, True])
    @run_async
    async def test_messages_of_one_sender_come_in_order_and_each_once(
        self, tmp_path: Path, slow: bool
    ) -> None:
        async with self.make(tmp_path) as (near, far):
            inbox = Inbox(slow=slow)
            far.subscribe("test.order", inbox)
            await self.settle(near, far)
            sent = beats(500)
            for start in range(0, 500, 7):
                near.publish("test.order", sent[start : start + 7])
                await asyncio.sleep(0)
            assert await inbox.until(500) == sent

    @run_async
    async def test_a_handler_is_called_once_at_a_time_with_what_has_gathered(
        self, tmp_path: Path
    ) -> None:
        async with self.make(tmp_path) as (near, far):
            inbox = Inbox(slow=True)
            far.subscribe("test.gather", inbox)
            await self.settle(near, far)
            for beat in beats(200):
                near.publish("test.gather", [beat])
            await inbox.until(200)
            assert inbox.most_running == 1
            assert inbox.batches < 200

    @run_async
    async def test_publishing_never_runs_a_handler_on_the_spot(self, tmp_path: Path) -> None:
        async with self.make(tmp_path) as (near, far):
            inbox = Inbox()
            far.subscribe("test.later", inbox)
            await self.settle(near, far)
            near.publish("test.later", beats(1))
            assert inbox.messages == []
            await inbox.until(1)

    @run_async
    async def test_a_sender_may_go_on_changing_its_list(self, tmp_path: Path) -> None:
        async with self.make(tmp_path) as (near, far):
            inbox = Inbox()
            far.subscribe("test.list", inbox)
            await self.settle(near, far)
            batch = beats(3)
            near.publish("test.list", batch)
            batch.clear()
            assert await inbox.until(3) == beats(3)

    @run_async
    async def test_subjects_do_not_mix(self, tmp_path: Path) -> None:
        async with self.make(tmp_path) as (near, far):
            one, two = Inbox(), Inbox()
            far.subscribe("test.one", one)
            far.subscribe("test.two", two)
            await self.settle(near, far)
            near.publish("test.one", beats(1, "first"))
            near.publish("test.two", beats(1, "second"))
            near.publish("test.nobody", beats(1, "third"))
            assert await one.until(1) == beats(1, "first")
            assert await two.until(1) == beats(1, "second")

    @run_async
    async def test_subscribers_of_one_subject_each_get_everything(self, tmp_path: Path) -> None:
        async with self.make(tmp_path) as (near, far):
            inboxes = [Inbox(), Inbox(), Inbox()]
            for end, inbox in zip((near, far, far), inboxes, strict=True):
                end.subscribe("test.all", inbox)
            await self.settle(near, far)
            near.publish("test.all", beats(5))
            for inbox in inboxes:
                assert await inbox.until(5) == beats(5)

    @run_async
    async def test_one_subscriber_may_leave_and_the_others_stay(self, tmp_path: Path) -> None:
        async with self.make(tmp_path) as (near, far):
            first, second = Inbox(), Inbox()
            leaving = far.subscribe("test.leave", first)
            far.subscribe("test.leave", second)
            await self.settle(near, far)
            await leaving.close()
            near.publish("test.leave", beats(2))
            assert await second.until(2) == beats(2)
            assert first.messages == []

    @run_async
    async def test_a_closed_subscription_delivers_no_more(self, tmp_path: Path) -> None:
        async with self.make(tmp_path) as (near, far):
            inbox, after = Inbox(slow=True), Inbox()
            subscription = far.subscribe("test.close", inbox)
            await self.settle(near, far)
            near.publish("test.close", beats(3))
            await inbox.until(3)
            near.publish("test.close", beats(2))
            await subscription.close()
            assert inbox.running == 0
            seen = len(inbox.messages)
            far.subscribe("test.close", after)
            await self.settle(near, far)
            near.publish("test.close", beats(1))
            await after.until(1)
            assert len(inbox.messages) == seen

    @run_async
    async def test_a_handler_that_fails_is_still_given_what_comes_next(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with self.make(tmp_path) as (near, far):
            inbox = Inbox(failing=1)
            far.subscribe("test.fail", inbox)
            await self.settle(near, far)
            near.publish("test.fail", beats(1))
            await inbox.until(1)
            near.publish("test.fail", beats(1))
            await inbox.until(2)
            assert "by design" in caplog.text
