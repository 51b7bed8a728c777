"""A real worker with simulated jobs, behind a connection that can fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from tests.support.simulation.engine import LIMITS, SimEngine
from tests.support.simulation.family import Parent, SimClient
from tests.support.simulation.history import (
    Absent,
    Began,
    Checkpointed,
    CutOff,
    Finished,
    Hired,
    History,
    Present,
    StepsRead,
)
from tests.support.simulation.link import SimLink, SimStartLog, SimStartLogs
from tests.support.simulation.store import UNSTORABLE

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.core.job import Job, TopicDefaults
from penstock.core.ledger import Step
from penstock.lifecycles.canonical import JobState
from penstock.ports.bus import Bus
from penstock.ports.clock import Clock
from penstock.ports.executor import Context, Outcome, Task
from penstock.worker.worker import Worker, WorkerOptions

BEAT = LIMITS.lease / 4


class SimExecutor:
    """Runs jobs that do what their `act` says; each real run is written down."""

    resumable = False

    def __init__(
        self, link: SimLink, client: SimClient, chance: random.Random, history: History
    ) -> None:
        self.topics: tuple[str, ...] = ("job.*",)
        self.topic_defaults: Mapping[str, TopicDefaults] = {}
        self._link, self._client = link, client
        self._chance, self._history = chance, history
        self._running: set[tuple[str, int]] = set()

    def check(self, topic: str, payload: bytes) -> None:
        pass

    async def run(self, task: Task, ctx: Context) -> Outcome:
        key = (task.request.job_id, task.attempt)
        if not self._link.dead:
            self._running.add(key)
            self._history.events.append(Began(*key, self._link.worker_id))
        try:
            act = task.request.env.get("act", "succeed")
            if act == "checkpoint":
                await self._checkpoint(ctx)
            elif act == "parent":
                act = await Parent(
                    task.payload, ctx, self._link, self._client, self._chance, self._history
                ).run()
            return await self._act(act)
        finally:
            self._end(key)

    async def _checkpoint(self, ctx: Context) -> None:
        """Go on where an earlier attempt ended, and write down what is acknowledged."""
        places = [(row.name, row.n) async for row in ctx.steps()]
        done = {n for _, n in places}
        if not self._link.dead:
            self._history.events.append(StepsRead(ctx.job_id, ctx.attempt, tuple(places)))
        for n in range(5):
            if n in done:
                continue
            await asyncio.sleep(self._chance.random())
            key = UNSTORABLE if self._chance.random() < 0.1 else ""
            rows = [Step("page", n), Step("cursor", 0, output=str(n))]
            writes = [ctx.checkpoint(rows), ctx.checkpoint([Step("extra", n, key=key)])]
            kept, extra = await asyncio.gather(*writes, return_exceptions=True)
            if self._link.dead:
                continue
            for name, end in (("page", kept), ("extra", extra)):
                if end is None:
                    self._history.events.append(Checkpointed(ctx.job_id, ctx.attempt, (name, n)))
            if isinstance(kept, BaseException):
                raise kept

    async def _act(self, act: str) -> Outcome:
        match act:
            case "fail":
                await asyncio.sleep(self._chance.random())
                return Outcome(JobState.FAILED, error_code="BOOM")
            case "unstorable":
                await asyncio.sleep(self._chance.random())
                return Outcome(JobState.FAILED, error_code=UNSTORABLE)
            case "endless":
                await asyncio.sleep(1000)
            case "deaf":
                try:
                    await asyncio.sleep(self._chance.uniform(0.5, 12))
                except asyncio.CancelledError:
                    await asyncio.sleep(self._chance.uniform(0, 1.5))
                    raise
            case "long":
                await asyncio.sleep(self._chance.uniform(1, 5))
            case _:
                await asyncio.sleep(self._chance.random() * 0.8)
        return Outcome(JobState.SUCCEEDED, b"1")

    def _end(self, key: tuple[str, int]) -> None:
        if key in self._running:
            self._running.discard(key)
            self._history.events.append(Finished(*key, self._link.worker_id))

    def die(self) -> None:
        """What ran in the process ended with it."""
        for key in list(self._running):
            self._end(key)

    async def close(self) -> None:
        pass


class SimWorker:
    """One worker process."""

    def __init__(
        self,
        worker_id: str,
        clock: Clock,
        chance: random.Random,
        history: History,
        engine: Callable[[], SimEngine],
        met: Callable[[Job], None],
        *,
        pool: str = "default",
        starts: SimStartLogs | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._clock, self._chance, self._history = clock, chance, history
        self.link = SimLink(worker_id, chance, history)
        client = SimClient(self.link, engine, met)
        self._executor = SimExecutor(self.link, client, chance, history)
        slots = chance.choice([1, 1, 2, 3])
        options = WorkerOptions(worker_id=worker_id, pool=pool, slots=slots, drain_timeout=1.0)
        history.events.append(Hired(worker_id, slots))
        make_log = None if starts is None else lambda *_: SimStartLog(starts)
        self._worker = Worker(self.link, MemoryBlobs(), [self._executor], clock, options, make_log)
        self._cut = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.leaving = False

    @property
    def has_waiting(self) -> bool:
        """Whether jobs that it runs wait for others."""
        return any(attempt.is_waiting for attempt in self._worker._active.values())

    def start(self, engine: Bus) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._worker.run()), loop.create_task(self._beat())]
        loop.call_soon(self._join, engine)

    def _join(self, engine: Bus) -> None:
        self.link.on_connect = self._worker.announce
        self.link.connect(engine)

    async def _beat(self) -> None:
        while True:
            self.link.beat()
            await asyncio.sleep(BEAT)

    # -- what can happen to it ----------------------------------------------------

    def die(self) -> None:
        """As by SIGKILL: it says nothing more, and what it ran is gone."""
        told = self._chance.random() < 0.5
        self.link.disconnect(told=told)
        self.link.dead = True
        self._executor.die()
        self._history.events.append(Absent(self.worker_id))

    async def fall_silent(self, seconds: float) -> None:
        """As by SIGSTOP or a lost network, for a while."""
        self.link.fall_silent()
        # The last beat may have been sent just before: from then on the lease runs.
        if seconds > LIMITS.lease - BEAT:
            await asyncio.sleep(LIMITS.lease - BEAT)
            self._history.events.append(Absent(self.worker_id))
            seconds -= LIMITS.lease - BEAT
        await asyncio.sleep(seconds)
        self.link.speak_again()
        self._is_back()

    async def lose_connection(self, seconds: float, engine: Bus) -> None:
        """The connection drops; another is made after a while."""
        if not self.link.connected:
            return
        self.link.disconnect(told=True)
        self._history.events.append(CutOff(self.worker_id))
        self._cut += 1
        cut = self._cut
        if seconds >= LIMITS.lost_grace:
            await asyncio.sleep(LIMITS.lost_grace)
            self._history.events.append(Absent(self.worker_id))
            seconds -= LIMITS.lost_grace
        await asyncio.sleep(seconds)
        if cut == self._cut:
            self.find_engine(engine)

    def lose_engine(self) -> None:
        """The engine crashed."""
        self._cut += 1
        self.link.disconnect(told=False)
        self._history.events.append(Absent(self.worker_id))

    def find_engine(self, engine: Bus) -> None:
        if not self.link.connected:
            self.link.connect(engine)
            self._is_back()

    def _is_back(self) -> None:
        if self.link.connected and not self.link.silent:
            self._history.events.append(Present(self.worker_id))

    def leave(self) -> None:
        """As by SIGTERM: it drains and goes."""
        self.leaving = True
        self._tasks[0].add_done_callback(lambda _: self._go())
        self._tasks[0].cancel()

    def _go(self) -> None:
        self.link.disconnect(told=False)
        self.link.dead = True
        self._history.events.append(Absent(self.worker_id))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.link.close()
