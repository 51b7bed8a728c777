"""`penstock approvals`, `penstock approve` and `penstock reject`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import click

from penstock.cli.exits import Exit, exit_of
from penstock.cli.filters import filtered, query_of
from penstock.cli.ids import job_ids, meant
from penstock.cli.paper import Listing, emit, print_json, record
from penstock.cli.parameters import as_json, limited
from penstock.cli.place import Place, api_at, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.cli.words import short_id, span
from penstock.core.errors import PenstockError
from penstock.core.job import Job
from penstock.core.verdict import Hold
from penstock.ports.engine_api import EngineApi


@click.command()
@filtered
@limited(50)
@as_json
@placed
@click.pass_obj
def approvals(place: Place, /, limit: int, json: bool, **filters: Any) -> None:
    """List jobs that are awaiting approval.

    Oldest first, with who may approve them, how many did, and how long is left.
    """
    jobs = run(_awaiting_approval(place, filters, limit))
    if json:
        print_json([record(job) for job in jobs])
    elif not jobs:
        echo("no job is awaiting approval", err=True)
    else:
        emit(_listing(jobs, time.time()))


async def _awaiting_approval(place: Place, filters: dict[str, Any], limit: int) -> list[Job]:
    async with reading_at(place) as api:
        return await api.find(
            await query_of(api, filters, awaiting_approval=True, oldest_first=True, limit=limit)
        )


def _listing(jobs: list[Job], now: float) -> Listing:
    listing = Listing(
        *("JOB", "TOPIC", "FROM", "YES", "LEFT", "WHO MAY", "RULE", "SNAPSHOT"),
        flexible=("JOB", "TOPIC", "FROM", "WHO MAY", "RULE", "SNAPSHOT"),
        right=("YES", "LEFT"),
    )
    for job in jobs:
        assert job.hold is not None
        hold = job.hold
        listing.add(
            short_id(job.job_id),
            job.request.topic,
            job.request.principal,
            f"{len(hold.votes)}/{hold.terms.needed}",
            span(max(0.0, hold.until - now)),
            who_may(hold),
            hold.rule_id,
            hold.snapshot,
        )
    return listing


def who_may(hold: Hold) -> str:
    """Who may approve it."""
    return ", ".join(hold.terms.approvers) or "any approver"


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--reason", default="", help="Reason; stored in the history.")
@click.option(
    "--snapshot", default="", help="Only if the job is held by this snapshot of the rules."
)
@as_json
@placed
@click.pass_obj
def approve(place: Place, jobs: tuple[str, ...], reason: str, snapshot: str, json: bool) -> int:
    """Approve jobs that are awaiting approval.

    Says of each whether it goes on or needs more approvals. `-` reads ids from standard
    input.
    """

    async def say_yes(api: EngineApi, job_id: str) -> Job:
        return await api.approvals.approve(job_id, reason=reason, snapshot=snapshot)

    return run(_decide(place, job_ids(jobs), say_yes, _approved, json))


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--reason", default="", help="Reason; stored in the history.")
@as_json
@placed
@click.pass_obj
def reject(place: Place, jobs: tuple[str, ...], reason: str, json: bool) -> int:
    """Reject jobs that are awaiting approval: they end DENIED.

    `-` reads ids from standard input.
    """

    async def say_no(api: EngineApi, job_id: str) -> Job:
        return await api.approvals.reject(job_id, reason=reason)

    return run(_decide(place, job_ids(jobs), say_no, lambda job: "rejected", json))


async def _decide(
    place: Place,
    texts: list[str],
    decide: Callable[[EngineApi, str], Awaitable[Job]],
    say: Callable[[Job], str],
    json: bool,
) -> int:
    code, answers = Exit.OK, []
    async with api_at(place) as api:
        for text in texts:
            try:
                job = await decide(api, (await meant(api, text)).job_id)
            except PenstockError as error:
                echo(f"penstock: {text}: {error.message}", err=True)
                if error.hint:
                    echo(f"  {error.hint}", err=True)
                code = code or exit_of(error)
                answers.append({"job_id": text, "error": error.code, "message": error.message})
                continue
            answers.append(record(job))
            if not json:
                echo(f"{job.job_id} {say(job)}")
    if json:
        print_json(answers)
    return code


def _approved(job: Job) -> str:
    hold = job.hold
    if hold is None or hold.approved:
        return "approved: it goes on"
    missing = hold.terms.needed - len(hold.votes)
    return f"approved by {len(hold.votes)} of {hold.terms.needed}: {missing} more needed"
