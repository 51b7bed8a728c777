"""What jobs leave to be read: their output, while it grows and afterwards, and their artifacts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, BinaryIO

from penstock.lifecycles.container import ContainerJobState
from penstock.ports.clock import Clock
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import Sandboxes
from penstock.workloads.container.job import Artifact, ContainerRecord, Stream
from penstock.workloads.container.running.patience import done_within, drop
from penstock.workloads.container.standing.attempt import Attempt
from penstock.workloads.container.standing.feed import Feed
from penstock.workloads.container.store import ContainerStore, LogPage


class Leavings:
    def __init__(
        self,
        config: WorkerConfig,
        store: ContainerStore,
        sandboxes: Sandboxes,
        feed: Feed,
        attempts: Mapping[str, Attempt],
        clock: Clock,
    ) -> None:
        self._config, self._store, self._sandboxes = config, store, sandboxes
        self._feed, self._attempts, self._clock = feed, attempts, clock

    async def text(self, record: ContainerRecord) -> tuple[str, str]:
        if record.state is ContainerJobState.QUEUED:
            return "", ""
        attempt = self._attempts.get(record.job_id)
        output = attempt.output if attempt is not None else None
        return await asyncio.to_thread(lambda: _both(output or self._kept(record)))

    async def logs(
        self, job_id: str, stream: Stream, offset: int, limit: int, wait: float
    ) -> LogPage | None:
        until = self._clock.monotonic() + wait
        while True:
            with self._feed.next_change(job_id) as change:
                record = await self._store.get(job_id, body=False)
                if record is None:
                    return None
                attempt = self._attempts.get(job_id)
                output = attempt.output if attempt is not None else None
                page = await self._page(record, output, stream, offset, limit)
                left = until - self._clock.monotonic()
                if page.data or page.end or left <= 0 or self._feed.closed:
                    return page
                if output is not None:
                    await self._either(change, output.more(stream, page.next, left), left)
                elif attempt is not None:
                    await self._either(change, attempt.speaks.wait(), left)
                else:
                    await done_within(self._clock, left, change)

    async def artifact(self, job_id: str, path: str) -> tuple[Artifact, BinaryIO] | None:
        record = await self._store.get(job_id, body=False)
        for artifact in record.artifacts if record is not None else ():
            if artifact.path == path:
                sandbox = self._sandboxes.of(job_id)
                try:
                    return artifact, await asyncio.to_thread(sandbox.open, path)
                except FileNotFoundError:
                    return None
        return None

    async def _page(
        self,
        record: ContainerRecord,
        output: Output | None,
        stream: Stream,
        offset: int,
        limit: int,
    ) -> LogPage:
        if output is None and not record.is_final:
            return LogPage(stream, 0, b"", 0)
        return await asyncio.to_thread(
            lambda: (output or self._kept(record)).page(stream, offset, limit)
        )

    async def _either(
        self, change: asyncio.Future[None], other: Coroutine[Any, Any, Any], seconds: float
    ) -> None:
        waiting = asyncio.ensure_future(other)
        try:
            await done_within(self._clock, seconds, change, waiting)
        finally:
            await drop(waiting)

    def _kept(self, record: ContainerRecord) -> Output:
        """Of a job that nobody attends to, most often because it has ended."""
        limit = self._config.defaults.max_output_bytes
        if record.is_final:
            # A stream that was cut has just as much as its limit.
            limit = max(record.stdout.kept, record.stderr.kept, 1)
        logs = self._sandboxes.of(record.job_id).logs
        output = Output.reopen(logs, limit) if logs.is_dir() else Output(None, limit)
        if record.is_final:
            output.end()
        return output


def _both(output: Output) -> tuple[str, str]:
    return output.text(Stream.STDOUT), output.text(Stream.STDERR)
