"""Runs containers as canonical jobs: what happens inside RUNNING.

The input is the protocol's Job object; what the canonical job knows already (`job_id`,
`protocol_version`, the mode) need not be in it. The result is stored whatever the end: exit
code, output and artifacts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.core.errors import InvalidRequest, Misconfigured, NotFound, NotPermitted
from penstock.core.job import Job, TopicDefaults
from penstock.core.pointer import decode_data, encode_data
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.container import ContainerJobState, canonical_end
from penstock.ports.clock import SystemClock
from penstock.ports.executor import CancelToken, Context, Environment, Outcome, Task
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import Engine, EngineError, EngineFacts
from penstock.workloads.container.engines.discovery import open_engine
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import Sandbox, Sandboxes
from penstock.workloads.container.job import (
    PROTOCOL_VERSION,
    Artifact,
    ContainerJob,
    End,
    Rejected,
    Stream,
    StreamCount,
    Usage,
)
from penstock.workloads.container.lines import Lines
from penstock.workloads.container.owners import Owners
from penstock.workloads.container.protocol.body import Unreadable, read_input
from penstock.workloads.container.protocol.submission import check_job
from penstock.workloads.container.running.runner import Runner

log = logging.getLogger(__name__)

TOPIC = "job.container.run"
_FORBIDDEN = frozenset({"NOT_ALLOWED", "IMAGE_NOT_ALLOWED", "RUNTIME_NOT_SUPPORTED"})
"""Codes by which a worker's policy speaks."""
_MIB = 1 << 20
_CLEAR_UP = "what a container's user made can be removed by root"


class ContainerResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a container job returns, and leaves behind when it fails."""

    state: ContainerJobState
    exit_code: int | None
    stdout: str
    stderr: str
    error_code: str | None = None
    error_message: str | None = None
    artifacts: tuple[Artifact, ...] = ()
    skipped: tuple[str, ...] = ()
    usage: Usage = Usage()
    stdout_count: StreamCount = StreamCount()
    stderr_count: StreamCount = StreamCount()
    image_id: str = ""


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """How a container ended, and what it left."""

    job_id: str
    exit_code: int | None
    """None where there is none: after a timeout, a cancel, or where no engine answered."""
    stdout: str
    stderr: str
    error_code: str | None = None
    """Why it failed: OOM_KILLED, TIMEOUT, IMAGE_NOT_FOUND …"""
    error_message: str | None = None
    artifacts: tuple[Artifact, ...] = ()
    skipped: tuple[str, ...] = ()
    """What was left in the output folder and not kept, with the reason."""
    peak_memory_bytes: int | None = None
    cpu_seconds: float | None = None

    @property
    def ok(self) -> bool:
        return self.error_code is None

    def read(self, path: str) -> bytes:
        """An artifact's bytes. Raises NotFound."""
        for artifact in self.artifacts:
            if artifact.path == path:
                return decode_data(artifact.pointer)
        raise NotFound(f"job {self.job_id} left no artifact {path!r}")


def result_pointer(job: Job) -> str:
    return (job.result.result_ptr or "") if job.result is not None else ""


def ran(job: Job, result: bytes) -> Ran:
    """What became of a container job that has ended; `result` is what its pointer names."""
    if not result:
        ended = job.result
        return Ran(
            job_id=job.job_id,
            exit_code=None,
            stdout="",
            stderr="",
            error_code=(ended.error_code if ended else None) or job.state.value,
            error_message=ended.error_message if ended else None,
        )
    left = msgspec.json.decode(result, type=ContainerResult)
    return Ran(
        job_id=job.job_id,
        exit_code=left.exit_code,
        stdout=left.stdout,
        stderr=left.stderr,
        error_code=left.error_code,
        error_message=left.error_message,
        artifacts=left.artifacts,
        skipped=left.skipped,
        peak_memory_bytes=left.usage.peak_memory_bytes,
        cpu_seconds=left.usage.cpu_seconds,
    )


