"""Whose blobs are whose.

Blobs are named by their content, so two tenants may have the same one. A caller who is bound
to a tenant may read, and point to, what that tenant uploaded, what its jobs took or gave, and
what the items of its pipelines did.
"""

from __future__ import annotations

from penstock.core.errors import UnreadablePointer
from penstock.ports.clock import Clock
from penstock.ports.pipelines import PipelineStore
from penstock.ports.store import Store

PREFIX = "blob/"
_BLOB = "blob:"


class Uploads:
    """One tenant's sight of blobs; None sees all."""

    def __init__(
        self, store: Store, clock: Clock, tenant: str | None, runs: PipelineStore | None = None
    ) -> None:
        self._store, self._clock, self._tenant, self._runs = store, clock, tenant, runs

    async def note(self, uri: str) -> None:
        """Remember who brought it, until a job refers to it or it is forgotten."""
        if self._tenant is not None and uri.startswith(_BLOB):
            at = repr(self._clock.now()).encode()
            await self._store.remember(f"{PREFIX}{self._tenant}/{uri}", at)

    async def check(self, uri: str) -> None:
        """Raises UnreadablePointer, as for one that does not exist."""
        if self._tenant is None or not uri or uri.startswith("data:"):
            return
        if uri.startswith(_BLOB):
            if await self._store.refers(self._tenant, uri):
                return
            if await self._store.recall(f"{PREFIX}{self._tenant}/{uri}") is not None:
                return
            if self._runs is not None and await self._runs.refers(self._tenant, uri):
                return
        raise UnreadablePointer("pointer", f"there is no {uri!r}")
