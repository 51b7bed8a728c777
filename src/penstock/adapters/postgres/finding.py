"""How a JobQuery is answered: conditions in SQL, and those that need the request decoded here.

Open and ended jobs are two tables. Each is read in the order asked for, through an index if one
fits, so a page costs what it holds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import asyncpg

from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports import rows
from penstock.ports.query import matches
from penstock.ports.rows import DEAD, FIRST_FINAL, STATE_CODES
from penstock.ports.store import MAX_SEARCHED, AuditQuery, JobQuery

_SUCCEEDED = STATE_CODES[JobState.SUCCEEDED]
_BATCH = 200
_MOST = 5000
_EXACT = ("tenant", "parent_job_id", "child_of", "workflow_id", "idempotency_key", "schedule")


class _Terms:
    """Conditions with numbered parameters. Only fixed text goes into the statement."""

    def __init__(self) -> None:
        self.sql: list[str] = []
        self.values: list[Any] = []

    def add(self, sql: str, *values: Any) -> None:
        """`?` stands for the values, in order."""
        for value in values:
            self.values.append(value)
            sql = sql.replace("?", f"${len(self.values)}", 1)
        self.sql.append(sql)

    def clause(self) -> str:
        return f" WHERE {' AND '.join(self.sql)}" if self.sql else ""


async def find(
    query: JobQuery, skip: Collection[int], db: asyncpg.Connection, schema: str
) -> list[Job]:
    """The page. Runs in a transaction."""
    limit = max(query.limit, 0)
    if not limit:
        return []
    terms = _terms(query, skip)
    order = "step_index NULLS FIRST, seq" if query.by_step else "seq"
    order += "" if query.oldest_first or query.by_step else " DESC"
    text = query.error
    decoded = bool(query.labels) or query.principal is not None or text is not None
    codes = {STATE_CODES[state] for state in query.states}
    tables = []
    if not query.dead and text is None and (not codes or min(codes) < FIRST_FINAL):
        tables.append("job")
    if not query.awaiting_approval and (not codes or max(codes) >= FIRST_FINAL):
        tables.append("done")
    columns = f"{rows.COLUMNS}, step_index"
    where, cut, has = terms.clause(), "" if decoded else f" LIMIT {limit}", ""
    if text is not None:
        cut = f" LIMIT {MAX_SEARCHED}"
        terms.values.append(text.encode("utf-8", "surrogatepass"))
        # Bytes as text, so that there are letters: those that are not ASCII are escaped.
        wanted = f"lower(encode(${len(terms.values)}::bytea, 'escape'))"
        has = f" WHERE position({wanted} IN lower(encode(record, 'escape'))) > 0"
    parts = [
        f"(SELECT {columns} FROM {schema}.{name}{where} ORDER BY {order}{cut})" for name in tables
    ]
    if not parts:
        return []
    every = " UNION ALL ".join(parts)
    sql = f"SELECT {rows.COLUMNS} FROM ({every}) AS found{has} ORDER BY {order}"
    if not decoded:
        found = await db.fetch(f"{sql} LIMIT {limit}", *terms.values)
        return [rows.read_job(row) for row in found]
    jobs: list[Job] = []
    async for row in db.cursor(sql, *terms.values, prefetch=min(max(limit, _BATCH), _MOST)):
        job = rows.read_job(row)
        if matches(query, job):
            jobs.append(job)
            if len(jobs) == limit:
                break
    return jobs


def _terms(query: JobQuery, skip: Collection[int]) -> _Terms:
    terms = _Terms()
    for column, pattern in (("job_id", query.job_id), ("topic", query.topic)):
        if pattern is not None:
            _glob(terms, column, pattern)
    if query.states:
        terms.add("state = ANY (?::smallint[])", [STATE_CODES[state] for state in query.states])
    for name in _EXACT:
        if (value := getattr(query, name)) is not None:
            terms.add(f"{name} = ?", value)
    if (first := query.first_try) is not None:
        terms.add("(first_try = ? OR job_id = ? AND first_try IS NULL)", first, first)
    if query.awaiting_approval is not None:
        terms.add(f"parked IS {'NOT ' if query.awaiting_approval else ''}NULL")
    if query.dead:
        terms.add(f"state IN {DEAD} AND successor IS NULL")
    if query.folded:
        terms.add("successor IS NULL")
    if query.error is not None:
        terms.add(f"state > {_SUCCEEDED}")
    # Of what is in the encoded request only: it saves decoding what can't match.
    for key, value in query.labels.items():
        terms.add("position(?::bytea IN request) > 0", rows.encode(key) + rows.encode(value))
    if query.principal:
        has = rows.encode("principal") + rows.encode(query.principal)
        terms.add("position(?::bytea IN request) > 0", has)
    if query.accepted_from is not None:
        terms.add("accepted_at >= ?", query.accepted_from)
    if query.accepted_to is not None:
        terms.add("accepted_at < ?", query.accepted_to)
    if query.before is not None:
        terms.add("seq < ?", query.before)
    if query.since is not None:
        terms.add("seq > ?", query.since)
    if skip:
        terms.add("seq <> ALL (?::bigint[])", [*skip])
    return terms


def _glob(terms: _Terms, column: str, pattern: str) -> None:
    if not any(wild in pattern for wild in "*?["):
        terms.add(f"{column} = ?", pattern)
        return
    head = pattern[: min(pattern.find(wild) % (len(pattern) + 1) for wild in "*?[")]
    terms.add(f'{column} COLLATE "C" ~ ?', _regex(pattern))
    if head:
        terms.add(f"starts_with({column}, ?)", head)


def _regex(glob: str) -> str:
    """A glob as PostgreSQL's regular expressions have it."""
    parts, at = ["^"], 0
    while at < len(glob):
        character = glob[at]
        at += 1
        if character == "*":
            parts.append(".*")
        elif character == "?":
            parts.append(".")
        elif character == "[" and (end := glob.find("]", at + 1 + (glob[at : at + 1] == "!"))) > 0:
            body = glob[at:end].replace("\\", "\\\\")
            parts.append(f"[^{body[1:]}]" if body.startswith("!") else f"[{body}]")
            at = end + 1
        elif character.isalnum() or character == "_" or ord(character) > 127:
            parts.append(character)
        else:
            parts.append("\\" + character)
    return "".join([*parts, "$"])


def audit_sql(query: AuditQuery, schema: str) -> tuple[Any, ...]:
    """The statement and its values."""
    terms = _Terms()
    for name in ("principal", "subject", "tenant"):
        if (value := getattr(query, name)) is not None:
            terms.add(f"{name} = ?", value)
    if query.action is not None:
        _glob(terms, "action", query.action)
    if query.before is not None:
        terms.add("n < ?", query.before)
    sql = f"SELECT n, entry FROM {schema}.audit{terms.clause()} ORDER BY n DESC"
    return f"{sql} LIMIT {max(query.limit, 0)}", *terms.values
