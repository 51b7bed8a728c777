"""Pools as people see them, and pausing them."""

from __future__ import annotations

from collections.abc import Callable

from penstock.control.roster import Roster
from penstock.core.errors import NotFound
from penstock.ports.desk import PoolView
from penstock.ports.store import Store

_PREFIX = "pool/"
_PAUSED = b"paused"


class PoolKeeper:
    """A paused pool stays paused over a restart."""

    def __init__(self, store: Store, roster: Roster, nudge: Callable[[], None]) -> None:
        self._store, self._roster, self._nudge = store, roster, nudge

    async def load(self) -> None:
        facts = await self._store.recall_all(_PREFIX)
        self._roster.paused.update(name.removeprefix(_PREFIX) for name in facts)

    def list(self) -> list[PoolView]:
        workers = self._roster.workers.values()
        views = []
        for pool in self._roster.pools.values():
            members = [w for w in workers if w.pool == pool.name]
            topics = pool.topics or tuple(sorted({t for w in members for t in w.topics}))
            views.append(
                PoolView(
                    name=pool.name,
                    topics=topics,
                    capacity=pool.capacity,
                    held=sum(len(w.held) for w in members),
                    workers=len(members),
                    labels=pool.labels,
                    paused=pool.name in self._roster.paused,
                )
            )
        return views

    async def pause(self, name: str) -> PoolView:
        self._check(name)
        await self._store.remember(_PREFIX + name, _PAUSED)
        self._roster.paused.add(name)
        return self._view(name)

    async def resume(self, name: str) -> PoolView:
        self._check(name)
        await self._store.forget(_PREFIX + name)
        self._roster.paused.discard(name)
        self._nudge()
        return self._view(name)

    def _check(self, name: str) -> None:
        if name not in self._roster.pools and name not in self._roster.paused:
            raise NotFound(f"no pool {name!r}", hint="'penstock pool list' shows them")

    def _view(self, name: str) -> PoolView:
        self._roster.pool(name)
        return next(view for view in self.list() if view.name == name)
