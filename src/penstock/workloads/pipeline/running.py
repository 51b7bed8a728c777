"""A job that this process runs, from its claim to its end."""

from __future__ import annotations

import asyncio

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator, Stop
from penstock.workloads.pipeline.records import PipelineRecord
from penstock.workloads.pipeline.store import CancelAnswer


class RunningJob:
    """The background task of a job, and the way to end it.

    It can be stopped at any time. Before there is an orchestrator, the wish is kept for it: a
    task that is cancelled while it claims its job would not know whether it has it.
    """

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self._orchestrator: AsyncPipelineOrchestrator | None = None
        self._asked: list[tuple[Stop, str]] = []
        self.fence: int | None = None
        """Of its claim."""

    @property
    def is_stopping(self) -> bool:
        return bool(self._asked)

    async def orchestrate(self, orchestrator: AsyncPipelineOrchestrator) -> PipelineRecord:
        self._orchestrator = orchestrator
        for how, reason in self._asked:
            orchestrator.stop(how, reason)
        return await orchestrator.run()

    def stop(self, how: Stop, reason: str) -> None:
        self._asked.append((how, reason))
        if self._orchestrator is not None:
            self._orchestrator.stop(how, reason)

    def hurry(self) -> None:
        """Cancel the task: a stop that was asked for waits for nothing any more."""
        if self._orchestrator is not None:
            self.task.cancel()

    async def ended_within(self, grace: float, timeout: float) -> None:
        """Wait for its end. When the grace time is over it is cancelled as a task, too."""
        _, late = await asyncio.wait((self.task,), timeout=min(grace, timeout))
        if late and timeout > grace:
            self.hurry()
            await asyncio.wait((self.task,), timeout=timeout - grace)


def outcome_of(record: PipelineRecord) -> CancelAnswer:
    """What a cancel that was marked came to: the record's own word."""
    if record.is_final and record.status is not PipelineJobStatus.CANCELLED:
        return CancelAnswer(False, record.status, f"it ended {record.status} first")
    return CancelAnswer(True, record.status)
