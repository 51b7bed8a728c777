"""What stands behind a door to the network: whose key it is, and the Desk that serves them."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from penstock.core.caller import Caller, KeyRole
from penstock.ports.desk import Desk


class Require(Protocol):
    def __call__(self, role: KeyRole, action: str, subject: str = "") -> None:
        """Raises NotPermitted for a role that the caller lacks, and writes it to the audit log."""


class Guest(Struct, frozen=True):
    caller: Caller
    desk: Desk | None = None
    """Checks by itself what this caller may do and see. None at a door to something else than an
    engine."""
    require: Require | None = None


class Door(Protocol):
    def enter(self, token: str) -> Guest:
        """Raises NotAuthenticated for a token that opens nothing."""
