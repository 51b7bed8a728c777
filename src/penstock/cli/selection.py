"""Which jobs a command is about: ids, or filters that lists and bulk commands share."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import click
from msgspec.structs import replace

from penstock.cli.exits import Exit, exit_of
from penstock.cli.formats import plural
from penstock.cli.options import options
from penstock.cli.output import echo, print_json, warn
from penstock.core.errors import NotFound, PenstockError
from penstock.core.job import Job, chain_of
from penstock.ports.engine_api import Bulk, EngineApi
from penstock.ports.store import JobQuery

Done = tuple[Exit, dict[str, Any], str]
"""What came of an act: an exit code, its JSON, and that in words."""

_ENOUGH = 5
_SHORTEST = 3
_COUNTED = 1000

# -- by id -------------------------------------------------------------------------


def job_ids(given: Sequence[str]) -> list[str]:
    """The ids on the command line; `-` stands for those on standard input."""
    ids: list[str] = []
    for text in given:
        ids += sys.stdin.read().split() if text == "-" else [text]
    return ids


async def find_job(api: EngineApi, text: str) -> Job:
    """The job with this id, or with one that begins or ends so.

    Raises NotFound, or BadParameter if it could be several.
    """
    try:
        return await api.get(text)
    except NotFound:
        found = await _alike(api, text) if len(text) >= _SHORTEST else []
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"no job {text!r}", hint="'penstock ps' lists the jobs there are")
    some = ", ".join(job.job_id for job in found[:3]) + (", …" if len(found) > 3 else "")
    raise click.BadParameter(f"{text!r} could be several jobs: {some}")


async def job_id_of(api: EngineApi, text: str) -> str:
    """The whole id; what was given, if no job has it: it may have been pruned."""
    try:
        return (await find_job(api, text)).job_id
    except NotFound:
        return text


async def _alike(api: EngineApi, text: str) -> list[Job]:
    """Jobs whose id begins or ends so; a few are enough to say that it could be several."""
    plain = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)
    found = {
        job.job_id: job
        for glob in (f"{plain}*", f"*{plain}")
        for job in await api.find(JobQuery(job_id=glob, limit=_ENOUGH))
    }
    return list(found.values())


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


def is_narrowed(said: dict[str, Any]) -> bool:
    """Whether any filter was given."""
    return any(value not in (None, ()) for value in said.values())


async def query_of(api: EngineApi, said: dict[str, Any], **more: Any) -> JobQuery:
    now = time.time()
    newer, older, parent = said["newer_than"], said["older_than"], said["parent"]
    return JobQuery(
        topic=said["topic"],
        tenant=said["tenant"],
        labels=dict(said["label"]),
        workflow_id=said["workflow"],
        child_of=None if parent is None else await _first_try(api, parent),
        principal=said["principal"],
        schedule=said["schedule"],
        accepted_from=None if newer is None else now - newer,
        accepted_to=None if older is None else now - older,
        **more,
    )


async def _first_try(api: EngineApi, text: str) -> str:
    """The first try of a job; what was given, if no job has that id: it may have been pruned."""
    try:
        return chain_of((await find_job(api, text)).request)
    except NotFound:
        return text


async def in_bulk(
    api: EngineApi,
    query: JobQuery,
    act: Callable[[JobQuery], Awaitable[Bulk]],
    verb: str,
    said: str,
    *,
    concerns: JobQuery | None = None,
    yes: bool,
    json: bool,
) -> Exit:
    """Do something to all jobs that match, after asking; `said` is a sentence with a gap for how
    many. `concerns` is the query that counts them, if it is another."""
    if not yes and not await _confirmed(api, concerns or query, verb):
        return Exit.OK
    bulk = await act(query)
    if json:
        print_json(bulk)
    else:
        echo(said.format(f"{bulk.done:,} of {plural(bulk.matched, 'job')}"))
        for job_id, why in bulk.refused:
            warn(f"{job_id}: {why}")
    return Exit.CONFLICT if bulk.refused else Exit.OK


async def _confirmed(api: EngineApi, query: JobQuery, verb: str) -> bool:
    """Whether the caller means it. Where nobody can be asked, they must have said so."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"can't ask whether to {verb} them without a terminal; say --yes")
    found = await api.find(replace(query, limit=_COUNTED + 1))
    if not found:
        echo("no such jobs", err=True)
        return False
    count = f"more than {_COUNTED:,} jobs" if len(found) > _COUNTED else plural(len(found), "job")
    return click.confirm(f"{verb} {count}?", err=True)
