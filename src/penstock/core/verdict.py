"""What the safety kernel can answer."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Decision(StrEnum):
    ALLOW = "allow"
    DENY = "deny"


class SafetyVerdict(Struct, frozen=True):
    """A decision, the rule that spoke, and the snapshot of the rules it spoke from."""

    decision: Decision
    rule_id: str
    snapshot: str
    reason: str = ""

    @property
    def allows(self) -> bool:
        return self.decision is Decision.ALLOW
