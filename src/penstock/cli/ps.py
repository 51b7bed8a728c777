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
from penstock.cli.parameters import STATE, as_json, limited
from penstock.cli.place import Place, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.cli.words import run_time, short_id, span
from penstock.core.errors import NotFound
from penstock.core.job import Job, chain_of
from penstock.lifecycles.canonical import HELD, TERMINAL, JobState
from penstock.ports.engine_api import EngineApi
from penstock.ports.store import JobQuery

_EXPLAINED = 50
"""For how many unfinished jobs the reason or the progress is asked."""
_PAGE = 1000


@click.command()
@click.option("--state", type=STATE, multiple=True, help="In this state; may be repeated.")
@click.option("--active", is_flag=True, help="Not ended yet.")
@click.option("--awaiting-approval", is_flag=True, help="Awaiting approval.")
@filtered
@limited(20)
@click.option("--tries", is_flag=True, help="Each try of a job by itself.")
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
    awaiting_approval: bool,
    limit: int,
    tries: bool,
    everything: bool,
    before: int | None,
    quiet: bool,
    json: bool,
    **filters: Any,
) -> None:
    """List jobs, newest first.

    All conditions must hold. A job and its retries are one line, under the id of the first
    try and in the state of the newest; the conditions are about the newest. Jobs of a workflow
    come in the order of its steps. With --json it is an array of records, of the newest tries.
    """
    states = tuple(map(JobState, state))
    if active:
        states += tuple(s for s in JobState if s not in TERMINAL and s not in states)
    more = {
        "states": states,
        "awaiting_approval": awaiting_approval or None,
        "tries": tries,
        "before": before,
        "limit": limit,
    }
    run(_ps(place, filters, more, everything, quiet, json))


async def _ps(
    place: Place,
    filters: dict[str, Any],
    more: dict[str, Any],
    everything: bool,
    quiet: bool,
    json: bool,
) -> None:
    async with reading_at(place) as api:
        query = await query_of(api, filters, **more)
        jobs = await (_every(api, query) if everything else api.find(query))
        if json:
            print_json([record(job) for job in jobs])
        elif quiet:
            echo("".join(f"{known_as(job, query)}\n" for job in jobs), nl=False)
        elif not jobs:
            echo("no such jobs", err=True)
        else:
            await print_jobs(api, jobs, query)
            if len(jobs) == query.limit and not everything and query.workflow_id is None:
                echo(f"there may be more: --before {jobs[-1].seq}, or --all", err=True)


async def _every(api: EngineApi, query: JobQuery) -> list[Job]:
    """All pages. A workflow's steps come in another order, so they are asked for at once."""
    if query.workflow_id is not None:
        return await api.find(replace(query, limit=sys.maxsize))
    jobs: list[Job] = []
    while page := await api.find(replace(query, limit=_PAGE)):
        jobs += page
        query = replace(query, before=page[-1].seq)
        if len(page) < _PAGE:
            break
    return jobs


def known_as(job: Job, query: JobQuery) -> str:
    """The id that a listing shows: of the first try, unless it is a listing of tries."""
    return chain_of(job.request) if query.folded else job.job_id


async def print_jobs(api: EngineApi, jobs: Sequence[Job], query: JobQuery) -> None:
    """As a table, with what each waits for or does, or why it ended so."""
    emit(await listing_of(api, jobs, query))


async def listing_of(
    api: EngineApi, jobs: Sequence[Job], query: JobQuery, *, title: str = "JOB"
) -> Listing:
    now, wide = time.time(), console().width >= WIDE
    explained = [job for job in jobs if not job.is_final][:_EXPLAINED]
    reasons = await asyncio.gather(*(why_open(api, job) for job in explained))
    why = {job.job_id: reason for job, reason in zip(explained, reasons, strict=True)}
    tenants = {job.request.tenant for job in jobs} != {"default"}
    tries = any(job.request.try_number > 1 for job in jobs)
    extra = (["PRIORITY"] if wide else []) + (["TENANT"] if tenants else [])
    extra += ["TRIES" if query.folded else "TRY"] if tries else []
    listing = Listing(
        *(title, "STATE", "TOPIC", *extra, "AGE", "TOOK", "NOTE"),
        flexible=(title, "TOPIC", "TENANT", "NOTE"),
        right=("TRIES", "TRY", "AGE", "TOOK"),
    )
    for job in jobs:
        request, job_id = job.request, known_as(job, query)
        more = ([request.priority.value] if wide else []) + ([request.tenant] if tenants else [])
        more += [str(request.try_number)] if tries else []
        listing.add(
            job_id if wide else short_id(job_id),
            styled(job.state),
            request.topic,
            *more,
            span(now - job.accepted_at),
            "" if job.started_at is None else span(run_time(job, now)),
            why.get(job.job_id) or _note(job),
        )
    return listing


async def why_open(api: EngineApi, job: Job) -> str:
    """What it waits for, or how far it is; nothing if it is gone by now."""
    try:
        return await api.why(job.job_id)
    except NotFound:
        return ""


def _note(job: Job) -> str:
    """The one thing about it that is worth a glance."""
    if job.successor is not None:
        return f"retried as {short_id(job.successor)}"
    if job.state in HELD:
        asked = ", asked to end" if job.cancel_requested else ""
        attempt = f", attempt {job.attempt}" if job.attempt > 1 else ""
        return f"on {job.worker_id}{attempt}{asked}"
    return error_of(job)


def error_of(job: Job) -> str:
    """What went wrong, on one line."""
    result = job.result
    if result is None:
        return ""
    code = None if result.error_code == job.state.value else result.error_code
    return ": ".join(filter(None, (code, result.error_message)))
