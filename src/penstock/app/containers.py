"""`penstock.container`: a command in a container, as a job."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import msgspec
from msgspec import structs

from penstock.app.artifacts import ArtifactHandle
from penstock.app.client import DefaultClient
from penstock.config import load
from penstock.core.errors import InvalidRequest, NotFound
from penstock.lifecycles.container import ContainerJobState
from penstock.ports.engine_api import JobUpdate, Streamed
from penstock.workloads.container.files.output import read_piece
from penstock.workloads.container.job import TOPIC, ContainerResult
from penstock.workloads.function.options import SubmitOptions

if TYPE_CHECKING:
    from penstock.app.application import Session
    from penstock.app.client import Client, JobHandle
    from penstock.core.job import Job

Content = str | bytes | Path
"""A file's content, or where it is."""


class _LimitOptions(TypedDict, total=False):
    memory_mb: float
    cpus: float
    pids: int
    tmp_mb: float
    shm_mb: float
    max_output_bytes: int
    max_log_bytes: int
    max_artifact_bytes: int
    pull_seconds: float


class ContainerOptions(_LimitOptions, total=False):
    """What `container` takes by name besides: limits, and fields of the protocol's `runtime`."""

    entrypoint: Sequence[str]
    user: int | str
    workdir: str
    network: bool | str
    gpus: int | str
    read_only: bool
    runtime: str
    mode: Literal["image", "build"]
    build: Mapping[str, Any]


class Ran(ContainerResult, frozen=True, kw_only=True):
    """The result of a container job, and the files that it left."""

    job_id: str
    artifacts: tuple[ArtifactHandle, ...] = ()
    """The files that it left in /output."""

    @property
    def peak_memory_bytes(self) -> int | None:
        return self.usage.peak_memory_bytes

    @property
    def cpu_seconds(self) -> float | None:
        return self.usage.cpu_seconds

    @property
    def ok(self) -> bool:
        return self.error_code is None

    def output(self, stream: str) -> bytes:
        """All that is kept of `stdout` or `stderr`, byte for byte."""
        log = self._log(stream)
        return getattr(self, stream).encode() if log is None else log.read()

    async def aoutput(self, stream: str) -> bytes:
        log = self._log(stream)
        return getattr(self, stream).encode() if log is None else await log.aread()

    def _log(self, stream: str) -> ArtifactHandle | None:
        """The artifact that has it, where the text does not have all of it."""
        return next((one for one in self.artifacts if one.name == f"{stream}.log"), None)

    def read(self, name: str) -> bytes:
        """An artifact's bytes. Raises NotFound."""
        return self._named(name).read()

    async def aread(self, name: str) -> bytes:
        return await self._named(name).aread()

    def _named(self, name: str) -> ArtifactHandle:
        for one in self.artifacts:
            if one.name == name:
                return one
        raise NotFound(f"job {self.job_id} left no artifact {name!r}")


def result_pointer(job: Job) -> str:
    return (job.result.result_ptr or "") if job.result is not None else ""


def ran(client: Client, job: Job, result: bytes) -> Ran:
    """How a container job ended; `result` is what its pointer names."""
    end = job.result
    if result:
        found = msgspec.json.decode(result, type=ContainerResult)
    else:
        found = ContainerResult(
            state=ContainerJobState.FAILED,
            error_code=(end.error_code if end else None) or job.state.value,
            error_message=end.error_message if end else None,
        )
    left = tuple(ArtifactHandle(client._engine, one) for one in end.artifacts) if end else ()
    return Ran(job_id=job.job_id, artifacts=left, **structs.asdict(found))


class Container:
    """A command in a container, ready to be run as a job. Make one with `penstock.container`."""

    def __init__(self, job: Mapping[str, Any], timeout: float | None) -> None:
        self.job = job
        """The protocol's Job object."""
        self._timeout = timeout

    def submit(
        self, client: Client | None = None, **options: Unpack[SubmitOptions]
    ) -> JobHandle[Any]:
        """Submit it; returns when it is durable. Without a client: to the engine on the data
        folder, or one in this process. Raises InvalidRequest and its kin."""
        return (client or _default.client()).submit(TOPIC, self.job, **self._timed(options))

    async def asubmit(
        self, client: Client | None = None, **options: Unpack[SubmitOptions]
    ) -> JobHandle[Any]:
        engine = await _engine(client)
        return await engine.asubmit(TOPIC, self.job, **self._timed(options))

    def run(self, client: Client | None = None, **options: Unpack[SubmitOptions]) -> Ran:
        """Run it to its end, whatever the end."""
        engine = client or _default.client()
        job = self.submit(engine, **options).wait()
        pointer = result_pointer(job)
        return ran(engine, job, engine.read(pointer) if pointer else b"")

    async def arun(self, client: Client | None = None, **options: Unpack[SubmitOptions]) -> Ran:
        engine = await _engine(client)
        job = await (await self.asubmit(engine, **options)).await_end()
        pointer = result_pointer(job)
        return ran(engine, job, await engine.aread(pointer) if pointer else b"")

    def _timed(self, options: SubmitOptions) -> SubmitOptions:
        if self._timeout is not None:
            options.setdefault("timeout", self._timeout + _SPARE)
        return options


