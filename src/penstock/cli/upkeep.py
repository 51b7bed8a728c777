"""`penstock verify` and `penstock prune`."""

from __future__ import annotations

import time

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.paper import print_json
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.place import Place, api_at, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.cli.words import plural, span
from penstock.ports.engine_api import Cleaned
from penstock.ports.store import Verified

_SHOWN = 50


@click.command()
@as_json
@placed
@click.pass_obj
def verify(place: Place, json: bool) -> int:
    """Check every job's record against its log.

    Each job's log is folded, step by step against the lifecycle's table, and compared with
    the record. Works without a running engine.
    """
    start = time.monotonic()
    verified = run(_verify(place))
    if json:
        print_json(msgspec.to_builtins(verified))
    else:
        *problems, verdict = report(verified)
        for line in problems:
            echo(line)
        echo(f"{verdict} ({span(time.monotonic() - start)})")
    return Exit.MISMATCH if verified.mismatches else Exit.OK


async def _verify(place: Place) -> Verified:
    async with reading_at(place) as api:
        return await api.verify()


def report(verified: Verified) -> list[str]:
    """A line for each mismatch, up to a limit, and one for the whole."""
    found = verified.mismatches
    lines = [f"{mismatch.job_id}: {mismatch.problem}" for mismatch in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"… and {len(found) - _SHOWN} more")
    read = f"{plural(verified.jobs, 'job')}, {plural(verified.transitions, 'transition')}"
    verdict = plural(len(found), "mismatch").replace("mismatchs", "mismatches")
    lines.append(f"{read}: {verdict if found else 'every record is the fold of its log'}")
    return lines


@click.command()
@click.option(
    "--older-than",
    type=DURATION,
    default="7d",
    show_default=True,
    help="Forget what ended longer ago than this.",
)
@as_json
@placed
@click.pass_obj
def prune(place: Place, older_than: float, json: bool) -> None:
    """Forget jobs that ended long ago.

    With them go their history, their output, and payloads that nothing points to any more.
    """
    cleaned = run(_prune(place, older_than))
    if json:
        print_json(msgspec.to_builtins(cleaned))
        return
    parts = (
        plural(cleaned.jobs, "job"),
        plural(cleaned.transitions, "transition"),
        plural(cleaned.log_lines, "log line"),
        plural(cleaned.blobs, "blob"),
    )
    echo("forgot " + ", ".join(parts))


async def _prune(place: Place, older_than: float) -> Cleaned:
    async with api_at(place) as api:
        return await api.prune(older_than)
