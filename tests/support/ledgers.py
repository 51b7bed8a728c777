"""Ledgers for tests."""

from __future__ import annotations

from penstock.adapters.memory.store import MemoryBackend
from penstock.control.ledger import Ledger


class MemoryLedger(Ledger):
    """A ledger that forgets."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
