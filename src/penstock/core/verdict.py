"""What the safety kernel can answer, and what follows from it.

A verdict travels with the job: it is stored in its record, and what it constrains is
enforced by the scheduler, the worker and the executor.
"""

from __future__ import annotations

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
    """Constraints under which a job was allowed; None is no limit."""

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
