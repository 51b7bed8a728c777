"""The conditions of a JobQuery as SQL, each under its name."""

from __future__ import annotations

import msgspec

from penstock.adapters.sqlite.database import DEAD, STATE_CODES
from penstock.ports.store import JobQuery

Term = tuple[str, tuple[object, ...]]
"""A condition, and the values in it. Only fixed text goes into the condition."""

_encode = msgspec.msgpack.Encoder().encode
_WILD = frozenset("*?[")


def terms_of(query: JobQuery) -> dict[str, Term]:
    """All but the place, which is `place`. Labels are only looked for: see `_label`."""
    terms: dict[str, Term] = {}
    if query.job_id is not None:
        terms.update(_glob("job_id", "exact_id", query.job_id))
    if query.states:
        codes = tuple(STATE_CODES[state] for state in query.states)
        terms["states"] = (f"state IN ({', '.join('?' * len(codes))})", codes)
    if query.topic is not None:
        terms.update(_glob("topic", "exact_topic", query.topic))
    for name in (
        "tenant",
        "parent_job_id",
        "workflow_id",
        "idempotency_key",
        "principal",
        "schedule",
    ):
        value = getattr(query, name)
        if value is not None:
            terms[name] = (f"{name} = ?", (value,))
    if query.principal == "":
        terms["principal"] = ("principal IS NULL", ())
    if query.parked is not None:
        terms["parked"] = (f"parked IS {'NOT ' if query.parked else ''}NULL", ())
    if query.dead:
        # Word for word what the index says, or it would not be used.
        codes_of_dead = ", ".join(map(str, DEAD))
        terms["dead"] = (f"state IN ({codes_of_dead}) AND successor IS NULL", ())
    for key, value in query.labels.items():
        terms[f"label {key}"] = _label(key, value)
    if query.accepted_from is not None:
        terms["accepted_from"] = ("accepted_at >= ?", (query.accepted_from,))
    if query.accepted_to is not None:
        terms["accepted_to"] = ("accepted_at < ?", (query.accepted_to,))
    return terms


def place(query: JobQuery) -> list[Term]:
    """Where the page begins."""
    terms: list[Term] = []
    if query.before is not None:
        terms.append(("seq < ?", (query.before,)))
    if query.since is not None:
        terms.append(("seq > ?", (query.since,)))
    return terms


def _label(key: str, value: str) -> Term:
    """A request has these bytes if it has the label; one that has them need not.

    It saves decoding what can't fit.
    """
    return "instr(request, ?) > 0", (_encode(key) + _encode(value),)


def is_wild(pattern: str | None) -> bool:
    """Whether a glob can match anything but itself."""
    return pattern is not None and not _WILD.isdisjoint(pattern)


def _glob(column: str, exact: str, pattern: str) -> dict[str, Term]:
    if not is_wild(pattern):
        return {exact: (f"{column} = ?", (pattern,))}
    return {column: (f"{column} GLOB ?", (pattern.replace("[!", "[^"),))}
