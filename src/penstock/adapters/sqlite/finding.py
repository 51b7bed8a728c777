"""How a JobQuery is answered: where to look, and what is left to check.

A page is read from indexes whose jobs come in the order asked for, or merged from several. So
it costs what it holds, however many jobs are stored. That is so for `tenant`, `topic` and both
together, `states` of open jobs or of those that ended in trouble, `dead`,
`awaiting_approval`, `schedule`, `workflow_id`, `parent_job_id`, `child_of`, `first_try`,
`idempotency_key` and none of them, from any `before` or `since`. Every other condition is
checked job by job, and to fill a page with what is rare may mean to read all jobs, in a thread.
For `error`, only a number of jobs is read: `MAX_SEARCHED` of each state.

A job and its retries are one in a listing: its newest try. Indexes of open jobs and of those that
ended in trouble have nothing else; elsewhere the tries that were retried are passed over, in a
thread, so a page also costs what lies between its jobs.

By tenant and by topic there are no indexes but late lists: tables that have every job up to the
mark 'listed'. Newer jobs, a few thousand at most, are looked through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from heapq import merge
from itertools import islice

import apsw
import msgspec
from msgspec import Struct

from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports import rows
from penstock.ports.query import matches
from penstock.ports.rows import DEAD, FIRST_FINAL, STATE_CODES
from penstock.ports.store import MAX_SEARCHED, AuditQuery, JobQuery

Term = tuple[str, tuple[object, ...]]
"""A condition, and the values in it. Only fixed text goes into the condition."""

_SHORT = 200
"""A page up to this long is read in the caller's own thread, if it is read from an index."""
_MOST_SKIPPED = 2000
"""The same for jobs that are to be left out."""
_MOST_AT_ONCE = 1000
_MOST_TOPICS = 200
"""Topics that fit a glob up to which their lists are merged."""
_OPEN = frozenset(code for code in STATE_CODES.values() if code < FIRST_FINAL)
_SUCCEEDED = STATE_CODES[JobState.SUCCEEDED]
_TROUBLE = frozenset(STATE_CODES.values()) - _OPEN - {_SUCCEEDED}
_WILD = frozenset("*?[")
_LAST_SEQ = (1 << 63) - 1
_encode = msgspec.msgpack.Encoder().encode


Stream = Callable[[apsw.Connection], Iterator[int]]
"""Reads the `seq`s of jobs in the order asked for."""


class _Plan(Struct, frozen=True):
    """Where jobs are looked for."""

    sees_to: frozenset[str]
    """The names of the conditions that need not be checked of each."""
    straight: tuple[str, tuple[Term, ...]] | None = None
    """An index of the table of jobs, and the conditions that pick a range of it."""
    streams: tuple[Stream, ...] = ()
    """Without such an index: what is to be merged."""
    is_quick: bool = True
    """It finds a page at once, however many jobs there are."""


def is_short(query: JobQuery, skip: Collection[int]) -> bool:
    """Whether it is soon done, however many jobs there are."""
    if query.limit > _SHORT or len(skip) > _MOST_SKIPPED or _needs_decoding(query):
        return False
    terms = _terms(query)
    plan = _choose(query, terms)
    # What an index finds is mostly of one tenant: to check that takes no time.
    quick = {"tenant"} if plan.straight is not None and plan.sees_to else set()
    return plan.is_quick and terms.keys() <= plan.sees_to | quick


def find(query: JobQuery, skip: Collection[int], db: apsw.Connection) -> list[Job]:
    """The page. What it reads must be one state of the file."""
    terms = _terms(query)
    plan = _choose(query, terms)
    left = tuple(term for name, term in terms.items() if name not in plan.sees_to)
    if plan.straight is not None:
        index, found = plan.straight
        read = db.execute(*_select(query, rows.COLUMNS, index, (*found, *left)))
        jobs: Iterator[Job] = (rows.read_job(row) for row in read if row[0] not in skip)
    else:
        seqs = merge(*(read(db) for read in plan.streams), reverse=not query.oldest_first)
        wanted = (seq for seq in seqs if seq not in skip)
        jobs = map(rows.read_job, _rows(wanted, left, min(query.limit, _SHORT), db))
    if _needs_decoding(query):
        jobs = (job for job in jobs if matches(query, job))
    return list(islice(jobs, max(query.limit, 0)))


