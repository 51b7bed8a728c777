"""`penstock db`: the PostgreSQL database of an engine."""

from __future__ import annotations

from copy import copy as shallow

import click

from penstock.cli.data import verify as verify_store
from penstock.cli.engine import EngineRef, run
from penstock.cli.formats import plural, size
from penstock.cli.groups import Commands
from penstock.cli.output import emit, facts, print_done, print_json


@click.group(cls=Commands)
def db() -> None:
    """Show, migrate, verify and fill the engine's PostgreSQL database."""


_URL = click.argument("url", required=False, metavar="[URL]")


def _url(engine: EngineRef, url: str | None) -> str:
    found = url or engine.settings().store
    if not found:
        raise click.UsageError(
            "no database: name it as postgresql://user@host/database, or set store"
        )
    return found


@db.command()
@_URL
def status(engine: EngineRef, url: str | None, json: bool) -> None:
    """Show the schema's version, the owner, sizes and replicas."""
    from penstock.app.databases import database_status

    found = run(database_status(_url(engine, url)))
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


@db.command()
@_URL
def migrate(engine: EngineRef, url: str | None, json: bool) -> None:
    """Bring the schema up to date.

    Engines of the version before may keep running.
    """
    from penstock.app.databases import migrate_database

    applied = run(migrate_database(_url(engine, url)))
    text = f"applied {plural(applied, 'migration')}" if applied else "up to date"
    print_done(json, {"applied": applied}, text)


@db.command()
def copy(engine: EngineRef, url: str, json: bool) -> None:
    """Copy the jobs of a SQLite engine to PostgreSQL.

    It is the engine of the data directory, and must be stopped. Nothing is changed there, and blobs
    stay there. Start the engine with --store URL afterwards.
    """
    from penstock.app.databases import copy_to_postgres

    copied = run(copy_to_postgres(engine.settings(), url))
    jobs = plural(copied.get("job", 0) + copied.get("done", 0), "job")
    pages = plural(copied.get("journal", 0), "journal page")
    print_done(json, copied, f"copied {jobs} and {pages}")


db.add_command(shallow(verify_store))
