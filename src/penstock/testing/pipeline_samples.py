"""Pipeline runs, stages and items to test with, made in few words."""

from __future__ import annotations

from typing import Any

from penstock.lifecycles.pipeline import PipelineJobEvent, PipelineJobStatus
from penstock.testing.samples import T0
from penstock.workloads.pipeline.records import (
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    PipelineEventKind,
    PipelineRecord,
    StageKind,
    StageRecord,
)
from penstock.workloads.pipeline.store import Claim, Happening, PipelineStore, Save, StageItems

_S, _E = PipelineJobStatus, PipelineJobEvent
_ENDS = {
    _S.COMPLETED: _E.COMPLETE,
    _S.PARTIAL: _E.COMPLETE_PARTLY,
    _S.FAILED: _E.FAIL,
    _S.CANCELLED: _E.CANCEL,
}


def a_run(job_id: str = "a", **fields: Any) -> PipelineRecord:
    defaults: dict[str, Any] = {"trace_id": f"trace-{job_id}", "pipeline": "p", "created_at": T0}
    return PipelineRecord(id=job_id, **{**defaults, **fields})


def a_stage(name: str, index: int, **fields: Any) -> StageRecord:
    return StageRecord(name=name, index=index, **{"kind": StageKind.MAP, **fields})


def save_of(job_id: str, **fields: Any) -> Save:
    """A save by the first run of a job."""
    return Save(job_id=job_id, **{"fence": 1, "at": T0 + 2, **fields})


def listed_items(stage: str, count: int, *, start: int = 0, keys: str = "") -> tuple[StageItems]:
    """Items with the letters of `keys` as their keys, else `k` and their number."""
    items = (
        ItemRecord(seq=n, key=keys[n - start] if keys else f"k{n}", input=f"data:,{n}")
        for n in range(start, start + count)
    )
    return (StageItems(stage, tuple(items)),)


def ended_items(
    stage: str, *seqs: int, outcome: ItemOutcome = ItemOutcome.OK, **fields: Any
) -> tuple[StageItems]:
    """Items that ended. Their keys and inputs are wrong, because nobody may look at those."""
    given: dict[str, Any] = {"attempts": 1, "output": "data:,out", "finished_at": T0 + 3}
    if outcome is ItemOutcome.FAILED:
        given |= {"error_class": ErrorClass.PERMANENT, "error_code": "E", "error": "no"}
    items = (
        ItemRecord(seq=seq, key="wrong", input="wrong", outcome=outcome, **{**given, **fields})
        for seq in seqs
    )
    return (StageItems(stage, tuple(items)),)


async def begun(
    store: PipelineStore, job_id: str, *, lease_until: float | None = None, **fields: Any
) -> PipelineRecord:
    """A run that is RUNNING as its first run, since T0 + 1."""
    await store.create(a_run(job_id, **fields))
    await store.claim(Claim(job_id=job_id, owner="me", now=T0 + 1, lease_until=lease_until))
    await store.save(Save(job_id=job_id, fence=1, at=T0 + 1, event=_E.EXECUTE))
    record = await store.get(job_id)
    assert record is not None
    return record


async def bring_to(
    store: PipelineStore, job_id: str, status: PipelineJobStatus, **fields: Any
) -> PipelineRecord:
    """A run in any status, ended at T0 + 2."""
    if status is _S.PENDING:
        return await store.create(a_run(job_id, **fields))
    await begun(store, job_id, **fields)
    if status is not _S.RUNNING:
        await store.save(save_of(job_id, event=_ENDS[status]))
    record = await store.get(job_id)
    assert record is not None
    return record


async def record_of(store: PipelineStore, job_id: str) -> PipelineRecord:
    record = await store.get(job_id)
    assert record is not None
    return record


def progress(n: int) -> Happening:
    return Happening(PipelineEventKind.STAGE_PROGRESS, {"n": n})