def _rows(
    seqs: Iterator[int], left: Iterable[Term], size: int, db: apsw.Connection
) -> Iterator[rows.Row]:
    """The rows with these numbers that pass what is left to check."""
    checks = "".join(f" AND {sql}" for sql, _ in left)
    values = tuple(value for _, bound in left for value in bound)
    sql = f"SELECT {rows.COLUMNS} FROM job WHERE seq = ?{checks}"
    while some := list(islice(seqs, size)):
        # To the end: a cursor that has statements left can't be given up.
        yield from db.executemany(sql, [(seq, *values) for seq in some]).fetchall()
        size = min(2 * size, _MOST_AT_ONCE)


# -- conditions -------------------------------------------------------------------


_EXACT = ("tenant", "parent_job_id", "child_of", "workflow_id", "idempotency_key", "schedule")


def _terms(query: JobQuery) -> dict[str, Term]:
    """The conditions by name, but for the place of the page."""
    terms: dict[str, Term] = {}
    for column, pattern in (("job_id", query.job_id), ("topic", query.topic)):
        if pattern is None:
            continue
        if _is_wild(pattern):
            terms[column] = (f"{column} GLOB ?", (pattern.replace("[!", "[^"),))
        else:
            terms[f"exact_{column}"] = (f"{column} = ?", (pattern,))
    if query.states:
        codes = _codes(query)
        terms["states"] = (f"state IN ({', '.join('?' * len(codes))})", tuple(codes))
    for name in _EXACT:
        if (value := getattr(query, name)) is not None:
            terms[name] = (f"{name} = ?", (value,))
    if (first := query.first_try) is not None:
        terms["first_try"] = ("ifnull(first_try, job_id) = ?", (first,))
    if query.awaiting_approval is not None:
        terms["parked"] = (f"parked IS {'NOT ' if query.awaiting_approval else ''}NULL", ())
    if query.dead:
        terms["dead"] = (f"state IN {DEAD} AND successor IS NULL", ())
    if query.folded:
        terms["newest"] = ("successor IS NULL", ())
    # Of what is in the encoded request only: it saves decoding what can't match.
    for key, value in query.labels.items():
        terms[f"label {key}"] = ("instr(request, ?) > 0", (_encode(key) + _encode(value),))
    if query.principal:
        has = _encode("principal") + _encode(query.principal)
        terms["principal"] = ("instr(request, ?) > 0", (has,))
    if query.error is not None:
        within = "instr(lower(CAST(record AS TEXT)), lower(?)) > 0"
        terms["error"] = (within, (query.error,))
    if query.accepted_from is not None:
        terms["accepted_from"] = ("accepted_at >= ?", (query.accepted_from,))
    if query.accepted_to is not None:
        terms["accepted_to"] = ("accepted_at < ?", (query.accepted_to,))
    return terms


def _needs_decoding(query: JobQuery) -> bool:
    """Whether the columns can't tell for sure."""
    return bool(query.labels) or query.principal is not None or query.error is not None


def _codes(query: JobQuery) -> list[int]:
    return [STATE_CODES[state] for state in query.states]


def _is_wild(pattern: str) -> bool:
    """Whether a glob can match anything but itself."""
    return not _WILD.isdisjoint(pattern)


# -- where to look ----------------------------------------------------------------

_INDEXES = {
    "exact_job_id": "sqlite_autoindex_job_1",
    "workflow_id": "job_workflow",
    "parent_job_id": "job_parent",
    "child_of": "job_child",
    "idempotency_key": "job_key",
    "schedule": "job_schedule",
}
_ALL = "job NOT INDEXED"
_NOT_LISTED: Term = ("seq > (SELECT value FROM mark WHERE name = 'listed')", ())


