"""`penstock dead`: what ended FAILED or TIMEOUT and was not retried."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.bulk import confirm, report, sure
from penstock.cli.exits import Exit
from penstock.cli.filters import filtered, is_narrowed, query_of
from penstock.cli.groups import Commands
from penstock.cli.paper import print_json, record
from penstock.cli.parameters import as_json, limited
from penstock.cli.place import Place, api_at, placed, reading_at, run
from penstock.cli.ps import known_as, print_jobs
from penstock.cli.terminal import echo


@click.group(cls=Commands, acts=True)
@filtered
@limited(20)
@click.option("--before", type=int, metavar="SEQ", help="Older than this: the next page.")
@click.option("-q", "--quiet", is_flag=True, help="Print ids only.")
@as_json
@placed
@click.pass_context
def dead(
    ctx: click.Context, /, limit: int, before: int | None, quiet: bool, json: bool, **filters: Any
) -> None:
    """List jobs that ended FAILED or TIMEOUT and were not retried.

    `dead retry` submits them once more.
    """
    if ctx.invoked_subcommand is None:
        run(_list(ctx.obj, filters, limit, before, quiet, json))
    elif is_narrowed(filters):
        raise click.UsageError("the conditions stand after 'retry'", ctx)


async def _list(
    place: Place, filters: dict[str, Any], limit: int, before: int | None, quiet: bool, json: bool
) -> None:
    async with reading_at(place) as api:
        query = await query_of(api, filters, dead=True, before=before, limit=limit)
        jobs = await api.find(query)
        if json:
            print_json([record(job) for job in jobs])
        elif quiet:
            echo("".join(f"{known_as(job, query)}\n" for job in jobs), nl=False)
        elif not jobs:
            echo("no dead jobs", err=True)
        else:
            await print_jobs(api, jobs, query)
            if len(jobs) == limit:
                echo(f"there may be more: --before {jobs[-1].seq}", err=True)


@dead.command("retry")
@filtered
@click.option("--all", "everything", is_flag=True, help="All of them.")
@sure
@as_json
@placed
@click.pass_obj
def retry_dead(place: Place, /, everything: bool, yes: bool, json: bool, **filters: Any) -> int:
    """Submit the dead jobs that match once more.

    The new jobs keep every field of the old, and pass the safety rules again.
    """
    if is_narrowed(filters) is everything:
        raise click.UsageError("say which: conditions, or --all")
    return run(_retry(place, filters, yes, json))


async def _retry(place: Place, filters: dict[str, Any], yes: bool, json: bool) -> int:
    async with api_at(place) as api:
        query = await query_of(api, filters, dead=True)
        if not await confirm(api, query, "retry", yes=yes):
            return Exit.OK
        return report(await api.retry_many(query), "retried {}", json=json)
