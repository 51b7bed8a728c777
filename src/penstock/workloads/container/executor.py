"""Runs containers as canonical jobs: what happens inside RUNNING.

The input is the protocol's Job object; what the canonical job knows already (`job_id`,
`protocol_version`, the mode) need not be in it. The result is stored whatever the end: exit
code and output; the files that it left are the job's artifacts.

A container outlives its worker. Before it is started, the job checkpoints where that is. A worker
that stops leaves it running; the one that finds it (`ContainerHost.reconcile`) tells the engine,
gets the job with its next attempt, and reattaches. The container and its folder are removed only
after the job's end is recorded, so a worker can die at any moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from penstock import values
from penstock.core.errors import InvalidRequest, Misconfigured, NotPermitted
from penstock.core.job import TopicDefaults
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.container import ContainerJobState, canonical_end
from penstock.ports.blobs import BlobStat
from penstock.ports.executor import (
    PAUSED,
    REATTACHABLE,
    SCHEMA,
    USAGE,
    Context,
    Environment,
    Interrupted,
    NotBegun,
    Outcome,
    Task,
    TopicPaused,
)
from penstock.ports.process import failpoint
from penstock.workloads.container.config import OnRestart, WorkerConfig
from penstock.workloads.container.engine import (
    NO_NETWORK,
    ContainerEngine,
    ContainerState,
    ContainerSummary,
    EngineError,
)
from penstock.workloads.container.engines.discovery import open_engine
from penstock.workloads.container.files.artifacts import ArtifactCollector, LogUploads
from penstock.workloads.container.files.output import Lines, Output, Pieces
from penstock.workloads.container.host import STEP, ContainerHost, Started, engine_id
from penstock.workloads.container.job import (
    OUTPUT_FOLDER,
    PROTOCOL_VERSION,
    TOPIC,
    ContainerJob,
    ContainerResult,
    ErrorCode,
    Rejected,
    Stream,
    StreamCount,
)
from penstock.workloads.container.machine import Need, need_of
from penstock.workloads.container.protocol.body import Unreadable, compact, encode, read_input
from penstock.workloads.container.protocol.schema import JobBody
from penstock.workloads.container.protocol.submission import check_job
from penstock.workloads.container.timeouts import StopRequest, drop, in_thread_if, to_its_end

log = logging.getLogger(__name__)

_FORBIDDEN = frozenset({"NOT_ALLOWED", "IMAGE_NOT_ALLOWED", "RUNTIME_NOT_SUPPORTED"})
"""Codes by which a worker's policy speaks."""
_ROOM = 1.0
"""Seconds that a job waits here for memory and processors before it goes back to the queue."""
_LARGE = 256 << 10
"""Bytes of an input or an output that is read in a thread."""
_LONGEST = 8
"""Bytes of a character in JSON at most, with some to spare for the rest of the result."""
_MIB = 1 << 20
_STOPPED = "the worker was stopped while the job ran (on_restart: end)"
BUILD_LOG = "build.log"
"""The artifact that a build's log becomes, unless the job left one of that name."""
_RESTARTED = "the worker was restarted while the job ran (on_restart: end)"
_VANISHED = "the worker was restarted, and the job's container is not there any more"


