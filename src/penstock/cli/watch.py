"""`penstock watch`: one job, live, until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from operator import itemgetter
from typing import TYPE_CHECKING

import click

from penstock.app.client import outcome_of
from penstock.cli.exits import Exit
from penstock.cli.ids import meant
from penstock.cli.paper import STYLES, console, print_line
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.words import moment, short_id
from penstock.core.job import Job
from penstock.core.journal import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi, JobUpdate, Logged, Moved, Progressed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


@click.command()
@click.argument("job")
@click.option("--json", "json", is_flag=True, help="Print JSON lines.")
@placed
@click.pass_obj
def watch(place: Place, job: str, json: bool) -> int:
    """Watch a job until it ends.

    Shows its moves, its output and its progress, following retries; the exit code says how
    it ended. With --json each line is an object with a "type": moved, progress or log.
    Ctrl-C leaves the job alone.
    """
    return run(_watch(place, job, json))


async def _watch(place: Place, text: str, json: bool) -> int:
    async with api_at(place) as api:
        job = await meant(api, text)
        while True:
            if json:
                async for update in _updates(api, job.job_id):
                    print_line(update)
            else:
                await _view(api, job)
            job = await api.get(job.job_id)
            if job.successor is None:
                break
            job = await api.get(job.successor)
        if job.state is not JobState.SUCCEEDED:
            await outcome_of(api, job)
        return Exit.OK


async def _updates(api: EngineApi, job_id: str) -> AsyncIterator[JobUpdate]:
    """All that happened so far, in its order, and then what `EngineApi.follow` tells."""
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
    after = 0
    while lines := await api.read_log(job_id, after):
        timed += [(line.at, Logged(line)) for line in lines]
        after = lines[-1].n
    return [update for _, update in sorted(timed, key=itemgetter(0))]


async def _view(api: EngineApi, job: Job) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    page = console()
    title = f"{short_id(job.job_id)} {job.request.topic}"
    page.print(f"job {job.job_id}  {job.request.topic}", soft_wrap=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}", markup=False),
        console=page,
        transient=True,
        disable=not sys.stdout.isatty(),
    )
    with bar:
        task = bar.add_task(title, total=None, said="")
        async for update in _updates(api, job.job_id):
            _tell(bar, task, page, update)


def _tell(bar: Progress, task: TaskID, page: Console, update: JobUpdate) -> None:
    match update:
        case Moved(entry):
            _print_move(page, entry)
        case Logged(line):
            page.print(f"{moment(line.at, time.time())}  │ {line.text}", soft_wrap=True)
        case Progressed(_, fraction, message):
            total = None if fraction is None else 1.0
            bar.update(task, completed=fraction or 0.0, total=total, said=message)


def _print_move(page: Console, entry: Transition) -> None:
    from rich.text import Text

    to = f"to {entry.worker_id} " if entry.worker_id else ""
    page.print(
        Text.assemble(
            f"{moment(entry.at, time.time())}  ",
            (f"{entry.after.value:<10}", STYLES[entry.after]),
            f"  {entry.event.value}",
            (f"  {to}{entry.reason}".rstrip(), "dim"),
        ),
        soft_wrap=True,
    )
