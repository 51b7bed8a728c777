"""`penstock watch`, `logs` and `events`: what happens to jobs, as it happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator
from operator import itemgetter
from typing import TYPE_CHECKING

import click

from penstock.app.client import outcome_of
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import moment, short_id
from penstock.cli.groups import command
from penstock.cli.live import progress
from penstock.cli.options import as_lines, options
from penstock.cli.output import STYLES, console, harmless, print_line, rich_text, warn
from penstock.cli.selection import find_job
from penstock.core.errors import InvalidRequest
from penstock.core.job import Job
from penstock.core.journal import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import (
    JOURNAL_KINDS,
    EngineApi,
    JobUpdate,
    Logged,
    Moved,
    Progressed,
    StreamQuery,
)
from penstock.ports.store import LogLine

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


async def _tries(api: EngineApi, text: str) -> AsyncIterator[Job]:
    """A job and its retries, each once the one before has ended."""
    job = await find_job(api, text)
    while True:
        yield job
        job = await api.get(job.job_id)
        if job.successor is None:
            return
        job = await api.get(job.successor)


# -- watch -------------------------------------------------------------------------


@command()
@as_lines
def watch(engine: EngineRef, job: str, json: bool) -> int:
    """Watch a job until it ends.

    Shows its moves, its output and its progress, and those of its retries; the exit code says how
    it ended. With --json each line is an object with a "type": moved, progress or log. Ctrl-C
    leaves the job alone.
    """

    async def follow(api: EngineApi) -> int:
        async for one in _tries(api, job):
            if json:
                async for update in _updates(api, one.job_id):
                    print_line(update)
            else:
                await _view(api, one)
        one = await api.get(one.job_id)
        if one.state is not JobState.SUCCEEDED:
            await outcome_of(api, one)
        return Exit.OK

    return engine.ask(follow)


async def _updates(api: EngineApi, job_id: str) -> AsyncIterator[JobUpdate]:
    """Everything that has happened so far, in order, then the updates of `EngineApi.follow`."""
    told, read = 0, 0
    for update in await _past(api, job_id):
        match update:
            case Moved(entry):
                told = entry.n
            case Logged(line):
                read = line.n
        yield update
    async for update in api.follow(job_id, read):
        if isinstance(update, Moved):
            # Moves made before we began to follow are in neither, or in both.
            for entry in (await api.history(job_id))[told : update.transition.n]:
                told = entry.n
                yield Moved(entry)
        else:
            yield update
    for entry in (await api.history(job_id))[told:]:
        yield Moved(entry)


async def _past(api: EngineApi, job_id: str) -> list[JobUpdate]:
    timed: list[tuple[float, JobUpdate]] = [
        (entry.at, Moved(entry)) for entry in await api.history(job_id)
    ]
    timed += [(line.at, Logged(line)) async for line in _lines_so_far(api, job_id)]
    return [update for _, update in sorted(timed, key=itemgetter(0))]


async def _view(api: EngineApi, job: Job) -> None:
    page = console()
    page.print(f"job {job.job_id}  {job.request.topic}", soft_wrap=True)
    title = f"{short_id(job.job_id)} {job.request.topic}"
    with progress(title, kind="fraction", err=False) as bar:
        async for update in _updates(api, job.job_id):
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
def logs(engine: EngineRef, job: str, follow: bool, times: bool, json: bool) -> None:
    """Print what a job wrote, and after it what its retries wrote.

    With --json each line is an object of "job_id", "attempt", "at", "level", "text", "n".
    """

    async def read(api: EngineApi) -> None:
        first = True
        async for one in _tries(api, job):
            if not first:
                warn(f"try {one.request.try_number} is {one.job_id}")
            first = False
            lines = _lines_followed if follow else _lines_so_far
            async for line in lines(api, one.job_id):
                _print(line, times, json)

    engine.ask(read, reading=True)


async def _lines_so_far(api: EngineApi, job_id: str) -> AsyncIterator[LogLine]:
    after = 0
    while lines := await api.read_log(job_id, after):
        for line in lines:
            yield line
        after = lines[-1].n


async def _lines_followed(api: EngineApi, job_id: str) -> AsyncIterator[LogLine]:
    async for update in api.follow(job_id):
        if isinstance(update, Logged):
            yield update.line


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
def events(engine: EngineRef, after: int | None, topic: str | None, json: bool) -> None:
    """Print everything that happens to any job, from now on.

    With --json each line is an event with its "cursor", which --after takes. Ctrl-C ends it.
    """
    page = console()
    query = StreamQuery(kinds=tuple(JOURNAL_KINDS), topic=topic)

    async def follow(api: EngineApi) -> None:
        async for batch in api.stream(query, None if after is None else str(after)):
            if batch.gap:
                raise InvalidRequest("after", batch.gap)
            for event in batch.entries:
                if json:
                    print_line(event)
                else:
                    _print_move(page, event.transition, f"{short_id(event.transition.job_id)}  ")
            sys.stdout.flush()

    engine.ask(follow)
