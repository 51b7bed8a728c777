"""Doing something to many jobs: asking first, and telling what came of it."""

from __future__ import annotations

import sys

import click
import msgspec
from msgspec.structs import replace

from penstock.cli.exits import Exit
from penstock.cli.paper import print_json
from penstock.cli.terminal import echo
from penstock.cli.words import plural
from penstock.ports.engine_api import Bulk, EngineApi
from penstock.ports.store import JobQuery

_COUNTED = 1000

sure = click.option("--yes", is_flag=True, help="Don't ask.")


async def confirm(api: EngineApi, query: JobQuery, verb: str, *, yes: bool) -> bool:
    """Whether the caller means it. Where nobody can be asked, they must have said so."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"nobody can be asked whether to {verb} them; say --yes")
    found = await api.find(replace(query, limit=_COUNTED + 1))
    if not found:
        echo("no such jobs", err=True)
        return False
    count = f"more than {_COUNTED:,} jobs" if len(found) > _COUNTED else plural(len(found), "job")
    return click.confirm(f"{verb} {count}?", err=True)


def report(bulk: Bulk, said: str, *, json: bool) -> int:
    """Tell how many, in a sentence with a gap; the exit code says whether all of them."""
    if json:
        print_json(msgspec.to_builtins(bulk))
    else:
        echo(said.format(f"{bulk.done:,} of {plural(bulk.matched, 'job')}"))
        for job_id, why in bulk.refused:
            echo(f"penstock: {job_id}: {why}", err=True)
    return Exit.CONFLICT if bulk.refused else Exit.OK
