"""`penstock spool get`: what a job made."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.paper import print_json, print_line
from penstock.cli.parameters import as_json
from penstock.cli.spool_found import print_content, print_found, view_of
from penstock.cli.spool_jobs import ids_given, is_piped, placed, workspace_at
from penstock.cli.terminal import echo
from penstock.core.errors import InvalidRequest, NotFound
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.flow import Flow
from penstock.workloads.spool.found import Found

NOT_READY = 2
"""The original's exit code for a job that has no result yet; its other two are 0 and 1."""


@click.command()
@placed
@click.argument("ids", nargs=-1, metavar="[ID…]")
@click.option("--partial", is_flag=True, help="Of a running job, what there is by now.")
@click.option("--jsonl", is_flag=True, help="Print a line of JSON for each of several jobs.")
@as_json
def get(workspace: Path, ids: tuple[str, ...], partial: bool, jsonl: bool, json: bool) -> int:
    """Print what a job made, as it is.

    The id comes on the command line or on standard input; without one it is the job that
    ended last. Exit code 1: it failed, and standard error says why; 2: it is not ready, or
    there is no such job.
    """
    flow = Flow(workspace_at(workspace))
    try:
        wanted = ids_given(ids) if ids or is_piped() else []
    except InvalidRequest as error:
        # Not 2, which would tell a script to ask again.
        echo(f"penstock: {error.message}\n  {error.hint}", err=True)
        return Exit.FAILED
    if jsonl:
        return max([_print_line(flow.get(one)) for one in wanted], default=Exit.OK)
    if len(wanted) > 1:
        raise click.UsageError("several results in a row can't be told apart; say --jsonl")
    found = flow.get(wanted[0]) if wanted else _latest(flow)
    if partial and found.status is Status.RUNNING:
        return _print_partial(flow, found, json)
    print_found(found, json=json)
    return _code(found)


def _code(found: Found) -> int:
    ends = {Status.DONE: Exit.OK, Status.FAILED: Exit.FAILED}
    return ends.get(found.status, NOT_READY)


def _print_line(found: Found) -> int:
    print_line(view_of(found))
    return _code(found)


def _latest(flow: Flow) -> Found:
    found = flow.latest()
    if found is None:
        path = flow.workspace.path
        raise NotFound(
            f"no job of {path} has ended", hint=f"'penstock spool status {path}' counts them"
        )
    return found


def _print_partial(flow: Flow, found: Found, json: bool) -> int:
    part = flow.partial(found.job_id)
    if json:
        progress = msgspec.to_builtins(part.progress)
        print_json({**view_of(found), "partial": part.text, "progress": progress})
    else:
        print_content(part.text.encode())
    return Exit.OK
