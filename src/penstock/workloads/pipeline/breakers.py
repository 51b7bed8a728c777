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
never more of them than `trials`, over all processes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from penstock.core.errors import Misconfigured
from penstock.ports.clock import Clock
from penstock.ports.executor import CancelToken
from penstock.ports.shared_state import SharedState
from penstock.workloads.pipeline.pacing import pause, release
from penstock.workloads.pipeline.records import Breaker, BreakerState, WhenOpen
from penstock.workloads.pipeline.retrying import BreakerOpen, Failure, judge

MAX_COOLDOWN = 365 * 86_400.0


class BreakerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a breaker opens, for how long, and how it is tried."""

    threshold: Annotated[int, Meta(ge=1)] = 5
    cooldown: Annotated[float, Meta(ge=0, le=MAX_COOLDOWN)] = 60.0
    trials: Annotated[int, Meta(ge=1)] = 1

    @staticmethod
    def of(name: str, given: Mapping[str, Any]) -> BreakerSettings:
        """From what a pipeline says of it. Raises Misconfigured, naming the breaker."""
        try:
            return msgspec.convert(dict(given), BreakerSettings)
        except msgspec.ValidationError as problem:
            raise Misconfigured(
                f"breaker {name}: {problem}",
                hint=f"it has {', '.join(BreakerSettings.__struct_fields__)}",
            ) from None

    def apply(self, breaker: Breaker) -> Breaker:
        """The breaker as these settings have it. No move: they are stored with the next one."""
        changed = replace(breaker, **asdict(self))
        return breaker if changed == breaker else changed


class Passage(StrEnum):
    """What a call may do."""

    PASS = "pass"
    TRIAL = "trial"
    NOT = "not"


class Decision(Struct, frozen=True):
    """What `let_pass` said. A TRIAL holds only once `breaker` is stored."""

    passage: Passage
    breaker: Breaker
    until: float | None = None
    """Of a TRIAL: when it lapses, which names its slot. Of a NOT: when to ask again."""


def let_pass(breaker: Breaker, now: float, timeout: float | None = None) -> Decision:
    """Whether a call, that may take `timeout` seconds, is let through."""
    if breaker.state is BreakerState.CLOSED:
        return Decision(Passage.PASS, breaker)
    if breaker.state is BreakerState.OPEN and now < (cooled := _cooled_at(breaker, now)):
        return Decision(Passage.NOT, breaker, cooled)
    under_way = tuple(until for until in breaker.trial_until if until > now)
    if len(under_way) >= breaker.trials:
        return Decision(Passage.NOT, breaker, min(under_way))
    # Never in the past, else the slot would be lost as soon as it is given.
    lapse = now + max(breaker.cooldown, timeout or 0.0, _LEAST_LAPSE)
    moved = _move(breaker, state=BreakerState.HALF_OPEN, trial_until=(*under_way, lapse))
    return Decision(Passage.TRIAL, moved, lapse)


def succeeded(breaker: Breaker, now: float, trial: float | None = None) -> Breaker:
    """A call succeeded; `trial` is the `until` of its Decision if it was one."""
    if breaker.state is BreakerState.CLOSED:
        return reset(breaker) if breaker.failures else breaker
    if breaker.state is BreakerState.HALF_OPEN and trial is not None:
        return reset(breaker)
    return given_back(breaker, now, trial)


def failed(breaker: Breaker, now: float, trial: float | None = None) -> Breaker:
    """A call failed in a way that counts.

    One that began before the breaker opened makes it stay open for longer, but says nothing
    of a breaker that is being tried.
    """
    failures = breaker.failures + 1
    if breaker.state is BreakerState.CLOSED:
        if failures < breaker.threshold:
            return _move(breaker, failures=failures)
    elif breaker.state is BreakerState.HALF_OPEN and trial is None:
        return breaker
    return _move(
        breaker,
        state=BreakerState.OPEN,
        failures=failures,
        opened_at=now,
        trial_until=_without(breaker.trial_until, trial),
    )


def given_back(breaker: Breaker, now: float, trial: float | None = None) -> Breaker:
    """A call ended and says nothing of the breaker: it was cancelled, or its item was bad."""
    if trial not in breaker.trial_until:
        return breaker
    return _move(breaker, trial_until=_without(breaker.trial_until, trial))


def reset(breaker: Breaker) -> Breaker:
    """Closed, by hand or by a success. Always a move, so that trials under way can't undo it."""
    return _move(breaker, state=BreakerState.CLOSED, failures=0, opened_at=None, trial_until=())