def _choose(query: JobQuery, terms: dict[str, Term]) -> _Plan:
    for name, index in _INDEXES.items():
        if name in terms:
            found = [name, "tenant"] if name == "idempotency_key" and query.tenant else [name]
            chosen = tuple(terms[one] for one in found)
            return _Plan(frozenset(found), (f"job INDEXED BY {index}", chosen))
    if (first := query.first_try) is not None:
        retries = _range(query, "job INDEXED BY job_try", ("first_try = ?", (first,)))
        itself: Term = ("job_id = ? AND first_try IS NULL", (first,))
        one = _range(query, "job INDEXED BY sqlite_autoindex_job_1", itself)
        return _Plan(frozenset({"first_try"}), streams=(retries, one))
    if query.awaiting_approval:
        parked = ("job INDEXED BY job_parked", (terms["parked"],))
        return _Plan(frozenset({"parked", "newest"}), parked)
    alone = [1] if query.folded else [0, 1]
    codes = set(_codes(query))
    if query.error is not None:
        streams = _searched(query, terms, (codes or _TROUBLE) & _TROUBLE, alone)
        return _Plan(frozenset(terms), streams=streams)
    if query.dead:
        return _Plan(frozenset({"dead", "newest", "tenant"}), streams=_trouble(query, DEAD, [1]))
    if codes:
        if codes <= _OPEN:
            seen = frozenset({"states", "newest"} if codes == _OPEN else {"newest"})
            return _Plan(seen, ("job INDEXED BY job_open", (_IS_OPEN,)))
        if codes <= _TROUBLE:
            streams = _trouble(query, codes, alone)
            return _Plan(frozenset({"states", "newest", "tenant"}), streams=streams)
        if codes <= _TROUBLE | _OPEN:
            streams = _trouble(query, codes & _TROUBLE, alone)
            is_open = _range(query, "job INDEXED BY job_open", _IS_OPEN)
            return _Plan(frozenset({"newest"}), streams=(*streams, is_open))
    if "job_id" in terms:
        scan = _range(query, "job INDEXED BY sqlite_autoindex_job_1", terms["job_id"])
        return _Plan(frozenset({"job_id"}), streams=(scan,), is_quick=False)
    return _by_list(query, terms)


_IS_OPEN: Term = (f"state < {FIRST_FINAL}", ())


def _trouble(query: JobQuery, codes: Iterable[int], alone: Iterable[int]) -> tuple[Stream, ...]:
    """Jobs that ended in these states, each with or without a successor."""
    return tuple(_range(query, index, *found) for index, found in _ends(query, codes, alone))


def _ends(
    query: JobQuery, codes: Iterable[int], alone: Iterable[int]
) -> Iterator[tuple[str, list[Term]]]:
    """The index, and the conditions that pick a range of it, for each of these states."""
    index, of_tenant = "job INDEXED BY job_trouble", []
    if query.tenant is not None:
        index, of_tenant = f"{index}_tenant", [("tenant = ?", (query.tenant,))]
    # The first condition is word for word what the index says, or it would not be used.
    state = f"state > {_SUCCEEDED} AND state = ? AND (successor IS NULL) = ?"
    for code in codes:
        for one in alone:
            yield index, [*of_tenant, (state, (code, one))]


def _searched(
    query: JobQuery, terms: dict[str, Term], codes: Iterable[int], alone: Iterable[int]
) -> tuple[Stream, ...]:
    """The same with a text in their errors, without a step of Python for each that is looked at."""
    has, text = terms["error"]
    others = [term for name, term in terms.items() if name != "error"]

    def stream(index: str, found: list[Term]) -> Stream:
        inner, values = _select(query, "seq, record", index, [*found, *others])
        order = "" if query.oldest_first else "DESC"
        sql = f"SELECT seq FROM ({inner} LIMIT {MAX_SEARCHED}) WHERE {has} ORDER BY seq {order}"
        return lambda db: (row[0] for row in db.execute(sql, (*values, *text)))

    return tuple(stream(index, found) for index, found in _ends(query, codes, alone))


def _by_list(query: JobQuery, terms: dict[str, Term]) -> _Plan:
    """From the late lists, and from the newest jobs, which are not in them yet."""
    if "tenant" in terms and "exact_topic" in terms:
        seen = ["tenant", "exact_topic"]
        streams: tuple[Stream, ...] = (partial(_by_both, query),)
    elif "tenant" in terms:
        seen = ["tenant"]
        streams = (_range(query, "job_by_tenant", terms["tenant"]),)
    elif "exact_topic" in terms:
        seen = ["exact_topic"]
        streams = (_range(query, "job_by_topic", terms["exact_topic"]),)
    elif "topic" in terms:
        seen = ["topic"]
        streams = (partial(_by_topics, query, terms["topic"]),)
    else:
        return _Plan(frozenset(), (_ALL, ()))
    newest = _range(query, _ALL, _NOT_LISTED, *(terms[name] for name in seen))
    # Lists of two kinds, or of many topics, may have to be read far.
    is_quick = seen in (["tenant"], ["exact_topic"])
    return _Plan(frozenset(seen), streams=(*streams, newest), is_quick=is_quick)


