"""Numbers over time: what was submitted, started and ended in each minute of the last day.

Fed by every commit. A minute that is over is kept as a few hundred bytes, in memory and as a fact
of the store, so a restart keeps the day; a crash loses the minute that was not over. Jobs are
counted by tenant and topic; in one minute at most so many pairs, the rest together.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TypeVar

import msgspec
from msgspec import Struct

from penstock.control.ledger import Ledger
from penstock.core.errors import PenstockError
from penstock.core.job import Job, ready_at
from penstock.core.journal import Stride
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Activity, FailureCount, Timeline, TimelinePoint, WaitCount

K = TypeVar("K")

KEPT_MINUTES = 1440
_MINUTE = 60.0
_PAIRS = 100
"""Pairs of tenant and topic that are counted in one minute."""
_OTHERS = ("", "(others)")
_REASONS = 50
"""Error codes that are counted for one pair in one minute."""
_FACTS = "minute/"

_Key = tuple[str, str]
"""Tenant and topic."""


class _Cell(Struct, omit_defaults=True):
    """What happened to the jobs of one tenant and topic in a minute."""

    submitted: int = 0
    started: int = 0
    retried: int = 0
    ended: dict[JobState, int] = {}
    failures: dict[str, int] = {}
    """By error code; tries that were retried are among them."""
    waits: dict[int, int] = {}
    """Starts by how long the job had waited: see `_step`."""
    waited: float = 0.0
    """Seconds that those had waited together."""
    open_before: dict[JobState, int] = {}
    """Unfinished jobs when the minute began, as they had been since the cell before."""


_Minute = list[tuple[str, str, _Cell]]
_decode = msgspec.json.Decoder(_Minute).decode


class Statistics:
    """Counts commits; a service that stores each minute."""

    def __init__(self, store: Ledger, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._open: dict[_Key, dict[JobState, int]] = {}
        """Unfinished jobs by state."""
        self._began: dict[_Key, dict[JobState, int]] = {}
        """The same when the minute began that is not over."""
        self._minute = int(clock.now() // _MINUTE)
        self._cells: dict[_Key, _Cell] = {}
        """Of the minute that is not over."""
        self._earlier = _new_cell()
        """All cells of minutes that were over since the engine started."""
        self._past: dict[int, bytes] = {}
        """Minutes that are over, oldest first."""
        self._unstored: dict[str, bytes | None] = {}
        self._counted = asyncio.Event()
        """Set while the minute that is not over has something in it, or something is not stored."""

    # -- feeding ------------------------------------------------------------------

    def hear(self, strides: Sequence[Stride]) -> None:
        """After a commit."""
        self._turn()
        cells, open_jobs = self._cells, self._open
        for stride in strides:
            before, after = stride.path.before, stride.path.after
            if before is after:
                continue  # a note, or another attempt
            ends = after in TERMINAL
            # A start may be told together with the end, and never comes first.
            starts = before is not JobState.RUNNING and (
                after is JobState.RUNNING or (ends and len(stride.path.steps) > 1)
            )
            for key, jobs in _by_key(stride.jobs).items():
                counts = open_jobs.get(key)
                if counts is None:
                    counts = open_jobs[key] = {}
                if before is not None:
                    counts[before] = counts.get(before, 0) - len(jobs)
                if not ends:
                    counts[after] = counts.get(after, 0) + len(jobs)
                cell = cells.get(key) or self._cell(key)
                if not ends and before is not None and not starts:
                    continue
                if before is None:
                    cell.submitted += sum(not job.request.retry_number for job in jobs)
                if starts:
                    _count_starts(cell, jobs, stride.at)
                if after is JobState.SUCCEEDED:
                    cell.ended[after] = cell.ended.get(after, 0) + len(jobs)
                elif ends:
                    for job in jobs:
                        _count_failure(cell, job)

    def _cell(self, key: _Key) -> _Cell:
        if len(self._cells) >= _PAIRS:
            key = _OTHERS
        self._counted.set()
        cell = self._cells.setdefault(key, _new_cell())
        cell.open_before = self._began.get(key, {})
        return cell

    def _turn(self) -> None:
        """Begin another minute if the last one is over."""
        minute = int(self._clock.now() // _MINUTE)
        if minute <= self._minute:
            return
        self._seal()
        for cell in self._cells.values():
            _add(self._earlier, cell)
        self._minute, self._cells = minute, {}
        self._open = {key: counts for key, counts in self._open.items() if any(counts.values())}
        self._began = self._open_now()
        for old in [one for one in self._past if one <= minute - KEPT_MINUTES]:
            del self._past[old]
            self._unstored[f"{_FACTS}{old}"] = None

    def _seal(self) -> None:
        if (others := self._cells.get(_OTHERS)) is not None:
            apart = [counts for key, counts in self._began.items() if key not in self._cells]
            others.open_before = _added(apart)
        if self._cells:
            cells: _Minute = [(*key, cell) for key, cell in self._cells.items()]
            self._past[self._minute] = value = msgspec.json.encode(cells)
            self._unstored[f"{_FACTS}{self._minute}"] = value

    # -- keeping ------------------------------------------------------------------

    async def restore(self) -> None:
        """Take up what an earlier engine counted."""
        facts = await self._store.recall_all(_FACTS)
        for name, value in sorted(facts.items(), key=lambda one: int(one[0][len(_FACTS) :])):
            self._past[int(name.removeprefix(_FACTS))] = value
        if (value := self._past.pop(self._minute, b"")) and (cells := _readable(value)):
            self._cells = {(tenant, topic): cell for tenant, topic, cell in cells}
            self._counted.set()

    def restore_open(self, jobs: Iterable[Job]) -> None:
        """The same for unfinished jobs."""
        for job in jobs:
            counts = self._open.setdefault((job.request.tenant, job.request.topic), {})
            counts[job.state] = counts.get(job.state, 0) + 1
        self._began = self._open_now()

    async def run(self) -> None:
        try:
            while True:
                await self._counted.wait()  # nothing is to be done while nothing happens
                await self._clock.sleep(_MINUTE - self._clock.now() % _MINUTE)
                self._turn()
                await self._keep()
        finally:
            self._seal()
            await self._keep()

    async def _keep(self) -> None:
        facts, self._unstored = self._unstored, {}
        if facts:
            try:
                await self._store.commit((), facts=facts)
            except PenstockError:
                self._unstored = facts | self._unstored
        if not (self._cells or self._unstored):
            self._counted.clear()

    # -- asking -------------------------------------------------------------------

    def open_by_topic(self, tenant: str | None) -> dict[str, dict[JobState, int]]:
        found: dict[str, Counter[JobState]] = defaultdict(Counter)
        for (whose, topic), counts in self._open.items():
            if tenant in (None, whose):
                found[topic].update(counts)
        return {
            topic: {state: n for state in JobState if (n := counts[state])}
            for topic, counts in sorted(found.items())
            if any(counts.values())
        }

    def _open_now(self) -> dict[_Key, dict[JobState, int]]:
        return {
            key: present
            for key, counts in self._open.items()
            if (present := {state: n for state, n in counts.items() if n})
        }

    def timeline(self, minutes: int, tenant: str | None, topic: str | None) -> Timeline:
        self._turn()
        first = self._minute - minutes + 1
        total, failures = _new_cell(), Counter[_Key]()

        def asked(key: _Key) -> bool:
            return tenant in (None, key[0]) and (topic is None or fnmatchcase(key[1], topic))

        points = []
        opened = {key: counts for key, counts in self._open_now().items() if asked(key)}
        for minute in range(self._minute, first - 1, -1):
            cell, open_jobs, before = _new_cell(), _added(opened.values()), {}
            for *key, one in self._cells_of(minute):
                if asked(which := (key[0], key[1])):
                    before[which] = one.open_before
                    _add(cell, one)
                    failures.update({(which[1], code): n for code, n in one.failures.items()})
            opened = before if _OTHERS in before else opened | before
            _add(total, cell)
            points.append(_point(minute * _MINUTE, cell, open_jobs))
        reasons = [FailureCount(*key, count) for key, count in failures.most_common(100)]
        whole = _point(first * _MINUTE, total, points[0].open)
        return Timeline(tuple(reversed(points)), whole, tuple(reasons))

    def activity(self) -> Activity:
        """Since the engine started."""
        total = _new_cell()
        for cell in (self._earlier, *self._cells.values()):
            _add(total, cell)
        waits = tuple(WaitCount(_seconds(step), n) for step, n in sorted(total.waits.items()))
        return Activity(
            submitted=total.submitted,
            started=total.started,
            retried=total.retried,
            ended=total.ended,
            failures=total.failures,
            waits=waits,
            waited=total.waited,
        )

    def _cells_of(self, minute: int) -> Iterator[tuple[str, str, _Cell]]:
        if minute == self._minute:
            for (tenant, topic), cell in self._cells.items():
                yield tenant, topic, cell
        elif (value := self._past.get(minute)) is not None:
            yield from _readable(value)


def _readable(value: bytes) -> _Minute:
    with suppress(msgspec.DecodeError):
        return _decode(value)
    return []


def _by_key(jobs: list[Job]) -> dict[_Key, list[Job]]:
    """Mostly the jobs of one move are of one tenant and topic."""
    groups: dict[_Key, list[Job]] = {}
    for job in jobs:
        request = job.request
        key = (request.tenant, request.topic)
        some = groups.get(key)
        if some is None:
            groups[key] = [job]
        else:
            some.append(job)
    return groups


def _count_starts(cell: _Cell, jobs: Iterable[Job], at: float) -> None:
    waits = cell.waits
    for job in jobs:
        if job.started_at is not None:
            cell.started += 1
            waited = max(0.0, at - ready_at(job.request, job.accepted_at))
            cell.waited += waited
            step = _step(waited)
            waits[step] = waits.get(step, 0) + 1


def _count_failure(cell: _Cell, job: Job) -> None:
    if job.successor is None:
        cell.ended[job.state] = cell.ended.get(job.state, 0) + 1
    else:
        cell.retried += 1
    code = (job.result.error_code if job.result is not None else None) or job.state.value
    _add_failures(cell, code, 1)


def _add_failures(cell: _Cell, code: str, count: int) -> None:
    if code not in cell.failures and len(cell.failures) >= _REASONS:
        code = _OTHERS[1]
    cell.failures[code] = cell.failures.get(code, 0) + count


def _new_cell() -> _Cell:
    return _Cell(ended={}, failures={}, waits={})


def _add(cell: _Cell, other: _Cell) -> None:
    cell.submitted += other.submitted
    cell.started += other.started
    cell.retried += other.retried
    cell.waited += other.waited
    _add_counts(cell.ended, other.ended)
    _add_counts(cell.waits, other.waits)
    for code, count in other.failures.items():
        _add_failures(cell, code, count)


def _add_counts(counts: dict[K, int], others: Mapping[K, int]) -> None:
    for key, count in others.items():
        counts[key] = counts.get(key, 0) + count


def _added(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: dict[K, int] = {}
    for one in counts:
        _add_counts(total, one)
    return total


def _point(at: float, cell: _Cell, open_jobs: dict[JobState, int]) -> TimelinePoint:
    return TimelinePoint(
        at=at,
        submitted=cell.submitted,
        started=cell.started,
        retried=cell.retried,
        ended=cell.ended,
        open=open_jobs,
        wait_p50=_quantile(cell.waits, 0.5),
        wait_p99=_quantile(cell.waits, 0.99),
    )


def _step(seconds: float) -> int:
    """Which step of a scale that doubles every two steps, from a millisecond on."""
    return max(0, math.ceil(2 * math.log2(seconds * 1000))) if seconds > 0.001 else 0


def _quantile(waits: Mapping[int, int], share: float) -> float | None:
    """Seconds, rounded up to a step of the scale; None without any."""
    left = share * sum(waits.values())
    for step in sorted(waits):
        left -= waits[step]
        if left <= 0:
            return _seconds(step)
    return None


def _seconds(step: int) -> float:
    """The upper end of a step of the scale."""
    return round(2 ** (step / 2) / 1000, 6)
