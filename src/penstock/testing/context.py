"""Run a job function in-line, and a Context that records what a job reports.

assert run(shout, "hello") == "HELLO!"

ctx = RecordingContext()
assert ctx.run(shout, "hello") == "HELLO!"
assert ctx.logged("info") == ["shouting"]
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.app.client import request_fields
from penstock.core.artifact import Artifact
from penstock.core.job import JobRequest
from penstock.core.ledger import Step
from penstock.core.steps import check_notes, check_row
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Source, keep_artifact
from penstock.ports.executor import CancelToken, Environment
from penstock.ports.steps import RunsSteps
from penstock.workloads.function.context import running
from penstock.workloads.function.definition import Returns
from penstock.workloads.function.options import Mode
from penstock.workloads.function.outcomes import OUTPUT, leave

P = ParamSpec("P")
T = TypeVar("T")


class RecordingContext(RunsSteps):
    """The Context of a job that runs in a test: keeps what the job reports."""

    def __init__(
        self,
        request: JobRequest | None = None,
        *,
        attempt: int = 1,
        timeout: float = 60.0,
        environment: Environment | None = None,
    ) -> None:
        self.request = request or JobRequest(job_id="a-job", topic="job.test")
        self.job_id = self.request.job_id
        self.attempt = attempt
        self.cancel = CancelToken()
        self.ended_as = JobState.CANCELLED
        self.environment = environment
        self.waits = None
        self.progressed: list[tuple[float | None, str]] = []
        self.lines: list[tuple[str, str]] = []
        """(level, text) of every line."""
        self.streamed: list[str] = []
        self.checkpointed: dict[tuple[str, int], Step] = {}
        self.notes: list[str] = []
        """Rows by name and number; a test may put those of an earlier attempt here."""
        self.artifacts: dict[str, bytes] = {}
        """The content of each file that the job left, by name."""
        self._until = time.monotonic() + timeout
        self._reported = threading.Condition()

    def run(self, function: Returns[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job function here and now, with this as its Context.

        Arguments and result are checked, encoded and decoded as by an engine. What the function
        raises is raised. There is no engine: nothing is retried, and no time limit applies.
        """
        if function.mode is Mode.ASYNC:
            if asyncio._get_running_loop() is not None:
                raise RuntimeError("an event loop is running here: use `await arun(...)`")
            return asyncio.run(self.arun(function, *args, **kwargs))
        arguments = self._begin(function, args, kwargs)
        token = running.set(self)
        OUTPUT.open()
        try:
            value = function.signature.call(function.fn, arguments, self)
        finally:
            leave(token, self)
            OUTPUT.close()
        return _round_trip(value, function)

    async def arun(self, function: Returns[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The same, in the running event loop; a plain function runs in a thread."""
        if function.mode is not Mode.ASYNC:
            return await asyncio.to_thread(self.run, function, *args, **kwargs)
        arguments = self._begin(function, args, kwargs)
        token = running.set(self)
        OUTPUT.open()
        try:
            value = await function.signature.call(function.fn, arguments, self)
        finally:
            leave(token, self)
            OUTPUT.close()
        return _round_trip(value, function)

    def _begin(
        self, function: Returns[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments as a worker would decode them."""
        payload = function.signature.bind(args, kwargs)
        fields = request_fields(function.submit_defaults, True)
        fields["job_id"] = fields["job_id"] or self.job_id
        self.request = JobRequest(topic=function.topic, **fields)
        self.job_id = self.request.job_id
        return function.signature.decode(payload)

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        with self._reported:
            self.progressed.append((fraction, message))
            self._reported.notify_all()

    def log(self, text: str, level: str = "info") -> None:
        with self._reported:
            self.lines.append((level, text))
            self._reported.notify_all()

    def stream(self, text: str) -> None:
        with self._reported:
            self.streamed.append(text)
            self._reported.notify_all()

    async def checkpoint(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None:
        self.checkpoint_sync(rows, notes)

    def checkpoint_sync(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None:
        self.notes.extend(check_notes(notes))
        for index, row in enumerate(rows):
            check_row(row, f"rows[{index}]")
        self.checkpointed.update({(row.name, row.n): row for row in rows})

    async def artifact(self, name: str, source: Source, media_type: str | None = None) -> Artifact:
        blobs = environment.blobs if (environment := self.environment) else MemoryBlobs()
        left = await keep_artifact(blobs, name, source, media_type)
        pieces = [piece async for piece in blobs.stream(left.pointer)]
        self.artifacts[name] = b"".join(pieces)
        return left

    def artifact_sync(self, name: str, source: Source, media_type: str | None = None) -> Artifact:
        return asyncio.run(self.artifact(name, source, media_type))

    async def steps(
        self,
        name: str | None = None,
        *,
        after: tuple[str, int] | None = None,
        previous: bool = False,
    ) -> AsyncIterator[Step]:
        for row in self.steps_sync(name, after=after, previous=previous):
            yield row

    def steps_sync(
        self,
        name: str | None = None,
        *,
        after: tuple[str, int] | None = None,
        previous: bool = False,
    ) -> Iterator[Step]:
        for place in sorted(() if previous else self.checkpointed):
            if name in (None, place[0]) and (after is None or place > after):
                yield self.checkpointed[place]

    def remaining(self) -> float:
        return self._until - time.monotonic()

    def logged(self, level: str) -> list[str]:
        """The lines of one level."""
        return [text for at, text in list(self.lines) if at == level]

    def wait_for_progress(self, message: str, timeout: float = 30.0) -> bool:
        """Block a thread until the job has reported this message."""

        def reported() -> bool:
            return any(said == message for _, said in self.progressed)

        with self._reported:
            return self._reported.wait_for(reported, timeout)


def run(function: Returns[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a job function here and now: `RecordingContext().run(function, ...)`."""
    return RecordingContext().run(function, *args, **kwargs)


async def arun(function: Returns[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The same in the running event loop."""
    return await RecordingContext().arun(function, *args, **kwargs)


def _round_trip(value: Any, function: Returns[..., T]) -> T:
    """A result as a caller of the job gets it.

    Raises InvalidRequest if it can't be stored, or is not what the function says it returns.
    """
    signature = function.signature
    return cast(T, signature.returns.read(*signature.encode_result(value)))
