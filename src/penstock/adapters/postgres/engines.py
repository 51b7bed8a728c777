"""The engines that share one database: who owns it, and where each of them is reached."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import asyncpg
from msgspec import Struct

from penstock.adapters.postgres.schema import Address, connect, load_queries, translated
from penstock.core.errors import NotOwner, StoreFailed

log = logging.getLogger(__name__)

STANDBY = "standby "
"""How the holders of engines begin that don't own the database."""
_TIMEOUT = 2.0
PERIOD = 0.5
"""Seconds between two looks at the other engines."""


class EngineEntry(Struct, frozen=True, kw_only=True):
    """One engine, as the others see it."""

    holder: str
    """Names one start of one engine, and no other."""
    name: str
    """Host and process."""
    machine: str
    """What all engines of one running machine have in common."""
    links: tuple[str, ...] = ()
    """Where it listens for workers and clients."""
    http: str = ""
    token: str = ""
    """The digest of the token in its data directory, which opens every engine of the database."""
    version: str = ""
    seen: float = 0.0
    """When it last renewed this entry, by the database's clock."""
    owns: bool = False
    """Whether it owns the database, and its lease is valid."""


class Engines:
    """Keeps the entry of one engine, and reads those of all. `run` does both until cancelled."""

    def __init__(self, url: str, entry: EngineEntry, *, lease: float = 0.0) -> None:
        """With `lease` it is the owner, which must not go on for longer than so many seconds while
        it can't reach the database: another engine may own that by then."""
        self._at, self.entry, self._lease = Address.parse(url), entry, lease
        self._sql = load_queries(self._at.schema)
        self.all: tuple[EngineEntry, ...] = ()
        """Those that were heard of within the last seconds."""
        self.is_free = False
        """Whether nobody owns the database now."""
        self.looked = asyncio.Event()
        """Set for a moment after each look."""
        self.on_look: Callable[[], None] = lambda: None
        """Called after each look."""
        self._db: asyncpg.Connection | None = None
        self._trouble = ""
        self._looked_at = 0.0

    @property
    def owner(self) -> EngineEntry | None:
        return next((engine for engine in self.all if engine.owns), None)

    def opens(self, digest: str) -> bool:
        """Whether it is the digest of the token of one of them."""
        return any(engine.token == digest for engine in self.all)

    async def run(self) -> None:
        """Raises NotOwner when another engine owns what this one should own."""
        self._looked_at = time.monotonic()
        try:
            while True:
                try:
                    await self.look()
                except NotOwner:
                    raise
                except StoreFailed as error:
                    if self._trouble != error.message:
                        log.warning("can't look at the other engines: %s", error.message)
                    self._trouble = error.message
                    self._check_lease()
                await asyncio.sleep(PERIOD)
        finally:
            await self.close()

    def _check_lease(self) -> None:
        """An owner that nobody would replace goes on."""
        silent = time.monotonic() - self._looked_at
        if self._lease and len(self.all) > 1 and silent > self._lease:
            name = self._at.name
            raise NotOwner(f"{name} was out of reach for {silent:.0f} s: another may own it now")

    async def look(self) -> None:
        """Renew the entry, and read all. Raises StoreFailed."""
        me, begin = self.entry, time.monotonic()
        values = (me.holder, me.name, me.machine, me.links, me.http, me.token, me.version)
        try:
            if self._db is None or self._db.is_closed():
                self._db = await connect(self._at, timeout=_TIMEOUT)
            await self._db.execute(self._sql["renew_entry"], *values, timeout=_TIMEOUT)
            found = await self._db.fetch(self._sql["engines"], timeout=_TIMEOUT)
            owner = await self._db.fetchrow(self._sql["owner"], 0, timeout=_TIMEOUT)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            if self._db is not None:
                self._db.terminate()
            raise translated(error, self._at) from error
        self._trouble, self._looked_at = "", begin
        self.is_free = owner is None or not owner["owns"]
        holder = "" if owner is None or self.is_free else owner["holder"]
        self.all = tuple(_entry(row, holder) for row in found)
        self.looked.set()
        self.looked.clear()
        self.on_look()
        if self._lease and owner is not None and owner["holder"] != me.holder:
            raise NotOwner(f"another engine owns {self._at.name} now")

    async def be_known(self) -> None:
        """Wait until the owner has read this entry. Raises StoreFailed."""
        await self.look()
        mine = next(engine for engine in self.all if engine.holder == self.entry.holder)
        while self.owner is not None and self.owner.seen <= mine.seen:
            await asyncio.sleep(PERIOD / 5)
            await self.look()

    async def close(self) -> None:
        """Take the entry out, so that nobody connects any more."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await db.execute(self._sql["remove_entry"], self.entry.holder, timeout=2)
            db.terminate()


def _entry(row: asyncpg.Record, owner: str) -> EngineEntry:
    holder, name, machine, links, http, token, version, seen = row
    return EngineEntry(
        holder=holder,
        name=name,
        machine=machine,
        links=tuple(links),
        http=http,
        token=token,
        version=version,
        seen=seen,
        owns=holder == owner,
    )
