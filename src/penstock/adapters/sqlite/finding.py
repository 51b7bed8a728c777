"""How a JobQuery is answered: from which indexes, and with what left to check.

A page is merged from index ranges whose jobs come in the order asked for, one a state and
tenant, say. So it costs what it holds, however many jobs are stored. That is so for
`tenant`, `states`, `topic`, `parked`, `dead`, `schedule`, `workflow_id`, `parent_job_id`,
`idempotency_key` and none of them, each alone or with a tenant, from any `before` or `since`.
Every other condition, or two of these, is checked job by job, and to fill a page with what is
rare may mean to read all jobs, in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from heapq import merge
from itertools import islice
from typing import Any

from msgspec import Struct

from penstock.adapters.sqlite import rows
from penstock.adapters.sqlite.conditions import Term, is_wild, place, terms_of
from penstock.adapters.sqlite.database import DEAD, STATE_CODES
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import JobQuery

Read = Callable[..., Iterable[rows.Row]]

SHORT = 200
"""A page up to this long, from few ranges, is read in the caller's own thread."""
_FEW_RANGES = 32
_MOST_RANGES = 2000
"""Beyond that it is quicker to look at the jobs one by one."""
_MOST_AT_ONCE = 1000
_FEW_JOBS = 10_000
"""Up to so many jobs in the states asked for are searched for a topic, and not vice versa."""
_ALL = tuple(STATE_CODES.values())


class Search(Struct, frozen=True):
    """Where to look for what a query asks, and what must be checked of each job found."""

    ranges: tuple[Range, ...]
    left: tuple[Term, ...]
    is_short: bool
    """It is soon done, however many jobs there are."""


def plan(query: JobQuery, read: Read) -> Search:
    """Choose the ranges; the tally, which is small, is read for it."""
    terms = terms_of(query)
    ranges, seen_to = _Ranges(query, terms, read).choose()
    left = tuple(term for name, term in terms.items() if name not in seen_to)
    few = query.limit <= SHORT and len(ranges) <= _FEW_RANGES
    return Search(tuple(ranges), left, few and not left and may_be_short(query))


def may_be_short(query: JobQuery) -> bool:
    """Whether it is worth to plan it where others wait."""
    return not (query.labels or is_wild(query.topic) or is_wild(query.job_id))


Range = tuple[str, tuple[Term, ...]]
"""An index, and the conditions that pick a range of it."""


class _Ranges:
    """Picks the index that fits a query best."""

    def __init__(self, query: JobQuery, terms: dict[str, Term], read: Read) -> None:
        self._query, self._terms, self._read = query, terms, read

    def choose(self) -> tuple[list[Range], set[str]]:
        """Ranges that hold all that is sought, and the conditions that they see to."""
        query, terms = self._query, self._terms
        for name, index in _FEW.items():
            if name in terms:
                return [(index, (terms[name],))], {name}
        if query.idempotency_key is not None and query.tenant is not None:
            both = (terms["tenant"], terms["idempotency_key"])
            return [("INDEXED BY job_key", both)], {"tenant", "idempotency_key"}
        if query.parked:
            scheduled = (STATE_CODES[JobState.SCHEDULED],)
            return self._by_tenant("parked", "INDEXED BY job_parked", scheduled)
        if query.dead:
            return self._by_tenant("dead", "INDEXED BY job_dead", DEAD)
        if query.schedule is not None:
            return self._by_tenant("schedule", "INDEXED BY job_schedule", _ALL)
        if query.topic is not None and not (query.states and self._are_few()):
            if "exact_topic" in terms:
                return self._by_tenant("exact_topic", "INDEXED BY job_topic", _ALL)
            if ranges := self._by_topic(query.topic):
                return ranges, {"topic", "tenant"}
        if query.states or query.tenant is not None:
            return [
                ("INDEXED BY job_state", (("state = ?", (state,)), ("tenant = ?", (tenant,))))
                for state, tenant, _ in self._count(_ALL)
            ], {"states", "tenant"}
        return [("NOT INDEXED", ())], set()

    def _by_tenant(
        self, name: str, index: str, states: Sequence[int]
    ) -> tuple[list[Range], set[str]]:
        """One range a tenant, of those that have jobs in such states."""
        tenants = dict.fromkeys(tenant for _, tenant, _ in self._count(states))
        ranges: list[Range] = [
            (index, (self._terms[name], ("tenant = ?", (one,)))) for one in tenants
        ]
        return ranges, {name, "tenant"}

    def _by_topic(self, pattern: str) -> list[Range]:
        """One range a topic and tenant; none if that would be too many."""
        tenants = dict.fromkeys(tenant for _, tenant, _ in self._count(_ALL))
        topics: list[str] = []
        topic = ""
        sql = "SELECT topic FROM job INDEXED BY job_topic WHERE topic > ? ORDER BY topic LIMIT 1"
        while row := next(iter(self._read(sql, (topic,))), None):
            topic = row[0]
            if fnmatchcase(topic, pattern):
                topics.append(topic)
        if len(topics) * len(tenants) > _MOST_RANGES:
            return []
        return [
            ("INDEXED BY job_topic", (("topic = ?", (each,)), ("tenant = ?", (tenant,))))
            for each in topics
            for tenant in tenants
        ]

    def _are_few(self) -> bool:
        counted: int = sum(count for _, _, count in self._count(_ALL))
        return counted < _FEW_JOBS

    def _count(self, states: Sequence[int]) -> list[Any]:
        """State, tenant and number of the jobs in question, as far as the tally tells."""
        query = self._query
        wanted = [STATE_CODES[state] for state in query.states] or _ALL
        codes = json.dumps([code for code in states if code in wanted])
        sql = (
            "SELECT state, tenant, count FROM tally WHERE count > 0"
            " AND state IN (SELECT value FROM json_each(?))"
        )
        if query.tenant is None:
            return list(self._read(sql, (codes,)))
        return list(self._read(f"{sql} AND tenant = ?", (codes, query.tenant)))


