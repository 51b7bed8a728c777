"""The conditions of a safety rule, each made ready to be asked often.

A condition that looks at something the job does not say is not met, not even by `*`; only
a cost that is not said counts as the highest one, so that saying nothing wins nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate
from typing import NamedTuple

from penstock.core.job import JobRequest, Priority

Glimpse = Callable[[JobRequest], str | None]
"""Reads one field; None or empty if the job does not say it."""

_SHOWN = 200
NOTHING = "nothing"
"""What was found where there is nothing."""


class Check(NamedTuple):
    """One condition, and what to say of it."""

    field: str
    wanted: str
    passes: Callable[[JobRequest], bool]
    found: Callable[[JobRequest], str]


def one_of(field: str, globs: Sequence[str], read: Glimpse) -> Check:
    """The field matches one of the globs."""
    matches = matcher(globs)

    def passes(request: JobRequest) -> bool:
        value = read(request)
        return matches(value) if value else False

    return Check(field, listed(globs), passes, lambda request: read(request) or NOTHING)


def some_risk_tag(globs: Sequence[str]) -> Check:
    """One of the job's risk tags matches one of the globs."""
    matches = matcher(globs)
    return Check(
        "risk_tags",
        listed(globs),
        lambda request: any(map(matches, request.risk_tags)),
        lambda request: _shown(request.risk_tags),
    )


def has_label(name: str, globs: Sequence[str]) -> Check:
    """The label is there, and its value matches one of the globs."""
    matches = matcher(globs)

    def passes(request: JobRequest) -> bool:
        value = request.labels.get(name)
        return value is not None and matches(value)

    def found(request: JobRequest) -> str:
        value = request.labels.get(name)
        return NOTHING if value is None else _shown([value or '""'])

    return Check(f"labels.{name}", listed(globs), passes, found)


def has_env_key(glob: str) -> Check:
    """A variable with such a name is there; its value is never looked at."""
    matches = matcher([glob])
    return Check(
        "env_keys",
        glob,
        lambda request: any(map(matches, request.env)),
        lambda request: _shown(sorted(request.env)),
    )


def has_priority(priorities: Sequence[Priority]) -> Check:
    wanted = frozenset(priorities)
    return Check(
        "priorities",
        listed([priority.value for priority in priorities]),
        lambda request: request.priority in wanted,
        lambda request: request.priority.value,
    )


def costs_at_least(least: float) -> Check:
    return Check(
        "min_cost",
        f"{least:g} or more",
        lambda request: request.estimated_cost is None or request.estimated_cost >= least,
        _cost,
    )


def costs_at_most(most: float) -> Check:
    return Check(
        "max_cost",
        f"{most:g} or less",
        lambda request: request.estimated_cost is not None and request.estimated_cost <= most,
        _cost,
    )


def _cost(request: JobRequest) -> str:
    cost = request.estimated_cost
    return "no estimate, which counts as the highest" if cost is None else f"{cost:g}"


def matcher(globs: Iterable[str]) -> Callable[[str], bool]:
    """Whether one of the globs matches a text; case matters, and a star crosses dots."""
    plain = frozenset(glob for glob in globs if not is_pattern(glob))
    patterns = [translate(glob) for glob in globs if is_pattern(glob)]
    if not patterns:
        return plain.__contains__
    match = re.compile("|".join(patterns)).match
    if not plain:
        return lambda text: match(text) is not None
    return lambda text: text in plain or match(text) is not None


def is_pattern(glob: str) -> bool:
    return any(sign in glob for sign in "*?[")


def listed(values: Iterable[str]) -> str:
    return ", ".join(values)


def _shown(values: Sequence[str]) -> str:
    text = listed(values) or NOTHING
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
