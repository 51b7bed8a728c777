"""`penstock schedule`: jobs submitted at the times of a cron expression."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Any

import click
import msgspec

from penstock.cli.groups import Commands
from penstock.cli.paper import Listing, emit, facts, print_json, record
from penstock.cli.parameters import DURATION, PRIORITY, as_json, read_object, read_source, several
from penstock.cli.place import Place, ask_engine, placed
from penstock.cli.terminal import echo
from penstock.cli.words import moment, span
from penstock.core.job import RetryPolicy
from penstock.ports.engine_api import CatchUp, EngineApi, Schedule, ScheduleView

CATCH_UP = click.Choice([one.value for one in CatchUp])
tenanted = click.option("--tenant", default="default", help="Its tenant.")
_AHEAD = 3
"""How many of its next times to show."""


@click.group(cls=Commands)
def schedule() -> None:
    """Create, list and change schedules (cron)."""


@schedule.command()
@click.argument("name")
@click.argument("cron")
@click.argument("topic")
@click.option("--input", "given", metavar="JSON|@FILE|-", help="The arguments, a JSON object.")
@click.option("--timezone", default="UTC", show_default=True, help="As Europe/Berlin.")
@click.option(
    "--catch-up",
    type=CATCH_UP,
    default=CatchUp.LAST.value,
    show_default=True,
    help="What to do about times missed while no engine ran.",
)
@click.option(
    "--no-overlap", is_flag=True, help="Skip a time while the previous job has not ended."
)
@click.option("--paused", is_flag=True, help="Create it paused.")
@click.option("--priority", type=PRIORITY, help="Priority of its jobs.")
@several("--env", "Passed on to its jobs; may be repeated.")
@several("--label", "Kept with its jobs; may be repeated.")
@click.option("--timeout", type=DURATION, help="Maximum run time of one attempt.")
@click.option("--retries", type=click.IntRange(0), help="Maximum number of retries.")
@click.option("--idempotent/--not-idempotent", default=None, help="Whether they may run twice.")
@click.option("--capability", help="What its jobs do, as safety rules know it.")
@click.option("--risk-tag", "risk_tags", multiple=True, help="For safety rules; may be repeated.")
@click.option("--cost", "estimated_cost", type=float, help="An estimate, for safety rules.")
@tenanted
@as_json
@placed
@click.pass_obj
def put(
    place: Place,
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
    """Create or change a schedule.

    CRON is five fields, minute hour day month weekday ('30 7 * * mon-fri'), six with seconds
    in front, or @hourly, @daily, @weekly, @monthly, @yearly.
    """
    payload = None if given is None else read_object("--input", read_source("--input", given))

    async def make(api: EngineApi) -> ScheduleView:
        from penstock.core.job import JobRequest

        made = Schedule(
            name=name,
            cron=cron,
            request=JobRequest(
                job_id="",
                topic=topic,
                context_ptr=await _pointer(api, payload),
                tenant=tenant,
                **_fields(options),
            ),
            timezone=timezone,
            catch_up=CatchUp(catch_up),
            overlap=not no_overlap,
            tenant=tenant,
            paused=paused,
        )
        return await api.schedules.put(made)

    _tell(ask_engine(place, make), json)


async def _pointer(api: EngineApi, payload: dict[str, Any] | None) -> str:
    from penstock.app.client import encode_input

    return "" if payload is None else await api.put_blob(encode_input(payload))


def _fields(said: dict[str, Any]) -> dict[str, Any]:
    """The command's options as fields of a JobRequest, without those not given."""
    from penstock.workloads.function.options import checked

    renamed = {"label": "labels"}
    options = {
        renamed.get(name, name): value for name, value in said.items() if value not in (None, ())
    }
    for name in ("env", "labels"):
        if name in options:
            options[name] = dict(options[name])
    if (retries := options.pop("retries", None)) is not None:
        options["retry"] = RetryPolicy(retries=retries)
    return checked(options)


def _tell(view: ScheduleView, json: bool) -> None:
    if json:
        print_json(msgspec.to_builtins(view))
    else:
        echo(f"{view.schedule.name} {_next(view, time.time())}")


def _next(view: ScheduleView, now: float) -> str:
    if view.schedule.paused:
        return "is paused"
    if view.next_at is None:
        return "never fires"
    return f"fires next {moment(view.next_at, now)} (in {span(view.next_at - now)})"


