"""Who works here: workers and pools, as the control plane last heard of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from penstock.ports.bus import Handshake

DEFAULT_POOL = "default"


class Pool(Struct, frozen=True):
    """A named group of workers."""

    name: str
    topics: tuple[str, ...] = ()
    """Globs; empty means whatever its workers announce."""
    capacity: int | None = None
    """How many jobs it may hold at once, over all its workers."""
    labels: Mapping[str, str] = {}


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker. `held` is what it holds by its own account and our dispatches."""

    worker_id: str
    pool: str = DEFAULT_POOL
    topics: tuple[str, ...] = ()
    slots: int = 0
    limit: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    """job_id -> attempt."""
    host: str = ""
    pid: int = 0
    local: bool = False
    session: str = ""
    link: int = 0
    heard_at: float = 0.0
    """Monotonic."""
    missing_since: float | None = None
    """Monotonic time at which its connection dropped; None while it is connected."""
    draining: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its executors tell of themselves."""

    @property
    def ready(self) -> bool:
        return self.missing_since is None and not self.draining

    @property
    def status(self) -> str:
        if self.missing_since is not None:
            return "missing"
        return "draining" if self.draining else "ready"

    def greet(self, hello: Handshake, monotonic: float) -> None:
        """It came, or came back: what it says of itself replaces what we thought."""
        self.pool = hello.pool
        self.topics = hello.topics
        self.slots = self.limit = hello.slots
        self.labels = hello.labels
        self.held = dict(hello.held)
        self.host, self.pid, self.local = hello.host, hello.pid, hello.local
        if hello.session != self.session:
            self.facts = {}
        self.session, self.link = hello.session, hello.link
        self.heard_at = monotonic
        self.missing_since = None
        self.draining = False


class Roster:
    """The workers and pools of one engine."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.pools: dict[str, Pool] = dict(pools)
        self.pools.setdefault(DEFAULT_POOL, Pool(DEFAULT_POOL))
        self.paused: set[str] = set()
        """Pools whose workers are given nothing new."""

    def worker(self, worker_id: str) -> WorkerRecord:
        record = self.workers.get(worker_id)
        if record is None:
            record = self.workers[worker_id] = WorkerRecord(worker_id)
        return record

    def pool(self, name: str) -> Pool:
        """A pool that no setting names comes into being with its first worker."""
        return self.pools.setdefault(name, Pool(name))

    def heard(self, worker_id: str, monotonic: float) -> bool:
        """Note a sign of life; False if nobody of that name has introduced itself."""
        record = self.workers.get(worker_id)
        if record is None:
            return False
        record.heard_at = monotonic
        return record.slots > 0

    def hold(self, worker_id: str, job_id: str, attempt: int, monotonic: float) -> None:
        """A worker, known or not, says that it has this."""
        record = self.worker(worker_id)
        record.held[job_id] = attempt
        record.heard_at = monotonic

    def release(self, worker_id: str | None, job_id: str, attempt: int) -> None:
        """The worker no longer holds this attempt."""
        record = self.workers.get(worker_id or "")
        if record is not None and record.held.get(job_id) == attempt:
            del record.held[job_id]
