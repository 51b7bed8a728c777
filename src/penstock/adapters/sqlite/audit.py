"""An AuditQuery as SQL."""

from __future__ import annotations

from penstock.ports.store import AuditQuery


def audit_sql(query: AuditQuery) -> tuple[str, tuple[object, ...]]:
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
