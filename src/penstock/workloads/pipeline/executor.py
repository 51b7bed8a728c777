"""Runs pipelines as canonical jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.core.job import Offer
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome, Task


class PipelineExecutor:
    """Being built."""

    resumable = True

    def __init__(self) -> None:
        self.topics: tuple[str, ...] = ()
        self.offers: Mapping[str, Offer] = {}

    def check(self, topic: str, payload: bytes) -> None:
        raise InvalidRequest("topic", "nobody serves it")

    async def run(self, task: Task, ctx: Context) -> Outcome:
        return Outcome(JobState.FAILED, error_code="UNKNOWN_TOPIC")

    async def close(self) -> None:
        pass


def make(app: Any, options: Mapping[str, Any]) -> PipelineExecutor:
    return PipelineExecutor()