class ContainerExecutor:
    """Executes container jobs on one engine; without a config it serves nothing."""

    resumable = True

    def __init__(self, config: WorkerConfig | None, engine: ContainerEngine | None = None) -> None:
        self._config = config
        self._engine = engine
        self._opening = asyncio.Lock()
        self.host: ContainerHost | None = None
        """Once it is open."""
        self.topics: tuple[str, ...] = ()
        self.topic_defaults: Mapping[str, TopicDefaults] = {}
        if config is not None:
            self.topics = (TOPIC,)
            defaults = TopicDefaults(reattach_timeout=config.reattach_seconds)
            self.topic_defaults = {TOPIC: defaults}

    async def open(self, environment: Environment) -> None:
        """Find the engine, and what an earlier worker left there."""
        if self._config is not None:
            await self._opened(environment)

    async def _opened(self, environment: Environment | None) -> ContainerHost:
        config = self._config
        assert config is not None
        async with self._opening:
            if self.host is None:
                try:
                    engine = self._engine = self._engine or await open_engine(config)
                    host = ContainerHost(engine, config, environment, await engine_id(environment))
                    await host.open()
                except EngineError as error:
                    raise Misconfigured(
                        f"no container can be run here: {error}",
                        hint="'penstock doctor' says which engines work",
                    ) from error
                self.host = host
            return self.host

    def check(self, topic: str, payload: bytes) -> None:
        self._read(payload, "job")

    def _read(self, payload: bytes, job_id: str) -> tuple[ContainerJob, bool]:
        """The job, and whether it sets its own time limit. Raises InvalidRequest, and NotPermitted
        where the worker's policy speaks."""
        assert self._config is not None
        payload = payload or b"{}"
        try:
            value = read_input(payload)
        except Unreadable as error:
            raise InvalidRequest("input", f"can't be read: {error}") from error
        try:
            job = check_job(
                completed(value, job_id),
                self._config,
                self.host.facts if self.host is not None else None,
                body=_body(payload, value, job_id),
            ).job
        except Rejected as refused:
            wrong = refused.error
            if wrong.code in _FORBIDDEN:
                raise NotPermitted(f"{wrong.code}: {wrong.message}") from refused
            raise InvalidRequest(wrong.field or "input", wrong.message) from refused
        limits = value["runtime"].get("limits") or {}
        return job, limits.get("max_runtime_seconds") is not None

    async def run(self, task: Task, ctx: Context) -> Outcome:
        if self._config is None:
            return _failure("UNKNOWN_TOPIC", "no containers are run here")
        try:
            job, is_timed = await in_thread_if(
                len(task.payload) > _LARGE, self._read, task.payload, ctx.job_id
            )
            if not is_timed:
                job = _timed(job, ctx, self._config)
            job = _constrained(replace(job, job_id=ctx.job_id), task.constraints)
            if task.request.traceparent is not None:
                job = replace(job, env={"TRACEPARENT": ctx.traceparent, **job.env})
        except NotPermitted as refused:
            code, _, message = refused.message.partition(": ")
            return _failure(code, message)
        except InvalidRequest as wrong:
            return _failure("BAD_INPUT", str(wrong))
        except _NotEnforced as unmet:
            return _failure("CONSTRAINT_NOT_ENFORCED", str(unmet))
        host = await self._opened(ctx.environment)
        return await ContainerAttempt(host, job, ctx, task.request.idempotent).outcome()

    def facts(self) -> Mapping[str, Any]:
        """What the engine is told of this worker: what a job takes, lost jobs to which it can
        reattach, why it takes no others now, and what its containers have used."""
        host = self.host
        if host is None:
            return {}
        obstacle = host.obstacle() or host.capacity.shortage
        return {
            SCHEMA + TOPIC: _SCHEMA,
            REATTACHABLE: dict(host.reattachable),
            PAUSED: {TOPIC: obstacle} if obstacle else {},
            USAGE: msgspec.to_builtins(host.usage),
        }

    async def close(self) -> None:
        if self.host is not None:
            await self.host.close()
        elif self._engine is not None:
            await self._engine.close()


def make(app: Any, options: Mapping[str, Any]) -> ContainerExecutor:
    """The executor of container jobs (entry point `penstock.executors`)."""
    return ContainerExecutor(options.get("containers"))


