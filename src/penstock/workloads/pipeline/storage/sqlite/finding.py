"""A page of runs as SQL: which index to walk, newest first, and what to leave out."""

from __future__ import annotations

from typing import NamedTuple

from penstock.adapters.sqlite.database import one_of
from penstock.lifecycles.pipeline import ACTIVE
from penstock.workloads.pipeline.storage.sqlite.schema import RUN_COLUMNS, TROUBLE
from penstock.workloads.pipeline.store import RunQuery


class Search(NamedTuple):
    sql: str
    values: tuple[object, ...]
    is_short: bool
    """Whether it reads little more than it finds."""


def search_for(query: RunQuery) -> Search:
    """The statement for a query. Only fixed text goes into it; the rest are values."""
    terms: list[str] = []
    values: list[object] = []
    for name in ("retry_of", "pipeline", "tenant"):
        value = getattr(query, name)
        if value is not None:
            terms.append(f"{name} = ?")
            values.append(value)
    index, served = _index(query)
    if query.statuses:
        terms.append(f"status IN ({', '.join('?' * len(query.statuses))})")
        values.extend(query.statuses)
        # Word for word what the index says, or it could not be used.
        if index == "run_open":
            terms.append("finished_at IS NULL")
        elif index == "run_trouble":
            terms.append(f"({one_of('status', TROUBLE)})")
    conditions = len(terms)
    if query.before is not None:
        terms.append("(created_at, id) < (?, ?)")
        values.extend(query.before)
    where = f" WHERE {' AND '.join(terms)}" if terms else ""
    sql = (
        f"SELECT {RUN_COLUMNS} FROM run INDEXED BY {index}{where}"
        " ORDER BY created_at DESC, id DESC LIMIT ?"
    )
    return Search(sql, (*values, query.limit), conditions <= served)


def _index(query: RunQuery) -> tuple[str, int]:
    """The index that leaves the least to read, and how many conditions it sees to.

    Few runs are unfinished and few retry another, so all conditions on them are cheap.
    """
    if query.retry_of is not None:
        return "run_retry", 9
    if query.statuses and ACTIVE.issuperset(query.statuses):
        return "run_open", 9
    if query.statuses and TROUBLE.issuperset(query.statuses):
        return "run_trouble", 2
    if query.pipeline is not None:
        return "run_pipeline", 1
    if query.tenant is not None:
        return "run_tenant", 1
    return "run_created", 0
