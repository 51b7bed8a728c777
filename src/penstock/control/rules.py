"""Reading a rule file (TOML).

    default = "deny"

    [[rules]]
    id = "public-text"
    decision = "allow"
    topics = ["job.text.*"]

    [[rules]]
    id = "ask-for-mail"
    decision = "require_approval"
    topics = ["job.mail.*"]
    labels = { audience = "all*" }
    approval = { needed = 2, expires = "4h" }
    reason = "two people look at what everybody gets"

A file that is wrong in any place is refused whole, naming the line and the key.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

from penstock.control.rule_fields import Wrong, kind, member, nearest, read_rule
from penstock.control.safety import Rule, RuleSet
from penstock.control.toml_lines import line_of
from penstock.core.errors import Misconfigured
from penstock.core.verdict import Decision

LARGEST = 1 << 20
"""Bytes that a rule file may have."""
_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def load_rules(path: Path) -> RuleSet:
    """Read and check a rule file. Raises Misconfigured."""
    return parse_rules(read_text(path), str(path))


def read_text(path: Path) -> bytes:
    """A rule file as it stands. Raises Misconfigured."""
    try:
        with path.open("rb") as file:
            return file.read(LARGEST + 1)
    except OSError as error:
        raise Misconfigured(f"rules {path}: can't be read: {error.strerror}") from error


def parse_rules(text: bytes, source: str) -> RuleSet:
    """Rules from the text of a file; `source` is what errors call it. Raises Misconfigured."""
    if len(text) > LARGEST:
        raise Misconfigured(f"rules {source}: larger than {LARGEST:,} bytes")
    try:
        plain = text.decode()
        document = tomllib.loads(plain)
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise Misconfigured(f"rules {source}, line {line}: is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise Misconfigured(_not_toml(str(error), plain, source)) from error
    except RecursionError:
        raise Misconfigured(f"rules {source}: is nested too deeply") from None
    try:
        return _rule_set(document, snapshot_of(text))
    except Wrong as wrong:
        line = line_of(plain, wrong.path)
        message = f"rules {source}, line {line}: {_place(document, wrong)}{wrong.problem}"
        raise Misconfigured(message, hint=wrong.hint) from None


def snapshot_of(text: bytes) -> str:
    """The short name of a text."""
    return hashlib.sha256(text).hexdigest()[:12]


def _rule_set(document: dict[str, Any], snapshot: str) -> RuleSet:
    for key in document:
        if key not in ("default", "rules"):
            raise Wrong("there is no such key", nearest(key, ("default", "rules")), (key,))
    default = _default(document)
    entries = document.get("rules", [])
    if not isinstance(entries, list):
        raise Wrong(
            f"is {kind(entries)}, not a list", "write [[rules]] above each rule", ("rules",)
        )
    rules: dict[str, Rule] = {}
    for index, entry in enumerate(entries):
        try:
            rule = read_rule(entry)
            if rule.id in rules:
                raise Wrong(f"rule {[*rules].index(rule.id) + 1} has this id, too", path=("id",))
        except Wrong as wrong:
            raise wrong.below("rules", index) from None
        rules[rule.id] = rule
    return RuleSet(default, tuple(rules.values()), snapshot)


def _default(document: dict[str, Any]) -> Decision:
    hint = 'write default = "deny", or "allow"'
    if "default" not in document:
        raise Wrong("is missing: say what holds when no rule matches", hint, ("default",))
    try:
        default = member(document["default"], Decision)
    except Wrong as wrong:
        raise Wrong(wrong.problem, hint, ("default",)) from None
    if default not in (Decision.ALLOW, Decision.DENY):
        raise Wrong(
            f"can't be {default.value!r}, only 'allow' or 'deny'",
            "for anything else, let the last rule have no conditions",
            ("default",),
        )
    return default


def _place(document: dict[str, Any], wrong: Wrong) -> str:
    """The key in words, and which rule it belongs to."""
    match wrong.path:
        case ("rules", int(index), *inner):
            entry = document["rules"][index]
            name = entry.get("id") if isinstance(entry, dict) else None
            said = f"rule {index + 1} ({name if isinstance(name, str) else 'without an id'}): "
        case inner:
            said = ""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
    return said + (f"{key.removeprefix('.')}: " if key else "")


def _not_toml(said: str, text: str, source: str) -> str:
    at = _AT.search(said)
    line = at[1] if at and at[1] else max(1, len(text.splitlines()))
    column = f", column {at[2]}" if at and at[2] else ""
    problem = said[: at.start()] if at else said
    return f"rules {source}, line {line}{column}: is not valid TOML: {problem}"
