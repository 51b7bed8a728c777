"""`penstock spool ls` and `status`: which jobs there are, and where."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import msgspec
from msgspec import Struct

from penstock.cli.exits import Exit
from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import as_json
from penstock.cli.spool_found import NO_SERVER, styled
from penstock.cli.spool_jobs import STATUS, placed, workspace_at
from penstock.cli.terminal import echo, harmless
from penstock.cli.words import plural, span
from penstock.core.errors import NotFound
from penstock.lifecycles.spool import FOLDERS, VISIBLE, Status
from penstock.workloads.spool.disk import Unfit
from penstock.workloads.spool.flow import Flow
from penstock.workloads.spool.found import Found
from penstock.workloads.spool.ids import check_job_id, submitted_near
from penstock.workloads.spool.meta import time_of
from penstock.workloads.spool.places import Position

_SHOWN = 20
_BEGINNING = 120


class Row(Struct, frozen=True, kw_only=True):
    """A job in the list, as much of it as is shown."""

    job_id: str
    status: Status
    submitted_at: float
    prompt: str
    """Its beginning, in one line."""
    tokens: int | None = None
    """Of the answer, so far."""
    seconds: float | None = None
    """For which it ran."""
    code: str = ""
    tags: tuple[str, ...] = ()


@click.command("ls")
@placed
@click.option("--status", "states", type=STATUS, multiple=True, help="In this state; repeatable.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1),
    default=_SHOWN,
    show_default=True,
    help="At most so many.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only ids.")
@as_json
def list_jobs(
    workspace: Path, states: tuple[str, ...], limit: int, quiet: bool, json: bool
) -> None:
    """List jobs, newest first."""
    flow = Flow(workspace_at(workspace))
    found = flow.list([Status(one) for one in states] or VISIBLE, limit)
    if quiet:
        echo("".join(f"{one.job_id}\n" for one in found), nl=False)
        return
    rows = [_row(flow, flow.get(one.job_id)) for one in found]
    if json:
        print_json(msgspec.to_builtins(rows))
    elif rows:
        emit(_listing(rows))
    else:
        echo("no jobs", err=True)


def _row(flow: Flow, found: Found) -> Row:
    meta = found.meta
    tokens, seconds = meta.completion_tokens, meta.duration_s
    if found.status is Status.RUNNING:
        tokens = _running_tokens(flow, found.job_id)
    return Row(
        job_id=found.job_id,
        status=found.status,
        submitted_at=time_of(meta.submitted_at) or submitted_near(found.job_id),
        prompt=_beginning(flow, found.job_id),
        tokens=tokens,
        seconds=seconds,
        code=meta.code,
        tags=meta.tags,
    )


def _running_tokens(flow: Flow, job_id: str) -> int | None:
    try:
        return flow.partial(job_id).progress.tokens
    except NotFound:
        return None


def _beginning(flow: Flow, job_id: str) -> str:
    try:
        text = flow.prompt(job_id)
    except (NotFound, Unfit):
        return ""
    line = " ".join(harmless(text[: 4 * _BEGINNING]).split())
    return line if len(line) <= _BEGINNING else line[:_BEGINNING] + "…"


def _listing(rows: list[Row]) -> Listing:
    listing = Listing(
        *("ID", "STATUS", "AGE", "TOOK", "TOKENS", "PROMPT"),
        flexible=("PROMPT",),
        right=("AGE", "TOOK", "TOKENS"),
    )
    now = time.time()
    for row in rows:
        listing.add(
            row.job_id,
            styled(row.status),
            span(now - row.submitted_at),
            "" if row.seconds is None else span(row.seconds),
            "" if row.tokens is None else f"{row.tokens:,}",
            row.prompt,
        )
    return listing


@click.command()
@placed
@click.argument("id", required=False, metavar="[ID]")
@as_json
def status(workspace: Path, id: str | None, json: bool) -> int:
    """Say where a job is; without an id, how many are where.

    It is one word: QUEUED, RUNNING, DONE, FAILED or MISSING (exit code 3). On a terminal it also
    says how many jobs are before it, and how long it may take.
    """
    flow = Flow(workspace_at(workspace))
    if id is None:
        return _print_counts(flow, json)
    place = _position(flow, check_job_id(id))
    if json:
        print_json({"job_id": id, **msgspec.to_builtins(place)})
    else:
        echo(place.status.value)
        if sys.stderr.isatty() and (words := in_words(place)):
            echo(words, err=True)
    return Exit.NOT_FOUND if place.status is Status.MISSING else Exit.OK


def _position(flow: Flow, job_id: str) -> Position:
    try:
        return flow.position(job_id)
    except NotFound:
        return Position(status=Status.MISSING)


def in_words(place: Position) -> str:
    """What there is to say of a job that has not ended."""
    soon = "" if place.eta_s is None else f"done in about {span(place.eta_s)}"
    if place.status is Status.RUNNING:
        return soon
    if place.status is not Status.QUEUED:
        return ""
    if not place.served:
        return NO_SERVER
    first = f"{plural(place.ahead, 'job')} before it" if place.ahead else "next"
    return ", ".join(filter(None, (first, f"{place.running:,} running", soon)))


def _print_counts(flow: Flow, json: bool) -> int:
    counts = {one: flow.counts()[one] for one in FOLDERS if one in VISIBLE}
    if json:
        print_json({one.value: count for one, count in counts.items()})
        return Exit.OK
    listing = Listing("STATUS", "JOBS", "FOLDER", right=("JOBS",))
    for one, count in counts.items():
        listing.add(styled(one), f"{count:,}", FOLDERS[one])
    emit(listing)
    return Exit.OK
