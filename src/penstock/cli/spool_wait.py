"""`penstock spool wait`: until jobs have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from penstock.cli.exits import Exit
from penstock.cli.paper import print_json
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.spool_found import code_of, counting, say_why, warn_if_unserved
from penstock.cli.spool_jobs import ids_given, placed, workspace_at
from penstock.cli.terminal import echo
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.flow import Flow


@click.command()
@placed
@click.argument("ids", nargs=-1, metavar="[ID…]")
@click.option("--idle", is_flag=True, help="Wait until nothing is queued or running here.")
@click.option("--timeout", type=DURATION, help="Wait no longer than this; the jobs go on.")
@as_json
def wait(
    workspace: Path, ids: tuple[str, ...], idle: bool, timeout: float | None, json: bool
) -> int:
    """Wait until jobs have ended; prints their ids.

    The ids come on the command line or on standard input, and are printed in their order, so
    that 'get' can go on with them. The exit code is that of the first that failed; 9 if the
    time was over. With --idle it waits for all jobs here, prints how many have ended, and the
    exit code is 1 if one failed meanwhile.
    """
    flow = Flow(workspace_at(workspace))
    if idle:
        if ids:
            raise click.UsageError("--idle waits for all jobs; it takes no ids")
        warn_if_unserved(flow)
        return _wait_idle(flow, timeout, json)
    wanted = ids_given(ids)
    if not wanted:
        raise click.UsageError("say which jobs: their ids, ids on standard input, or --idle")
    warn_if_unserved(flow)
    return _wait_for(flow, wanted, timeout, json)


def _wait_for(flow: Flow, ids: Sequence[str], timeout: float | None, json: bool) -> int:
    end = None if timeout is None else time.monotonic() + timeout
    code, told = Exit.OK, []
    with counting("waiting", len(ids)) as count:
        for job_id in ids:
            found = flow.wait(job_id, None if end is None else max(0.0, end - time.monotonic()))
            count()
            code = code or code_of(found)
            told.append({"job_id": job_id, "status": found.status.value})
            if found.status is Status.FAILED:
                say_why(found)
            if not json:
                echo(job_id)
    if json:
        print_json(told)
    return code


def _wait_idle(flow: Flow, timeout: float | None, json: bool) -> int:
    before = flow.counts()[Status.FAILED]
    counts = flow.wait_idle(timeout)
    if json:
        print_json({status.value: count for status, count in counts.items()})
    else:
        echo(f"{counts[Status.DONE]:,} done, {counts[Status.FAILED]:,} failed")
    return Exit.FAILED if counts[Status.FAILED] > before else Exit.OK
