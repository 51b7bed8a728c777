"""What every batch needs of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.control.gateway import Gateway
from penstock.ports.batches import Dialect, Shelf
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.store import Store


@dataclass(frozen=True)
class Surroundings:
    shelf: Shelf
    store: Store
    blobs: Blobs
    gateway: Gateway
    dialect: Dialect
    clock: Clock
    knows: Callable[[str], bool]
    """Whether somebody serves this topic, or may."""
    room: int = 10_000
    """Jobs of one batch that may be unfinished at a time."""
    longest: int = 64 << 20
    """Bytes that a line may have."""
    grace: float = 10.0
    """Seconds in which the workers of a model may come back before it counts as unknown."""
