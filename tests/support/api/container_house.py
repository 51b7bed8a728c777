"""The container protocol's HTTP API before a worker in memory, which runs what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, cast

import aiohttp
import msgspec
from msgspec.structs import replace
from tests.support.api.house import Answer
from yarl import URL

from penstock.api.container.facade import (
    ContainerFacade,
    ContainerRecord,
    WorkerHealth,
    WorkerInfo,
)
from penstock.api.container.server import LIMITS, container_server
from penstock.api.metrics import Traffic
from penstock.api.server import ApiServer
from penstock.core.artifact import Artifact
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.job import Priority as JobPriority
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.container import ContainerJobState
from penstock.ports.clock import SystemClock
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.files.output import LogPage
from penstock.workloads.container.job import (
    TOPIC,
    ContainerResult,
    ErrorCode,
    JobError,
    Priority,
    Rejected,
    Stream,
    StreamCount,
    Usage,
)

_S = ContainerJobState
CREATED = 1_700_000_000.123


_STATES = {
    _S.QUEUED: JobState.SCHEDULED,
    _S.RUNNING: JobState.RUNNING,
    _S.FINISHED: JobState.SUCCEEDED,
    _S.FAILED: JobState.FAILED,
}
_PRIORITIES = {
    Priority.HIGH: JobPriority.CRITICAL,
    Priority.NORMAL: JobPriority.INTERACTIVE,
    Priority.LOW: JobPriority.BATCH,
}


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """What a test says of a job."""

    job_id: str
    seq: int
    state: ContainerJobState = _S.QUEUED
    created_at: float = CREATED
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    error: JobError | None = None
    priority: Priority = Priority.NORMAL
    labels: dict[str, str] = {}
    image: str = "alpine:latest"
    usage: Usage = Usage()
    artifacts: tuple[Artifact, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        return self.state in (_S.FINISHED, _S.FAILED)

    def record(self, run: Run) -> ContainerRecord:
        """The same as the engine has it."""
        error = self.error
        result = JobResult(
            job_id=self.job_id,
            status=_STATES[self.state],
            error_code=error.code if error else None,
            error_message=error.message if error else None,
            artifacts=self.artifacts,
        )
        job = Job(
            seq=self.seq,
            request=JobRequest(
                job_id=self.job_id,
                topic=TOPIC,
                priority=_PRIORITIES[self.priority],
                labels={**self.labels, "container.image": self.image},
            ),
            state=_STATES[self.state],
            version=1,
            accepted_at=self.created_at,
            updated_at=self.created_at,
            started_at=self.started_at,
            finished_at=self.finished_at,
            result=result if self.is_final else None,
        )
        if not self.is_final:
            return ContainerRecord(job)
        counts = {
            f"{stream}_count": StreamCount(len(data), kept := min(len(data), run.kept), False, kept)
            for stream, data in run.written.items()
        }
        texts = {one.value: data.decode("utf-8", "replace") for one, data in run.written.items()}
        return ContainerRecord(
            job,
            ContainerResult(
                state=self.state,
                exit_code=self.exit_code,
                error_field=error.field if error else "",
                skipped=self.skipped,
                usage=self.usage,
                image_id="",
                **counts,
                **texts,
            ),
        )


class Run:
    """What one job wrote and left, and who waits for it."""

    def __init__(self, record: Fields, kept: int) -> None:
        self.record, self.kept = record, kept
        self.written = {Stream.STDOUT: b"", Stream.STDERR: b""}
        self.ended = False
        self.files: dict[str, bytes] = {}
        self.changed = asyncio.Event()

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def page(self, stream: Stream, offset: int, limit: int) -> LogPage:
        """Half of what is kept is the beginning, half the end."""
        whole = self.written[stream]
        size, half = len(whole), self.kept // 2
        wanted = max(0, size + offset) if offset < 0 else min(offset, size)
        tail = max(half, size - half)
        start = tail if half <= wanted < tail else wanted
        stop = min(start + limit, size, half if start < half < tail else size)
        end, cut = self.ended and stop == size, stop == half < tail
        return LogPage(stream, start, whole[start:stop], stop, start - wanted, end, cut)


class Labelled(msgspec.Struct):
    """What of a job is looked at here beyond what the protocol checks."""

    labels: dict[str, str] | None = None
    priority: Priority | None = None


class MemoryFacade:
    """An honest worker: it keeps jobs, and a test starts, feeds and ends them."""

    def __init__(self, *, most_queued: int = 100, kept: int = 1 << 20) -> None:
        self.runs: dict[str, Run] = {}
        self.keys: dict[str, str] = {}
        self.most_queued, self.kept = most_queued, kept
        self.draining = False
        self.waiters = 0
        self.problems: tuple[str, ...] = ()

    # -- what a test does ---------------------------------------------------------

    def add(self, job_id: str, **fields: Any) -> None:
        record = Fields(job_id=job_id, seq=len(self.runs) + 1, **fields)
        self.runs[job_id] = Run(record, self.kept)

    def start(self, job_id: str, at: float = CREATED + 1) -> None:
        self._change(job_id, state=_S.RUNNING, started_at=at)

    def write(self, job_id: str, stream: str, data: bytes) -> None:
        run = self.runs[job_id]
        run.written[Stream(stream)] += data
        run.tell()

    def close(self, job_id: str) -> None:
        self.runs[job_id].ended = True
        self.runs[job_id].tell()

    def end(self, job_id: str, exit_code: int | None = 0, error: JobError | None = None) -> None:
        run = self.runs[job_id]
        run.ended = True
        self._change(
            job_id,
            state=_S.FINISHED if error is None else _S.FAILED,
            finished_at=CREATED + 2.5,
            exit_code=exit_code,
            error=error,
            usage=Usage(1 << 20, 0.25),
        )

    def leave(self, job_id: str, files: Mapping[str, bytes]) -> None:
        self.runs[job_id].files = dict(files)
        artifacts = tuple(
            Artifact(path, len(data), sha256(data).hexdigest(), "text/plain", f"blob:{path}")
            for path, data in files.items()
        )
        self._change(job_id, artifacts=artifacts, skipped=("link: is a symbolic link",))

    def _change(self, job_id: str, **fields: Any) -> None:
        run = self.runs[job_id]
        run.record = replace(run.record, **fields)
        run.tell()

    # -- what the API asks --------------------------------------------------------

    async def submit(self, body: bytes, key: str = "") -> ContainerRecord:
        try:
            job = json.loads(body)
        except ValueError:
            raise Rejected(ErrorCode.INVALID_BODY, "body must be a JSON object") from None
        if not isinstance(job, dict):
            raise Rejected(ErrorCode.INVALID_BODY, "body must be a JSON object")
        job_id: Any = job.get("job_id")
        self._check(job, job_id)
        try:
            fields = msgspec.convert(job, Labelled)
        except msgspec.ValidationError as error:
            raise Rejected(ErrorCode.INVALID_FIELD, str(error), job_id=job_id) from None
        if key and key in self.keys:
            run = self.runs[self.keys[key]]
            return run.record.record(run)
        self._check_room(job_id)
        self.add(
            job_id,
            image=job["runtime"]["image"],
            labels=fields.labels or {},
            priority=fields.priority or Priority.NORMAL,
        )
        if key:
            self.keys[key] = job_id
        run = self.runs[job_id]
        return run.record.record(run)

    def _check(self, job: dict[str, Any], job_id: Any) -> None:
        if job.get("protocol_version") != 1:
            raise Rejected(
                ErrorCode.UNSUPPORTED_PROTOCOL_VERSION, "protocol_version must be 1", job_id=job_id
            )
        if not isinstance(job_id, str) or not job_id:
            raise Rejected(ErrorCode.MISSING_JOB_ID, "job_id is missing", job_id=job_id)
        runtime = job.get("runtime")
        if not isinstance(runtime, dict):
            raise Rejected(ErrorCode.MISSING_RUNTIME, "runtime is missing", job_id=job_id)
        if runtime.get("mode") != "image":
            raise Rejected(
                ErrorCode.RUNTIME_NOT_SUPPORTED,
                "runtime.mode=build not supported on this worker",
                job_id=job_id,
            )
        if not isinstance(runtime.get("image"), str) or not runtime["image"]:
            raise Rejected(ErrorCode.MISSING_IMAGE, "runtime.image is missing", job_id=job_id)
        limits = runtime.get("limits")
        memory = limits.get("memory_mb") if isinstance(limits, dict) else None
        if isinstance(memory, int | float) and memory < 6:
            raise Rejected(
                ErrorCode.INVALID_FIELD,
                "is less than 6",
                field="runtime.limits.memory_mb",
                job_id=job_id,
            )

    def _check_room(self, job_id: str) -> None:
        if job_id in self.runs:
            message = f"job {job_id} is here already"
            raise Rejected(ErrorCode.JOB_ID_ALREADY_EXISTS, message, job_id=job_id, status=409)
        if self.draining:
            raise Rejected(
                ErrorCode.DRAINING, "no jobs now", job_id=job_id, status=503, retry_after=29.5
            )
        if sum(run.record.state is _S.QUEUED for run in self.runs.values()) >= self.most_queued:
            raise Rejected(ErrorCode.QUEUE_FULL, "full", job_id=job_id, status=429, retry_after=3)

    async def get(self, job_id: str) -> ContainerRecord | None:
        run = self.runs.get(job_id)
        return None if run is None else run.record.record(run)

    async def waits_for(self, record: ContainerRecord) -> str:
        return "a free place" if record.state is _S.QUEUED else ""

    async def find(
        self,
        states: Sequence[ContainerJobState] = (),
        labels: Mapping[str, str] | None = None,
        image: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> Sequence[ContainerRecord]:
        def fits(record: Fields) -> bool:
            return (
                (not states or record.state in states)
                and (labels or {}).items() <= record.labels.items()
                and (image is None or record.image == image)
                and (before is None or record.seq < before)
            )

        runs = sorted(self.runs.values(), key=lambda one: -one.record.seq)
        return [run.record.record(run) for run in runs if fits(run.record)][:limit]

    async def wait(
        self, job_id: str, timeout: float, *, removed: bool = False
    ) -> ContainerRecord | None:
        run = self.runs.get(job_id)
        if run is None:
            return None
        self.waiters += 1
        try:
            async with asyncio.timeout(timeout):
                while not run.record.is_final:
                    await run.changed.wait()
        except TimeoutError:
            pass
        finally:
            self.waiters -= 1
        return run.record.record(run)

    async def cancel(self, job_id: str) -> ContainerRecord | None:
        run = self.runs[job_id]
        if run.record.state is _S.QUEUED:
            self.end(job_id, None, JobError(ErrorCode.CANCELLED, "cancelled while queued"))
        return run.record.record(run)

    async def logs(
        self,
        job_id: str,
        stream: Stream,
        offset: int,
        *,
        limit: int,
        wait: float = 0,
        text: bool = False,
    ) -> LogPage | None:
        run = self.runs.get(job_id)
        if run is None:
            return None

        def look() -> LogPage:
            page = run.page(stream, offset, limit)
            return page.whole(ragged=offset < 0 < page.offset) if text else page

        self.waiters += 1
        try:
            async with asyncio.timeout(wait):
                while wait and not (look().data or look().end):
                    await run.changed.wait()
        except TimeoutError:
            pass
        finally:
            self.waiters -= 1
        return look()

    async def read_artifact(self, artifact: Artifact, at: int, size: int) -> bytes:
        for run in self.runs.values():
            if artifact in run.record.artifacts:
                return run.files[artifact.name][at : at + size]
        raise AssertionError(artifact)

    def drain(self, on: bool) -> None:
        self.draining = on

    async def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id="worker001",
            hostname="worker001",
            os="linux",
            os_architecture="x64",
            protocol_version=1,
            cpu_model=None,
            cpu_cores=None,
            cpu_threads=2,
            memory_mb=2048,
            labels=("gpu",),
            version="0.1",
            engine="fake",
            modes=("image",),
            gpus=False,
            limits={"defaults": {"memory_mb": 256}},
        )

    async def health(self) -> WorkerHealth:
        return WorkerHealth(
            status="degraded" if self.problems else "ok",
            uptime_seconds=12,
            load_average=(0.5, 0.25, 0.125),
            running_jobs=0,
            max_concurrent_jobs=2,
            temperature_c=None,
            timestamp_unix_ms=1_700_000_000_123,
            cpu_threads=2,
            memory_total_mb=2048,
            memory_available_mb=1024,
            jobs_path="jobs",
            jobs_disk_total_mb=None,
            jobs_disk_available_mb=None,
            docker_root_dir="docker",
            docker_disk_total_mb=10,
            docker_disk_available_mb=5,
            queued_jobs=len(self.runs),
            max_queued_jobs=self.most_queued,
            draining=self.draining,
            accepting=not self.draining,
            engine={"name": "fake", "reachable": True},
            problems=self.problems,
        )

    async def figures(self, traffic: Traffic, streams: int) -> Figures:
        return Figures()


class Figures:
    def text(self) -> bytes:
        return b"penstock_jobs 0\n"


def a_job(job_id: str = "job-1", **fields: Any) -> dict[str, Any]:
    runtime = {"mode": "image", "image": "alpine:latest", "env": {"KEY": "a-secret-value"}}
    return {"protocol_version": 1, "job_id": job_id, "runtime": runtime, **fields}


class ContainerHouse:
    """A worker, its server, and a session with it."""

    def __init__(self, api: MemoryFacade, server: ApiServer, token: str = "") -> None:
        self.api, self.server = api, server
        self.token = token
        self.session: aiohttp.ClientSession
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2])

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> Answer:
        """`body` is sent as JSON, `data` as it is."""
        given = dict(headers or {})
        if token or (token is None and self.token):
            given.setdefault("Authorization", f"Bearer {token or self.token}")
        if body is not None:
            data = msgspec.json.encode(body)
            given.setdefault("Content-Type", "application/json")
        url = URL(self.server.url + path, encoded=True)
        async with self.session.request(method, url, data=data, headers=given) as response:
            return Answer(response.status, response.headers, await response.read())

    async def submit(self, job_id: str = "job-1", **fields: Any) -> None:
        answer = await self.call("POST", "/jobs", a_job(job_id, **fields))
        assert answer.status == 202, answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    async def raw(self, data: bytes) -> bytes:
        """Send bytes on a connection of their own; everything until the other end closes."""
        reader, writer = await self.connect()
        writer.write(data)
        return await asyncio.wait_for(reader.read(-1), 20)

    def head(self, method: str, path: str, *headers: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    async def end(self) -> None:
        for writer in self._writers:
            writer.close()
        await self.session.close()
        await self.server.close()


@asynccontextmanager
async def container_house(
    api: MemoryFacade | None = None,
    *,
    limits: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[ContainerHouse]:
    api = api or MemoryFacade()
    config = WorkerConfig(port=0, **options)
    http = replace(LIMITS, **{"grace": 0.5, **(limits or {})})
    server = container_server(
        cast("ContainerFacade", api), config, clock=SystemClock(), limits=http
    )
    house = ContainerHouse(api, server, config.token)
    await house.server.start()
    house.session = aiohttp.ClientSession(
        auto_decompress=False, headers={"Accept-Encoding": "identity"}
    )
    try:
        yield house
    finally:
        await house.end()
