"""What a run does beside its stages: it keeps its lease, says that it lives, and looks at the
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.ports.clock import Clock
from penstock.workloads.pipeline.checkpoint import Checkpoint
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.options import RunOptions, Tell
from penstock.workloads.pipeline.records import STALE_MESSAGE, PipelineEventKind

_SOON = 0.01


class Upkeep:
    """Hears what stages report, and acts on what they don't."""

    def __init__(
        self,
        pipeline: Definition,
        checkpoint: Checkpoint,
        clock: Clock,
        options: RunOptions,
        tell: Tell,
        give_up: Callable[[str], None],
    ) -> None:
        self._pipeline, self._checkpoint, self._clock = pipeline, checkpoint, clock
        self._options, self._tell, self._give_up = options, tell, give_up
        self._places = {name: index for index, name in enumerate(pipeline.stages)}
        self._news: dict[str, Any] | None = None
        self._started_at: float | None = None
        self._late_at = float("inf")
        """Monotonic."""

    # -- heard --------------------------------------------------------------------

    def progressed(self, stage: str, fraction: float | None, message: str) -> None:
        """A call reports how far it is. From any thread."""
        self._checkpoint.touch()
        self._news = {"stage": stage, "fraction": fraction, "message": message}
        self.tell(stage, fraction or 0.0, message)

    def emitted(self, stage: str, key: str, data: dict[str, Any]) -> None:
        """A stage sends an event of its own."""
        told = {"stage": stage, "key": key, "data": data}
        self._checkpoint.happened(PipelineEventKind.CUSTOM, told)
        self._checkpoint.wake()

    def tell(self, stage: str, part: float, message: str) -> None:
        """How far the job is, if every stage is as long as the others."""
        place = self._places.get(stage, len(self._places)) + min(max(part, 0.0), 1.0)
        self._tell.progress(min(place / len(self._places), 1.0), message)

    # -- done ---------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._clock.sleep(self._until_next_look())
            news, self._news = self._news, None
            if news is not None:
                self._checkpoint.happened(PipelineEventKind.STAGE_PROGRESS, news)
                self._checkpoint.wake()
            elif self._options.lease is not None:
                self._checkpoint.wake()
            self._look_at_time()

    def _until_next_look(self) -> float:
        options, lease = self._options, self._options.lease
        every = options.heartbeat if lease is None else lease / 3
        # A limit that has passed was acted upon, and needs no look of its own any more.
        limits = [left for left in (self._until_stale(), self._until_late()) if left > 0]
        return max(_SOON, min([every, *(left + _SOON for left in limits)]))

    def _look_at_time(self) -> None:
        if self._until_stale() <= 0:
            self._give_up(STALE_MESSAGE)
        elif self._until_late() <= 0:
            self._give_up(f"the job took longer than its {self._pipeline.timeout:g} s")

    def _until_stale(self) -> float:
        """Seconds until it counts as stuck; a call may take as long as it was given."""
        limit = self._pipeline.stale_after
        if limit is None:
            return float("inf")
        stage = self._pipeline.stages.get(self._checkpoint.current_stage)
        if stage is not None:
            limit = max(limit, stage.info.timeout or 0.0)
        return self._checkpoint.progress_at + limit - self._clock.monotonic()

    def _until_late(self) -> float:
        limit, started = self._pipeline.timeout, self._checkpoint.started_at
        if limit is None or started is None:
            return float("inf")
        monotonic = self._clock.monotonic()
        if started != self._started_at:  # from now on, nobody who sets the clock matters
            self._started_at = started
            self._late_at = monotonic + started + limit - self._clock.now()
        return self._late_at - monotonic