_SPARE = 330.0
"""Seconds beyond a container's own limit that its job has: for its image and its end."""


def container(
    image: str,
    *cmd: str,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
    inputs: Mapping[str, Content] | None = None,
    outputs: bool = False,
    timeout: float | None = None,
    payload: Any = None,
    mounts: Mapping[str, str | Path] | None = None,
    attach: bool = False,
    **others: Unpack[ContainerOptions],
) -> Container:
    """A command in a container.

    `inputs` are files that it finds in /input; with `outputs` it may leave files in /output, which
    are the job's artifacts. `timeout` is how many seconds it may run. `stdin` is what it reads;
    without it, it reads the whole job, with `payload` in it, as JSON. `mounts` are folders of the
    worker's machine, by the path that they have in the container, read-only and from the worker's
    list. With `attach`, readers of the job get its output byte for byte, too. Limits
    (`memory_mb`, `cpus`, `pids`, `tmp_mb`, `shm_mb`, `max_output_bytes` …) and other fields of
    `runtime` (`entrypoint`, `user`, `network`, `workdir`, `gpus`, `runtime`) can be given by name.
    """
    limits = {
        name: value for name, value in others.items() if name in _LimitOptions.__annotations__
    }
    fields = {name: value for name, value in others.items() if name not in limits}
    if timeout is not None:
        limits["max_runtime_seconds"] = timeout
    runtime: dict[str, Any] = {"image": image, "cmd": list(cmd), **fields}
    if env:
        runtime["env"] = dict(env)
    if limits:
        runtime["limits"] = limits
    if mounts:
        runtime["mounts"] = [
            {"source": str(source), "target": target} for target, source in mounts.items()
        ]
    if stdin is not None:
        runtime["stdin"] = _content(stdin) if stdin else "none"
    job: dict[str, Any] = {"runtime": runtime}
    if payload is not None:
        job["task"] = {"type": "container", "payload": payload}
    if inputs:
        job["inputs"] = [_input(path, content) for path, content in inputs.items()]
    if outputs:
        job["outputs"] = True
    if attach:
        job["attach"] = True
    return Container(job, timeout)


def _input(path: str, content: Content) -> dict[str, Any]:
    if isinstance(content, Path):
        try:
            content = content.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"inputs[{path!r}]", f"can't be read: {error}") from error
    return {"path": path, **_content(content)}


def _content(content: str | bytes) -> dict[str, str]:
    if isinstance(content, str):
        return {"text": content}
    return {"base64": base64.b64encode(content).decode()}


def _embedded() -> Session:
    from penstock.app.application import App

    settings = load()
    if not settings.containers.engine:
        settings = settings.changed(containers__engine="auto")
    return App().run(settings=settings)


def _check_served(client: Client) -> None:
    served = {topic for worker in client.workers() for topic in worker.topics}
    if TOPIC not in served:
        raise NotFound(
            "the engine that is running here runs no containers",
            hint="start it with 'penstock up --containers auto', or join it with"
            " 'penstock worker --containers auto'",
        )


_default = DefaultClient(_embedded, _check_served)


async def _engine(client: Client | None) -> Client:
    return client if client is not None else await asyncio.to_thread(_default.client)


class OutputFollower:
    """Passes on what a container writes, as it comes; what did not come, at the end."""

    def __init__(
        self, write: Callable[[str, bytes], Awaitable[None]], streams: Iterable[str]
    ) -> None:
        self._write, self._written = write, dict.fromkeys(streams, 0)
        """Bytes of each stream."""
        self._next: tuple[int, int] | None = None
        """Attempt and number of the next piece; None before the first."""

    async def follow(self, updates: AsyncIterator[JobUpdate]) -> None:
        async for update in updates:
            if isinstance(update, Streamed):
                place = (update.attempt, update.n)
                if place == (self._next or (update.attempt, 1)):
                    self._next = (update.attempt, update.n + 1)
                    await self._pass_on(*read_piece(update.text))

    async def _pass_on(self, stream: str, data: bytes) -> None:
        if stream in self._written:
            self._written[stream] += len(data)
            await self._write(stream, data)

    async def complete(self, end: Ran) -> dict[str, str]:
        """Write what did not come while it ran; returns what is missing, by stream."""
        missing = {}
        for stream, done in self._written.items():
            total, left = getattr(end, f"{stream}_count").bytes, await end.aoutput(stream)
            if done < total == len(left):
                await self._pass_on(stream, left[done:])
            elif done < total:
                missing[stream] = f"{total - done:,} of {total:,} bytes"
        return missing
