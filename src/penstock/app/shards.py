"""The shards of a database, in one process: it owns some, and stands by for the others.

Each shard has an engine of its own with its own addresses: `settings_of` says which. A shard that
nobody owns goes to the process that owns the fewest, and a process that owns two more than another
one gives one of them up, so each core has its part of the work. Every process sees who owns what by
the entries that engines keep in the database.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.adapters.link.address import Address
from penstock.app.engine import make_private, make_token
from penstock.config import Settings
from penstock.control.guard import digest_of
from penstock.core.errors import Misconfigured
from penstock.core.shards import Shard, shard_url
from penstock.ports.address import parse_address

if TYPE_CHECKING:
    from penstock.app.standby import StandBy

log = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between two looks."""
_SILENT = 2.0
"""Seconds after which an engine that was not heard of is not waited for."""
_GATHER = 2.0
"""Seconds after the start in which a process takes one shard at most: others may be starting."""
_YIELD = 3 * PERIOD
"""Seconds for which a shard without an owner is left to a process that owns fewer."""
_SETTLE = 10.0
"""Seconds between two shards that a process gives up."""


def settings_of(settings: Settings, shard: Shard) -> Settings:
    """Those of the engine of one shard. Those of shard 0 are as they were set; another one has a
    folder `shard-N` in the data directory and in the store of payloads, and ports that are higher
    by N."""
    if shard.count > 1:
        for name, is_set in (
            ("cap.enabled", settings.cap.enabled),
            ("bus.start_server", settings.bus.start_server),
        ):
            if is_set:
                raise Misconfigured(f"{name} can't be used with a database of several shards")
    if not (number := shard.number):
        return settings
    said = settings.storage.blobs
    return settings.changed(
        data_dir=folder_of(settings.data_dir, number),
        store=shard_url(settings.store, number),
        listen=tuple(address_of(text, number) for text in settings.listen),
        http__listen=_port(settings.http.listen, number),
        link__listen=_port(settings.link.listen, number),
        link__advertise=_port(settings.link.advertise, number),
        link__authority=settings.authority_dir,
        bus__prefix=bus_prefix(settings, number),
        storage__blobs=f"{said.rstrip('/')}/shard-{number}" if said else "",
        storage__sources=settings.allowed_sources,
    )


def folder_of(data_dir: Path, number: int) -> Path:
    """The data directory of a shard, in that of its process."""
    return data_dir / f"shard-{number}" if number else data_dir


def bus_prefix(settings: Settings, number: int) -> str:
    return f"{settings.bus.prefix}-{number}" if number else settings.bus.prefix


def address_of(text: str, number: int) -> str:
    """Where a shard is reached, by the address of shard 0; `unix:` is in the data directory."""
    if not number or text == "unix:":
        return text
    address = Address.parse(text)
    if address.path is not None:
        return f"{text}-{number}"
    return str(replace(address, port=address.port and address.port + number))


def _port(text: str, number: int) -> str:
    """Port 0 is any free one."""
    if not text:
        return ""
    host, port = parse_address(text)
    port = port and port + number
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def share_token(settings: Settings, shards: Iterable[Settings]) -> str:
    """Let the token of the data directory open each shard; answers its digest."""
    make_private(settings.data_dir)
    token = make_token(settings.token_file)
    for one in shards:
        make_private(one.data_dir)
        if make_token(one.token_file) != token:
            _write_private(one.token_file, token)
    return digest_of(token)


def _write_private(path: Path, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)


class Balance:
    """Which shards this process is to own. Decides; whoever asks does it."""

    def __init__(self, mine: str) -> None:
        """`mine` is the digest of the token of this process, by which its entries are known."""
        self._mine = mine
        self.standbys: dict[int, StandBy] = {}
        """Of each shard: they know its engines, whether this process owns it or not."""
        self.owned: set[int] = set()
        """The shards that this process owns, or is about to."""
        self._began = self._gave_at = time.monotonic()
        self._free_since: dict[int, float] = {}
        self.give_up: dict[int, asyncio.Event] = {}
        """Set for a shard that is to be given to another process."""

    def claim(self, number: int) -> bool:
        """Whether this process is to own a shard that has no owner; from now on it counts."""
        now = time.monotonic()
        since = self._free_since.setdefault(number, now)
        if self.owned:
            if now - self._began < _GATHER:
                return False
            if self._lightest() < len(self.owned) and now - since < _YIELD:
                return False
        self.owned.add(number)
        return True

    async def owner_url(self, number: int) -> str:
        """Wait for the URL of the owner of a shard. Raises TimeoutError."""
        if (standby := self.standbys.get(number)) is None:
            raise TimeoutError("this process has just started")
        return await standby.owner_url()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            self._look()

    def _look(self) -> None:
        """Forget which shards were free, if they are not; give one up if that is fair."""
        for number, standby in self.standbys.items():
            if not standby.engines.is_free:
                self._free_since.pop(number, None)
        now = time.monotonic()
        if now - self._gave_at < _SETTLE or len(self.owned) < self._lightest() + 2:
            return
        ready = [number for number in self.owned if number in self.give_up]
        if ready:
            self._gave_at, number = now, max(ready)
            log.info("giving shard %d to an engine that owns fewer", number)
            self.give_up[number].set()

    def _lightest(self) -> int:
        """How many shards another process owns that owns the fewest; many, if there is none."""
        known = [standby.engines for standby in self.standbys.values()]
        entries = [one for engines in known for one in engines.all]
        newest = max((one.seen for one in entries), default=0.0)
        others = {
            one.token for one in entries if one.token != self._mine and one.seen > newest - _SILENT
        }
        owners = (engines.owner for engines in known)
        counts: Counter[str] = Counter(one.token for one in owners if one is not None)
        return min((counts[token] for token in others), default=len(known))