class ContainerAttempt:
    """One attempt of one container job."""

    def __init__(
        self, host: ContainerHost, job: ContainerJob, ctx: Context, is_repeatable: bool
    ) -> None:
        self._host, self._job, self._ctx, self._is_repeatable = host, job, ctx, is_repeatable
        self._sandbox = host.folders.sandbox(job.job_id, self._check_pointer)
        self._stop = StopRequest()
        self._starting = False
        """From just before the container is started."""
        self._uploads: dict[Stream, asyncio.Task[BlobStat]] = {}
        """Of streams that are too long for the result."""

    async def _check_pointer(self, uri: str) -> None:
        """A pointer in a job leads no further than one that its submitter follows."""
        environment = self._ctx.environment
        if environment is not None and not uri.startswith("data:"):
            await environment.api.stat_blob(uri, job_id=self._ctx.job_id)

    async def outcome(self) -> Outcome:
        """Raises Interrupted if the container goes on without us, and NotBegun if it was not
        started."""
        host, ctx, job_id = self._host, self._ctx, self._job.job_id
        # A folder that is held here may belong to a container that runs: the job is not to be
        # given to another worker, however bad the moment.
        if not host.folders.holds(job_id) and (obstacle := host.obstacle()):
            raise TopicPaused(obstacle)
        need = need_of(self._job, host.config)
        if (small := host.capacity.too_small(need)) is not None:
            return _failure(ErrorCode.NOT_ALLOWED, f"{small[0]} {small[1]}")
        try:
            await host.enter(self._job)
        except asyncio.CancelledError:
            if ctx.ended_as is JobState.FAILED:
                self._let_go(ctx.cancel.reason)
            raise
        try:
            if not host.folders.hold(job_id):
                raise Interrupted("another worker on this machine has the job")
            return await self._whole(need)
        except NotBegun:
            # The folder of a job that was interrupted stays: the next worker here gets it first.
            await (host.runner.remove if ctx.cancel.requested else host.remove)(job_id)
            raise
        except asyncio.CancelledError:
            if ctx.ended_as is JobState.FAILED:
                self._let_go(ctx.cancel.reason)
            await to_its_end(host.remove(job_id))
            raise
        finally:
            await drop(*self._uploads.values())
            host.end(job_id)

    async def _whole(self, need: Need) -> Outcome:
        host = self._host
        try:
            started, found = await self._left()
        except EngineError as error:
            host.failed(str(error))
            raise Interrupted(f"the container engine is unavailable: {error}") from error
        self._starting = found is not None and found.state is not ContainerState.CREATED
        if self._ctx.cancel.requested:
            if not self._starting:
                raise asyncio.CancelledError
            self._stop.request(self._ctx.cancel.reason)
        if started is not None and found is None:
            return await self._gone()
        if started is not None and not self._starting:
            # It never was. Without its container, the next attempt must not take it for lost.
            await self._ctx.checkpoint([Started().row()])
        await self._admit(need)
        result, output = await self._run(started, found)
        return await self._ended(result, output)

    async def _left(self) -> tuple[Started | None, ContainerSummary | None]:
        """What an earlier attempt left here: its word that it started a container, and that."""
        ctx, host = self._ctx, self._host
        if ctx.attempt == 1:
            return None, None
        rows = [Started.of(row) async for row in ctx.steps(STEP)]
        started = next((row for row in rows if row.owner == host.owner), None)
        if not self._is_repeatable and any(row.owner not in ("", host.owner) for row in rows):
            raise Interrupted("its container was started elsewhere")
        return started, await host.find(ctx.job_id)

    async def _admit(self, need: Need) -> None:
        host, job = self._host, self._job
        if self._starting:
            host.capacity.hold(job.job_id, need)
        elif lacks := await host.capacity.admit(job.job_id, need, _ROOM):
            raise TopicPaused(f"it {lacks}")

    async def _run(
        self, started: Started | None, found: ContainerSummary | None
    ) -> tuple[ContainerResult, Output]:
        host, job = self._host, self._job
        limit = job.limits.max_log_bytes
        if found is not None and self._starting:
            output = Output.reopen(self._sandbox.logs, limit)
            if host.config.on_restart is OnRestart.END:
                self._stop.request(_RESTARTED)
            at = started.at if started is not None else found.created
            work = host.runner.adopt(job, found, self._sandbox, output, self._stop, at)
        else:
            # A worker that died may have left one that was not started, or was made only in part.
            if self._ctx.attempt > 1 and not await host.runner.remove(job.job_id):
                raise Interrupted("a container that was made and not started can't be removed")
            output = Output(self._sandbox.logs, limit)
            work = host.runner.run(job, self._sandbox, output, self._stop, starts=self._checkpoint)
        host.begin(job.job_id, output)
        lines = Lines(self._ctx.log, job.limits.max_output_bytes)
        output.listen(lines.hear)
        if job.attach:
            most = host.config.max_limits.max_output_bytes
            output.listen(Pieces(self._ctx.stream, most).hear)
        if host.blobs is not None:
            self._uploads = LogUploads(host.blobs, output, job.limits.max_output_bytes).tasks
        result = await self._supervised(work)
        lines.end()
        return result, output

    async def _checkpoint(self) -> None:
        """Say where the container is started, durably; it is started next."""
        self._starting = True
        host = self._host
        name = host.runner.name_of(self._job.job_id)
        started = Started(host.owner, name, host.clock.now(), host.where)
        await self._ctx.checkpoint([started.row()])
        failpoint("container-job-named")

    async def _supervised(self, work: Coroutine[Any, Any, ContainerResult]) -> ContainerResult:
        """Run it. A cancel or a time limit ends the container first; a worker that stops leaves it
        running, unless its configuration says otherwise."""
        ctx = self._ctx
        running = asyncio.ensure_future(work)
        while not running.done():
            try:
                await asyncio.wait((running,))
            except asyncio.CancelledError:
                stops = ctx.cancel.requested and ctx.ended_as is JobState.FAILED
                if stops and self._host.config.on_restart is OnRestart.ADOPT:
                    await drop(running)
                    self._let_go(ctx.cancel.reason)
                self._stop.request(_STOPPED if stops else ctx.cancel.reason or "cancelled")
        return running.result()

    def _let_go(self, reason: str) -> NoReturn:
        if not self._starting and self._ctx.attempt == 1:
            raise NotBegun(reason)
        self._host.look_soon()
        raise Interrupted(f"{reason}; its container goes on")

    # -- the end ----------------------------------------------------------------------------

    async def _ended(self, result: ContainerResult, output: Output) -> Outcome:
        host, ctx = self._host, self._ctx
        failpoint("container-job-ended")
        if result.error_code == ErrorCode.ENGINE_UNAVAILABLE:
            message = result.error_message or ""
            host.failed(message)  # nobody else starts before it has answered
            if not self._starting:
                raise TopicPaused(message)
        asked = ctx.cancel.requested and ctx.ended_as is not JobState.FAILED
        if result.error_code == ErrorCode.CANCELLED and not asked:
            result = replace(result, error_code=ErrorCode.WORKER_RESTARTED)
        outcome = await self._outcome(result, output)
        host.settle(self._job.job_id, ctx.attempt, result.image_id)
        return outcome

    async def _gone(self) -> Outcome:
        """Its container was started here, and somebody removed it."""
        output = Output.reopen(self._sandbox.logs, self._job.limits.max_log_bytes)
        output.end()
        stdout, stderr = map(output.count, Stream)
        result = ContainerResult(
            state=ContainerJobState.FAILED,
            error_code=ErrorCode.WORKER_RESTARTED,
            error_message=_VANISHED,
            stdout_count=stdout,
            stderr_count=stderr,
        )
        try:
            return await self._ended(result, output)
        finally:
            output.close()

    async def _outcome(self, result: ContainerResult, output: Output) -> Outcome:
        blobs, limits = self._host.blobs, self._job.limits
        most = limits.max_output_bytes
        stdout, stderr = await _texts(output, most)
        if blobs is not None and len(stdout) + len(stderr) > blobs.max_size // _LONGEST:
            size = sum(len(msgspec.json.encode(text)) for text in (stdout, stderr))
            if size > blobs.max_size * 3 // 4:
                most = blobs.max_size // 16  # so that it can be stored; artifacts have it all
                stdout, stderr = await _texts(output, most)
        collector = ArtifactCollector(blobs, limits.max_artifact_bytes)
        try:
            if self._job.outputs:
                await collector.add_folder(self._sandbox.output)
            if self._sandbox.build_log.exists():
                await collector.add(BUILD_LOG, self._sandbox.build_log, "text/plain")
            for stream, text in zip(Stream, (stdout, stderr), strict=True):
                await collector.add_log(stream, text, output, self._uploads.get(stream))
        except Exception as error:
            log.exception("what job %s left can't be collected", self._job.job_id)
            message = f"what it left in /output could not be collected: {error}"
            collector.skip(OUTPUT_FOLDER, f"could not be collected: {error}")
            if result.state is ContainerJobState.FINISHED:
                failed, code = ContainerJobState.FAILED, ErrorCode.RUNTIME_ERROR
                result = replace(result, state=failed, error_code=code, error_message=message)
        result = replace(
            result,
            stdout=stdout,
            stderr=stderr,
            skipped=collector.skipped,
            stdout_count=_shown(result.stdout_count, most),
            stderr_count=_shown(result.stderr_count, most),
        )
        counts_as = canonical_end(result.state, result.error_code)
        return Outcome(
            counts_as.state,
            msgspec.json.encode(result),
            error_code=counts_as.error_code,
            error_message=result.error_message,
            artifacts=tuple(collector.artifacts),
        )


