"""The sides of the engine's benchmark, and which of them can be measured here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess

from peers import postgres

PENSTOCK, HUEY_FSYNC, HUEY = "penstock", "huey-fsync", "huey"
PGQUEUER, DRAMATIQ, PROCRASTINATE = "pgqueuer", "dramatiq", "procrastinate"
TASKIQ, OBAN = "taskiq", "oban"

SIDES = {
    PENSTOCK: "Penstock",
    HUEY_FSYNC: "Huey, SQLite, fsync",
    HUEY: "Huey, SQLite, no fsync",
    PGQUEUER: "PgQueuer, PostgreSQL, fsync",
    DRAMATIQ: "Dramatiq, Redis, memory",
    PROCRASTINATE: "Procrastinate, PostgreSQL, fsync",
    TASKIQ: "taskiq, NATS JetStream, fsync",
    OBAN: "Oban, PostgreSQL, fsync",
}
PEERS = (HUEY_FSYNC, HUEY, PGQUEUER, DRAMATIQ)
_PACKAGES = {
    PGQUEUER: ("pgqueuer", "asyncpg"),
    DRAMATIQ: ("dramatiq",),
    PROCRASTINATE: ("procrastinate", "psycopg"),
    TASKIQ: ("taskiq", "taskiq_nats"),
    OBAN: (),  # another interpreter has it
}


def missing(side: str) -> str | None:
    """Why a peer can't be measured here, if so."""
    packages = _PACKAGES.get(side, ("huey",))
    if any(importlib.util.find_spec(name) is None for name in packages):
        return f"{' and '.join(packages)} not installed: 'make bench' installs it"
    if side == DRAMATIQ and shutil.which("redis-server") is None:
        return "there is no redis-server: install the system's package of that name"
    if side in (PGQUEUER, PROCRASTINATE, OBAN) and postgres.programs() is None:
        return postgres.MISSING
    return None


def version(package: str) -> str:
    return importlib.metadata.version(package)


def servers() -> dict[str, str]:
    """The versions of the peers' servers."""
    found = {}
    if (server := shutil.which("redis-server")) is not None:
        said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
        found["redis-server"] = said.stdout.partition("v=")[2].partition(" ")[0]
    if (postgresql := postgres.version()) is not None:
        found["PostgreSQL"] = postgresql
    return found
