"""How long the control plane waits for what."""

from __future__ import annotations

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    timeout: float = 3600.0
    """Seconds an attempt may run, unless the job says otherwise."""
    dispatch_timeout: float = 300.0
    """Seconds a worker may hold a job before it starts it."""
    lease: float = 15.0
    """Seconds of silence after which a worker counts as lost."""
    lost_grace: float = 3.0
    """Seconds a worker has to come back after its connection dropped."""
    kill_grace: float = 5.0
    """Seconds that work has to end by itself after it was asked to."""
    max_attempts: int = 5
    """How often an idempotent job may lose its worker before it ends TIMEOUT."""
