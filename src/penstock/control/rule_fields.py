"""What each key of a rule file may be, and what it becomes. Each refusal names the key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from penstock.control.conditions import is_pattern
from penstock.control.safety import EFFECTS, Rule
from penstock.core.check import MAX_RETRIES, MAX_TIMEOUT, MAX_WAIT, check_name, check_number
from penstock.core.errors import InvalidRequest
from penstock.core.job import Priority
from penstock.core.quantity import parse_duration, parse_rate, parse_size
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate

E = TypeVar("E", bound=StrEnum)
Reader: TypeAlias = Callable[[Any], Any]

_LONGEST = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MOST_BYTES = 1 << 50


class Wrong(Exception):
    """A value that can't be: the keys that lead to it, what is wrong, what to do."""

    def __init__(self, problem: str, hint: str = "", path: tuple[str | int, ...] = ()) -> None:
        super().__init__(problem)
        self.problem, self.hint, self.path = problem, hint, path

    def below(self, *path: str | int) -> Wrong:
        return Wrong(self.problem, self.hint, (*path, *self.path))


def read_rule(entry: Any) -> Rule:
    """One of the [[rules]]. Raises Wrong."""
    values = read_table(entry, RULE)
    for key in ("id", "decision"):
        if key not in values:
            raise Wrong("is missing; every rule has 'id' and 'decision'", path=(key,))
    _check_effects(values)
    least, most = values.get("min_cost"), values.get("max_cost")
    if least is not None and most is not None and least > most:
        raise Wrong("is less than min_cost: no job can match", path=("max_cost",))
    return Rule(**values)


def _check_effects(values: Mapping[str, Any]) -> None:
    decided: Decision = values["decision"]
    for effect, decision in EFFECTS.items():
        if effect in values and decision is not decided:
            raise Wrong(f"goes with decision {decision.value!r} only", path=(effect,))
        if effect not in values and decision is decided and effect != "approval":
            raise Wrong(
                f"{decision.value!r} also needs {effect!r}", _EXAMPLES[effect], ("decision",)
            )


_EXAMPLES = {
    "rate": 'as rate = "10/m"',
    "constraints": 'as constraints = { max_runtime = "10m" }',
}


