"""A JobQuery as SQL."""

from __future__ import annotations

from penstock.adapters.sqlite.database import STATE_CODES
from penstock.adapters.sqlite.rows import job_columns
from penstock.ports.store import JobQuery


def find_sql(query: JobQuery) -> tuple[str, tuple[object, ...]]:
    """The statement and its values; only fixed text goes into the statement."""
    conditions: list[str] = []
    values: list[object] = []

    def where(condition: str, *bound: object) -> None:
        conditions.append(condition)
        values.extend(bound)

    if query.job_id is not None:
        where("job_id GLOB ?", query.job_id)
    if query.states:
        where(
            f"state IN ({', '.join('?' * len(query.states))})",
            *(STATE_CODES[state] for state in query.states),
        )
    if query.topic is not None:
        where("topic GLOB ?", query.topic.replace("[!", "[^"))
    if query.tenant is not None:
        where("tenant = ?", query.tenant)
    if query.parent_job_id is not None:
        where("parent_job_id = ?", query.parent_job_id)
    if query.workflow_id is not None:
        where("workflow_id = ?", query.workflow_id)
    if query.idempotency_key is not None:
        where("idempotency_key = ?", query.idempotency_key)
    if query.before is not None:
        where("seq < ?", query.before)

    order = "seq" if query.oldest_first else "seq DESC"
    if query.workflow_id is not None:
        order = "step_index, seq"
    clause = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    sql = f"SELECT {job_columns()} FROM job{clause} ORDER BY {order}"
    return sql, tuple(values)
