"""`penstock retry`."""

from __future__ import annotations

import click

from penstock.cli.exits import Exit, exit_of
from penstock.cli.ids import job_ids, meant
from penstock.cli.paper import print_json, record
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.terminal import echo
from penstock.core.errors import PenstockError


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@as_json
@placed
@click.pass_obj
def retry(place: Place, jobs: tuple[str, ...], json: bool) -> int:
    """Submit jobs that ended badly once more.

    Prints the ids of the new jobs, which keep every field of the old. `-` reads ids from
    standard input.
    """
    return run(_retry(place, job_ids(jobs), json))


async def _retry(place: Place, texts: list[str], json: bool) -> int:
    code, emitted = Exit.OK, []
    async with api_at(place) as api:
        for text in texts:
            try:
                job = await api.retry((await meant(api, text)).job_id)
            except PenstockError as error:
                echo(f"penstock: {error.message}", err=True)
                code = code or exit_of(error)
                continue
            emitted.append(record(job))
            if not json:
                echo(job.job_id)
    if json:
        print_json(emitted)
    return code
