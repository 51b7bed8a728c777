"""How a circuit breaker moves: a function from one `Breaker` value to the next.

    closed     every call passes; `threshold` failures in a row open it
    open       no call passes until `cooldown` seconds after the last failure
    half open  `trials` calls at once pass as trials; the first to end decides

Every move gives a Breaker whose version is one higher, to be stored by compare-and-set;
where nothing changes, the very same value comes back and there is nothing to store.

A trial holds a slot, known by the time at which it lapses. The slot is given back by the
trial's end, whatever that is, or by its lapse if whoever ran it is gone. A trial that ends
after its lapse still decides, so calls slower than that can close a breaker too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.core.errors import Misconfigured
from penstock.workloads.pipeline.records import Breaker, BreakerState, WhenOpen

BREAKER_OPEN = "BREAKER_OPEN"
"""The error code of an item that failed because its breaker was open."""

MAX_COOLDOWN = 365 * 86_400.0


class BreakerOpen(Exception):
    """An item was not run because its breaker is open, and it is not to wait."""

    def __init__(self, name: str, until: float, when_open: WhenOpen) -> None:
        super().__init__(f"circuit breaker {name} is open")
        self.name, self.until, self.when_open = name, until, when_open


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
        mine = (self.threshold, self.cooldown, self.trials)
        if (breaker.threshold, breaker.cooldown, breaker.trials) == mine:
            return breaker
        return replace(
            breaker, threshold=self.threshold, cooldown=self.cooldown, trials=self.trials
        )


def unknown(name: str) -> Breaker:
    """One that nobody has stored. Its first move has version 0, as a store wants it."""
    return Breaker(name=name, version=-1)


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
        return _closed(breaker) if breaker.failures else breaker
    if breaker.state is BreakerState.HALF_OPEN and trial is not None:
        return _closed(breaker)
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
    """Closed by hand. Always a move, so that trials under way can't undo it."""
    return _closed(breaker)


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


def _closed(breaker: Breaker) -> Breaker:
    return _move(breaker, state=BreakerState.CLOSED, failures=0, opened_at=None, trial_until=())


def _move(breaker: Breaker, **changes: Any) -> Breaker:
    return replace(breaker, version=breaker.version + 1, **changes)
