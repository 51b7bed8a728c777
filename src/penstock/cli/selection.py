"""Which jobs a command is about: ids, or filters that lists and bulk commands share."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import click

from penstock.app.finding import every_job, find_job, first_try_of
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit, exit_of
from penstock.cli.formats import plural, total
from penstock.cli.options import SHARED, options, together
from penstock.cli.output import echo, print_done, print_json, warn
from penstock.core.errors import PenstockError
from penstock.ports.engine_api import Bulk, EngineApi
from penstock.ports.store import JobQuery

Done = tuple[Exit, dict[str, Any], str]
"""What came of an act: an exit code, its JSON, and that in words."""

# -- by id -------------------------------------------------------------------------


def job_ids(given: Sequence[str]) -> list[str]:
    """The ids on the command line; `-` stands for those on standard input."""
    ids: list[str] = []
    for text in given:
        ids += sys.stdin.buffer.read().decode("utf-8", "replace").split() if text == "-" else [text]
    return ids


async def each(ids: Sequence[str], act: Callable[[str], Awaitable[Done]], *, json: bool) -> Exit:
    """Do something to each; all are tried. The code is that of the first that did not work out."""
    code, views = Exit.OK, []
    for one in ids:
        try:
            ended, view, text = await act(one)
        except PenstockError as error:
            warn(f"{one}: {error.message}", error.hint)
            ended, text = exit_of(error), ""
            view = {"job_id": one, "error": error.code, "message": error.message}
        code = code or ended
        views.append(view)
        if text and not json:
            echo(text)
    if json:
        print_json(views)
    return code


# -- by filters --------------------------------------------------------------------

filtered = options(
    """
    --topic GLOB           With a topic that matches, as job.text.*.
    --tenant TENANT        Of this tenant.
    --label KEY=VALUE...   With this label; may be repeated.
    --workflow ID          Of this workflow.
    --parent JOB           Submitted inside this job.
    --principal NAME       Submitted by this principal.
    --schedule NAME        Submitted by this schedule.
    --newer-than DURATION  Accepted no longer ago than this.
    --older-than DURATION  Accepted longer ago than this.
    """
)
"""`query_of` makes a query of what a command with these options is called with."""


async def query_of(api: EngineApi, said: dict[str, Any], **more: Any) -> JobQuery:
    now = time.time()
    newer, older, parent = said["newer_than"], said["older_than"], said["parent"]
    return JobQuery(
        topic=said["topic"],
        tenant=said["tenant"],
        labels=dict(said["label"]),
        workflow_id=said["workflow"],
        child_of=None if parent is None else await first_try_of(api, parent),
        principal=said["principal"],
        schedule=said["schedule"],
        accepted_from=None if newer is None else now - newer,
        accepted_to=None if older is None else now - older,
        **more,
    )


# -- acts on several jobs ----------------------------------------------------------

chosen = together(
    click.argument("jobs", nargs=-1, metavar="[JOB...]"),
    filtered,
    options("--all as everything  Every job to which this can be done."),
    SHARED["yes"],
    SHARED["json"],
)
"""The options of an act on jobs: ids, filters or --all. `act` makes sense of them."""


async def act(
    engine: EngineRef,
    said: dict[str, Any],
    verb: str,
    one: Callable[[EngineApi, str], Awaitable[Done]],
    many: Callable[[EngineApi, JobQuery], Awaitable[Bulk]] | None = None,
    told: str = "",
    **more: Any,
) -> Exit:
    """Do something to each job that is named; all are tried. With filters, do it to all that match
    after asking: by `many`, whose outcome is `told` with a gap for how many, or to each. `more` are
    fields of the query that every job has to which this can be done."""
    ids, everything, sure, json = (said.pop(name) for name in ("jobs", "everything", "yes", "json"))
    narrowed = any(value not in (None, ()) for value in said.values())
    if bool(ids) + narrowed + everything != 1:
        raise click.UsageError("no jobs selected: give ids, filters or --all")
    async with engine.api() as api:

        async def on_one(text: str) -> Done:
            return await one(api, (await find_job(api, text)).job_id)

        if ids:
            return await each(job_ids(ids), on_one, json=json)
        query = await query_of(api, said, **more)
        if not sure and not await confirmed(api, query, verb):
            return Exit.OK
        if many is None:
            found = [job.job_id for job in await every_job(api, query)]
            return await each(found, on_one, json=json)
        bulk = await many(api, query)
    print_done(json, bulk, told.format(f"{bulk.done:,} of {plural(bulk.matched, 'job')}"))
    for job_id, why in () if json else bulk.refused:
        warn(f"{job_id}: {why}")
    return Exit.CONFLICT if bulk.refused else Exit.OK


async def confirmed(api: EngineApi, query: JobQuery, verb: str) -> bool:
    """Whether the caller means it. Where nobody can be asked, they must have said so."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"no terminal to confirm on: give --yes to {verb} them")
    found = await api.count(query)
    if not found.count:
        echo("no such jobs", err=True)
        return False
    return click.confirm(f"{verb} {total(found)}?", err=True)
