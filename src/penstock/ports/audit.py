"""Who did what."""

from __future__ import annotations

from typing import Protocol

from penstock.ports.store import AuditEntry, AuditQuery


class Audit(Protocol):
    async def read(self, query: AuditQuery) -> list[AuditEntry]: ...
