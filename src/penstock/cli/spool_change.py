"""`penstock spool cancel`, `retry` and `clean`: what people do to jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from penstock.cli.exits import Exit, exit_of
from penstock.cli.paper import print_json
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.spool_options import ids_given, placed, workspace_at
from penstock.cli.terminal import echo
from penstock.cli.words import plural
from penstock.core.errors import PenstockError, WaitTimedOut
from penstock.lifecycles.spool import SPOOL, Status
from penstock.workloads.spool.client import changes
from penstock.workloads.spool.client.changes import outdated
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.disk.workspace import Workspace

_PATIENCE = "10s"
Done = tuple[Exit, dict[str, Any], str]
"""An exit code, what is told of it as JSON, and in words."""


@click.command()
@placed
@click.argument("ids", nargs=-1, metavar="[ID…]")
@click.option("--reason", default="", help="Why; kept with the job.")
@click.option(
    "--timeout",
    type=DURATION,
    default=_PATIENCE,
    show_default=True,
    help="How long to wait for running work to end.",
)
@as_json
def cancel(workspace: Path, ids: tuple[str, ...], reason: str, timeout: float, json: bool) -> int:
    """End jobs; a running one stops within a token.

    They are FAILED afterwards, with the code CANCELLED. Says of each which won: the
    cancellation, or an end that came first (exit code 4). The ids come on the command line or
    on standard input.
    """
    place = workspace_at(workspace)
    return _each(_named(ids), lambda one: _cancel(place, one, reason, timeout), json)


def _cancel(workspace: Workspace, job_id: str, reason: str, timeout: float) -> Done:
    flow = Flow(workspace)
    if SPOOL.is_final(before := flow.status(job_id)):
        return _told(job_id, before, Exit.CONFLICT, f"had ended already: {before}")
    now = changes.cancel(workspace, job_id, reason or "cancelled by its user")
    if not SPOOL.is_final(now):
        try:
            flow.wait(job_id, timeout)
        except WaitTimedOut:
            said = f"was asked to end and is still {flow.status(job_id)}"
            return _told(job_id, now, Exit.NOT_YET, said)
    found = flow.get(job_id)
    if found.meta.code == changes.CANCELLED:
        return _told(job_id, found.status, Exit.OK, "cancelled")
    return _told(job_id, found.status, Exit.CONFLICT, f"had ended already: {found.status}")


def _told(job_id: str, status: Status, code: Exit, said: str) -> Done:
    cancelled = code is Exit.OK
    view = {"job_id": job_id, "status": status.value, "cancelled": cancelled}
    return code, view, f"{job_id} {said}"


@click.command()
@placed
@click.argument("ids", nargs=-1, metavar="[ID…]")
@as_json
def retry(workspace: Path, ids: tuple[str, ...], json: bool) -> int:
    """Submit jobs that have ended once more; prints the new ids.

    The new job has the same files and options as the old one, which stays where it is. The
    ids come on the command line or on standard input.
    """
    place = workspace_at(workspace)

    def again(job_id: str) -> Done:
        new = changes.retry(place, job_id)
        return Exit.OK, {"job_id": new, "retry_of": job_id}, new

    return _each(_named(ids), again, json)


def _named(given: tuple[str, ...]) -> list[str]:
    ids = ids_given(given)
    if not ids:
        raise click.UsageError("say which jobs: their ids, or ids on standard input")
    return ids


def _each(ids: Sequence[str], act: Callable[[str], Done], json: bool) -> int:
    """All are tried; the exit code is that of the first that did not work out."""
    code, views = Exit.OK, []
    for job_id in ids:
        try:
            ended, view, said = act(job_id)
        except PenstockError as error:
            echo(f"penstock: {error.message}", err=True)
            ended, said = exit_of(error), ""
            view = {"job_id": job_id, "error": error.code, "message": error.message}
        code = code or ended
        views.append(view)
        if said and not json:
            echo(said)
    if json:
        print_json(views)
    return code


@click.command()
@placed
@click.option("--older-than", type=DURATION, help="Those that ended longer ago than this.")
@click.option("--keep", type=click.IntRange(0), metavar="N", help="All but the last so many.")
@click.option("--done", is_flag=True, help="Only of those that are DONE.")
@click.option("--failed", is_flag=True, help="Only of those that are FAILED.")
@click.option("--dry-run", is_flag=True, help="Only say which ones.")
@as_json
def clean(
    workspace: Path,
    older_than: float | None,
    keep: int | None,
    done: bool,
    failed: bool,
    dry_run: bool,
    json: bool,
) -> None:
    """Delete jobs that have ended, by age or by number.

    With both conditions, those go that meet one of them; --keep counts DONE and FAILED jobs
    apart. What submitters left behind that were killed goes too.
    """
    if older_than is None and keep is None:
        raise click.UsageError("say which: --older-than 7d, --keep 100, or both")
    wanted = [Status.DONE] * done + [Status.FAILED] * failed
    states = wanted or sorted(SPOOL.final)
    choose = outdated if dry_run else changes.clean
    gone = choose(workspace_at(workspace), older_than, keep, states)
    if json:
        print_json({"removed": [] if dry_run else gone, "matched": gone})
    elif dry_run:
        echo("".join(f"{job_id}\n" for job_id in gone), nl=False)
        echo(f"penstock: {plural(len(gone), 'job')} would go", err=True)
    else:
        echo(f"removed {plural(len(gone), 'job')}")
