"""What the safety kernel can answer, and what follows from it.

A verdict travels with the job: it is stored in its record, and what it constrains is
enforced by the scheduler, the worker and the executor.
"""

from __future__ import annotations

import re
from enum import StrEnum
from fnmatch import fnmatchcase

from msgspec import Struct


class Decision(StrEnum):
    ALLOW = "allow"
    DENY = "deny"
    REQUIRE_APPROVAL = "require_approval"
    """Held until enough people approve it."""
    THROTTLE = "throttle"
    """Allowed, but no faster than a rate."""
    ALLOW_WITH_CONSTRAINTS = "allow_with_constraints"
    """Allowed within limits that travel with the job."""


class Rate(Struct, frozen=True):
    """`count` in any `per` seconds; all of them may start at once."""

    count: int
    per: float

    def __str__(self) -> str:
        return f"{self.count}/{_UNITS.get(self.per) or f'{self.per:g}s'}"


_UNITS = {1.0: "s", 60.0: "m", 3600.0: "h", 86400.0: "d"}


class Constraints(Struct, frozen=True, omit_defaults=True):
    """Constraints under which a job was allowed; None: no limit."""

    max_runtime: float | None = None
    """Seconds one attempt may run."""
    max_retries: int | None = None
    max_concurrent: int | None = None
    """Maximum number of running jobs of one tenant under this rule."""
    max_memory: int | None = None
    """Bytes."""
    max_output: int | None = None
    """Maximum size of the result in bytes."""
    network: tuple[str, ...] | None = None
    """Hosts that it may connect to; an empty list means no network."""
    read_only: bool = False
    """It may not write to the file system."""


class ApprovalTerms(Struct, frozen=True, omit_defaults=True):
    """How many approvals are needed, from whom, and how soon."""

    needed: int = 1
    approvers: tuple[str, ...] = ()
    """Globs of principals; none means anybody with the role."""
    expires: float = 86_400.0
    """Time limit for collecting approvals, in seconds; then the job is denied."""
    self_approval: bool = False
    """Whether the submitter may approve the job."""

    def may_approve(self, principal: str) -> bool:
        return not self.approvers or any(fnmatchcase(principal, glob) for glob in self.approvers)


class SafetyVerdict(Struct, frozen=True, omit_defaults=True):
    """A decision, the rule that made it, and the snapshot of the rules."""

    decision: Decision
    rule_id: str
    snapshot: str
    reason: str = ""
    constraints: Constraints | None = None
    approval: ApprovalTerms | None = None
    rate: Rate | None = None

    @property
    def allows(self) -> bool:
        """Whether the job may run without approval."""
        return self.decision not in (Decision.DENY, Decision.REQUIRE_APPROVAL)


class Vote(Struct, frozen=True, omit_defaults=True):
    """One person's approval."""

    by: str
    at: float
    reason: str = ""


class Hold(Struct, frozen=True, omit_defaults=True):
    """Why a job is awaiting approval: from whom, until when, and who has approved.

    It is bound to the request and to the rules: if either changes, it is void and approval is
    requested again.
    """

    rule_id: str
    snapshot: str
    request_hash: str
    since: float
    until: float
    terms: ApprovalTerms
    votes: tuple[Vote, ...] = ()

    @property
    def approved(self) -> bool:
        return len(self.votes) >= self.terms.needed


# -- durations, sizes and rates as people write them ---------------------------------

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_BYTES = _DECIMAL | _BINARY
_NUMBER_AND_UNIT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]+)", re.ASCII)
_RATE = re.compile(r"(\d{1,9})\s*/\s*(\d{1,15}(?:\.\d{1,9})?)?\s*([a-z]+)", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds. Raises ValueError."""
    found = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if found is None or found[2] not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration; write 500ms, 30s, 10m, 2h, 7d or 1w")
    return float(found[1]) * _SECONDS[found[2]]


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError."""
    found = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if found is None or found[2].lower() not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write 64KiB, 512MiB, 2GiB or 500MB")
    return round(float(found[1]) * _BYTES[found[2].lower()])


def parse_rate(text: str) -> Rate:
    """So many in a time, as `10/m` or `5/30s`. Raises ValueError."""
    found = _RATE.fullmatch(text.strip())
    if found is None or found[3] not in _SECONDS:
        raise ValueError(f"{text!r} is not a rate; write 10/s, 10/m, 10/h, 10/d or 5/30s")
    rate = Rate(int(found[1]), float(found[2] or 1) * _SECONDS[found[3]])
    if not rate.count or not rate.per:
        raise ValueError(f"{text!r} lets nothing through, or everything; both numbers are above 0")
    return rate


def say_duration(seconds: float) -> str:
    """As `parse_duration` reads it, in the largest unit that fits."""
    unit = next((u for u in ("d", "h", "m") if seconds and not seconds % _SECONDS[u]), "s")
    return f"{seconds / _SECONDS[unit]:.12g}{unit}"


def say_size(count: int) -> str:
    """As `parse_size` reads it, in the largest unit that fits."""
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if not count % _BYTES[u.lower()]), "B")
    return f"{count // _BYTES[unit.lower()]}{unit}"
