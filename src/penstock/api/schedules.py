"""Schedule operations whose HTTP shape differs from the engine's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from penstock.api.reply import Reply, json_reply
from penstock.api.submit import Submission, request_of
from penstock.api.table import bound
from penstock.core.errors import InvalidRequest
from penstock.ports.engine_api import CatchUp, Schedule, ScheduleView

if TYPE_CHECKING:
    from penstock.api.call import Call


class TenantQuery(Struct, frozen=True):
    tenant: str | None = None
    """Only for keys that are of no tenant; else it is the key's own."""


class ScheduleBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to submit what."""

    cron: Annotated[str, Meta(max_length=200)]
    """Five fields (minute hour day month weekday), six with seconds first, or @hourly, @daily …"""
    job: Submission
    """What to submit; without a `job_id` of its own."""
    timezone: str = "UTC"
    catch_up: CatchUp = CatchUp.LAST
    """What to do about times missed while no engine ran."""
    overlap: bool = True
    """Whether a new job is submitted while the one before has not ended."""
    paused: bool = False


@bound("put_schedule", query=TenantQuery, body=ScheduleBody, answer=ScheduleView)
async def put_schedule(call: Call) -> Reply:
    tenant = call.tenant(call.query(TenantQuery).tenant)
    given = await call.json(ScheduleBody, parsed_depth=2)
    for field in ("job_id", "idempotency_key", "tenant", "run_at", "deadline"):
        if getattr(given.job, field):
            raise InvalidRequest(f"job.{field}", "can't be set for a scheduled job")
    request = await request_of(call, given.job, "job.")
    schedule = Schedule(
        name=call.params["name"],
        cron=given.cron,
        request=request,
        timezone=given.timezone,
        catch_up=given.catch_up,
        overlap=given.overlap,
        tenant=tenant,
        paused=given.paused,
    )
    return json_reply(await call.api.schedules.put(schedule))