_LEAST_LAPSE = 1.0


def _cooled_at(breaker: Breaker, now: float) -> float:
    opened = now if breaker.opened_at is None else breaker.opened_at
    # Opened in the far future means that the clock was set back: the wait was long enough.
    return now if opened > now + breaker.cooldown else opened + breaker.cooldown


def _without(slots: tuple[float, ...], trial: float | None) -> tuple[float, ...]:
    """One slot less. Of two that lapse at the same time, it does not matter which."""
    if trial not in slots:
        return slots
    at = slots.index(trial)
    return slots[:at] + slots[at + 1 :]


def _move(breaker: Breaker, **changes: Any) -> Breaker:
    return replace(breaker, version=breaker.version + 1, **changes)


LOOK_EVERY = 0.2
"""Seconds for which what was read of a breaker is believed."""
WATCH_EVERY = 1.0
"""Seconds between checks whether another process closed an open breaker."""
DEFAULT = BreakerSettings()
PREFIX = "breaker/"
"""How the names begin that breakers are kept under."""
_decode = msgspec.json.Decoder(Breaker).decode


async def load_breakers(shared: SharedState) -> list[Breaker]:
    """All that were ever stored, by name."""
    return [_decode(value) for value in (await shared.read_all(PREFIX)).values()]


async def load_breaker(shared: SharedState, name: str) -> Breaker | None:
    value = await shared.read(PREFIX + name)
    return None if value is None else _decode(value)


async def store_breaker(shared: SharedState, breaker: Breaker) -> bool:
    """Store it if its `version` is one more than the stored one's (0 where none is)."""
    name = PREFIX + breaker.name
    before = await shared.read(name)
    if breaker.version != (0 if before is None else _decode(before).version + 1):
        return False
    return await shared.replace(name, before, msgspec.json.encode(breaker))


class Call(Struct):
    """One call behind a breaker."""

    name: str
    settings: BreakerSettings
    when_open: WhenOpen
    cancel: CancelToken | None
    timeout: float | None
    trial: float | None = None
    failure: Failure | None = None

    def ended(self, failure: Failure | None) -> None:
        """How the call ended, where no exception tells: None is a success."""
        self.failure = failure


class Breakers:
    """The breakers as one process sees them. Make one for all its jobs."""

    def __init__(self, shared: SharedState, clock: Clock) -> None:
        self._shared, self._clock = shared, clock
        self._seen: dict[str, tuple[Breaker, float]] = {}
        """What was last read or written, and when."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)

    @asynccontextmanager
    async def call(
        self,
        name: str,
        settings: BreakerSettings = DEFAULT,
        *,
        when_open: WhenOpen = WhenOpen.WAIT,
        cancel: CancelToken | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Call]:
        """One call behind a breaker. Entering it raises BreakerOpen, or waits, while the breaker
        is open, and `penstock.Cancelled` if the wait is to end. `timeout` is how long the call
        itself may take: a trial that is silent for longer is given up for lost."""
        call = Call(name, settings, when_open, cancel, timeout)
        call.trial = await self._enter(call)
        try:
            yield call
        except BaseException as error:
            await self._leave(call, judge(error))
            raise
        await self._leave(call, call.failure)

    async def _enter(self, call: Call) -> float | None:
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

    async def _leave(self, call: Call, failure: Failure | None) -> None:
        """Tell the breaker how a call ended."""
        breaker, trial = self._fresh(call), call.trial
        if failure is not None:
            move = failed if failure.counts_for_breaker else given_back
        elif breaker is not None and breaker.state is BreakerState.CLOSED and not breaker.failures:
            return  # a success changes nothing
        else:
            move = succeeded
        if move is not given_back or trial is not None:
            await self._move(call, lambda breaker: move(breaker, self._clock.now(), trial))

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
                if await store_breaker(self._shared, moved):
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
        # The first move of one that nobody has stored has version 0, as a store wants it.
        stored = await load_breaker(self._shared, call.name)
        breaker = stored or Breaker(name=call.name, version=-1)
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
