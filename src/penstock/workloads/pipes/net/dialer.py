"""Addresses that are dialed until somebody answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.core.errors import Misconfigured
from penstock.workloads.pipes.wire.connection import Connection, NotConnected

FORGET = 600.0
"""Seconds after which a node that does not answer is dialed no more, or rarely if it was named at
the start. Who can reach it still tells of it."""
MAX_TARGETS = 4096
"""Addresses that others may have us dial."""
_FIRST, _LAST, _RARE = 0.1, 5.0, 60.0


@dataclass
class Target:
    address: str
    node_id: str = ""
    """Who answered there, or is said to; "" for one that was named at the start and has not
    answered yet."""
    seed: bool = False
    task: asyncio.Task[None] | None = None
    dialing: bool = False
    """A task that dials is left to it: it may have its connection already."""


class Dialer:
    """Owns the tasks that dial. One for each address at most."""

    def __init__(
        self,
        dial: Callable[[str], Awaitable[Connection]],
        connected: Callable[[str], bool],
        failed: Callable[[Target, NotConnected], None],
    ) -> None:
        self._dial, self._connected, self._failed = dial, connected, failed
        self._targets: dict[str, Target] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def seed(self, address: str) -> None:
        target = self._targets.setdefault(address, Target(address))
        target.seed = True
        self._call(target, 0.0)

    def heard(self, node_id: str, address: str, after: float) -> None:
        """A node was announced: dial it after this many seconds, if it is not connected then."""
        known = address in self._targets or len(self._targets) < MAX_TARGETS
        if address and known and not self._connected(node_id):
            self._call(self._known(node_id, address), after)

    def reached(self, node_id: str, address: str) -> None:
        """There is a connection: nothing has to be dialed until it is lost."""
        if address:
            self._known(node_id, address)
        for target in self._of(node_id):
            self._stop(target)

    def lost(self, node_id: str, after: float) -> None:
        """Dial it again, wherever it was seen."""
        for target in self._of(node_id):
            self._call(target, after)

    def forget(self, node_id: str) -> None:
        """It left, and said so. An address that was named at the start may see it come back."""
        for target in self._of(node_id):
            self.drop(target)
            if target.seed:
                self._targets[target.address] = again = Target(target.address, seed=True)
                self._call(again, _LAST)

    def drop(self, target: Target) -> None:
        """It leads nowhere."""
        self._stop(target)
        self._targets.pop(target.address, None)

    async def stop(self) -> None:
        self._targets.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _known(self, node_id: str, address: str) -> Target:
        target = self._targets.setdefault(address, Target(address))
        target.node_id = node_id
        return target

    def _of(self, node_id: str) -> list[Target]:
        return [t for t in self._targets.values() if t.node_id == node_id]

    def _call(self, target: Target, after: float) -> None:
        if target.task is None:
            target.task = asyncio.create_task(self._until_answered(target, after))
            self._tasks.add(target.task)
            target.task.add_done_callback(self._tasks.discard)

    def _stop(self, target: Target) -> None:
        if target.task is not None and not target.dialing:
            target.task.cancel()
            target.task = None

    async def _until_answered(self, target: Target, after: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + FORGET
        pause = _FIRST
        await asyncio.sleep(after)
        while not self._connected(target.node_id) and not await self._answered(target):
            if not target.seed and loop.time() > until:
                self._targets.pop(target.address, None)
            if self._targets.get(target.address) is not target:
                return
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(_LAST if loop.time() < until else _RARE, pause * 2)
        target.task = None

    async def _answered(self, target: Target) -> bool:
        target.dialing = True
        try:
            connection = await self._dial(target.address)
        except NotConnected as error:
            self._failed(target, error)
            return False
        except (Misconfigured, ValueError) as error:
            # It was told by another node, and is no address at all.
            self._failed(target, NotConnected(f"{target.address}: {error}"))
            self._targets.pop(target.address, None)
            return False
        finally:
            target.dialing = False
        target.node_id = connection.peer.node_id
        return True
