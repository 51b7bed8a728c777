"""`penstock watch`, `logs` and `events`: what happens to jobs, as it happens."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from penstock.app.client import outcome_of
from penstock.app.following import log_followed, log_lines, tries_of, updates_of
from penstock.cli.exits import Exit
from penstock.cli.formats import moment, short_id
from penstock.cli.groups import command
from penstock.cli.live import progress
from penstock.cli.options import as_lines, options
from penstock.cli.output import STYLES, console, print_line, rich_text, warn
from penstock.core.errors import InvalidRequest
from penstock.core.job import Job
from penstock.core.journal import Transition
from penstock.core.text import harmless
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import (
    JOURNAL_KINDS,
    EngineApi,
    Logged,
    Moved,
    Progressed,
    StreamQuery,
)
from penstock.ports.store import LogLine

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


# -- watch -------------------------------------------------------------------------


@command()
@as_lines
async def watch(api: EngineApi, job: str, json: bool) -> int:
    """Watch a job until it ends.

    Shows its moves, its output and its progress, and those of its retries; the exit code says how
    it ended. With --json each line is an object with a "type": moved, progress or log. Ctrl-C
    leaves the job alone.
    """
    async for one in tries_of(api, job):
        if json:
            async for update in updates_of(api, one.job_id):
                print_line(update)
        else:
            await _view(api, one)
    one = await api.get(one.job_id)
    if one.state is not JobState.SUCCEEDED:
        await outcome_of(api, one)
    return Exit.OK


async def _view(api: EngineApi, job: Job) -> None:
    page = console()
    page.print(f"job {job.job_id}  {job.request.topic}", soft_wrap=True)
    title = f"{short_id(job.job_id)} {job.request.topic}"
    with progress(title, kind="fraction", err=False) as bar:
        async for update in updates_of(api, job.job_id):
            match update:
                case Moved(entry):
                    _print_move(bar.console, entry)
                case Logged(line):
                    when = moment(line.at, time.time())
                    bar.console.print(f"{when}  │ {line.text}", soft_wrap=True)
                case Progressed(_, fraction, message):
                    bar.update(fraction, None if fraction is None else 1.0, text=message)


def _print_move(page: Console, entry: Transition, job_id: str = "") -> None:
    to = f"to {entry.worker_id} " if entry.worker_id else ""
    page.print(
        rich_text(
            f"{moment(entry.at, time.time())}  {job_id}",
            (f"{entry.after.value:<10}", STYLES[entry.after.lower()]),
            f"  {entry.event.value}",
            (f"  {to}{entry.reason}".rstrip(), "dim"),
        ),
        soft_wrap=True,
    )


# -- logs --------------------------------------------------------------------------


@command()
@options(
    """
    -f, --follow  Go on until the job has ended.
    -t, --times   Print when each line was written.
    """
)
@as_lines
async def logs(reading: EngineApi, job: str, follow: bool, times: bool, json: bool) -> None:
    """Print what a job wrote, and after it what its retries wrote.

    With --json each line is an object of "job_id", "attempt", "at", "level", "text", "n".
    """
    first = True
    async for one in tries_of(reading, job):
        if not first:
            warn(f"try {one.request.try_number} is {one.job_id}")
        first = False
        lines = log_followed if follow else log_lines
        async for line in lines(reading, one.job_id):
            _print(line, times, json)


def _print(line: LogLine, times: bool, json: bool) -> None:
    if json:
        print_line(line)
        return
    text = harmless(line.text) if sys.stdout.isatty() else line.text
    if colour := _COLOURS.get(line.level):
        text = click.style(text, fg=colour)
    if times:
        text = f"{click.style(moment(line.at, time.time()), dim=True)} {text}"
    coloured = False if "NO_COLOR" in os.environ else None
    click.echo(text, color=coloured)  # noqa: TID251 (with our own codes)


# -- events ------------------------------------------------------------------------


@command()
@options(
    """
    --after CURSOR  Resume after this cursor; else from now.
    --topic GLOB    Only jobs with a topic that matches, as job.text.*.
    """,
    after=int,
)
@as_lines
async def events(api: EngineApi, after: int | None, topic: str | None, json: bool) -> None:
    """Print everything that happens to any job, from now on.

    With --json each line is an event with its "cursor", which --after takes. Ctrl-C ends it.
    """
    page = console()
    query = StreamQuery(kinds=tuple(JOURNAL_KINDS), topic=topic)
    async for batch in api.stream(query, None if after is None else str(after)):
        if batch.gap:
            raise InvalidRequest("after", batch.gap)
        for event in batch.entries:
            if json:
                print_line(event)
            else:
                _print_move(page, event.transition, f"{short_id(event.transition.job_id)}  ")
        sys.stdout.flush()
