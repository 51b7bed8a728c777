"""Keys: who may come in by the network, and what for."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from penstock.core.caller import KeyRole


class KeyView(Struct, frozen=True, kw_only=True):
    """What is known of a key; the key itself is not."""

    key_id: str
    name: str
    """The principal that it makes of its holder."""
    roles: tuple[KeyRole, ...]
    tenant: str | None
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


class NewKey(Struct, frozen=True):
    key: KeyView
    token: str
    """Shown this once; only its hash is kept."""

    def __repr__(self) -> str:
        # Values end up in logs and tracebacks; a token must not.
        return f"NewKey({self.key!r}, token=...)"


class Keys(Protocol):
    async def create(
        self,
        name: str,
        roles: tuple[KeyRole, ...],
        *,
        tenant: str | None = None,
        expires_in: float | None = None,
    ) -> NewKey: ...

    async def list(self) -> list[KeyView]: ...

    async def revoke(self, key_id: str) -> KeyView:
        """By its id, or by its name if only one valid key has it."""
