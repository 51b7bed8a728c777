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
    """Parked until enough people say yes."""
    THROTTLE = "throttle"
    """Allowed, but no faster than a rate."""
    ALLOW_WITH_CONSTRAINTS = "allow_with_constraints"
    """Allowed within limits that travel with the job."""


class Rate(Struct, frozen=True):
    """So many in so many seconds; all of them may come at once."""

    count: int
    per: float

    def __str__(self) -> str:
        return f"{self.count}/{_UNITS.get(self.per) or f'{self.per:g}s'}"


_UNITS = {1.0: "s", 60.0: "m", 3600.0: "h", 86400.0: "d"}


class Constraints(Struct, frozen=True, omit_defaults=True):
    """The limits within which a job was allowed. None is no limit."""

    max_runtime: float | None = None
    """Seconds one attempt may run."""
    max_retries: int | None = None
    max_concurrent: int | None = None
    """How many jobs of one tenant may run at once under the rule that said so."""
    max_memory: int | None = None
    """Bytes."""
    max_output: int | None = None
    """Bytes that the result may have."""
    network: tuple[str, ...] | None = None
    """Hosts that it may reach; an empty list is no network at all."""
    read_only: bool = False
    """It may not write to the file system."""


class ApprovalTerms(Struct, frozen=True, omit_defaults=True):
    """How many people must say yes, who may, and for how long they may be waited for."""

    needed: int = 1
    approvers: tuple[str, ...] = ()
    """Globs of principals; none means whoever has the role."""
    expires: float = 86_400.0
    """Seconds; a job that nobody approved by then is denied."""
    self_approval: bool = False
    """Whether who submitted a job may approve it, too."""

    def may_approve(self, principal: str) -> bool:
        return not self.approvers or any(fnmatchcase(principal, glob) for glob in self.approvers)


class SafetyVerdict(Struct, frozen=True, omit_defaults=True):
    """A decision, the rule that spoke, and the snapshot of the rules it spoke from."""

    decision: Decision
    rule_id: str
    snapshot: str
    reason: str = ""
    constraints: Constraints | None = None
    approval: ApprovalTerms | None = None
    rate: Rate | None = None

    @property
    def allows(self) -> bool:
        """Whether the job may go on without anybody's word."""
        return self.decision not in (Decision.DENY, Decision.REQUIRE_APPROVAL)


class Vote(Struct, frozen=True, omit_defaults=True):
    """One person's yes."""

    by: str
    at: float
    reason: str = ""


class Hold(Struct, frozen=True, omit_defaults=True):
    """Why a job is parked: whose word it needs, until when, and who has spoken.

    It is bound to the request and to the rules: if either is another one, it counts for
    nothing and is asked for again.
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
