"""What a run is given beside its pipeline: its limits, and what it reports to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from penstock.workloads.pipeline.records import ItemRecord, StageRecord

if TYPE_CHECKING:
    from penstock.workloads.pipeline.definition import Stage
    from penstock.workloads.pipeline.rows import ItemReport


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
    progress_every: float = 0.25
    """The least time between two reports of progress."""


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


class Distributed(Protocol):
    """Runs items elsewhere, as jobs of their own."""

    async def run(
        self, stage: Stage, record: StageRecord, item: ItemRecord, output_counts: Mapping[str, int]
    ) -> tuple[ItemRecord, ItemReport | None]:
        """The item as it ended, and what it reported. `output_counts` are the outputs that the
        stages before gave."""

    async def stop(self, stage: Stage, reason: str) -> None:
        """End whatever is still running of this stage."""
