"""`penstock schedule`: jobs submitted at the times of a cron expression."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click

from penstock.cli.engine import EngineRef
from penstock.cli.formats import Number, moment, span
from penstock.cli.groups import Commands
from penstock.cli.nouns import Noun
from penstock.cli.options import (
    SHARED,
    job_fields,
    job_options,
    options,
    read_object,
    read_source,
)
from penstock.cli.output import Row, print_done, record
from penstock.ports.engine_api import CatchUp, EngineApi, Schedule, ScheduleView

CATCH_UP = click.Choice([one.value for one in CatchUp])
_AHEAD = 3
"""How many of its next times to show."""


@click.group(cls=Commands)
def schedule() -> None:
    """Create, list, show, change and delete schedules (cron)."""


@schedule.command()
@options(
    """
    --timezone TIMEZONE=UTC  As Europe/Berlin.
    --no-overlap             Skip a time while the previous job has not ended.
    --paused                 Create it paused.
    --catch-up CATCH-UP=last  What to do about times missed while no engine ran.
    """,
    catch_up=CATCH_UP,
)
@job_options
async def create(
    engine: EngineRef,
    /,
    name: str,
    cron: str,
    topic: str,
    given: str | None,
    timezone: str,
    catch_up: str,
    no_overlap: bool,
    paused: bool,
    tenant: str,
    json: bool,
    **options: Any,
) -> None:
    """Create or replace a schedule.

    CRON is five fields, minute hour day month weekday ('30 7 * * mon-fri'), six with seconds
    in front, or @hourly, @daily, @weekly, @monthly, @yearly.
    """
    from penstock.app.client import encode_input
    from penstock.core.job import JobRequest
    from penstock.workloads.function.options import checked

    payload = None if given is None else read_object("--input", read_source("--input", given))
    fields = {"job_id": "", "topic": topic, "tenant": tenant, **checked(job_fields(options))}
    async with engine.api() as api:
        pointer = "" if payload is None else await api.put_blob(encode_input(payload))
        view = await api.schedules.put(
            Schedule(
                name=name,
                cron=cron,
                request=JobRequest(context_ptr=pointer, **fields),
                timezone=timezone,
                catch_up=CatchUp(catch_up),
                overlap=not no_overlap,
                tenant=tenant,
                paused=paused,
            )
        )
    print_done(json, view, _next(view))


def _next(view: ScheduleView) -> str:
    return f"{view.schedule.name} {_firing(view, time.time())}"


def _firing(view: ScheduleView, now: float) -> str:
    if view.schedule.paused:
        return "is paused"
    if view.next_at is None:
        return "never fires"
    return f"fires next {_times(view)[0]} (in {span(view.next_at - now)})"


def schedule_row(view: ScheduleView, now: float) -> Row:
    known = view.schedule
    next_at = "never" if view.next_at is None else span(view.next_at - now)
    return {
        "NAME": known.name,
        "TENANT": known.tenant,
        "CRON": known.cron,
        "ZONE": known.timezone,
        "TOPIC": known.request.topic,
        "NEXT": Number("paused" if known.paused else next_at),
        "LAST": None if view.last_at is None else span(max(0.0, now - view.last_at)),
        "FIRED": view.fired,
        "PROBLEM": view.problem,
    }


def _facts(view: ScheduleView, now: float) -> Iterator[tuple[str, str]]:
    known = view.schedule
    yield "now", _firing(view, now)
    yield "cron", f"{known.cron}, {known.timezone}"
    if view.next_at is not None:
        yield "times", ", ".join(_times(view)[:_AHEAD])
    yield "topic", known.request.topic
    yield "tenant", known.tenant
    yield "missed", _MISSED[known.catch_up]
    yield "overlap", "yes" if known.overlap else "no: a time is skipped while the previous job runs"
    if view.last_at is not None:
        yield "last", f"{moment(view.last_at, now)}, job {view.last_job_id}"
    yield "fired", f"{view.fired:,} times, skipped {view.skipped:,}"
    if view.problem:
        yield "problem", view.problem


_MISSED = {
    CatchUp.SKIP: "skipped",
    CatchUp.LAST: "only the last one is submitted",
    CatchUp.ALL: "all of them are submitted",
}


def _times(view: ScheduleView) -> list[str]:
    """Its next times, in its time zone."""
    from penstock.core.calendar import zone

    local = zone(view.schedule.timezone)
    return [f"{datetime.fromtimestamp(at, local):%Y-%m-%d %H:%M:%S %Z}" for at in view.upcoming]


async def _fire(api: EngineApi, name: str, tenant: str) -> dict[str, Any]:
    return record(await api.schedules.fire(name, tenant))


SCHEDULES = Noun(
    schedule,
    schedule_row,
    lambda api: api.schedules.list(),
    "no schedules; create one with 'penstock schedule create NAME CRON TOPIC'",
    naming=SHARED["tenant"],
)
SCHEDULES.list("List the schedules.")
SCHEDULES.show(
    "Show a schedule, its next times and its last job.",
    lambda api, name, tenant: api.schedules.get(name, tenant),
    _facts,
)
SCHEDULES.act(
    "pause",
    """Pause a schedule.

    Times that pass while it is paused are skipped.
    """,
    lambda api, name, tenant: api.schedules.pause(name, tenant),
    _next,
)
SCHEDULES.act(
    "resume",
    "Resume a paused schedule, from its next time on.",
    lambda api, name, tenant: api.schedules.pause(name, tenant, paused=False),
    _next,
)
SCHEDULES.act(
    "fire",
    "Submit its job now, in addition to its times; prints the id.",
    _fire,
    lambda job: str(job["job_id"]),
)
SCHEDULES.act(
    "delete",
    "Delete a schedule. Jobs that it submitted go on.",
    lambda api, name, tenant: api.schedules.delete(name, tenant),
)
