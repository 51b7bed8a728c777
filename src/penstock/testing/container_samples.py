"""Container jobs and their ends to test with, made in few words."""

from __future__ import annotations

from typing import Any

from penstock.lifecycles.container import ContainerJobEvent, ContainerJobState
from penstock.testing.samples import T0
from penstock.workloads.container.job import (
    Artifact,
    Code,
    ContainerRecord,
    End,
    JobError,
    StreamCount,
    Usage,
)
from penstock.workloads.container.store import Change, ContainerStore

_S, _E = ContainerJobState, ContainerJobEvent
_WAY: dict[ContainerJobState, tuple[ContainerJobEvent, ...]] = {
    _S.QUEUED: (),
    _S.RUNNING: (_E.START,),
    _S.FINISHED: (_E.START, _E.FINISH),
    _S.FAILED: (_E.START, _E.FAIL),
}
FULL_END = End(
    state=_S.FAILED,
    exit_code=137,
    error=JobError(Code.OOM_KILLED, "it used more than its 64 MB: ü", "runtime.limits.memory_mb"),
    usage=Usage(64 << 20, 0.25),
    stdout=StreamCount(5_000_000_000, 1 << 20, gap=True),
    stderr=StreamCount(3, 3),
    artifacts=(Artifact("a/ü.txt", 3, "ab" * 32), Artifact("b", 0, "cd" * 32, "blob:b")),
    skipped=("link: not a regular file",),
    image_id="sha256:" + "ef" * 32,
)


def a_record(job_id: str = "a", **fields: Any) -> ContainerRecord:
    return ContainerRecord(job_id=job_id, **{"created_at": T0, "image": "alpine", **fields})


def an_end(event: ContainerJobEvent, code: str = Code.NON_ZERO_EXIT) -> End | None:
    """How a job ended, for an event that ends one."""
    if event is _E.FINISH:
        return End(state=_S.FINISHED, exit_code=0)
    if event in (_E.FAIL, _E.CANCEL):
        return End(state=_S.FAILED, exit_code=1, error=JobError(code, "it failed"))
    return None


async def happen(
    store: ContainerStore,
    job_id: str,
    *events: ContainerJobEvent,
    at: float = T0 + 1,
    code: str = Code.NON_ZERO_EXIT,
) -> ContainerRecord:
    for event in events:
        await store.change(Change(job_id=job_id, event=event, at=at, end=an_end(event, code)))
    record = await store.get(job_id)
    assert record is not None
    return record


async def bring_to(
    store: ContainerStore,
    job_id: str,
    state: ContainerJobState,
    *,
    at: float = T0 + 1,
    code: str = Code.NON_ZERO_EXIT,
    **fields: Any,
) -> ContainerRecord:
    await store.add(a_record(job_id, **fields))
    return await happen(store, job_id, *_WAY[state], at=at, code=code)
