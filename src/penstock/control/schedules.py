"""Schedules: jobs that are submitted at the times of a cron expression.

A firing submits its job under a key made of the schedule's name and the time it fires for,
and then remembers that this time is done. Whatever dies in between, the time is fired for
again and the gateway answers with the job that is already there: no time has two jobs.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.control.guard import Guard, Uploads
from penstock.control.ledger import Ledger
from penstock.core.calendar import Calendar
from penstock.core.check import check_name, check_request
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PenstockError,
    TooMany,
    Unavailable,
    UnknownTopic,
)
from penstock.core.job import Job, JobRequest
from penstock.ports.clock import Clock, wait_at_most
from penstock.ports.engine_api import CatchUp, KeyRole, Schedule, Schedules, ScheduleView
from penstock.ports.store import JobQuery

log = logging.getLogger(__name__)

Submit = Callable[[Sequence[JobRequest]], Awaitable[list[Job]]]

_FACTS = "schedule/"
_LATE = 60.0
"""Seconds after which a time counts as missed, as after sleep or a clock change."""
_LOOK = 60.0
"""Seconds between checks of the wall clock, which may be changed meanwhile."""
_AT_ONCE = 50
"""Missed times that one schedule fires for before the others have their turn."""
MOST_MISSED = 1000
"""How many missed times are fired for; older ones are dropped."""
_FIRST_RETRY, _LAST_RETRY = 1.0, 300.0
"""Seconds after which a job that could not be submitted is tried again: first, at most."""
_SET_BACK = 60.0
_UPCOMING = 5
_NOT_FOR_ALL = ("idempotency_key", "run_at", "deadline")
"""Fields of a request that can't be right for more than one job."""


