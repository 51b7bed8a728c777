"""Rules that can never speak, as far as it can be told from their text.

What is found is certain; not everything is found.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from penstock.control.conditions import is_pattern, matcher
from penstock.control.safety import Rule, RuleSet

_GLOBS = ("topics", "tenants", "principals", "capabilities", "risk_tags", "priorities")
"""Conditions of which any entry may match."""


def warnings_of(rules: RuleSet) -> Iterator[tuple[str, str]]:
    """The id of each rule that is in vain, and why."""
    for number, rule in enumerate(rules.rules):
        if dead := [glob for glob in rule.topics if not _can_be_topic(glob)]:
            yield rule.id, f"no topic matches {dead[0]!r}: every topic begins with 'job.'"
        before = (other for other in rules.rules[:number] if covers(other, rule))
        if (other := next(before, None)) is not None:
            all_of_it = "every job" if not any(other.checks()) else "whatever it would match"
            yield rule.id, f"is never reached: rule {other.id} before it matches {all_of_it}"


def covers(rule: Rule, other: Rule) -> bool:
    """Whether `rule` certainly matches every job that `other` does."""
    return (
        all(_covers_any(getattr(rule, field), getattr(other, field)) for field in _GLOBS)
        and all(
            name in other.labels and _covers_any(_globs(globs), _globs(other.labels[name]))
            for name, globs in rule.labels.items()
        )
        and {*rule.env_keys} <= {*other.env_keys}
        and _covers_bound(rule.min_cost, other.min_cost, operator.le)
        and _covers_bound(rule.max_cost, other.max_cost, operator.ge)
    )


def _covers_any(globs: Sequence[str], others: Sequence[str]) -> bool:
    if not globs:
        return True
    return bool(others) and all(_covers_glob(globs, other) for other in others)


def _covers_glob(globs: Sequence[str], other: str) -> bool:
    if other in globs:
        return True
    if not is_pattern(other):
        return matcher(globs)(other)
    if "[" in other:
        return False
    # A glob of plain text and stars matches the signs of another glob only by its stars,
    # which then match whatever these signs stand for.
    stars = [glob for glob in globs if "?" not in glob and "[" not in glob]
    return bool(stars) and matcher(stars)(other)


def _covers_bound(
    bound: float | None, other: float | None, beyond: Callable[[float, float], bool]
) -> bool:
    return bound is None or (other is not None and beyond(bound, other))


def _globs(globs: str | tuple[str, ...]) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else globs


def _can_be_topic(glob: str) -> bool:
    start = "".join(takewhile(lambda sign: sign not in "*?[", glob))
    whole = start == glob
    return start.startswith("job.") or (not whole and "job.".startswith(start))
