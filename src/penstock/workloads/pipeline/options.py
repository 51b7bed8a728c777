"""What a run is given beside its pipeline: its limits, and whom it tells and asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from penstock.workloads.pipeline.records import ItemRecord, PipelineRecord

if TYPE_CHECKING:
    from penstock.workloads.pipeline.context import Notes
    from penstock.workloads.pipeline.stage import Stage


class RunOptions(Struct, frozen=True, kw_only=True):
    """How a run uses the machine it is on. Times are in seconds."""

    inline_limit: int = 16 << 10
    """Bytes of an input or output that are kept in its row; larger ones go to a blob."""
    page: int = 500
    """Rows read or listed at once: what bounds the memory of a stage."""
    backlog: int = 500
    """Ended items that wait to be written, at most."""
    max_outputs: int = 100_000
    """How much one call may yield before it is taken to be endless."""
    max_result: int = 64 << 20
    """Bytes of one output."""
    threads: int = 32
    processes: int | None = None
    kill_grace: float = 5.0
    """How long a call that ran out of time has to stop before it is killed, or left."""
    lease: float | None = None
    """How long a run counts as alive without a word; None: the control plane watches it."""
    progress_every: float = 0.25
    """The least time between two `stage_progress` events."""
    heartbeat: float = 30.0
    """How often a long call that reports progress is written down as alive."""
    store_patience: float = 30.0
    """How long a failing store is tried again before the run is left for a resume."""


DEFAULTS = RunOptions()


class Tell(Protocol):
    """Where live news of a run goes. Safe to call from any thread."""

    def log(self, text: str, level: str = "info") -> None: ...

    def progress(self, fraction: float | None = None, message: str = "") -> None: ...


class Silent:
    """Tells nobody."""

    def log(self, text: str, level: str = "info") -> None:
        pass

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        pass


class Spread(Protocol):
    """Runs items elsewhere, as jobs of their own."""

    async def run(
        self, record: PipelineRecord, stage: Stage, item: ItemRecord, fans: Mapping[str, int]
    ) -> tuple[ItemRecord, Notes | None]:
        """The item as it ended, and what it reported. `fans` are the outputs that the stages
        before gave."""

    async def stop(self, record: PipelineRecord, stage: Stage, reason: str) -> None:
        """End whatever is still running of this stage."""
