"""The file of jobs: its mark, its migrations, its named statements."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import apsw

from penstock.adapters.sqlite import database, rows, upgrade
from penstock.adapters.sqlite.database import Schema, read_migrations, read_queries
from penstock.lifecycles.canonical import HELD, JobState
from penstock.ports.store import Durability

APPLICATION_ID = 0x50454E53  # "PENS": how we know a file to be ours


def migrations() -> list[str]:
    """The numbered migration files, in order, with the lifecycle's rules filled in."""
    return read_migrations("penstock.adapters.sqlite", _rules())


JOBS = Schema(
    APPLICATION_ID,
    lambda: migrations(),  # looked up late: tests replace it
    {3: upgrade.convert},
)


def open_writer(path: Path, durability: Durability) -> apsw.Connection:
    return database.open_writer(path, durability, JOBS)


def open_reader(path: Path) -> apsw.Connection:
    return database.open_reader(path, JOBS)


@cache
def load_queries() -> dict[str, str]:
    fill = {"job": rows.COLUMNS, "first_final": str(rows.FIRST_FINAL)}
    return read_queries("penstock.adapters.sqlite", fill)


def _rules() -> dict[str, str]:
    codes = rows.STATE_CODES
    return {
        "states": ", ".join(f"({code}, '{state}')" for state, code in codes.items()),
        "last_state": str(max(codes.values())),
        "first_final": str(rows.FIRST_FINAL),
        "scheduled": str(codes[JobState.SCHEDULED]),
        "succeeded": str(codes[JobState.SUCCEEDED]),
        "dead": ", ".join(map(str, rows.DEAD)),
        "held": ", ".join(sorted(str(codes[state]) for state in HELD)),
    }
