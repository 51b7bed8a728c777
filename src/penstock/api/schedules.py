"""Jobs that come again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from penstock.api.jobs import job_json, located
from penstock.api.operation import Operation
from penstock.api.reply import NOTHING, Reply, json_reply
from penstock.api.submit import Submission, request_of
from penstock.core.errors import InvalidRequest
from penstock.core.job import Job
from penstock.ports.engine_api import CatchUp, KeyRole, Schedule, ScheduleView

if TYPE_CHECKING:
    from penstock.api.call import Call


class ScheduleList(Struct, frozen=True):
    schedules: list[ScheduleView]


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
    """What becomes of times that passed while no engine was there to fire."""
    overlap: bool = True
    """Whether a new job is submitted while the one before has not ended."""
    paused: bool = False


async def list_schedules(call: Call) -> Reply:
    return json_reply(ScheduleList(await call.api.schedules.list()))


async def put_schedule(call: Call) -> Reply:
    tenant = call.tenant(call.query(TenantQuery).tenant)
    given = await call.json(ScheduleBody, parsed_depth=2)
    for field in ("job_id", "idempotency_key", "tenant", "run_at", "deadline"):
        if getattr(given.job, field):
            raise InvalidRequest(f"job.{field}", "can't be set for a job that comes again")
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


async def get_schedule(call: Call) -> Reply:
    return json_reply(await call.api.schedules.get(*_named(call)))


async def delete_schedule(call: Call) -> Reply:
    await call.api.schedules.delete(*_named(call))
    return NOTHING


async def pause_schedule(call: Call) -> Reply:
    return json_reply(await call.api.schedules.pause(*_named(call), paused=True))


async def resume_schedule(call: Call) -> Reply:
    return json_reply(await call.api.schedules.pause(*_named(call), paused=False))


async def fire_schedule(call: Call) -> Reply:
    job = await call.api.schedules.fire(*_named(call))
    return Reply(job_json(job), 201, located(job))


def _named(call: Call) -> tuple[str, str]:
    return call.params["name"], call.tenant(call.query(TenantQuery).tenant)


_PATH = "/v1/schedules/{name}"

OPERATIONS = (
    Operation(
        "GET", "/v1/schedules", list_schedules, answer=ScheduleList, summary="List schedules"
    ),
    Operation(
        "PUT",
        _PATH,
        put_schedule,
        role=KeyRole.OPERATE,
        query=TenantQuery,
        body=ScheduleBody,
        answer=ScheduleView,
        refusals=(413, 415, 422),
        summary="Create or change a schedule",
    ),
    Operation(
        "GET",
        _PATH,
        get_schedule,
        query=TenantQuery,
        answer=ScheduleView,
        refusals=(404, 422),
        summary="Get a schedule",
    ),
    Operation(
        "DELETE",
        _PATH,
        delete_schedule,
        role=KeyRole.OPERATE,
        query=TenantQuery,
        status=204,
        refusals=(404, 422),
        summary="Delete a schedule",
        description="The jobs that it submitted go on.",
    ),
    Operation(
        "POST",
        _PATH + "/pause",
        pause_schedule,
        role=KeyRole.OPERATE,
        query=TenantQuery,
        answer=ScheduleView,
        refusals=(404, 422),
        summary="Pause a schedule",
    ),
    Operation(
        "POST",
        _PATH + "/resume",
        resume_schedule,
        role=KeyRole.OPERATE,
        query=TenantQuery,
        answer=ScheduleView,
        refusals=(404, 422),
        summary="Resume a schedule",
    ),
    Operation(
        "POST",
        _PATH + "/fire",
        fire_schedule,
        role=KeyRole.OPERATE,
        query=TenantQuery,
        answer=Job,
        status=201,
        refusals=(404, 409, 422, 429),
        summary="Submit a schedule's job now",
        description="In addition to its times, which do not change.",
    ),
)
