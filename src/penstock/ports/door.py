"""What stands behind a door to the network: whose key it is, and the Desk that serves them."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from penstock.core.caller import Caller
from penstock.ports.desk import Desk


class Guest(Struct, frozen=True):
    caller: Caller
    desk: Desk | None = None
    """Checks by itself what this caller may do and see. None at a door to something else than an
    engine."""


class Door(Protocol):
    def enter(self, token: str) -> Guest:
        """Raises NotAuthenticated for a token that opens nothing."""
