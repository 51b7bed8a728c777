"""How a JobQuery is answered: from which indexes, and with what left to check.

A page is merged from *streams*: index ranges whose jobs come in the order asked for, one a
state and tenant, say. So it costs what it holds, however many jobs are stored. That is so for
`tenant`, `states`, `topic` without wildcards, `parked`, `dead`, `schedule`, `workflow_id`,
`parent_job_id`, `idempotency_key` and none of them, each alone or with a tenant, from any
`before` or `since`. Every other condition is checked job by job, and to fill a page with what
is rare may mean to read all jobs, in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from penstock.adapters.sqlite import rows
from penstock.adapters.sqlite.conditions import Term, place, terms_of
from penstock.adapters.sqlite.database import DEAD, STATE_CODES
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import JobQuery

Read = Callable[..., Iterable[rows.Row]]

SHORT = 200
"""A page up to this long, from few streams, is read in the caller's own thread."""
_FEW_STREAMS = 32
_FEW_JOBS = 10_000
"""Up to so many jobs in the states asked for are searched for a topic, and not vice versa."""
_ALL = tuple(STATE_CODES.values())


class Stream(Struct, frozen=True):
    """One index range: the `seq`s in it, in order."""

    sql: str
    values: tuple[object, ...]


class Search(Struct, frozen=True):
    """Where to look for what a query asks, and what must be checked of each job found."""

    streams: tuple[Stream, ...]
    left: tuple[Term, ...]
    is_short: bool
    """It is soon done, however many jobs there are."""


def plan(query: JobQuery, read: Read) -> Search:
    """Choose the streams; the tally, which is small, is read for it."""
    terms = terms_of(query)
    ranges, seen_to = _Ranges(query, terms, read).choose()
    left = tuple(term for name, term in terms.items() if name not in seen_to)
    checks = bool(left or query.labels)
    most = -1 if checks else query.limit
    streams = tuple(_stream(query, index, found, most) for index, found in ranges)
    few = query.limit <= SHORT and len(streams) <= _FEW_STREAMS
    return Search(streams, left, few and not checks and "job_id" not in seen_to)


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
        if "exact_topic" in terms and not (query.states and self._are_few()):
            return self._by_tenant("exact_topic", "INDEXED BY job_topic", _ALL)
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

    def _are_few(self) -> bool:
        counted: int = sum(count for _, _, count in self._count(_ALL))
        return counted < _FEW_JOBS

    def _count(self, states: Sequence[int]) -> list[Any]:
        """State, tenant and number of the jobs in question, as far as the tally tells."""
        query = self._query
        wanted = [STATE_CODES[state] for state in query.states] or _ALL
        codes = msgspec.json.encode([code for code in states if code in wanted]).decode()
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


def _stream(query: JobQuery, index: str, found: tuple[Term, ...], most: int) -> Stream:
    terms = (*found, *place(query))
    clause = f" WHERE {' AND '.join(sql for sql, _ in terms)}" if terms else ""
    sql = f"SELECT seq FROM job {index}{clause} ORDER BY {_order(query)} LIMIT ?"
    return Stream(sql, (*(value for _, bound in terms for value in bound), most))


def _order(query: JobQuery) -> str:
    if query.workflow_id is not None:
        return "step_index, seq"
    return "seq" if query.oldest_first else "seq DESC"


def gather(query: JobQuery, search: Search, read: Read) -> list[Job]:
    """The page. Must see one state of the file: it reads the indexes first, then the jobs."""
    found: list[Job] = []
    if not search.streams:
        return found
    streams = [(row[0] for row in read(each.sql, each.values)) for each in search.streams]
    seqs = iter(merge(*streams, reverse=not query.oldest_first) if len(streams) > 1 else streams[0])
    checks = "".join(f" AND {sql}" for sql, _ in search.left)
    values = tuple(value for _, bound in search.left for value in bound)
    sql = (
        f"SELECT {rows.job_columns()} FROM job"
        f" WHERE seq IN (SELECT value FROM json_each(?)){checks}"
    )
    size = min(query.limit, SHORT)
    while len(found) < query.limit and (some := list(islice(seqs, size))):
        at_hand = {row[0]: row for row in read(sql, (msgspec.json.encode(some).decode(), *values))}
        for seq in some:
            if seq in at_hand:
                job = rows.read_job(at_hand[seq])
                if query.labels.items() <= job.request.labels.items():
                    found.append(job)
        size = 1000
    return found[: query.limit]