_FEW = {
    "exact_id": "INDEXED BY sqlite_autoindex_job_1",
    "job_id": "INDEXED BY sqlite_autoindex_job_1",
    "workflow_id": "INDEXED BY job_workflow",
    "parent_job_id": "INDEXED BY job_parent",
}


def gather(query: JobQuery, search: Search, read: Read) -> list[Job]:
    """The page. What it reads must be one state of the file."""
    if len(search.ranges) == 1:
        found = _straight(query, search, read)
    else:
        found = _merged(query, search, read)
    fitting = (
        job
        for job in map(rows.read_job, found)
        if query.labels.items() <= job.request.labels.items()
    )
    return list(islice(fitting, query.limit))


def _straight(query: JobQuery, search: Search, read: Read) -> Iterable[rows.Row]:
    (one,) = search.ranges
    return read(*_select(rows.job_columns(), query, one, search.left))


def _merged(query: JobQuery, search: Search, read: Read) -> Iterator[rows.Row]:
    """Merge the indexes, and read the jobs by what they say, a few at a time."""
    streams = [(row[0] for row in read(*_select("seq", query, one))) for one in search.ranges]
    seqs = merge(*streams, reverse=not query.oldest_first)
    checks = "".join(f" AND {sql}" for sql, _ in search.left)
    values = tuple(value for _, bound in search.left for value in bound)
    chosen = f"seq IN (SELECT value FROM json_each(?)){checks}"
    sql = f"SELECT {rows.job_columns()} FROM job WHERE {chosen}"
    size = min(query.limit, SHORT)
    while some := list(islice(seqs, size)):
        at_hand = {row[0]: row for row in read(sql, (json.dumps(some), *values))}
        yield from (at_hand[seq] for seq in some if seq in at_hand)
        size = min(2 * size, _MOST_AT_ONCE)


def _select(columns: str, query: JobQuery, one: Range, left: Sequence[Term] = ()) -> Term:
    """The statement and its values; only fixed text goes into the statement."""
    index, found = one
    terms = (*found, *place(query), *left)
    clause = f" WHERE {' AND '.join(sql for sql, _ in terms)}" if terms else ""
    sql = f"SELECT {columns} FROM job {index}{clause} ORDER BY {_order(query)}"
    return sql, tuple(value for _, bound in terms for value in bound)


def _order(query: JobQuery) -> str:
    if query.by_step:
        return "step_index, seq"
    return "seq" if query.oldest_first else "seq DESC"
