"""Penstock: one durable job engine for AI and compute work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock import values
    from penstock.app import App, Client, JobHandle, connect
    from penstock.app.application import Session
    from penstock.app.artifacts import ArtifactHandle
    from penstock.app.compose import (
        Completed,
        afirst_completed,
        agather,
        as_completed,
        first_completed,
        gather,
        value,
    )
    from penstock.app.containers import Container, Ran, container
    from penstock.app.llm import aask, ask
    from penstock.app.pipelines import Pipeline, PipelineJobManager, pipeline_jobs
    from penstock.core.artifact import Artifact
    from penstock.core.errors import (
        Conflict,
        EngineUnavailable,
        InvalidRequest,
        JobCancelled,
        JobDenied,
        JobEnded,
        JobFailed,
        JobTimedOut,
        MapInterrupted,
        NotFound,
        NotPermitted,
        PenstockError,
        PipelineBusy,
        StaleApproval,
        StepFailed,
        Superseded,
        TooLarge,
        TooMany,
        UnknownTopic,
        WaitTimedOut,
    )
    from penstock.core.job import (
        Cancelled,
        Job,
        JobRequest,
        JobResult,
        ParentPolicy,
        Priority,
        Retry,
        RetryPolicy,
        Unique,
    )
    from penstock.core.journal import Transition
    from penstock.core.ledger import Step
    from penstock.core.verdict import Rate
    from penstock.lifecycles.canonical import JobState
    from penstock.lifecycles.pipeline import PipelineJobStatus
    from penstock.ports.engine_api import (
        Bulk,
        Cancellation,
        CatchUp,
        Ended,
        EngineStatus,
        EventBatch,
        JobUpdate,
        KeyRole,
        Limit,
        LimitView,
        Logged,
        Moved,
        PoolView,
        Progressed,
        Schedule,
        ScheduleView,
        Streamed,
        WorkerView,
    )
    from penstock.ports.executor import Context
    from penstock.ports.store import AuditQuery, JobQuery, LogLine
    from penstock.workloads.function.context import current
    from penstock.workloads.function.definition import JobFunction
    from penstock.workloads.function.options import JobOptions, Mode, SubmitOptions
    from penstock.workloads.llm.answers import Answer
    from penstock.workloads.pipeline.interface import RunQuery
    from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator
    from penstock.workloads.pipeline.records import (
        AlertRule,
        ItemOutcome,
        PipelineRecord,
        StageStatus,
    )
    from penstock.workloads.spool.client.flow import Flow
    from penstock.workloads.spool.client.work import Work

_HOMES = {
    "App": "penstock.app",
    "Client": "penstock.app",
    "JobHandle": "penstock.app",
    "connect": "penstock.app",
    "Session": "penstock.app.application",
    "Artifact": "penstock.core.artifact",
    "ArtifactHandle": "penstock.app.artifacts",
    "Container": "penstock.app.containers",
    "container": "penstock.app.containers",
    "aask": "penstock.app.llm",
    "ask": "penstock.app.llm",
    "Pipeline": "penstock.app.pipelines",
    "PipelineJobManager": "penstock.app.pipelines",
    "pipeline_jobs": "penstock.app.pipelines",
    "Conflict": "penstock.core.errors",
    "EngineUnavailable": "penstock.core.errors",
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
    "StepFailed": "penstock.core.errors",
    "Superseded": "penstock.core.errors",
    "TooLarge": "penstock.core.errors",
    "TooMany": "penstock.core.errors",
    "UnknownTopic": "penstock.core.errors",
    "WaitTimedOut": "penstock.core.errors",
    "Cancelled": "penstock.core.job",
    "Job": "penstock.core.job",
    "JobRequest": "penstock.core.job",
    "JobResult": "penstock.core.job",
    "ParentPolicy": "penstock.core.job",
    "Priority": "penstock.core.job",
    "Retry": "penstock.core.job",
    "RetryPolicy": "penstock.core.job",
    "Unique": "penstock.core.job",
    "Step": "penstock.core.ledger",
    "Transition": "penstock.core.journal",
    "Rate": "penstock.core.verdict",
    "JobState": "penstock.lifecycles.canonical",
    "PipelineJobStatus": "penstock.lifecycles.pipeline",
    "Bulk": "penstock.ports.engine_api",
    "Cancellation": "penstock.ports.engine_api",
    "CatchUp": "penstock.ports.engine_api",
    "EngineStatus": "penstock.ports.engine_api",
    "EventBatch": "penstock.ports.engine_api",
    "JobUpdate": "penstock.ports.engine_api",
    "KeyRole": "penstock.ports.engine_api",
    "Limit": "penstock.ports.engine_api",
    "LimitView": "penstock.ports.engine_api",
    "Logged": "penstock.ports.engine_api",
    "Moved": "penstock.ports.engine_api",
    "PoolView": "penstock.ports.engine_api",
    "Progressed": "penstock.ports.engine_api",
    "Schedule": "penstock.ports.engine_api",
    "ScheduleView": "penstock.ports.engine_api",
    "Streamed": "penstock.ports.engine_api",
    "WorkerView": "penstock.ports.engine_api",
    "Context": "penstock.ports.executor",
    "AuditQuery": "penstock.ports.store",
    "JobQuery": "penstock.ports.store",
    "LogLine": "penstock.ports.store",
    "Ran": "penstock.app.containers",
    "current": "penstock.workloads.function.context",
    "gather": "penstock.app.compose",
    "value": "penstock.app.compose",
    "agather": "penstock.app.compose",
    "as_completed": "penstock.app.compose",
    "first_completed": "penstock.app.compose",
    "afirst_completed": "penstock.app.compose",
    "Completed": "penstock.app.compose",
    "MapInterrupted": "penstock.core.errors",
    "Ended": "penstock.ports.engine_api",
    "JobFunction": "penstock.workloads.function.definition",
    "JobOptions": "penstock.workloads.function.options",
    "Mode": "penstock.workloads.function.options",
    "SubmitOptions": "penstock.workloads.function.options",
    "Answer": "penstock.workloads.llm.answers",
    "AsyncPipelineOrchestrator": "penstock.workloads.pipeline.orchestrator",
    "AlertRule": "penstock.workloads.pipeline.records",
    "ItemOutcome": "penstock.workloads.pipeline.records",
    "PipelineRecord": "penstock.workloads.pipeline.records",
    "StageStatus": "penstock.workloads.pipeline.records",
    "RunQuery": "penstock.workloads.pipeline.interface",
    "Flow": "penstock.workloads.spool.client.flow",
    "Work": "penstock.workloads.spool.client.work",
}
"""Where each public name lives; it is imported when it is first asked for, so that
`import penstock` and `penstock --help` stay light."""

__all__ = [
    "AlertRule",
    "Answer",
    "App",
    "Artifact",
    "ArtifactHandle",
    "AsyncPipelineOrchestrator",
    "AuditQuery",
    "Bulk",
    "Cancellation",
    "Cancelled",
    "CatchUp",
    "Client",
    "Completed",
    "Conflict",
    "Container",
    "Context",
    "Ended",
    "EngineStatus",
    "EngineUnavailable",
    "EventBatch",
    "Flow",
    "InvalidRequest",
    "ItemOutcome",
    "Job",
    "JobCancelled",
    "JobDenied",
    "JobEnded",
    "JobFailed",
    "JobFunction",
    "JobHandle",
    "JobOptions",
    "JobQuery",
    "JobRequest",
    "JobResult",
    "JobState",
    "JobTimedOut",
    "JobUpdate",
    "KeyRole",
    "Limit",
    "LimitView",
    "LogLine",
    "Logged",
    "MapInterrupted",
    "Mode",
    "Moved",
    "NotFound",
    "NotPermitted",
    "ParentPolicy",
    "PenstockError",
    "Pipeline",
    "PipelineBusy",
    "PipelineJobManager",
    "PipelineJobStatus",
    "PipelineRecord",
    "PoolView",
    "Priority",
    "Progressed",
    "Ran",
    "Rate",
    "Retry",
    "RetryPolicy",
    "RunQuery",
    "Schedule",
    "ScheduleView",
    "Session",
    "StageStatus",
    "StaleApproval",
    "Step",
    "StepFailed",
    "Streamed",
    "SubmitOptions",
    "Superseded",
    "TooLarge",
    "TooMany",
    "Transition",
    "Unique",
    "UnknownTopic",
    "WaitTimedOut",
    "Work",
    "WorkerView",
    "__version__",
    "aask",
    "afirst_completed",
    "agather",
    "as_completed",
    "ask",
    "connect",
    "container",
    "current",
    "first_completed",
    "gather",
    "pipeline_jobs",
    "value",
    "values",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "values":
        return import_module("penstock.values")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