def read_table(value: Any, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """A table of known keys. Raises Wrong."""
    if not isinstance(value, dict):
        raise Wrong(f"is {kind(value)}, not a table")
    known: dict[str, Any] = {}
    for key, given in value.items():
        if key not in readers:
            raise Wrong("there is no such key", nearest(key, readers), (key,))
        try:
            known[key] = readers[key](given)
        except Wrong as wrong:
            raise wrong.below(key) from None
        except InvalidRequest as refusal:
            raise Wrong(refusal.problem, refusal.hint, (key,)) from None
        except ValueError as refusal:
            raise Wrong(str(refusal), path=(key,)) from None
    return known


def nearest(key: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    if near := get_close_matches(key, list(known), 1):
        return f"did you mean {near[0]!r}?"
    return "known are " + ", ".join(sorted(known))


def kind(value: Any) -> str:
    names = {bool: "a boolean", str: "a string", dict: "a table", list: "a list"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "a date")


# -- readers --------------------------------------------------------------------------------


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Wrong(f"is {kind(value)}, not a string")
    if _CONTROL.search(value):
        raise Wrong("has a control character")
    return value


def _id(value: Any) -> str:
    check_name("id", _string(value))
    if value == "default":
        raise Wrong("'default' is what speaks when no rule matches; choose another id")
    return str(value)


def _reason(value: Any) -> str:
    if len(_string(value)) > 1000:
        raise Wrong("is longer than 1,000 characters")
    return str(value)


def member(value: Any, members: type[E]) -> E:
    try:
        return members(_string(value))
    except ValueError:
        raise Wrong(
            f"{value[:60]!r} is not known", nearest(value, [m.value for m in members])
        ) from None


def _decision(value: Any) -> Decision:
    return member(value, Decision)


def _globs(value: Any) -> tuple[str, ...]:
    return _stated(_each(value, _glob))


def _stated(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        raise Wrong("is empty, and would match nothing; leave it out to match everything")
    return values


def _each(value: Any, reader: Callable[[Any], str]) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise Wrong(f"is {kind(value)}, not a list", 'write ["one", "another"]')
    return tuple(_one(index, item, reader) for index, item in enumerate(value))


def _one(index: int, item: Any, reader: Callable[[Any], str]) -> str:
    try:
        return reader(item)
    except Wrong as wrong:
        raise wrong.below(index) from None


def _glob(value: Any) -> str:
    glob = _string(value)
    if not glob or len(glob) > _LONGEST:
        raise Wrong(f"{glob[:20]!r} is no glob; it has 1 to {_LONGEST} characters")
    opened = re.sub(r"\[!?+\]?+[^\]]*+\]", "", glob)
    if "[" in opened:
        raise Wrong(f"{glob!r} opens a '[' that is never closed", "write [[] for the sign itself")
    return glob


def _labels(value: Any) -> dict[str, str | tuple[str, ...]]:
    if not isinstance(value, dict):
        raise Wrong(f"is {kind(value)}, not a table", 'write { name = "glob" }')
    if not value:
        raise Wrong("is empty; leave it out, or name a label")
    return read_table(value, dict.fromkeys(value, _label))


def _label(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, list):
        return _globs(value)
    return _glob(value) if value != "" else ""


def _priorities(value: Any) -> tuple[Priority, ...]:
    names = _each(value, lambda item: member(item, Priority))
    return tuple(map(Priority, _stated(names)))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Wrong(f"is {kind(value)}, not a number")
    return float(value)


def _cost(value: Any) -> float:
    check_number("cost", _number(value), 0, 1e12)
    return float(value)


def _count(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Wrong(f"is {kind(value)}, not a whole number")
        check_number("count", value, least, most)
        return value

    return read


def _seconds(most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        seconds = parse_duration(value) if isinstance(value, str) else _number(value)
        check_number("seconds", seconds, 0.001, most)
        return seconds

    return read


def _bytes(value: Any) -> int:
    size = parse_size(value) if isinstance(value, str) else _count(1, _MOST_BYTES)(value)
    check_number("bytes", size, 1, _MOST_BYTES)
    return size


def _rate(value: Any) -> Rate:
    rate = parse_rate(_string(value))
    check_number("rate", rate.per, 0.001, MAX_TIMEOUT)
    return rate


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Wrong(f"is {kind(value)}, not true or false")
    return value


def _host(value: Any) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:*\[\]-]{1,253}", _string(value), re.ASCII):
        raise Wrong(f"{value!r} is no host, as api.example.org")
    return str(value)


def _approval(value: Any) -> ApprovalTerms:
    terms = ApprovalTerms(**read_table(value, APPROVAL))
    named = terms.approvers
    if named and not any(map(is_pattern, named)) and len({*named}) < terms.needed:
        raise Wrong(
            f"{terms.needed} are needed, but there are only {len({*named})} approvers",
            path=("needed",),
        )
    return terms


def _constraints(value: Any) -> Constraints:
    constraints = Constraints(**read_table(value, CONSTRAINTS))
    if constraints == Constraints():
        raise Wrong("sets no limit", "known are " + ", ".join(sorted(CONSTRAINTS)))
    return constraints


APPROVAL: Mapping[str, Reader] = {
    "needed": _count(1, 100),
    "approvers": _globs,
    "expires": _seconds(MAX_WAIT),
    "self_approval": _flag,
}
CONSTRAINTS: Mapping[str, Reader] = {
    "max_runtime": _seconds(MAX_TIMEOUT),
    "max_retries": _count(0, MAX_RETRIES),
    "max_concurrent": _count(1, 1_000_000),
    "max_memory": _bytes,
    "max_output": _bytes,
    "network": lambda value: _each(value, _host),
    "read_only": _flag,
}
RULE: Mapping[str, Reader] = {
    "id": _id,
    "decision": _decision,
    "reason": _reason,
    "topics": _globs,
    "tenants": _globs,
    "principals": _globs,
    "labels": _labels,
    "env_keys": _globs,
    "capabilities": _globs,
    "risk_tags": _globs,
    "priorities": _priorities,
    "min_cost": _cost,
    "max_cost": _cost,
    "approval": _approval,
    "rate": _rate,
    "constraints": _constraints,
}