class ContainerExecutor:
    """Executes container jobs on one engine; without a config it serves nothing."""

    resumable = False

    def __init__(
        self,
        config: WorkerConfig | None,
        engine: Engine | None = None,
        *,
        max_result: int = 64 << 20,
    ) -> None:
        self._config = config
        self._most_result = max_result
        self._engine = engine
        self._facts: EngineFacts | None = None
        self._runner: Runner | None = None
        self._owners: Owners | None = None
        self._sandboxes: Sandboxes | None = None
        self._opening = asyncio.Lock()
        self.topics: tuple[str, ...] = () if config is None else (TOPIC,)
        self.topic_defaults: Mapping[str, TopicDefaults] = {}

    async def open(self, environment: Environment) -> None:
        """Find the engine, and clear away what a worker that died left behind."""
        if self._config is not None:
            await self._opened(environment)

    async def _opened(self, environment: Environment | None) -> Runner:
        config = self._config
        assert config is not None
        async with self._opening:
            if self._runner is None:
                engine = self._engine = self._engine or await open_engine(config)
                try:
                    self._facts = await engine.facts()
                    await self._enter(engine, config, environment)
                except EngineError as error:
                    raise Misconfigured(
                        f"no container can be run here: {error}",
                        hint="'penstock doctor' says which engines work",
                    ) from error
            assert self._runner is not None
            return self._runner

    async def _enter(
        self, engine: Engine, config: WorkerConfig, environment: Environment | None
    ) -> None:
        self._owners = owners = Owners(config.jobs_dir / "owners")
        folder = owners.enter()
        for name in await owners.sweep(engine):
            log.warning("container %s was left behind by a worker that died; removed", name)
        blobs, clock = (
            (environment.blobs, environment.clock)
            if environment is not None
            else (None, SystemClock())
        )
        self._sandboxes = Sandboxes(folder, config.inputs, blobs)
        self._runner = Runner(engine, config, clock, owners.me)

    def check(self, topic: str, payload: bytes) -> None:
        self._read(payload, "job")

    def _read(self, payload: bytes, job_id: str) -> ContainerJob:
        """Raises InvalidRequest, and NotPermitted where the worker's policy speaks."""
        assert self._config is not None
        try:
            value = read_input(payload) if payload else {}
        except Unreadable as error:
            raise InvalidRequest("input", f"can't be read: {error}") from error
        facts = self._facts
        try:
            return check_job(
                completed(value, job_id),
                self._config,
                can_build=facts is None or facts.can_build,
                runtimes=facts.runtimes if facts is not None else (),
            ).job
        except Rejected as refused:
            wrong = refused.error
            if wrong.code in _FORBIDDEN:
                raise NotPermitted(f"{wrong.code}: {wrong.message}") from refused
            raise InvalidRequest(wrong.field or "input", wrong.message) from refused

    async def run(self, task: Task, ctx: Context) -> Outcome:
        if self._config is None:
            return _failure("UNKNOWN_TOPIC", "no containers are run here")
        try:
            job = self._read(task.payload, ctx.job_id)
            job = _constrained(_timed(job, task.payload, ctx, self._config), task.constraints)
        except NotPermitted as refused:
            code, _, message = refused.message.partition(": ")
            return _failure(code, message)
        except InvalidRequest as wrong:
            return _failure("BAD_INPUT", str(wrong))
        except _NotEnforced as unmet:
            return _failure("CONSTRAINT_NOT_ENFORCED", str(unmet))
        return await self._contained(await self._opened(ctx.environment), job, ctx)

    async def _contained(self, runner: Runner, job: ContainerJob, ctx: Context) -> Outcome:
        assert self._sandboxes is not None
        attempt_id = f"{ctx.job_id}/{ctx.attempt}"
        sandbox = self._sandboxes.of(attempt_id)
        output = Output(None, job.limits.max_output_bytes)
        lines = Lines(ctx.log, job.limits.max_output_bytes)
        output.listen(lines.hear)
        job = replace(job, job_id=attempt_id)
        try:
            end = await _stoppable(runner, job, sandbox, output, ctx)
            lines.end()
            end = await asyncio.to_thread(_carried, end, sandbox, self._most_result)
            return _outcome(end, output)
        finally:
            output.close()
            await runner.remove(attempt_id, job)
            try:
                await sandbox.delete()
            except OSError as error:  # the result counts all the same
                log.warning("%s is still there: %s (%s)", sandbox.folder, error, _CLEAR_UP)

    async def close(self) -> None:
        if self._owners is not None:
            self._owners.leave()
        if self._engine is not None:
            await self._engine.close()


