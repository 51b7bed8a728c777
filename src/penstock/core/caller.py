"""Who asks, and what a key of theirs lets them do."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class KeyRole(StrEnum):
    """What a key is good for. Any of them may look at what its tenant has."""

    SUBMIT = "submit"
    """Submit jobs; cancel and retry single ones."""
    OPERATE = "operate"
    """Schedules, limits and pools; cancel and retry in bulk."""
    APPROVE = "approve"
    """Approve and reject what the rules parked."""
    ADMIN = "admin"
    """Everything, and keys, rules and the audit log besides."""


class Caller(Struct, frozen=True):
    """Somebody at one of the doors."""

    principal: str
    roles: frozenset[KeyRole]
    tenant: str | None = None
    """The only tenant whose things they see; None sees every tenant's."""
    key_id: str = ""

    def may(self, role: KeyRole) -> bool:
        return role in self.roles or KeyRole.ADMIN in self.roles

    def sees(self, tenant: str) -> bool:
        return self.tenant is None or self.tenant == tenant


OWNER = Caller("owner", frozenset(KeyRole))
"""Who can open the engine's own socket, holds its token, or runs it: its owner."""
