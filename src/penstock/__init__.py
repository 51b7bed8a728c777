"""Penstock: one durable job engine for AI and compute work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.app import App, Client, JobHandle, connect
    from penstock.app.asking import Answer, aask, ask
    from penstock.app.containers import Container, Ran, container
    from penstock.app.pipelines import Pipeline, pipeline_jobs
    from penstock.core.caller import KeyRole
    from penstock.core.errors import (
        Conflict,
        InvalidRequest,
        JobCancelled,
        JobDenied,
        JobEnded,
        JobFailed,
        JobTimedOut,
        NotFound,
        NotPermitted,
        PenstockError,
        PipelineBusy,
        StaleApproval,
        TooMany,
        UnknownTopic,
        WaitTimedOut,
    )
    from penstock.core.job import Job, JobRequest, JobResult, Priority, RetryPolicy, Unique
    from penstock.core.signals import Cancelled, Retry
    from penstock.core.stages import AlertRule, ItemOutcome, PipelineRecord, StageStatus
    from penstock.core.verdict import Rate
    from penstock.lifecycles.canonical import JobState
    from penstock.lifecycles.pipeline import PipelineJobStatus
    from penstock.ports.executor import Context
    from penstock.ports.limits import Limit
    from penstock.ports.pipelines import RunQuery
    from penstock.ports.schedules import Schedule
    from penstock.ports.store import AuditQuery, JobQuery
    from penstock.workloads.function.context import current
    from penstock.workloads.pipeline.manager import PipelineJobManager
    from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator
    from penstock.workloads.spool.flow import Flow
    from penstock.workloads.spool.work import Work

_HOMES = {
    "App": "penstock.app",
    "Client": "penstock.app",
    "JobHandle": "penstock.app",
    "connect": "penstock.app",
    "Answer": "penstock.app.asking",
    "aask": "penstock.app.asking",
    "ask": "penstock.app.asking",
    "Container": "penstock.app.containers",
    "Ran": "penstock.app.containers",
    "container": "penstock.app.containers",
    "Pipeline": "penstock.app.pipelines",
    "pipeline_jobs": "penstock.app.pipelines",
    "KeyRole": "penstock.core.caller",
    "Conflict": "penstock.core.errors",
    "InvalidRequest": "penstock.core.errors",
    "JobCancelled": "penstock.core.errors",
    "JobDenied": "penstock.core.errors",
    "JobEnded": "penstock.core.errors",
    "JobFailed": "penstock.core.errors",
    "JobTimedOut": "penstock.core.errors",
    "NotFound": "penstock.core.errors",
    "NotPermitted": "penstock.core.errors",
    "PenstockError": "penstock.core.errors",
    "PipelineBusy": "penstock.core.errors",
    "StaleApproval": "penstock.core.errors",
    "TooMany": "penstock.core.errors",
    "UnknownTopic": "penstock.core.errors",
    "WaitTimedOut": "penstock.core.errors",
    "Job": "penstock.core.job",
    "JobRequest": "penstock.core.job",
    "JobResult": "penstock.core.job",
    "Priority": "penstock.core.job",
    "RetryPolicy": "penstock.core.job",
    "Unique": "penstock.core.job",
    "Cancelled": "penstock.core.signals",
    "Retry": "penstock.core.signals",
    "AlertRule": "penstock.core.stages",
    "ItemOutcome": "penstock.core.stages",
    "PipelineRecord": "penstock.core.stages",
    "StageStatus": "penstock.core.stages",
    "Rate": "penstock.core.verdict",
    "JobState": "penstock.lifecycles.canonical",
    "PipelineJobStatus": "penstock.lifecycles.pipeline",
    "Context": "penstock.ports.executor",
    "Limit": "penstock.ports.limits",
    "RunQuery": "penstock.ports.pipelines",
    "Schedule": "penstock.ports.schedules",
    "AuditQuery": "penstock.ports.store",
    "JobQuery": "penstock.ports.store",
    "current": "penstock.workloads.function.context",
    "PipelineJobManager": "penstock.workloads.pipeline.manager",
    "AsyncPipelineOrchestrator": "penstock.workloads.pipeline.orchestrator",
    "Flow": "penstock.workloads.spool.flow",
    "Work": "penstock.workloads.spool.work",
}
"""Where each public name lives; it is imported when it is first asked for, so that
`import penstock` and `penstock --help` stay light."""

__all__ = [
    "AlertRule",
    "Answer",
    "App",
    "AsyncPipelineOrchestrator",
    "AuditQuery",
    "Cancelled",
    "Client",
    "Conflict",
    "Container",
    "Context",
    "Flow",
    "InvalidRequest",
    "ItemOutcome",
    "Job",
    "JobCancelled",
    "JobDenied",
    "JobEnded",
    "JobFailed",
    "JobHandle",
    "JobQuery",
    "JobRequest",
    "JobResult",
    "JobState",
    "JobTimedOut",
    "KeyRole",
    "Limit",
    "NotFound",
    "NotPermitted",
    "PenstockError",
    "Pipeline",
    "PipelineBusy",
    "PipelineJobManager",
    "PipelineJobStatus",
    "PipelineRecord",
    "Priority",
    "Ran",
    "Rate",
    "Retry",
    "RetryPolicy",
    "RunQuery",
    "Schedule",
    "StageStatus",
    "StaleApproval",
    "TooMany",
    "Unique",
    "UnknownTopic",
    "WaitTimedOut",
    "Work",
    "__version__",
    "aask",
    "ask",
    "connect",
    "container",
    "current",
    "pipeline_jobs",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
