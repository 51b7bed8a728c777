"""A page of container jobs as SQL: which index to walk, newest first, and what to leave out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.lifecycles.container import STORED, ContainerJobState
from penstock.workloads.container.storage.sqlite.schema import FINAL, JOB_COLUMNS
from penstock.workloads.container.store import RecordQuery

_RUNNING = frozenset({ContainerJobState.RUNNING})


class Search(NamedTuple):
    sql: str
    values: tuple[object, ...]
    is_short: bool
    """Whether it reads little more than it finds."""


class _Terms:
    """Conditions and their values, in step. Only fixed text becomes SQL."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.values: list[object] = []

    def add(self, text: str, *values: object) -> None:
        self.texts.append(text)
        self.values.extend(values)

    def page(self, table: str, limit: int) -> tuple[str, list[object]]:
        where = f" WHERE {' AND '.join(self.texts)}" if self.texts else ""
        sql = f"SELECT {JOB_COLUMNS} FROM {table}{where} ORDER BY seq DESC LIMIT ?"
        return sql, [*self.values, limit]


def search_for(query: RecordQuery) -> Search:
    """The statement for a query."""
    states = frozenset(query.states)
    if states >= STORED:
        states = frozenset()
    table = _table(query, states)
    conditions = [query.label, query.image, query.code, states or None]
    is_short = sum(one is not None for one in conditions) <= 1
    if states == _RUNNING and query.label is None:
        is_short = True  # no more of these than may run at once
    if table == "job INDEXED BY job_state":
        parts = [_terms(query, [state]).page(table, query.limit) for state in sorted(states)]
    else:
        parts = [_terms(query, sorted(states)).page(table, query.limit)]
    if len(parts) == 1:
        sql, values = parts[0]
        return Search(sql, tuple(values), is_short)
    # Each state has its own newest; the newest of all are among those.
    union = " UNION ALL ".join(f"SELECT * FROM ({sql})" for sql, _ in parts)
    values = [value for _, part in parts for value in part]
    return Search(f"{union} ORDER BY seq DESC LIMIT ?", (*values, query.limit), is_short)


def _table(query: RecordQuery, states: frozenset[ContainerJobState]) -> str:
    """What is walked: the index that leaves the least to read. Few jobs have not ended."""
    if query.label is not None:
        return "label INDEXED BY label_value CROSS JOIN job USING (seq)"
    if states and not states & FINAL:
        return "job INDEXED BY job_state"
    if query.code is not None:
        return "job INDEXED BY job_error"
    if query.image is not None:
        return "job INDEXED BY job_image"
    return "job INDEXED BY job_state" if states else "job"


def _terms(query: RecordQuery, states: Iterable[ContainerJobState]) -> _Terms:
    terms = _Terms()
    if query.label is not None:
        terms.add("name = ? AND value = ?", *query.label)
    if query.code is not None:
        terms.add("error_code = ?", query.code)
    if query.image is not None:
        terms.add("image = ?", query.image)
    if words := list(states):
        terms.add(f"state IN ({', '.join('?' * len(words))})", *words)
    if query.before is not None:
        terms.add("seq < ?", query.before)
    return terms
