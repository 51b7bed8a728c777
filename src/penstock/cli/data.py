"""`penstock verify`, `prune`, `backup` and `restore`: the data directory."""

from __future__ import annotations

import time
from pathlib import Path

import click

from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import moment, plural, size, span
from penstock.cli.groups import command
from penstock.cli.options import options
from penstock.cli.output import echo, print_done, print_json, warn
from penstock.ports.store import Verified

_FOLDER = click.Path(path_type=Path)
_SHOWN = 50


@command()
def verify(engine: EngineRef, json: bool) -> int:
    """Check every job's record against its log.

    Replays each job's log against the table of its lifecycle, and compares the outcome with the
    record. Works without a running engine.
    """
    start = time.monotonic()
    verified = engine.ask(lambda api: api.verify(), reading=True)
    took = span(time.monotonic() - start)
    print_done(json, verified, f"{_report(verified)} ({took})")
    return Exit.MISMATCH if verified.mismatches else Exit.OK


def _report(verified: Verified) -> str:
    """A line for each mismatch, up to a limit, and one for the whole."""
    found = verified.mismatches
    lines = [f"{mismatch.job_id}: {mismatch.problem}" for mismatch in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"… and {len(found) - _SHOWN} more")
    read = f"{plural(verified.jobs, 'job')}, {plural(verified.transitions, 'transition')}"
    verdict = "1 mismatch" if len(found) == 1 else f"{len(found):,} mismatches"
    lines.append(f"{read}: {verdict if found else 'every record is the fold of its log'}")
    return "\n".join(lines)


@command()
@options("--older-than DURATION=7d  Delete what ended longer ago than this.")
def prune(engine: EngineRef, older_than: float, json: bool) -> None:
    """Delete jobs that ended long ago.

    Also deletes their history, their output and unreferenced payloads.
    """
    cleaned = engine.ask(lambda api: api.prune(older_than))
    parts = (
        plural(cleaned.jobs, "job"),
        plural(cleaned.transitions, "transition"),
        plural(cleaned.log_lines, "log line"),
        plural(cleaned.blobs, "blob"),
    )
    print_done(json, cleaned, "deleted " + ", ".join(parts))


@command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
def backup(engine: EngineRef, folder: Path, json: bool) -> None:
    """Copy the data directory to a new folder.

    The engine may be running, and goes on meanwhile. The copy holds its secrets too (token,
    pipe.key), and only its owner can read it. Not copied are container images, models, and the
    settings and rules, which are kept elsewhere.
    """
    from penstock.app.backup import back_up

    _refuse_address(engine)
    start = time.monotonic()
    done = back_up(engine.settings(), folder)
    took = span(time.monotonic() - start)
    what = f"{plural(done.files, 'file')}, {size(done.bytes)}"
    print_done(json, done, f"backed up {what}, to {done.path} ({took})")
    if done.left_out and not json:
        warn(f"not backed up: {', '.join(done.left_out)}")
    if done.missing and not json:
        warn(
            f"{plural(len(done.missing), 'payload')} that jobs point to are not in the"
            f" data directory: {', '.join(done.missing[:3])} …"
        )


@command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@options("--replace  Move what the data directory has now to a folder inside it.")
def restore(engine: EngineRef, folder: Path, replace: bool, json: bool) -> int:
    """Restore a backup to the data directory.

    No engine may be running there, and the directory must be empty unless --replace is given.
    Every file is checked before anything changes; then every job's record is compared with its
    log, as 'penstock verify' does. Jobs that a worker held at the backup are treated as after a
    crash of the machine.
    """
    from penstock.app import backup

    _refuse_address(engine)
    start = time.monotonic()
    done = backup.restore(engine.settings(), folder, replace=replace)
    verified, took = done.verified, span(time.monotonic() - start)
    if json:
        print_json(done)
    else:
        what = f"{plural(done.files, 'file')}, {size(done.bytes)}"
        echo(f"restored {what}, of {moment(done.written_at, time.time())} to {done.path} ({took})")
        if done.replaced:
            echo(f"what was there is in {done.replaced}")
        if verified:
            echo(_report(verified))
    return Exit.MISMATCH if verified and verified.mismatches else Exit.OK


def _refuse_address(engine: EngineRef) -> None:
    if engine.connect:
        raise click.UsageError(
            "--connect can't be used here: run it where the data directory is, with --data"
        )
