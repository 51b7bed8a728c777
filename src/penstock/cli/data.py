"""`penstock verify`, `prune`, `backup`, `restore`, `db` and `audit`: the engine's data."""

from __future__ import annotations

import time
from copy import copy as shallow
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import Whole, moment, plural, size, span
from penstock.cli.groups import Commands, command
from penstock.cli.options import options
from penstock.cli.output import (
    Form,
    Row,
    echo,
    emit,
    facts,
    print_done,
    print_json,
    print_list,
    styled,
    warn,
)
from penstock.ports.engine_api import EngineApi
from penstock.ports.store import AuditEntry, AuditQuery, Verified

if TYPE_CHECKING:
    from penstock.adapters.postgres.admin import ShardStatus

_FOLDER = click.Path(path_type=Path)
_SHOWN = 50


@command()
async def verify(reading: EngineApi, json: bool) -> int:
    """Check every job's record against its log.

    Replays each job's log against the table of its lifecycle, and compares the outcome with the
    record. Works without a running engine.
    """
    start = time.monotonic()
    verified = await reading.verify()
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
    lines.append(f"{read}: {verdict if found else 'every record matches its log'}")
    return "\n".join(lines)


@command()
@options("--older-than DURATION=7d  Delete what ended longer ago than this.")
async def prune(api: EngineApi, older_than: float, json: bool) -> None:
    """Delete jobs that ended long ago.

    Also deletes their history, their output and unreferenced payloads.
    """
    cleaned = await api.prune(older_than)
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


# -- PostgreSQL --------------------------------------------------------------------


@click.group(cls=Commands)
def db() -> None:
    """Show, migrate, verify and fill the engine's PostgreSQL database."""


def _url(engine: EngineRef, url: str | None) -> str:
    found = url or engine.settings().store
    if not found:
        raise click.UsageError(
            "no database: name it as postgresql://user@host/database, or set store"
        )
    return found


@db.command()
async def status(engine: EngineRef, url: str | None, json: bool) -> None:
    """Show the schema's version, the owner, sizes and replicas."""
    from penstock.app.databases import database_status

    found = await database_status(_url(engine, url))
    if json:
        print_json(found)
        return
    rows = [("PostgreSQL", found.server)]
    if found.version is None:
        rows.append((f"schema {found.schema}", "nothing yet: 'penstock db migrate' creates it"))
    elif found.version < found.known:
        behind = f"version {found.version}; run 'penstock db migrate' for {found.known}"
        rows.append((f"schema {found.schema}", behind))
    else:
        owner = found.owner or "none"
        rows += [
            (f"schema {found.schema}", f"version {found.version}, up to date"),
            ("owner", owner if found.owned else f"none now (last: {owner})"),
            ("stand by", ", ".join(found.standbys) or "none"),
            ("jobs", f"{found.open_jobs:,} open, about {found.ended_jobs:,} ended"),
            ("size", f"{size(found.bytes)} in {plural(found.partitions, 'partition')}"),
            *((f"shard {one.number}", _shard(one)) for one in found.shards),
            ("inbox", f"{found.inbox} waiting, {found.refused} refused"),
            ("replicas", ", ".join(found.replicas) or "none"),
            (
                "failover",
                "loses no acknowledged job"
                if found.synchronous
                else "may lose the last jobs: no synchronous replica",
            ),
        ]
    emit(facts(rows))


def _shard(one: ShardStatus) -> str:
    owner = one.owner if one.owned else f"no owner now (last: {one.owner or 'none'})"
    return f"{owner}; {one.open_jobs:,} open; schema {one.schema}"


@db.command()
@options("--shards 1..64  Make a new database with so many shards; their number never changes.")
async def migrate(engine: EngineRef, url: str | None, shards: int | None, json: bool) -> None:
    """Bring the schema up to date, or create it.

    Engines of the version before may keep running.
    """
    from penstock.app.databases import migrate_database

    applied = await migrate_database(_url(engine, url), shards)
    text = f"applied {plural(applied, 'migration')}" if applied else "up to date"
    print_done(json, {"applied": applied}, text)


@db.command()
async def copy(engine: EngineRef, url: str, json: bool) -> None:
    """Copy the jobs of a SQLite engine to PostgreSQL.

    It is the engine of the data directory, and must be stopped. Nothing is changed there, and blobs
    stay there. Start the engine with --store URL afterwards.
    """
    from penstock.app.databases import copy_to_postgres

    copied = await copy_to_postgres(engine.settings(), url)
    jobs = plural(copied.get("job", 0) + copied.get("done", 0), "job")
    pages = plural(copied.get("journal", 0), "journal page")
    print_done(json, copied, f"copied {jobs} and {pages}")


db.add_command(shallow(verify))


# -- the audit log -----------------------------------------------------------------


@command()
@options(
    """
    --who NAME as principal  By this principal.
    --action GLOB            Such as job.cancel or key.*.
    --subject JOB|NAME       With this subject.
    --tenant TENANT          By keys of this tenant.
    -n, --limit 1..=50       Maximum number of results.
    """
)
async def audit(api: EngineApi, before: int | None, form: Form, **said: Any) -> None:
    """Show the audit log: who did what, newest first.

    Includes refused actions.
    """
    query = AuditQuery(before=before, **said)
    found = await api.audit.read(query)
    more = f"--before {found[-1].n}" if len(found) == query.limit else ""
    row = partial(audit_row, now=time.time())
    print_list(form, found, row, empty="no such entries", name=lambda one: one.subject, more=more)


def audit_row(entry: AuditEntry, now: float) -> Row:
    return {
        "TIME": moment(entry.at, now),
        "WHO": entry.principal,
        "ACTION": Whole(entry.action),
        "SUBJECT": entry.subject,
        "OUTCOME": styled("" if entry.outcome == "done" else "refused", entry.outcome),
        "DETAIL": entry.detail,
    }
