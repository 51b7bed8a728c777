"""Runs split models as canonical jobs: `job.chat.<model>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.job import Offer
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome, Task


class PipesExecutor:
    resumable = False

    def __init__(self) -> None:
        self.topics: tuple[str, ...] = ()
        self.offers: Mapping[str, Offer] = {}

    def check(self, topic: str, payload: bytes) -> None: ...

    async def run(self, task: Task, ctx: Context) -> Outcome:
        return Outcome(JobState.FAILED, error_code="UNKNOWN_TOPIC")

    async def close(self) -> None: ...


def make(app: Any, options: Mapping[str, Any]) -> PipesExecutor:
    """The executor of split models (entry point `penstock.executors`)."""
    return PipesExecutor()
