"""What happens in one history: users, faults, and then enough quiet for all to end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tests.support.simulation.engine import LIMITS, SimEngine
from tests.support.simulation.family import some_family
from tests.support.simulation.gate import COLOURS, RULES, TOPICS, VOTERS, some_limits
from tests.support.simulation.history import Acknowledged, Heard, History, Told
from tests.support.simulation.link import SimStartLogs
from tests.support.simulation.store import (
    FaultyMemoryStore,
    FaultySqliteStore,
    FaultyStore,
)
from tests.support.simulation.worker import SimWorker

from penstock.core.errors import PenstockError, StoreFailed
from penstock.core.job import Job, JobRequest, ParentPolicy, Priority, RetryPolicy
from penstock.testing.clock import LoopClock

UNREST = 12.0
"""Seconds in which users and faults strike."""
PATIENCE = 600
"""Seconds after which what has not ended counts as stuck."""
Action = Callable[[], Coroutine[Any, Any, None]]
ACTS = (
    *["succeed", "succeed", "fail", "long", "deaf", "endless", "checkpoint", "checkpoint"] * 3,
    *["parent"] * 7,
    "unstorable",
)
_IDEMPOTENT = {"checkpoint": 0.8, "parent": 0.9}
"""The share of them that goes on when their worker is lost."""


class World:
    """One seed's worth of trouble."""

    def __init__(
        self,
        seed: int,
        say: Callable[[str], None] = lambda text: None,
        folder: Path | None = None,
    ) -> None:
        """In memory, or over SQLite in a folder."""
        self.chance = random.Random(seed)
        self.clock = LoopClock(asyncio.get_running_loop())
        self.history = History(presence_known=True)
        self.store: FaultyStore
        if folder is None:
            self.store = FaultyMemoryStore(self.clock, self.chance, self.history)
        else:
            self.store = FaultySqliteStore(self.clock, self.chance, self.history, folder)
        self.starts = SimStartLogs()
        self.rules = self.chance.choice(RULES)
        self.limits = some_limits(self.chance)
        self.workers: list[SimWorker] = []
        self.known: dict[str, str] = {}
        """Ids of jobs that some user knows of, and whose they are."""
        self.asked: list[JobRequest] = []
        self.waiting: list[str] = []
        """Jobs for whose end some user waits."""
        self.failures: list[BaseException] = []
        self._say = say
        self._is_calm = False
        self._background: set[asyncio.Task[None]] = set()

    def say(self, text: str) -> None:
        self._say(f"{self.clock.monotonic():8.3f}  {text}")

    async def run(self) -> History:
        self.store.read_slowness = self.chance.choice([0.0, 0.0, 0.0, 0.01, 0.1, 1.0])
        await self._boot()
        for _ in range(self.chance.randint(1, 3)):
            self._hire()
        plan = self._plan()
        for at, action in sorted(plan, key=lambda step: step[0]):
            await asyncio.sleep(max(0.0, at - self.clock.monotonic()))
            await action()
        await self._calm_down()
        await self._until_quiet()
        await self._end()
        return self.history

    async def _boot(self) -> None:
        while True:
            self.engine = SimEngine(
                self.store,
                self.clock,
                self.chance,
                self.history,
                self.starts,
                self.rules,
                self.limits,
            )
            try:
                await self.engine.start()
            except StoreFailed as error:
                self.say(f"the engine can't start: {error}")
                await self.engine.crash()
                await asyncio.sleep(0.5)
            else:
                return

    def _hire(self) -> None:
        pool = self.chance.choice(["default", "default", "small"])
        name = f"w{len(self.workers) + 1}"
        starts = self.starts if self.chance.random() < 0.5 else None
        worker = SimWorker(
            name,
            self.clock,
            self.chance,
            self.history,
            lambda: self.engine,
            self._meet,
            pool=pool,
            starts=starts,
        )
        self.workers.append(worker)
        worker.start(self.engine.bus)
        self.say(f"{name} joins the pool {pool}")

    # -- the plan -----------------------------------------------------------------

    def _plan(self) -> list[tuple[float, Action]]:
        chance = self.chance
        steps: list[tuple[float, Action]] = []

        def strike(count: int, *actions: Action) -> None:
            for _ in range(count):
                steps.append((chance.uniform(0, UNREST), chance.choice(actions)))

        strike(chance.randint(1, 10), self._submit)
        strike(chance.randint(0, 4), self._cancel, self._cancel, self._retry)
        strike(chance.randint(0, 2), self._submit_again)
        strike(chance.randint(0, 9), self._vote)
        strike(chance.choice([0, 0, 2, 4]), self._change_rules, self._change_limits)
        faults = [
            self._kill,
            self._silence,
            self._cut,
            self._crash,
            self._break_disk,
            self._break_reads,
            self._slow_disk,
            self._slow_reads,
            self._set_clock,
            self._drain,
            self._stutter,
            self._hire_one,
        ]
        strike(chance.choice([0, 0, 1]), self._lose_parents)
        strike(chance.randint(0, 5), *chance.sample(faults, k=chance.randint(1, 5)))
        return steps

    # -- users --------------------------------------------------------------------

    async def _submit(self) -> None:
        chance, now = self.chance, self.clock.now()
        number = len(self.asked) + 1
        act, pointer = chance.choice(ACTS), ""
        timeout = chance.choice([None, None, 2.0])
        if act == "parent":
            pointer, timeout = some_family(chance)
        request = JobRequest(
            job_id=f"j{number}" if chance.random() < 0.7 else "",
            topic=chance.choice(TOPICS),
            priority=chance.choice(list(Priority)),
            tenant=(tenant := chance.choice(["t1", "t2"])),
            labels={"colour": chance.choice(COLOURS)} if chance.random() < 0.3 else {},
            after=self._some_parents(tenant),
            if_parent_fails=chance.choice(list(ParentPolicy)),
            env={"act": act},
            context_ptr=pointer,
            idempotency_key=f"k{number}" if chance.random() < 0.3 else None,
            timeout=timeout,
            dispatch_timeout=chance.choice([None, None, 2.0]),
            deadline=now + chance.uniform(1, 20) if chance.random() < 0.2 else None,
            run_at=now + chance.uniform(0, 5) if chance.random() < 0.2 else None,
            idempotent=chance.random() < _IDEMPOTENT.get(act, 0.4),
            retry=RetryPolicy(retries=chance.choice([0, 0, 1, 2]), delay=0.5),
        )
        self.asked.append(request)
        self.engine.own(self._ask(request))

    def _meet(self, child: Job) -> None:
        self.history.events.append(Acknowledged(child))
        self.say(f"{child.job_id} is acknowledged as a child of {child.request.child_of}")
        self.known[child.job_id] = child.request.tenant

    def _some_parents(self, tenant: str) -> tuple[str, ...]:
        mine = [job_id for job_id, owner in self.known.items() if owner == tenant]
        if not mine or self.chance.random() < 0.7:
            return ()
        return tuple(dict.fromkeys(self.chance.choices(mine, k=self.chance.randint(1, 2))))

    async def _submit_again(self) -> None:
        if self.asked:
            self.engine.own(self._ask(self.chance.choice(self.asked)))

    async def _ask(self, request: JobRequest) -> None:
        try:
            (job,) = await self.engine.gateway.submit([request])
        except PenstockError as error:
            self.say(f"{request.job_id or 'a new job'} is refused: {error}")
            return
        self.history.events.append(Acknowledged(job))
        self.say(f"{job.job_id} is acknowledged ({request.env['act']})")
        self.known[job.job_id] = job.request.tenant
        if not job.is_final:
            self.engine.own(self._follow(job))
        await self._wait(job)

    async def _wait(self, job: Job) -> None:
        self.waiting.append(job.job_id)
        try:
            while not job.is_final:
                try:
                    job = await self.engine.feed.ended(job.job_id)
                except StoreFailed:
                    await asyncio.sleep(0.5)
        finally:
            self.waiting.remove(job.job_id)
        self.history.events.append(Told(job))
        self.say(f"{job.job_id} is told to have ended {job.state}")

    async def _follow(self, job: Job) -> None:
        with self.engine.feed.reading(job.job_id) as updates:
            try:
                if (await self.engine.gateway.find(job.job_id)).is_final:
                    return
            except StoreFailed:
                return
            while (update := await updates.get()) is not None:
                if (entry := getattr(update, "transition", None)) is not None:
                    self.history.events.append(Heard(entry))

    async def _cancel(self) -> None:
        if self.known:
            self.engine.own(self._ask_to_end(self.chance.choice(list(self.known))))

    async def _ask_to_end(self, job_id: str) -> None:
        try:
            job = await self.engine.gateway.cancel(job_id, reason="", children=False)
        except StoreFailed as error:
            self.say(f"{job_id} can't be cancelled: {error}")
        else:
            self.say(f"{job_id} is cancelled: {job.job_id} is {job.state}")

    async def _vote(self) -> None:
        parked = sorted(job.job_id for job in self.engine.open_jobs.awaiting_approval.values())
        if parked:
            job_id, by = self.chance.choice(parked), self.chance.choice(VOTERS)
            self.engine.own(self._say_yes_or_no(job_id, by, no=self.chance.random() < 0.15))

    async def _say_yes_or_no(self, job_id: str, by: str, *, no: bool) -> None:
        approvals = self.engine.approvals(by)
        try:
            job = await (approvals.reject(job_id) if no else approvals.approve(job_id))
        except PenstockError as error:
            self.say(f"{by} can't vote on {job_id}: {error}")
        else:
            self.say(f"{by} {'rejects' if no else 'approves'} {job_id}: {job.state}, {job.hold}")

    async def _change_rules(self) -> None:
        self.rules = self.chance.choice(RULES)
        self.say(f"the rules are {self.rules.snapshot}")
        self.engine.use_rules(self.rules)

    async def _change_limits(self) -> None:
        self.limits = some_limits(self.chance)
        self.say(f"the limits are {', '.join(limit.name for limit in self.limits)}")
        self.engine.use_limits(self.limits)

    async def _retry(self) -> None:
        if self.known:
            self.engine.own(self._ask_again(self.chance.choice(list(self.known))))

    async def _ask_again(self, job_id: str) -> None:
        try:
            job = await self.engine.gateway.retry(job_id)
        except PenstockError as error:
            self.say(f"{job_id} is not retried: {error}")
        else:
            self.say(f"{job_id} is retried as {job.job_id}")
            self.history.events.append(Acknowledged(job))
            self.known[job.job_id] = job.request.tenant

    # -- faults -------------------------------------------------------------------

    def _victim(self) -> SimWorker | None:
        living = [worker for worker in self.workers if not worker.link.dead]
        return self.chance.choice(living) if living else None

    def _meanwhile(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _kill(self) -> None:
        if (worker := self._victim()) is not None:
            self.say(f"{worker.worker_id} dies")
            worker.die()

    async def _lose_parents(self) -> None:
        self._meanwhile(self._lose_next_parents())

    async def _lose_next_parents(self) -> None:
        """As soon as jobs of some worker wait for others, that worker is lost."""
        while not self._is_calm:
            for worker in self.workers:
                if worker.has_waiting and worker.link.healthy and not worker.leaving:
                    self.say(f"{worker.worker_id} is lost with parents that wait")
                    match self.chance.choice(["dies", "is silent", "is cut off"]):
                        case "dies":
                            worker.die()
                        case "is silent":
                            await worker.fall_silent(LIMITS.lease * 2)
                        case _:
                            await worker.lose_connection(LIMITS.lost_grace * 3, self.engine.bus)
                    return
            await asyncio.sleep(0.3)

    async def _silence(self) -> None:
        if (worker := self._victim()) is not None and worker.link.healthy:
            seconds = LIMITS.lease * self.chance.choice([0.3, 0.7, 1.2, 3.0])
            self.say(f"{worker.worker_id} falls silent for {seconds:.1f} s")
            self._meanwhile(worker.fall_silent(seconds))

    async def _cut(self) -> None:
        if (worker := self._victim()) is not None and worker.link.healthy:
            seconds = LIMITS.lost_grace * self.chance.choice([0.2, 0.8, 1.5, 5.0])
            self.say(f"{worker.worker_id} is cut off for {seconds:.1f} s")
            self._meanwhile(worker.lose_connection(seconds, self.engine.bus))

    async def _crash(self) -> None:
        self.say("the engine crashes")
        self.failures.extend(self.engine.failures)
        await self.engine.crash()
        for worker in self.workers:
            worker.lose_engine()
        await asyncio.sleep(self.chance.uniform(0, 2))
        self.say("the engine is back")
        await self._boot()
        for worker in self.workers:
            pause = self.chance.choice([0.0, LIMITS.lost_grace * 0.5, LIMITS.lost_grace * 2])
            asyncio.get_running_loop().call_later(pause, self._bring_back, worker)

    def _bring_back(self, worker: SimWorker) -> None:
        worker.find_engine(self.engine.bus)

    async def _break_disk(self) -> None:
        seconds = self.chance.choice([0.1, 0.6, LIMITS.lease * 1.5])
        self.say(f"the disk refuses for {seconds:.1f} s")
        self.store.failing = True
        asyncio.get_running_loop().call_later(seconds, self._mend_disk)

    def _mend_disk(self) -> None:
        self.store.failing = False

    async def _break_reads(self) -> None:
        self.store.unreadable = self.chance.choice([0.1, 0.5, 1.0])
        seconds = self.chance.choice([0.1, 0.6, LIMITS.lease * 1.5])
        self.say(f"{self.store.unreadable:.0%} of all reads fail for {seconds:.1f} s")
        asyncio.get_running_loop().call_later(seconds, self._mend_reads)

    def _mend_reads(self) -> None:
        self.store.unreadable = 0.0

    async def _slow_reads(self) -> None:
        self.store.read_slowness = self.chance.choice([0.0, 0.01, 0.1, 1.0])
        self.say(f"a read takes up to {self.store.read_slowness} s")

    async def _slow_disk(self) -> None:
        self.store.slowness = self.chance.choice([0.0, 0.005, 0.1, 0.5])
        self.say(f"the disk takes up to {self.store.slowness} s")

    async def _set_clock(self) -> None:
        seconds = self.chance.choice([-60.0, -2.0, 2.0, 60.0])
        self.say(f"the clock is set by {seconds:+} s")
        self.clock.jump(seconds)

    async def _drain(self) -> None:
        if (worker := self._victim()) is not None and not worker.leaving:
            self.say(f"{worker.worker_id} is told to leave")
            worker.leave()

    async def _stutter(self) -> None:
        if (worker := self._victim()) is not None:
            self.say(f"{worker.worker_id} stutters")
            worker.link.stutter = 0.3
            worker.link.repeat_something()

    async def _hire_one(self) -> None:
        self._hire()

    # -- the end ------------------------------------------------------------------

    async def _calm_down(self) -> None:
        """All faults end, and somebody is there to do what is left."""
        self.say("all is calm")
        self._is_calm = True
        self.store.mend()
        for worker in self.workers:
            worker.link.stutter = 0.0
        self._hire()
        await asyncio.sleep(1.0)

    async def _until_quiet(self) -> None:
        for _ in range(PATIENCE):
            if not await self.store.ledger.unfinished():
                break
            await asyncio.sleep(1.0)
        await asyncio.sleep(LIMITS.lease)

    async def _end(self) -> None:
        self.failures.extend(self.engine.failures)
        self.history.waiting = tuple(self.waiting)
        await self.engine.crash()
        await self.store.close_history()
        await self.store.close()
        for task in list(self._background):
            task.cancel()
        for worker in self.workers:
            await worker.stop()