async def _texts(output: Output, most: int) -> list[str]:
    size = sum(output.count(stream).kept for stream in Stream)
    return await in_thread_if(
        size > _LARGE, lambda: [output.text(stream, most) for stream in Stream]
    )


def _shown(count: StreamCount, most: int) -> StreamCount:
    return replace(count, shown=min(count.kept, most))


def _body(payload: bytes, value: Any, job_id: str) -> bytes:
    """The whole job as its container reads it: what was submitted, every number as it was, after
    what the canonical job knows."""
    text = compact(payload).strip()
    if not isinstance(value, dict):
        return text
    known = {"protocol_version": PROTOCOL_VERSION, "job_id": job_id}
    missing = {name: one for name, one in known.items() if name not in value}
    parts = [encode(missing)[1:-1], text[1:-1]]
    return b"{%b}" % b",".join(filter(None, parts))


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


def _timed(job: ContainerJob, ctx: Context, config: WorkerConfig) -> ContainerJob:
    """With no limit of its own, a container may run as long as its job may."""
    most = min(ctx.remaining(), config.max_limits.max_runtime_seconds)
    return replace(job, limits=replace(job.limits, max_runtime_seconds=max(most, 0.001)))


def _schema() -> dict[str, Any]:
    """The job as the protocol has it, without what `completed` fills in."""
    schema = values.json_schema(JobBody)
    schema["required"] = ["runtime"]
    for name in ("protocol_version", "job_id"):
        del schema["properties"][name]
    schema["$defs"]["RuntimeBody"]["required"].remove("mode")
    return {"description": "Runs a command in a container.", "input": schema}


_SCHEMA = _schema()


class _NotEnforced(Exception):
    """A demand of the safety rules to which a container can't be held."""


def _constrained(job: ContainerJob, constraints: Constraints | None) -> ContainerJob:
    """Within what the safety rules allow."""
    if constraints is None:
        return job
    if constraints.network is not None and job.network != NO_NETWORK:
        if constraints.network:
            raise _NotEnforced(
                f"the safety rules allow only {', '.join(constraints.network)} to be reached; a"
                " container has the whole network or none, so it was not run"
            )
        job = replace(job, network=NO_NETWORK)
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