@schedule.command("list")
@as_json
@placed
@click.pass_obj
def list_schedules(place: Place, json: bool) -> None:
    """List the schedules."""
    found = ask_engine(place, lambda api: api.schedules.list())
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        echo("no schedules; make one with 'penstock schedule put NAME CRON TOPIC'", err=True)
    else:
        emit(_listing(found, time.time()))


def _listing(found: list[ScheduleView], now: float) -> Listing:
    tenants = {view.schedule.tenant for view in found} != {"default"}
    listing = Listing(
        *("NAME", *(["TENANT"] if tenants else []), "CRON", "ZONE", "TOPIC"),
        *("NEXT", "LAST", "FIRED", "PROBLEM"),
        flexible=("NAME", "TENANT", "CRON", "ZONE", "TOPIC", "PROBLEM"),
        right=("NEXT", "LAST", "FIRED"),
    )
    for view in found:
        known = view.schedule
        listing.add(
            known.name,
            *([known.tenant] if tenants else []),
            known.cron,
            known.timezone,
            known.request.topic,
            "paused"
            if known.paused
            else ("never" if view.next_at is None else span(view.next_at - now)),
            "" if view.last_at is None else span(max(0.0, now - view.last_at)),
            f"{view.fired:,}",
            view.problem,
        )
    return listing


@schedule.command()
@click.argument("name")
@tenanted
@as_json
@placed
@click.pass_obj
def show(place: Place, name: str, tenant: str, json: bool) -> None:
    """Show a schedule, its next times and its last job."""
    view = ask_engine(place, lambda api: api.schedules.get(name, tenant))
    if json:
        print_json(msgspec.to_builtins(view))
        return
    emit(f"schedule {name}", facts(_facts(view, time.time())))


def _facts(view: ScheduleView, now: float) -> Iterator[tuple[str, str]]:
    known = view.schedule
    yield "now", _next(view, now)
    yield "cron", f"{known.cron}, {known.timezone}"
    if view.next_at is not None:
        yield "times", ", ".join(_ahead(view))
    yield "topic", known.request.topic
    yield "tenant", known.tenant
    yield "missed", _MISSED[known.catch_up]
    yield "overlap", "yes" if known.overlap else "no: skipped while the job before goes on"
    if view.last_at is not None:
        yield "last", f"{moment(view.last_at, now)}, job {view.last_job_id}"
    yield "fired", f"{view.fired:,} times, skipped {view.skipped:,}"
    if view.problem:
        yield "problem", view.problem


_MISSED = {
    CatchUp.SKIP: "left out",
    CatchUp.LAST: "the last is made up for",
    CatchUp.ALL: "all are made up for",
}


def _ahead(view: ScheduleView) -> Iterator[str]:
    """Its next times, in its time zone."""
    from penstock.core.calendar import Calendar, zone

    known = view.schedule
    assert view.next_at is not None
    for at in islice(Calendar(known.cron, known.timezone).after(view.next_at - 1), _AHEAD):
        yield f"{datetime.fromtimestamp(at, zone(known.timezone)):%Y-%m-%d %H:%M:%S %Z}"


@schedule.command()
@click.argument("name")
@tenanted
@as_json
@placed
@click.pass_obj
def pause(place: Place, name: str, tenant: str, json: bool) -> None:
    """Pause a schedule.

    Times that pass meanwhile are not made up for.
    """
    _tell(ask_engine(place, lambda api: api.schedules.pause(name, tenant)), json)


@schedule.command()
@click.argument("name")
@tenanted
@as_json
@placed
@click.pass_obj
def resume(place: Place, name: str, tenant: str, json: bool) -> None:
    """Resume a paused schedule, from its next time on."""
    _tell(ask_engine(place, lambda api: api.schedules.pause(name, tenant, paused=False)), json)


@schedule.command()
@click.argument("name")
@tenanted
@as_json
@placed
@click.pass_obj
def fire(place: Place, name: str, tenant: str, json: bool) -> None:
    """Submit its job now, in addition to its times; prints the id."""
    job = ask_engine(place, lambda api: api.schedules.fire(name, tenant))
    print_json(record(job)) if json else echo(job.job_id)


@schedule.command()
@click.argument("name")
@tenanted
@as_json
@placed
@click.pass_obj
def delete(place: Place, name: str, tenant: str, json: bool) -> None:
    """Delete a schedule. Jobs that it submitted go on."""
    ask_engine(place, lambda api: api.schedules.delete(name, tenant))
    print_json({"name": name, "deleted": True}) if json else echo(f"{name} deleted")
