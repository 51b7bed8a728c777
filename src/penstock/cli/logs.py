"""`penstock logs`: what a job wrote."""

from __future__ import annotations

import os
import sys
import time

import click
import msgspec

from penstock.cli.ids import meant
from penstock.cli.paper import print_line
from penstock.cli.place import Place, placed, reading_at, run
from penstock.cli.terminal import echo, harmless
from penstock.cli.words import moment
from penstock.ports.engine_api import EngineApi, Logged
from penstock.ports.store import LogLine

_COLOURS = {"warning": "yellow", "error": "red", "critical": "red"}


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("-t", "--times", is_flag=True, help="Say when each line was written.")
@click.option("--json", "json", is_flag=True, help="Print JSON lines.")
@placed
@click.pass_obj
def logs(place: Place, job: str, follow: bool, times: bool, json: bool) -> None:
    """Print what a job wrote, and after it what its retries wrote.

    With --json each line is an object of "job_id", "attempt", "at", "level", "text", "n".
    """
    run(_logs(place, job, follow, times, json))


async def _logs(place: Place, text: str, follow: bool, times: bool, json: bool) -> None:
    async with reading_at(place) as api:
        job = await meant(api, text)
        while True:
            await (_follow if follow else _so_far)(api, job.job_id, times, json)
            job = await api.get(job.job_id)
            if job.successor is None:
                break
            job = await api.get(job.successor)
            echo(f"penstock: try {job.request.try_number} is {job.job_id}", err=True)


async def _so_far(api: EngineApi, job_id: str, times: bool, json: bool) -> None:
    after = 0
    while lines := await api.read_log(job_id, after):
        for line in lines:
            _print(line, times, json)
        after = lines[-1].n


async def _follow(api: EngineApi, job_id: str, times: bool, json: bool) -> None:
    async for update in api.follow(job_id):
        if isinstance(update, Logged):
            _print(update.line, times, json)


def _print(line: LogLine, times: bool, json: bool) -> None:
    if json:
        print_line(msgspec.to_builtins(line))
        return
    text = harmless(line.text) if sys.stdout.isatty() else line.text
    if colour := _COLOURS.get(line.level):
        text = click.style(text, fg=colour)
    if times:
        text = f"{click.style(moment(line.at, time.time()), dim=True)} {text}"
    coloured = False if "NO_COLOR" in os.environ else None
    click.echo(text, color=coloured)  # noqa: TID251 (with our own codes)
