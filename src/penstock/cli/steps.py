"""`penstock steps`: the rows that a job checkpointed."""

from __future__ import annotations

import time

import click
import msgspec
from msgspec.structs import replace

from penstock.cli.ids import meant
from penstock.cli.paper import Listing, emit, print_line
from penstock.cli.place import Place, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.cli.words import moment
from penstock.core.ledger import Step
from penstock.core.steps import MAX_PAGE_ROWS
from penstock.ports.store import StepQuery


@click.command()
@click.argument("job")
@click.option("--name", help="Only rows of this name.")
@click.option(
    "--after", type=click.IntRange(0), metavar="N", help="With --name: only rows after this one."
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Maximum number of rows.",
)
@click.option("--json", "json", is_flag=True, help="Print JSON lines.")
@placed
@click.pass_obj
def steps(
    place: Place, job: str, name: str | None, after: int | None, limit: int, json: bool
) -> None:
    """List the rows that a job checkpointed, by name and number.

    With --json each line is an object of "name", "n", "key", "outcome", "input", "output",
    "error", "at" and "attempt"; fields without a value are left out.
    """
    if after is not None and name is None:
        raise click.UsageError("--after needs --name")
    run(_list(place, job, name, after, limit, json))


async def _list(
    place: Place, text: str, name: str | None, after: int | None, limit: int, json: bool
) -> None:
    async with reading_at(place) as api:
        job = await meant(api, text)
        last = None if name is None or after is None else (name, after)
        query = StepQuery(name=name, after=last)
        left, listing = limit, _Rows()
        more = True
        while more and left > 0:
            query = replace(query, limit=min(left, MAX_PAGE_ROWS))
            page = await api.read_steps(job.job_id, query)
            for row in page.steps:
                if json:
                    print_line(msgspec.to_builtins(row))
                else:
                    listing.add(row)
            left -= len(page.steps)
            more = page.more
            query = replace(query, after=page.last)
    if json:
        return
    if left == limit:
        echo("the job has no checkpointed rows", err=True)
        return
    emit(listing.table)
    if more:
        echo("there are more: raise --limit, or use --name and --after", err=True)


class _Rows:
    """Rows as a table."""

    def __init__(self) -> None:
        self._now = time.time()
        self.table = Listing(
            *("NAME", "N", "KEY", "OUTCOME", "OUTPUT", "ATTEMPT", "TIME"),
            flexible=("KEY", "OUTPUT"),
            right=("N", "ATTEMPT"),
        )

    def add(self, row: Step) -> None:
        self.table.add(
            row.name,
            str(row.n),
            row.key,
            row.outcome,
            row.error or row.output,
            str(row.attempt),
            moment(row.at, self._now),
        )
