"""One schedule by heart: what it owes, and what it submits.

What it *owes* are the times that came since those that were dealt with. All of this is a
function of plain values; `penstock.control.schedules` does what it says.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.calendar import Calendar
from penstock.core.check import check_name, check_request
from penstock.core.errors import InvalidRequest, TooMany
from penstock.core.job import JobRequest
from penstock.ports.schedules import CatchUp, Schedule, ScheduleView

MOST_MADE_UP = 1000
"""How many missed times are made up for; older ones are dropped."""
_FIRST_RETRY, _LAST_RETRY = 1.0, 300.0
"""Seconds after which a job that could not be submitted is tried again: first, at most."""
_SET_BACK = 60.0


class Kept(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule as it is stored."""

    schedule: Schedule
    by: str
    """Who made it: the principal of its jobs."""
    done: float
    """Every time up to this one is dealt with."""
    last_at: float | None = None
    last_job_id: str | None = None
    fired: int = 0
    skipped: int = 0
    problem: str = ""


class Recurrence:
    """A schedule, and when to look at it next."""

    def __init__(self, kept: Kept, calendar: Calendar | None) -> None:
        self.kept, self.calendar = kept, calendar
        self.tried: float | None = None
        """The time for which it could not be submitted."""
        self.said = ""
        """What is to be shown when it has made up for what it missed."""
        self._retry_at: float | None = None
        self._pause = _FIRST_RETRY
        self._due_at = self._next(kept.done)

    def _next(self, time: float) -> float | None:
        if self.calendar is None or self.kept.schedule.paused:
            return None
        return self.calendar.next(time)

    @property
    def wakes_at(self) -> float | None:
        return self._due_at if self._retry_at is None else self._retry_at

    def advance(self, kept: Kept) -> None:
        self.kept = kept
        self.tried = self._retry_at = None
        self._pause = _FIRST_RETRY
        self._due_at = self._next(kept.done)

    def hold_back(self, time: float | None, now: float, error: Exception) -> None:
        """Try again later. Nothing of this is stored: after a restart it is owed as before."""
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
        return ScheduleView(
            schedule=kept.schedule,
            next_at=self._next(max(kept.done, now)),
            last_at=kept.last_at,
            last_job_id=kept.last_job_id,
            fired=kept.fired,
            skipped=kept.skipped,
            problem=problem,
        )


class Owed(NamedTuple):
    """What to fire for, oldest first, and what to say of it."""

    times: list[float]
    until: float
    """The newest time looked at, fired for or not."""
    said: str = ""


def owed(
    calendar: Calendar,
    catch_up: CatchUp,
    done: float,
    now: float,
    *,
    punctual: float,
    tried: float | None = None,
) -> Owed | None:
    """What is to be done about the times in (done, now]; None if there are none.

    Times before `punctual` were missed, and `catch_up` says what becomes of them. One that
    was `tried` and could not be submitted is not missed as long as none came after it.
    """
    times, more = calendar.last(MOST_MADE_UP, done, now)
    if not times:
        return None
    missed = [time for time in times if time < punctual]
    if missed and missed[-1] == times[-1] == tried:
        missed.pop()
    in_time = times[len(missed) :]
    match catch_up:
        case CatchUp.SKIP:
            return Owed(in_time, times[-1])
        case CatchUp.LAST:
            return Owed(missed[-1:] + in_time, times[-1])
        case CatchUp.ALL:
            dropped = f"more than {MOST_MADE_UP} times were missed: the oldest were dropped"
            return Owed(missed + in_time, times[-1], dropped if more else "")


def iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def request_of(schedule: Schedule, by: str, time: float | None) -> JobRequest:
    """What to submit: for one of its times, or (None) besides them."""
    key = None if time is None else f"schedule:{schedule.name}:{iso(time)}"
    return replace(schedule.request, idempotency_key=key, principal=by)


def same_times(one: Schedule, other: Schedule) -> bool:
    return (one.cron, one.timezone, one.paused) == (other.cron, other.timezone, other.paused)


_NOT_FOR_ALL = ("idempotency_key", "run_at", "deadline")
"""Fields of a request that can't be right for more than one job."""


def checked(schedule: Schedule, now: float) -> Schedule:
    """The same, with a request that can be submitted again and again."""
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
