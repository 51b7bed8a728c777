"""How a worker speaks: in full, or (`compat: strict`) in the protocol's own words only."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from penstock.api.container.answers import answer
from penstock.api.container.strictness import strict_end, strict_refusal
from penstock.api.container.views import (
    JobRecord,
    JobSummary,
    ProtocolRecord,
    ProtocolSummary,
    Refusal,
    maybe_moment,
    moment,
)
from penstock.api.reply import Headers, Reply
from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.job import Code, ContainerRecord, JobError
from penstock.workloads.container.store import ContainerApi

HEALTH_KEYS = (
    "status",
    "uptime_seconds",
    "load_average",
    "running_jobs",
    "max_concurrent_jobs",
    "temperature_c",
    "health_protocol_version",
    "timestamp_unix_ms",
    "cpu_threads",
    "dedicated_reserved_cpu_ids",
    "dedicated_reserved_count",
    "memory_total_mb",
    "memory_available_mb",
    "jobs_path",
    "jobs_disk_total_mb",
    "jobs_disk_available_mb",
    "docker_root_dir",
    "docker_disk_total_mb",
    "docker_disk_available_mb",
)
INFO_KEYS = (
    "worker_id",
    "hostname",
    "os",
    "os_architecture",
    "protocol_version",
    "cpu_model",
    "cpu_cores",
    "cpu_threads",
    "memory_mb",
    "labels",
)


class Wording:
    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict

    async def record(self, api: ContainerApi, record: ContainerRecord) -> ProtocolRecord:
        stdout, stderr = await api.text(record) if record.is_final else ("", "")
        facts = self._facts(record)
        facts |= {"stdout": stdout, "stderr": stderr + _marker(record)}
        if self.strict:
            return ProtocolRecord(**facts)
        return JobRecord(
            **facts,
            priority=record.priority,
            labels=record.labels,
            image=record.image,
            image_id=record.image_id,
            engine=record.engine,
            position=api.position(record),
            waiting_for=api.waits_for(record),
            usage=record.usage,
            stdout_bytes=record.stdout.bytes,
            stdout_truncated=record.stdout.truncated,
            stdout_gap=record.stdout.gap,
            stderr_bytes=record.stderr.bytes,
            stderr_truncated=record.stderr.truncated,
            stderr_gap=record.stderr.gap,
            artifacts=record.artifacts,
            skipped=record.skipped,
        )

    def summary(self, record: ContainerRecord) -> ProtocolSummary:
        facts = self._facts(record)
        if self.strict:
            return ProtocolSummary(**facts)
        return JobSummary(
            **facts,
            priority=record.priority,
            labels=record.labels,
            image=record.image,
            engine=record.engine,
            usage=record.usage,
        )

    def _facts(self, record: ContainerRecord) -> dict[str, Any]:
        exit_code, error = self.end(record)
        return {
            "job_id": record.job_id,
            "state": record.state,
            "created_at": moment(record.created_at),
            "started_at": maybe_moment(record.started_at),
            "finished_at": maybe_moment(record.finished_at),
            "exit_code": exit_code,
            "error": error,
        }

    def end(self, record: ContainerRecord) -> tuple[int | None, JobError | None]:
        return strict_end(record) if self.strict else (record.exit_code, record.error)

    def refusal(
        self, error: JobError, job_id: Any, status: int = 400, headers: Headers = ()
    ) -> Reply:
        """What a submission that is refused is answered."""
        told = strict_refusal(error) if self.strict else error
        try:
            return answer(Refusal(False, job_id, _REJECTED, told), status, headers)
        except (TypeError, ValueError, OverflowError):  # an id that JSON can't even repeat
            return answer(Refusal(False, None, _REJECTED, told), status, headers)

    def chosen(self, told: Struct, keys: tuple[str, ...]) -> Struct | dict[str, Any]:
        """All of it, or those keys that the protocol has."""
        return {key: getattr(told, key) for key in keys} if self.strict else told


_REJECTED = ContainerJobState.REJECTED


def _marker(record: ContainerRecord) -> str:
    """A line at the end of stderr, by which the protocol tells of a timeout."""
    if record.error is None or record.error.code != Code.TIMEOUT:
        return ""
    return f"\n[worker] {record.error.message}"