def make(app: Any, options: Mapping[str, Any]) -> ContainerExecutor:
    """The executor of container jobs (entry point `penstock.executors`)."""
    return ContainerExecutor(
        options.get("containers"), max_result=options.get("max_result", 64 << 20)
    )


def completed(value: Any, job_id: str) -> Any:
    """The Job object with what the canonical job knows already."""
    if not isinstance(value, dict):
        return value
    job = {"protocol_version": PROTOCOL_VERSION, "job_id": job_id, **value}
    runtime = job.get("runtime")
    if isinstance(runtime, dict) and "mode" not in runtime:
        mode = "build" if "build" in runtime else "image"
        job["runtime"] = {"mode": mode, **runtime}
    return job


async def _stoppable(
    runner: Runner, job: ContainerJob, sandbox: Sandbox, output: Output, ctx: Context
) -> End:
    """Run it; whatever end is asked for, the container has ended before this does."""
    stop = CancelToken()
    running = asyncio.ensure_future(runner.run(job, sandbox, output, stop))
    while True:
        try:
            end = await asyncio.shield(running)
            break
        except asyncio.CancelledError:
            if running.done() and running.cancelled():
                raise
            stop.request(ctx.cancel.reason or "the worker stops")
    if stop.requested and end.error is not None and end.error.code == "CANCELLED":
        raise asyncio.CancelledError  # the worker knows what the end counts as
    return end


def _carried(end: End, sandbox: Sandbox, most: int) -> End:
    """With the artifacts inside the result, so that they live, and are seen, as long and by
    whom the job is; what would make it too large stays behind, with its reason."""
    carried, skipped, room = [], list(end.skipped), most // 2  # they grow by a third as text
    for artifact in end.artifacts:
        if artifact.size > room:
            skipped.append(
                f"{artifact.path}: {artifact.size:,} bytes are too many for the result (max_result)"
            )
            continue
        room -= artifact.size
        with sandbox.open(artifact.path) as file:
            carried.append(replace(artifact, pointer=encode_data(file.read(), _BYTES)))
    return replace(end, artifacts=tuple(carried), skipped=tuple(skipped))


_BYTES = "application/octet-stream"


def _outcome(end: End, output: Output) -> Outcome:
    error = end.error
    result = ContainerResult(
        state=end.state,
        exit_code=end.exit_code,
        stdout=output.text(Stream.STDOUT),
        stderr=output.text(Stream.STDERR),
        error_code=error.code if error else None,
        error_message=error.message if error else None,
        artifacts=end.artifacts,
        skipped=end.skipped,
        usage=end.usage,
        stdout_count=end.stdout,
        stderr_count=end.stderr,
        image_id=end.image_id,
    )
    counts_as = canonical_end(end.state, error.code if error else None)
    return Outcome(
        counts_as.state,
        msgspec.json.encode(result),
        error_code=counts_as.error_code,
        error_message=error.message if error else None,
    )


def _timed(job: ContainerJob, payload: bytes, ctx: Context, config: WorkerConfig) -> ContainerJob:
    """With no limit of its own, a container may run as long as its job may."""
    said = read_input(payload).get("runtime", {}).get("limits") or {}
    if said.get("max_runtime_seconds") is not None:
        return job
    most = min(ctx.remaining(), config.most.max_runtime_seconds)
    return replace(job, limits=replace(job.limits, max_runtime_seconds=max(most, 0.001)))


class _NotEnforced(Exception):
    """A demand of the safety rules to which a container can't be held."""


def _constrained(job: ContainerJob, constraints: Constraints | None) -> ContainerJob:
    """Within what the safety rules allow."""
    if constraints is None:
        return job
    if constraints.network is not None and job.network:
        if constraints.network:
            raise _NotEnforced(
                f"the safety rules allow only {', '.join(constraints.network)} to be reached; a"
                " container has the whole network or none, so it was not run"
            )
        job = replace(job, network=False)
    if constraints.read_only and job.outputs:
        raise _NotEnforced(
            "the safety rules demand read_only, and the job wants an output folder: leave"
            " 'outputs' out"
        )
    if constraints.max_memory is not None:
        memory = min(job.limits.memory_mb, constraints.max_memory / _MIB)
        job = replace(job, limits=replace(job.limits, memory_mb=memory))
    return job


def _failure(code: str, message: str) -> Outcome:
    return Outcome(JobState.FAILED, error_code=code, error_message=message)
