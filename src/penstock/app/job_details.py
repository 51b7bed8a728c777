"""All that there is to know about one job, read from an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from penstock.core.errors import NotFound, PenstockError
from penstock.core.job import Job, chain_of
from penstock.core.journal import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi
from penstock.ports.store import JobQuery, StepCount
from penstock.workloads.llm.values import PIPE_TOPICS, HopTime
from penstock.workloads.pipeline.records import PipelineRecord, pipeline_of

SHOWN = 10
"""Tries, and children, that are shown; the newest."""
_TRIES = 1000
_EXPLAINED = 50
"""For how many unfinished jobs the reason or the progress is asked."""


class JobDetails(Struct, frozen=True):
    """What there is to know about one job and its retries."""

    job: Job
    """The newest try."""
    why: str
    tries: list[Job]
    """All of them, in order; the newest, if there are very many."""
    histories: list[list[Transition]]
    """Of the last tries."""
    children: list[Job]
    """The newest of them."""
    child_reasons: dict[str, str]
    child_counts: dict[JobState, int]
    parents: list[tuple[str, str]]
    """The jobs that it waits for, and their states."""
    given: str
    returned: str
    steps: list[StepCount] = []
    """How many rows it checkpointed."""
    hops: tuple[HopTime, ...] = ()
    """The way of an answer over the nodes of its model."""
    run: PipelineRecord | None = None
    """If it is a run of a pipeline."""


async def job_details(api: EngineApi, job: Job, *, most: int, all_tries: bool) -> JobDetails:
    """`job` is the newest try; of a payload at most so many characters are read out."""
    first, result = chain_of(job.request), job.result.result_ptr if job.result is not None else None
    tries = await api.find(JobQuery(first_try=first, limit=_TRIES))
    # A retry that came by now, or of before jobs were known by their first try.
    tries = [one for one in reversed(tries) if one.seq < job.seq] + [job]
    counts = await api.count_children(job.job_id)
    children = await api.find(JobQuery(child_of=first, limit=SHOWN)) if counts else []
    return JobDetails(
        job,
        await api.why(job.job_id),
        tries,
        [await api.history(one.job_id) for one in (tries if all_tries else tries[-1:])],
        children,
        await reasons(api, children),
        counts,
        [(parent, await _state(api, parent)) for parent in job.request.after],
        await _glance(api, job.request.context_ptr, most),
        await _glance(api, result, most),
        await api.count_steps(job.job_id),
        await _hops(api, job, result),
        await _run(api, job),
    )


async def _run(api: EngineApi, job: Job) -> PipelineRecord | None:
    return None if pipeline_of(job.request.topic) is None else await api.pipelines.get(job.job_id)


async def _state(api: EngineApi, job_id: str) -> str:
    try:
        return (await api.get(job_id)).state.value
    except PenstockError:
        return "gone"


async def _glance(api: EngineApi, pointer: str | None, most: int) -> str:
    """A payload as far as it fits, or the pointer if it can't be read."""
    if not pointer:
        return ""
    try:
        text = (await api.get_blob(pointer)).decode("utf-8", "replace")
    except PenstockError as error:
        return f"{pointer} ({error.message})"
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


async def _hops(api: EngineApi, job: Job, pointer: str | None) -> tuple[HopTime, ...]:
    if not pointer or not job.request.topic.startswith(PIPE_TOPICS):
        return ()
    try:
        return msgspec.json.decode(await api.get_blob(pointer), type=_ResultHops).hops
    except (PenstockError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


class _ResultHops(Struct, frozen=True):
    """Of a result, the part that is looked at."""

    hops: tuple[HopTime, ...] = ()


async def reasons(api: EngineApi, jobs: Sequence[Job]) -> dict[str, str]:
    """What each unfinished job waits for, or how far it is, by id; not of very many."""
    open_jobs = [job.job_id for job in jobs if not job.is_final][:_EXPLAINED]
    found = await asyncio.gather(*(_why(api, job_id) for job_id in open_jobs))
    return dict(zip(open_jobs, found, strict=True))


async def _why(api: EngineApi, job_id: str) -> str:
    try:
        return await api.why(job_id)
    except NotFound:  # it is gone by now
        return ""
