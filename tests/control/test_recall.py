"""Rates hold over a restart: what went lately counts for the next engine, too."""

from __future__ import annotations

import pytest
from tests.support.ledgers import MemoryLedger

from penstock.control import limits
from penstock.control.limits import Limiter, recall_rates
from penstock.core.verdict import Decision, Rate, SafetyVerdict
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.engine_api import Limit
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, accept, move, succeeded

_E = JobEvent
_HOURLY = Limit(name="hourly", key=("tenant",), rate=Rate(2, 3600.0))


def limiter_at(clock: VirtualClock, *limits: Limit) -> Limiter:
    limiter = Limiter(clock.now)
    limiter.monotonic = clock.monotonic
    limiter.use(limits)
    return limiter


async def ran(store: MemoryLedger, job_id: str, at: float, **fields: object) -> None:
    verdict = fields.pop("verdict", None)
    given = move(job_id, _E.SCHEDULE, _E.DISPATCH, at=at, verdict=verdict)
    ended = move(job_id, _E.START, _E.SUCCEED, at=at, result=succeeded(job_id))
    await store.apply([accept(job_id, at, **fields), given, ended])


def opens_in(limiter: Limiter, clock: VirtualClock, limit: str = "hourly") -> float:
    (view,) = [view for view in limiter.views(clock.now()) if view.limit.name == limit]
    (use,) = view.uses
    return (use.blocked_until or clock.now()) - clock.now()


@run_async
async def test_a_job_that_went_and_ended_counts_until_its_time_is_over() -> None:
    store, clock = MemoryLedger(), VirtualClock(T0)
    await ran(store, "old", T0 - 4000)
    await ran(store, "a", T0 - 3000)
    await ran(store, "b", T0 - 600)
    limiter = limiter_at(clock, _HOURLY)
    assert await recall_rates(store, limiter, T0 - 3600) == 2
    assert opens_in(limiter, clock) == pytest.approx(600, abs=5)


@run_async
async def test_a_job_that_is_still_held_is_left_to_the_board() -> None:
    store, clock = MemoryLedger(), VirtualClock(T0)
    await store.apply([accept("a", T0 - 60), move("a", _E.SCHEDULE, _E.DISPATCH, at=T0 - 60)])
    limiter = limiter_at(clock, _HOURLY)
    assert await recall_rates(store, limiter, T0 - 3600) == 0


@run_async
async def test_the_rate_of_a_safety_rule_is_known_from_the_verdict() -> None:
    store, clock = MemoryLedger(), VirtualClock(T0)
    verdict = SafetyVerdict(Decision.THROTTLE, "slowly", "s1", rate=Rate(1, 60.0))
    await ran(store, "a", T0 - 10, verdict=verdict)
    limiter = limiter_at(clock)
    assert await recall_rates(store, limiter, T0 - 60) == 1
    assert opens_in(limiter, clock, "rule:slowly") == pytest.approx(50, abs=1)


@run_async
async def test_a_long_journal_is_read_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_PAGES", 2)
    store, clock = MemoryLedger(), VirtualClock(T0)
    for n in range(40):
        await ran(store, f"j{n}", T0 - 40 + n)
    limiter = limiter_at(clock, Limit(name="hourly", key=("tenant",), rate=Rate(100, 60.0)))
    assert await recall_rates(store, limiter, T0 - 20) == 20
