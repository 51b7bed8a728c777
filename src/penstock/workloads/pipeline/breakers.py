"""Circuit breakers that all jobs share, through the store.

    async with breakers.call("feeds", settings, when_open=..., cancel=..., timeout=...) as call:
        ...                         # what is raised here is judged and counted
        call.ended(failure)         # where a failure is known otherwise than by an exception

Failures that count are transient ones and timeouts. A bad item says nothing of the other
side, and neither does a cancelled one: they give their trial back and change nothing.

What sharing means. A failure is written at once, by compare-and-set, so failures of several
processes add up. What is read is up to `LOOK_EVERY` seconds old: so long after one process
opened a breaker, another may still make calls; and a success is not written while the breaker
was last seen closed and without failures. So "in a row" holds exactly within one `Breakers`,
and to a fifth of a second between them. A trial is always settled by the store: there are
never more of them than `trials`, whoever asks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from penstock.ports.clock import Clock
from penstock.ports.executor import CancelToken
from penstock.workloads.pipeline.breaker_rules import (
    BreakerOpen,
    BreakerSettings,
    Decision,
    Passage,
    failed,
    given_back,
    let_pass,
    succeeded,
    unknown,
)
from penstock.workloads.pipeline.records import Breaker, BreakerState, WhenOpen
from penstock.workloads.pipeline.retrying import Failure, judge
from penstock.workloads.pipeline.waiting import pause, release

LOOK_EVERY = 0.2
"""Seconds for which what was read of a breaker is believed."""
WATCH_EVERY = 1.0
"""Seconds after which who waits for an open breaker looks whether another process closed it."""

DEFAULT = BreakerSettings()


class BreakerStore(Protocol):
    """The part of a PipelineStore that is used here."""

    async def breaker(self, name: str) -> Breaker | None: ...

    async def put_breaker(self, breaker: Breaker) -> bool: ...


class Breakers:
    """The breakers as one process sees them. Make one for all its jobs."""

    def __init__(self, store: BreakerStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._seen: dict[str, tuple[Breaker, float]] = {}
        """What was last read or written, and when."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)

    def call(
        self,
        name: str,
        settings: BreakerSettings = DEFAULT,
        *,
        when_open: WhenOpen = WhenOpen.WAIT,
        cancel: CancelToken | None = None,
        timeout: float | None = None,
    ) -> Call:
        """One call behind a breaker. Entering it raises BreakerOpen, or waits, while the breaker
        is open, and `penstock.Cancelled` if the wait is to end. `timeout` is how long the call
        itself may take: a trial that is silent for longer is given up for lost."""
        return Call(self, name, settings, when_open, cancel, timeout)

    async def enter(self, call: Call) -> float | None:
        """Wait until the call may be made; the name of its slot if it is a trial."""
        while True:
            if call.cancel is not None:
                call.cancel.raise_if_requested()
            decision = await self._ask(call)
            if decision.passage is not Passage.NOT:
                return decision.until
            until = decision.until or 0.0
            if call.when_open is not WhenOpen.WAIT:
                raise BreakerOpen(call.name, until, call.when_open)
            await self._wait(call, until)

    async def leave(self, call: Call, failure: Failure | None, trial: float | None) -> None:
        """Tell the breaker how a call ended."""
        breaker = self._fresh(call)
        if failure is None and breaker is not None and _is_quiet(breaker):
            return

        def move(breaker: Breaker) -> Breaker:
            now = self._clock.now()
            if failure is None:
                return succeeded(breaker, now, trial)
            if failure.counts_for_breaker:
                return failed(breaker, now, trial)
            return given_back(breaker, now, trial)

        if failure is None or failure.counts_for_breaker or trial is not None:
            await self._move(call, move)

    # -- the store ----------------------------------------------------------------

    async def _ask(self, call: Call) -> Decision:
        breaker = self._fresh(call)
        if breaker is not None and breaker.state is BreakerState.CLOSED:
            return Decision(Passage.PASS, breaker)
        decision: list[Decision] = []

        def move(breaker: Breaker) -> Breaker:
            decision[:] = [let_pass(breaker, self._clock.now(), call.timeout)]
            return decision[0].breaker

        await self._move(call, move)
        return decision[0]

    async def _move(self, call: Call, move: Callable[[Breaker], Breaker]) -> None:
        """Apply a move to the breaker as it is, and again if somebody else was faster."""
        async with self._locks[call.name]:
            breaker = self._fresh(call) or await self._read(call)
            while (moved := move(breaker)) is not breaker:
                if await self._store.put_breaker(moved):
                    self._see(moved)
                    break
                breaker = await self._read(call)

    def _fresh(self, call: Call) -> Breaker | None:
        """What is known of it, unless that is too old."""
        breaker, seen = self._seen.get(call.name, (None, 0.0))
        if breaker is None or self._clock.monotonic() - seen > LOOK_EVERY:
            return None
        return call.settings.apply(breaker)

    async def _read(self, call: Call) -> Breaker:
        breaker = await self._store.breaker(call.name) or unknown(call.name)
        self._see(breaker)
        return call.settings.apply(breaker)

    def _see(self, breaker: Breaker) -> None:
        before, _ = self._seen.get(breaker.name, (breaker, 0.0))
        self._seen[breaker.name] = (breaker, self._clock.monotonic())
        if before.version != breaker.version:
            release(self._waiting.pop(breaker.name, ()))

    async def _wait(self, call: Call, until: float) -> None:
        """Until it may be tried, or is seen to have moved."""
        moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[call.name].append(moved)
        seconds = min(max(until - self._clock.now(), 0.0), WATCH_EVERY)
        try:
            await pause(self._clock, seconds, call.cancel, wake=moved)
        finally:
            if not moved.done():
                self._waiting[call.name].remove(moved)


class Call:
    """One call behind a breaker: an async context manager."""

    def __init__(
        self,
        breakers: Breakers,
        name: str,
        settings: BreakerSettings,
        when_open: WhenOpen,
        cancel: CancelToken | None,
        timeout: float | None,
    ) -> None:
        self.name, self.settings, self.when_open = name, settings, when_open
        self.cancel, self.timeout = cancel, timeout
        self._breakers = breakers
        self._trial: float | None = None
        self._failure: Failure | None = None

    def ended(self, failure: Failure | None) -> None:
        """How the call ended, where no exception tells: None is a success."""
        self._failure = failure

    async def __aenter__(self) -> Call:
        self._trial = await self._breakers.enter(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failure = self._failure if error is None else judge(error)
        await self._breakers.leave(self, failure, self._trial)


def _is_quiet(breaker: Breaker) -> bool:
    """Whether a success changes nothing."""
    return breaker.state is BreakerState.CLOSED and not breaker.failures
