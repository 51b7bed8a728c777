"""Jobs that come again and again."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from penstock.core.job import Job, JobRequest


class CatchUp(StrEnum):
    """What becomes of times that passed while no engine was there to fire."""

    SKIP = "skip"
    """They are left out."""
    LAST = "last"
    """Only the last of them is made up for."""
    ALL = "all"
    """Each is made up for, oldest first."""


class Schedule(Struct, frozen=True, kw_only=True):
    """When to submit what."""

    name: str
    cron: str
    """Five fields (minute hour day month weekday), six with seconds first, or @hourly …"""
    request: JobRequest
    """What to submit; its job_id is left empty."""
    timezone: str = "UTC"
    catch_up: CatchUp = CatchUp.LAST
    overlap: bool = True
    """Whether a new job is submitted while the one before has not ended."""
    tenant: str = "default"
    paused: bool = False


class ScheduleView(Struct, frozen=True, kw_only=True):
    schedule: Schedule
    next_at: float | None
    """When it fires next; None while it is paused, or if it never will."""
    last_at: float | None = None
    """The time for which it fired last."""
    last_job_id: str | None = None
    fired: int = 0
    skipped: int = 0
    """How often it was not fired because the job before had not ended."""
    problem: str = ""
    """Why its last firing was refused, as by a topic that nobody serves, or skipped."""


class Schedules(Protocol):
    async def put(self, schedule: Schedule) -> ScheduleView:
        """Make or change one. Raises InvalidRequest, naming the field."""

    async def list(self) -> list[ScheduleView]: ...

    async def get(self, name: str, tenant: str = "default") -> ScheduleView: ...

    async def pause(
        self, name: str, tenant: str = "default", *, paused: bool = True
    ) -> ScheduleView: ...

    async def fire(self, name: str, tenant: str = "default") -> Job:
        """Submit its job now, besides its times."""

    async def delete(self, name: str, tenant: str = "default") -> None: ...