# -- streams ----------------------------------------------------------------------


def _range(query: JobQuery, index: str, *found: Term) -> Stream:
    """What an index or a list has in order."""

    def read(db: apsw.Connection) -> Iterator[int]:
        return (row[0] for row in db.execute(*_select(query, "seq", index, found)))

    return read


def _by_both(query: JobQuery, db: apsw.Connection) -> Iterator[int]:
    """What is in a tenant's list and in a topic's: from each, leap to where the other is."""
    step, compare, order = (1, ">=", "") if query.oldest_first else (-1, "<=", "DESC")
    sql = f"SELECT seq FROM {{}} WHERE {{}} = ? AND seq {compare} ? ORDER BY seq {order} LIMIT 1"
    lists = (
        (sql.format("job_by_tenant", "tenant"), query.tenant),
        (sql.format("job_by_topic", "topic"), query.topic),
    )
    low = 0 if query.since is None else query.since + 1
    high = _LAST_SEQ if query.before is None else query.before - 1
    at, agreed = (low if query.oldest_first else high), 0
    while low <= at <= high:
        for each, name in lists:
            found = db.execute(each, (name, at)).get
            if found is None:
                return
            agreed = agreed + 1 if found == at else 1
            at = found
        if agreed > 1 and low <= at <= high:
            yield at
            at, agreed = at + step, 0


def _by_topics(query: JobQuery, fits: Term, db: apsw.Connection) -> Iterator[int]:
    """The lists of all topics that fit a glob; all jobs, if those are too many."""
    assert query.topic is not None
    topics: list[str] = []
    topic: str | None = ""
    sql = "SELECT topic FROM job_by_topic WHERE topic > ? ORDER BY topic LIMIT 1"
    while (topic := db.execute(sql, (topic,)).get) is not None:
        if fnmatchcase(topic, query.topic):
            topics.append(topic)
    if len(topics) > _MOST_TOPICS:
        listed: Term = (_NOT_LISTED[0].replace(">", "<="), ())
        return _range(query, _ALL, listed, fits)(db)
    streams = [_range(query, "job_by_topic", ("topic = ?", (each,)))(db) for each in topics]
    return iter(merge(*streams, reverse=not query.oldest_first))


def _select(query: JobQuery, columns: str, index: str, found: Iterable[Term]) -> Term:
    """The statement and its values; only fixed text goes into the statement."""
    terms = [*found]
    if query.before is not None:
        terms.append(("seq < ?", (query.before,)))
    if query.since is not None:
        terms.append(("seq > ?", (query.since,)))
    clause = f" WHERE {' AND '.join(sql for sql, _ in terms)}" if terms else ""
    order = "seq" if query.oldest_first else "seq DESC"
    if query.by_step:
        order = "step_index, seq"
    sql = f"SELECT {columns} FROM {index}{clause} ORDER BY {order}"
    return sql, tuple(value for _, bound in terms for value in bound)


def audit_sql(query: AuditQuery) -> Term:
    """The statement and its values; only fixed text goes into the statement."""
    terms = [
        ("principal = ?", query.principal),
        ("action GLOB ?", None if query.action is None else query.action.replace("[!", "[^")),
        ("subject = ?", query.subject),
        ("tenant = ?", query.tenant),
        ("n < ?", query.before),
    ]
    asked = [(term, value) for term, value in terms if value is not None]
    clause = f" WHERE {' AND '.join(term for term, _ in asked)}" if asked else ""
    sql = (
        "SELECT at, principal, action, subject, tenant, detail, outcome, n"
        f" FROM audit{clause} ORDER BY n DESC LIMIT ?"
    )
    return sql, (*(value for _, value in asked), max(query.limit, 0))
