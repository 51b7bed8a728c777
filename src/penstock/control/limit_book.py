"""The limits that were set, kept with the engine's facts and given to the limiter."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from penstock.control.limiter import Limiter
from penstock.control.recall import recall_rates
from penstock.core.check import DAY, check_name, check_number, check_pairs
from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.verdict import Rate
from penstock.ports.clock import Clock
from penstock.ports.limits import Limit, LimitView
from penstock.ports.store import Store

_PREFIX = "limit/"
_LONGEST = 7 * DAY
"""How far back rates look at start."""
_GLOB = re.compile(r"[A-Za-z0-9_.:@*?\[\]!-]{1,200}", re.ASCII)
_decode = msgspec.json.Decoder(Limit).decode


class LimitKeeper:
    """Keeps limits; tells the limiter, and whoever must take another look at what waits."""

    def __init__(self, store: Store, limiter: Limiter, clock: Clock) -> None:
        self._store, self._limiter, self._clock = store, limiter, clock
        self._limits: dict[str, Limit] = {}

    async def load(self, rates: Iterable[Rate] = ()) -> None:
        """Take up what was set; and, for its rates and these, what went lately."""
        facts = await self._store.recall_all(_PREFIX)
        self._limits = {limit.name: limit for limit in map(_decode, facts.values())}
        self._limiter.use(self._limits.values())
        spans = [limit.rate.per for limit in self._limits.values() if limit.rate is not None]
        spans += [rate.per for rate in rates]
        if spans:
            since = self._clock.now() - min(max(spans), _LONGEST)
            await recall_rates(self._store, self._limiter, since)

    async def put(self, limit: Limit) -> LimitView:
        check_limit(limit)
        await self._store.remember(_PREFIX + limit.name, msgspec.json.encode(limit))
        self._limits[limit.name] = limit
        self._limiter.use(self._limits.values())
        return next(view for view in await self.list() if view.limit.name == limit.name)

    async def list(self) -> list[LimitView]:
        return self._limiter.views(self._clock.now())

    async def delete(self, name: str) -> None:
        if not await self._store.forget(_PREFIX + name):
            raise NotFound(f"no limit {name!r}", hint="'penstock limit list' shows them")
        self._limits.pop(name, None)
        self._limiter.use(self._limits.values())


def check_limit(limit: Limit) -> None:
    """Raise InvalidRequest for the first field that is not acceptable."""
    check_name("name", limit.name)
    for index, part in enumerate(limit.key):
        if part not in ("tenant", "topic") and not re.fullmatch(r"label:.{1,128}", part):
            raise InvalidRequest(
                f"key[{index}]", f"{part!r} is no key", hint="tenant, topic or label:NAME"
            )
    for field in ("topics", "tenants"):
        for index, glob in enumerate(getattr(limit, field)):
            if not _GLOB.fullmatch(glob):
                raise InvalidRequest(f"{field}[{index}]", f"{glob!r} is no glob, as job.text.*")
    check_pairs("labels", limit.labels)
    if limit.concurrency is None and limit.rate is None and limit.max_waiting is None:
        raise InvalidRequest(
            "concurrency", "the limit limits nothing", hint="set concurrency, rate or max_waiting"
        )
    if limit.concurrency is not None:
        check_number("concurrency", limit.concurrency, 1, 1_000_000)
    if limit.max_waiting is not None:
        check_number("max_waiting", limit.max_waiting, 0, 100_000_000)
    if limit.rate is not None:
        check_number("rate.count", limit.rate.count, 1, 1_000_000)
        check_number("rate.per", limit.rate.per, 0.001, 31_536_000)