class StoredSchedule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule as it is stored."""

    schedule: Schedule
    by: str
    """Who made it: the principal of its jobs."""
    done: float
    """Every time up to this one is done."""
    last_at: float | None = None
    last_job_id: str | None = None
    fired: int = 0
    skipped: int = 0
    problem: str = ""


class ScheduleState:
    """A schedule, and when to check it next."""

    def __init__(self, kept: StoredSchedule, calendar: Calendar | None) -> None:
        self.kept, self.calendar = kept, calendar
        self.tried: float | None = None
        """The time for which it could not be submitted."""
        self.said = ""
        """What to report after firing for missed times."""
        self._retry_at: float | None = None
        self._pause = _FIRST_RETRY
        self._due_at = self._next(kept.done)

    def _next(self, time: float) -> float | None:
        if self.calendar is None or self.kept.schedule.paused:
            return None
        return self.calendar.next(time)

    def _upcoming(self, next_at: float) -> tuple[float, ...]:
        assert self.calendar is not None
        return tuple(islice(self.calendar.after(next_at - 1), _UPCOMING))

    @property
    def wakes_at(self) -> float | None:
        return self._due_at if self._retry_at is None else self._retry_at

    def advance(self, kept: StoredSchedule) -> None:
        self.kept = kept
        self.tried = self._retry_at = None
        self._pause = _FIRST_RETRY
        self._due_at = self._next(kept.done)

    def hold_back(self, time: float | None, now: float, error: Exception) -> None:
        """Retry later. This is not stored: after a restart the time is still due."""
        pause = error.retry_after if isinstance(error, TooMany) else self._pause
        self._pause = min(self._pause * 2, _LAST_RETRY)
        self._retry_at = now + min(max(pause, _FIRST_RETRY), _LAST_RETRY)
        self.tried = time
        when = "" if time is None else f"not submitted for {iso(time)}: "
        self.kept = replace(
            self.kept, problem=f"{when}{error}; tried again at {iso(self._retry_at)}"
        )

    def view(self, now: float) -> ScheduleView:
        kept, problem = self.kept, self.kept.problem
        if kept.done > now + _SET_BACK and not problem:
            problem = (
                f"the clock was set back; what is before {iso(kept.done)} was dealt with "
                "(pause and resume it to begin now)"
            )
        next_at = self._next(max(kept.done, now))
        return ScheduleView(
            schedule=kept.schedule,
            next_at=next_at,
            upcoming=() if next_at is None else self._upcoming(next_at),
            last_at=kept.last_at,
            last_job_id=kept.last_job_id,
            fired=kept.fired,
            skipped=kept.skipped,
            problem=problem,
        )


class DueTimes(NamedTuple):
    """The times to fire for, oldest first, and what to report."""

    times: list[float]
    until: float
    """The newest time considered, fired for or not."""
    said: str = ""


def due_times(
    calendar: Calendar,
    catch_up: CatchUp,
    done: float,
    now: float,
    *,
    punctual: float,
    tried: float | None = None,
) -> DueTimes | None:
    """Which of the times in (done, now] to fire for; None if there are none.

    Times before `punctual` were missed, and `catch_up` says what becomes of them. One that
    was `tried` and could not be submitted is not missed as long as none came after it.
    """
    times, more = calendar.last(MOST_MISSED, done, now)
    if not times:
        return None
    missed = [time for time in times if time < punctual]
    if missed and missed[-1] == times[-1] == tried:
        missed.pop()
    in_time = times[len(missed) :]
    match catch_up:
        case CatchUp.SKIP:
            return DueTimes(in_time, times[-1])
        case CatchUp.LAST:
            return DueTimes(missed[-1:] + in_time, times[-1])
        case CatchUp.ALL:
            dropped = f"more than {MOST_MISSED} times were missed: the oldest were dropped"
            return DueTimes(missed + in_time, times[-1], dropped if more else "")


def iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def request_of(schedule: Schedule, by: str, time: float | None) -> JobRequest:
    """The request to submit for one of its times, or for a manual firing (None)."""
    key = None if time is None else f"schedule:{schedule.name}:{iso(time)}"
    return replace(schedule.request, idempotency_key=key, principal=by)


def same_times(one: Schedule, other: Schedule) -> bool:
    return (one.cron, one.timezone, one.paused) == (other.cron, other.timezone, other.paused)


def checked(schedule: Schedule, now: float) -> Schedule:
    """The schedule, checked, with a request that can be submitted repeatedly."""
    check_name("name", schedule.name)
    check_name("tenant", schedule.tenant)
    request = replace(
        schedule.request, job_id="", tenant=schedule.tenant, retry_number=0, schedule=schedule.name
    )
    for field in _NOT_FOR_ALL:
        if getattr(request, field) is not None:
            raise InvalidRequest(
                f"request.{field}",
                "can't be the same for all jobs of a schedule",
                hint="leave it out; a schedule gives each job its time and key",
            )
    try:
        check_request(replace(request, job_id="any"), now)
    except InvalidRequest as error:
        raise InvalidRequest(f"request.{error.field}", error.problem, hint=error.hint) from None
    return replace(schedule, request=request)


class ScheduleRunner:
    """All schedules, in memory, and the service that fires them."""

    def __init__(self, store: Ledger, submit: Submit, clock: Clock) -> None:
        self.store, self.submit, self.clock = store, submit, clock
        self.known: dict[tuple[str, str], ScheduleState] = {}
        """By tenant and name."""
        self.changing = asyncio.Lock()
        self._changed = asyncio.Event()

    async def restore(self) -> None:
        """Load the stored schedules. An unreadable one does not affect the others."""
        facts = await self.store.recall_all(_FACTS)
        for name, value in facts.items():
            try:
                kept = msgspec.json.decode(value, type=StoredSchedule)
            except msgspec.MsgspecError as error:
                log.error("can't read the stored %s: %s", name, error)
                continue
            schedule = kept.schedule
            try:
                known = ScheduleState(kept, Calendar(schedule.cron, schedule.timezone))
            except InvalidRequest as error:  # a zone that the machine no longer knows
                known = ScheduleState(replace(kept, problem=str(error)), None)
            self.known[schedule.tenant, schedule.name] = known

    def requests(self) -> Iterable[JobRequest]:
        """Of future jobs, whose inputs must not be pruned."""
        return [known.kept.schedule.request for known in self.known.values()]

    async def use(self, known: ScheduleState) -> ScheduleView:
        """Store a new or changed schedule, then fire by it."""
        await self.remember(known.kept)
        schedule = known.kept.schedule
        self.known[schedule.tenant, schedule.name] = known
        self._changed.set()
        return known.view(self.clock.now())

    async def remember(self, kept: StoredSchedule) -> None:
        await self.store.remember(_fact(kept.schedule), msgspec.json.encode(kept))

    async def run(self) -> None:
        """Fire what is due, then sleep until the next time or change."""
        punctual = self.clock.now()  # what is older was missed while no engine ran
        while True:
            self._changed.clear()
            now = self.clock.now()
            for known in [*self.known.values()]:
                if (wake := known.wakes_at) is not None and wake <= now:
                    await self._check(known, punctual)
            await self._rest()
            punctual = self.clock.now() - _LATE

    async def _rest(self) -> None:
        wakes = [at for known in self.known.values() if (at := known.wakes_at) is not None]
        if not wakes:
            await self._changed.wait()
            return
        look = max(_LOOK, self.clock.recheck)
        seconds = min(max(0.0, min(wakes) - self.clock.now()), look)
        await wait_at_most(self.clock, seconds, self._changed)

    async def _check(self, known: ScheduleState, punctual: float) -> None:
        """Fire one schedule for its due times; an error affects no other schedule."""
        try:
            await self._fire_due(known, punctual)
        except Exception as error:
            schedule = known.kept.schedule
            if not isinstance(error, PenstockError):
                log.exception("schedule %s of %s", schedule.name, schedule.tenant)
            known.hold_back(known.tried, self.clock.now(), error)

    async def _fire_due(self, known: ScheduleState, punctual: float) -> None:
        kept, schedule = known.kept, known.kept.schedule
        assert known.calendar is not None
        due = due_times(
            known.calendar,
            schedule.catch_up,
            kept.done,
            self.clock.now(),
            punctual=punctual,
            tried=known.tried,
        )
        if due is None:  # the clock was set back
            known.advance(kept)
            return
        if due.said:
            known.said = due.said
            log.warning("schedule %s of %s: %s", schedule.name, schedule.tenant, due.said)
        for time in due.times[:_AT_ONCE]:
            async with self.changing:
                if not self._is_current(known) or not await self._fire_for(known, time):
                    return
        if len(due.times) <= _AT_ONCE:
            async with self.changing:
                if self._is_current(known) and (known.said or known.kept.done < due.until):
                    problem, known.said = known.said or known.kept.problem, ""
                    await self._keep(known, replace(known.kept, done=due.until, problem=problem))

    def _is_current(self, known: ScheduleState) -> bool:
        """Whether it was not changed or deleted meanwhile."""
        schedule = known.kept.schedule
        return self.known.get((schedule.tenant, schedule.name)) is known

    async def _fire_for(self, known: ScheduleState, time: float) -> bool:
        """Fire for one time; False if it must be retried later, before all that follow."""
        kept = known.kept
        if not kept.schedule.overlap and (busy := await self._unfinished(kept.last_job_id)):
            await self._skip(known, time, f"job {busy} of the time before has not ended")
            return True
        request = request_of(kept.schedule, kept.by, time)
        try:
            job = await self._submitted(request)
        except (TooMany, Unavailable, UnknownTopic) as error:
            known.hold_back(time, self.clock.now(), error)
            return False
        except PenstockError as error:
            problem = f"refused for {iso(time)}: {error}"
            await self._keep(known, replace(kept, done=time, problem=problem))
            return True
        if job.request.idempotency_key != request.idempotency_key:
            await self._skip(known, time, f"job {job.job_id} has its unique key")
            return True
        fired = replace(
            kept,
            done=time,
            last_at=time,
            last_job_id=job.job_id,
            fired=kept.fired + 1,
            problem="",
        )
        await self._keep(known, fired)
        return True

    async def _skip(self, known: ScheduleState, time: float, why: str) -> None:
        kept, problem = known.kept, f"skipped {iso(time)}: {why}"
        await self._keep(known, replace(kept, done=time, skipped=kept.skipped + 1, problem=problem))

    async def _submitted(self, request: JobRequest) -> Job:
        """Submit the job of this firing; if it was submitted before, return that job."""
        try:
            (job,) = await self.submit([request])
        except Conflict:
            key = request.idempotency_key
            query = JobQuery(tenant=request.tenant, idempotency_key=key, limit=1)
            if not (found := await self.store.find(query)):
                raise
            job = found[0]
        return job

    async def _unfinished(self, job_id: str | None) -> str | None:
        """The unfinished job of a chain of retries, if any."""
        while job_id is not None:
            job = await self.store.get(job_id)
            if job is None:
                return None
            if not job.is_final:
                return job_id
            job_id = job.successor
        return None

    async def _keep(self, known: ScheduleState, kept: StoredSchedule) -> None:
        await self.remember(kept)
        known.advance(kept)


class ScheduleService:
    """See `penstock.ports.engine_api.Schedules`."""

    def __init__(self, runner: ScheduleRunner, guard: Guard, uploads: Uploads) -> None:
        self._runner, self._guard, self._uploads = runner, guard, uploads

    async def put(self, schedule: Schedule) -> ScheduleView:
        """Create or change a schedule. Earlier times stay due only if its times do not change."""
        guard, runner = self._guard, self._runner
        with guard.doing(Schedules.put, schedule.name):
            guard.require_role(KeyRole.SUBMIT, "schedule.put")  # it submits in their name
            tenant = guard.tenant(schedule.tenant)
            runner.store.shard.check(tenant)
            request = guard.stamped(replace(schedule.request, tenant=tenant))
            await self._uploads.check(request.context_ptr)
            now = runner.clock.now()
            schedule = checked(replace(schedule, tenant=tenant, request=request), now)
            calendar = Calendar(schedule.cron, schedule.timezone)
            async with runner.changing:
                held = runner.known.get((tenant, schedule.name))
                if held is None:
                    kept = StoredSchedule(schedule=schedule, by=guard.by, done=now)
                else:
                    done = held.kept.done if same_times(held.kept.schedule, schedule) else now
                    kept = replace(held.kept, schedule=schedule, by=guard.by, done=done, problem="")
                return await runner.use(ScheduleState(kept, calendar))

    async def list(self) -> builtins.list[ScheduleView]:
        now, known = self._runner.clock.now(), self._runner.known
        return [known[key].view(now) for key in sorted(known) if self._guard.caller.sees(key[0])]

    async def get(self, name: str, tenant: str = "default") -> ScheduleView:
        return self._find(name, tenant).view(self._runner.clock.now())

    async def pause(
        self, name: str, tenant: str = "default", *, paused: bool = True
    ) -> ScheduleView:
        """Pause or resume. Times in between are skipped."""
        runner = self._runner
        with self._guard.doing(Schedules.pause, name, paused=paused):
            async with runner.changing:
                known, now = self._find(name, tenant), runner.clock.now()
                kept = known.kept
                if kept.schedule.paused is paused:
                    return known.view(now)
                schedule = replace(kept.schedule, paused=paused)
                kept = replace(kept, schedule=schedule, done=now, problem="")
                return await runner.use(ScheduleState(kept, known.calendar))

    async def fire(self, name: str, tenant: str = "default") -> Job:
        """Submit its job now, in addition to its times, as the caller."""
        guard, runner = self._guard, self._runner
        with guard.doing(Schedules.fire, name):
            guard.require_role(KeyRole.SUBMIT, "schedule.fire")
            async with runner.changing:
                known = self._find(name, tenant)
                (job,) = await runner.submit([request_of(known.kept.schedule, guard.by, None)])
                fired = replace(known.kept, last_job_id=job.job_id, fired=known.kept.fired + 1)
                await runner.remember(fired)
                known.kept = fired
                return job

    async def delete(self, name: str, tenant: str = "default") -> None:
        runner = self._runner
        with self._guard.doing(Schedules.delete, name):
            async with runner.changing:
                schedule = self._find(name, tenant).kept.schedule
                await runner.store.forget(_fact(schedule))
                del runner.known[schedule.tenant, schedule.name]

    def _find(self, name: str, tenant: str) -> ScheduleState:
        meant = self._guard.tenant(tenant)
        known = self._runner.known.get((meant, name))
        if known is None or not self._guard.caller.sees(meant):
            raise NotFound(f"no schedule {name!r}", hint="'penstock schedule list' shows them")
        return known


def _fact(schedule: Schedule) -> str:
    return f"{_FACTS}{schedule.tenant}/{schedule.name}"
