"""`penstock ps`: a list of jobs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import click
from msgspec.structs import replace

from penstock.cli.filters import filtered, query_of
from penstock.cli.paper import WIDE, Listing, console, emit, print_json, record, styled
from penstock.cli.parameters import STATE, as_json
from penstock.cli.place import Place, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.cli.words import run_time, short_id, span
from penstock.core.job import Job
from penstock.lifecycles.canonical import HELD, WAITING, JobState
from penstock.ports.desk import Desk
from penstock.ports.store import JobQuery

_EXPLAINED = 50
"""For how many waiting jobs the reason is asked."""
_PAGE = 1000


@click.command()
@click.option("--state", type=STATE, multiple=True, help="In this state; may be repeated.")
@click.option("--active", is_flag=True, help="Not ended yet.")
@click.option("--parked", is_flag=True, help="Waiting for an approval.")
@filtered
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, help="So many at most."
)
@click.option("--all", "everything", is_flag=True, help="As many as there are.")
@click.option("--before", type=int, metavar="SEQ", help="Older than this: the next page.")
@click.option("-q", "--quiet", is_flag=True, help="Print ids only.")
@as_json
@placed
@click.pass_obj
def ps(
    place: Place,
    /,
    state: tuple[str, ...],
    active: bool,
    parked: bool,
    limit: int,
    everything: bool,
    before: int | None,
    quiet: bool,
    json: bool,
    **filters: Any,
) -> None:
    """List jobs, newest first.

    All conditions must hold. Jobs of a workflow come in the order of its steps. With --json
    it is an array of records.
    """
    states = tuple(map(JobState, state))
    if active:
        states += tuple(s for s in JobState if s in WAITING | HELD and s not in states)
    more = {"states": states, "parked": parked or None, "before": before, "limit": limit}
    run(_ps(place, filters, more, everything, quiet, json))


async def _ps(
    place: Place,
    filters: dict[str, Any],
    more: dict[str, Any],
    everything: bool,
    quiet: bool,
    json: bool,
) -> None:
    async with reading_at(place) as desk:
        query = await query_of(desk, filters, **more)
        jobs = await (_every(desk, query) if everything else desk.find(query))
        if json:
            print_json([record(job) for job in jobs])
        elif quiet:
            echo("".join(f"{job.job_id}\n" for job in jobs), nl=False)
        elif not jobs:
            echo("no such jobs", err=True)
        else:
            await print_jobs(desk, jobs)
            if len(jobs) == query.limit and not everything and query.workflow_id is None:
                echo(f"there may be more: --before {jobs[-1].seq}, or --all", err=True)


async def _every(desk: Desk, query: JobQuery) -> list[Job]:
    """All pages. A workflow's steps come in another order, so they are asked for at once."""
    if query.workflow_id is not None:
        return await desk.find(replace(query, limit=sys.maxsize))
    jobs: list[Job] = []
    while page := await desk.find(replace(query, limit=_PAGE)):
        jobs += page
        query = replace(query, before=page[-1].seq)
        if len(page) < _PAGE:
            break
    return jobs


async def print_jobs(desk: Desk, jobs: Sequence[Job]) -> None:
    """As a table, with what each waits for or why it ended so."""
    emit(await _listing(desk, jobs))


async def _listing(desk: Desk, jobs: Sequence[Job]) -> Listing:
    now, wide = time.time(), console().width >= WIDE
    waiting = [job for job in jobs if job.state in WAITING][:_EXPLAINED]
    reasons = await asyncio.gather(*(desk.why(job.job_id) for job in waiting))
    why = {job.job_id: reason for job, reason in zip(waiting, reasons, strict=True)}
    tenants = {job.request.tenant for job in jobs} != {"default"}
    extra = (["PRIORITY"] if wide else []) + (["TENANT"] if tenants else [])
    listing = Listing(
        *("JOB", "STATE", "TOPIC", *extra, "AGE", "TOOK", "NOTE"),
        flexible=("JOB", "TOPIC", "TENANT", "NOTE"),
        right=("AGE", "TOOK"),
    )
    for job in jobs:
        request = job.request
        more = ([request.priority.value] if wide else []) + ([request.tenant] if tenants else [])
        listing.add(
            request.job_id if wide else short_id(request.job_id),
            styled(job.state),
            request.topic,
            *more,
            span(now - job.accepted_at),
            "" if job.started_at is None else span(run_time(job, now)),
            why.get(job.job_id) or _note(job),
        )
    return listing


def _note(job: Job) -> str:
    """The one thing about it that is worth a glance."""
    if job.successor is not None:
        return f"retried as {short_id(job.successor)}"
    result = job.result
    if result is not None and (result.error_code or result.error_message):
        code = None if result.error_code == job.state.value else result.error_code
        return ": ".join(filter(None, (code, result.error_message)))
    if job.state in HELD:
        asked = ", asked to end" if job.cancel_requested else ""
        attempt = f", attempt {job.attempt}" if job.attempt > 1 else ""
        return f"on {job.worker_id}{attempt}{asked}"
    return ""
