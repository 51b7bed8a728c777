"""Whom the mesh tells what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.workloads.pipes.wire.kinds import Kind

Frame = Callable[[str, memoryview], None]


class Events:
    """Callbacks, called in the order in which they were given."""

    def __init__(self) -> None:
        self.frames: dict[Kind, Frame] = {}
        self.on_lost: list[Callable[[str, str], None]] = []
        self.on_back: list[Callable[[str], None]] = []
        self.on_change: list[Callable[[], None]] = []
        self.on_refused: list[Callable[[str], None]] = []
        self._changing: asyncio.Handle | None = None

    def frame(self, sender: str, kind: Kind, payload: memoryview) -> None:
        callback = self.frames.get(kind)
        if callback is not None:
            callback(sender, payload)

    def lost(self, node_id: str, reason: str) -> None:
        for callback in self.on_lost:
            callback(node_id, reason)

    def back(self, node_id: str) -> None:
        for callback in self.on_back:
            callback(node_id)

    def refused(self, reason: str) -> None:
        for callback in self.on_refused:
            callback(reason)

    def change(self) -> None:
        """Soon, and once for all that happens until then."""
        if self._changing is None:
            self._changing = asyncio.get_running_loop().call_soon(self._changed)

    def _changed(self) -> None:
        self._changing = None
        for callback in self.on_change:
            callback()

    def stop(self) -> None:
        """Nobody is called any more."""
        if self._changing is not None:
            self._changing.cancel()
        for callbacks in (self.on_lost, self.on_back, self.on_change, self.on_refused):
            callbacks.clear()
        self.frames.clear()
