"""Reading a rule file (TOML).

    default = "deny"

    [[rules]]
    id = "public-text"
    decision = "allow"
    topics = ["job.text.*"]

    [[rules]]
    id = "no-guests"
    decision = "deny"
    tenants = ["guest*"]
    labels = { source = "web" }
    reason = "guests may not submit from the web"

A file that is wrong in any place is refused whole, naming the place.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import msgspec

from penstock.control.safety import Rule, RuleSet
from penstock.core.errors import Misconfigured
from penstock.core.verdict import Decision


class _File(msgspec.Struct, forbid_unknown_fields=True):
    default: Decision
    rules: tuple[dict[str, object], ...] = ()


class _Rule(Rule, frozen=True, forbid_unknown_fields=True):
    pass


def load_rules(path: Path) -> RuleSet:
    """Read and check a rule file. Raises Misconfigured."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Misconfigured(f"rules {path}: {error.strerror}") from error
    return parse_rules(text, str(path))


def parse_rules(text: bytes, source: str) -> RuleSet:
    try:
        document = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Misconfigured(f"rules {source}: {error}") from error
    try:
        file = msgspec.convert(document, _File)
    except msgspec.ValidationError as error:
        raise Misconfigured(f"rules {source}: {error}", hint=_ALLOWED) from error
    rules: list[Rule] = []
    for number, entry in enumerate(file.rules, start=1):
        where = f"rules {source}: rule {number} ({entry.get('id', 'without an id')})"
        try:
            rule = msgspec.convert(entry, _Rule)
        except msgspec.ValidationError as error:
            raise Misconfigured(f"{where}: {error}", hint=_ALLOWED) from error
        if any(rule.id == other.id for other in rules):
            raise Misconfigured(f"{where}: another rule has this id")
        rules.append(rule)
    return RuleSet(file.default, tuple(rules), hashlib.sha256(text).hexdigest()[:12])


_ALLOWED = (
    "a file has 'default' (allow or deny) and [[rules]] with 'id', 'decision', and any of"
    " 'topics', 'tenants', 'labels', 'reason'"
)
