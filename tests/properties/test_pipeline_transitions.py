"""The seed's job status diagram, square by square: 6 x 6, against real stores."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.core.errors import IllegalMove
from penstock.lifecycles.pipeline import PipelineJobEvent, PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.records import PipelineRecord
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.storage.sqlite.store import SqlitePipelineStore
from penstock.workloads.pipeline.store import Claim, PipelineStore, Save

_S, _E = PipelineJobStatus, PipelineJobEvent
NOW = 1_000_000.0

ARROWS = {
    (_S.PENDING, _S.RUNNING),
    (_S.PENDING, _S.CANCELLED),
    (_S.RUNNING, _S.COMPLETED),
    (_S.RUNNING, _S.PARTIAL),
    (_S.RUNNING, _S.FAILED),
    (_S.RUNNING, _S.CANCELLED),
    (_S.PENDING, _S.FAILED),
}
"""The diagram's, and the one of 'Stale Job Cleanup'."""

WAYS: dict[PipelineJobStatus, tuple[PipelineJobEvent, ...]] = {
    _S.PENDING: (),
    _S.RUNNING: (_E.EXECUTE,),
    _S.COMPLETED: (_E.EXECUTE, _E.COMPLETE),
    _S.PARTIAL: (_E.EXECUTE, _E.COMPLETE_PARTLY),
    _S.FAILED: (_E.EXECUTE, _E.FAIL),
    _S.CANCELLED: (_E.EXECUTE, _E.CANCEL),
}
"""How a job gets into each of the six."""
INTO: dict[PipelineJobStatus, tuple[PipelineJobEvent, ...]] = {
    _S.PENDING: (_E.CREATE,),
    _S.RUNNING: (_E.EXECUTE,),
    _S.COMPLETED: (_E.COMPLETE,),
    _S.PARTIAL: (_E.COMPLETE_PARTLY,),
    _S.FAILED: (_E.FAIL, _E.CLEAN_UP),
    _S.CANCELLED: (_E.CANCEL,),
}
"""What is meant to lead there."""


@asynccontextmanager
async def _store(kind: str, folder: Path) -> AsyncIterator[PipelineStore]:
    make: dict[str, Callable[[], PipelineStore]] = {
        "memory": MemoryPipelineStore,
        "sqlite": lambda: SqlitePipelineStore(folder / "pipelines.db"),
    }
    store = make[kind]()
    try:
        yield store
    finally:
        await store.close()


async def _job_that_is(store: PipelineStore, status: PipelineJobStatus) -> PipelineRecord:
    await store.create(PipelineRecord(id="a", trace_id="a", pipeline="p", created_at=NOW))
    record = await store.claim(Claim(job_id="a", owner="me", now=NOW, lease_until=NOW + 9))
    assert record is not None
    for event in WAYS[status]:
        await store.save(Save(job_id="a", fence=record.fence, at=NOW + 1, event=event))
    return await _read(store)


async def _read(store: PipelineStore) -> PipelineRecord:
    record = await store.get("a")
    assert record is not None
    return record


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize(("before", "after"), list(itertools.product(_S, _S)))
@run_async
async def test_the_arrows_of_the_diagram_are_the_only_moves(
    before: PipelineJobStatus, after: PipelineJobStatus, kind: str, tmp_path: Path
) -> None:
    reached = False
    for n, event in enumerate(INTO[after]):
        folder = tmp_path / str(n)
        folder.mkdir()
        async with _store(kind, folder) as store:
            job = await _job_that_is(store, before)
            assert job.status is before
            try:
                await store.save(Save(job_id="a", fence=job.fence, at=NOW + 2, event=event))
            except IllegalMove:
                assert before is not after or event in (_E.CREATE, _E.CLEAN_UP)
            now = await _read(store)
            reached = reached or now.status is not before
            if now.status is before:
                # A run that is taken up says again that it runs: that is a sign of life.
                alive = (now.version, now.progress_at) if before is _S.RUNNING else ()
                same = replace(job, version=alive[0], progress_at=alive[1]) if alive else job
                assert now == same, "what is refused, or said twice, changes nothing"
            else:
                assert now.status is after
                assert (now.finished_at is None) is (after is _S.RUNNING)
    assert reached is ((before, after) in ARROWS)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("before", list(_S))
@run_async
async def test_what_a_wish_to_cancel_does_to_each_of_the_six(
    before: PipelineJobStatus, kind: str, tmp_path: Path
) -> None:
    async with _store(kind, tmp_path) as store:
        job = await _job_that_is(store, before)
        answer = await store.request_cancel("a", NOW + 2)
        now = await _read(store)
    assert answer.status is now.status
    assert answer.accepted is not job.is_final
    assert now.cancel_requested is not job.is_final
    if job.is_final:
        assert now == job
    else:
        assert now.status is (_S.CANCELLED if before is _S.PENDING else _S.RUNNING)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("before", list(_S))
@run_async
async def test_only_the_unfinished_can_be_found_stale_and_only_as_they_were_judged(
    before: PipelineJobStatus, kind: str, tmp_path: Path
) -> None:
    async with _store(kind, tmp_path) as store:
        job = await _job_that_is(store, before)
        assert not await store.fail_stale("a", NOW + 2, "stale", job.version - 1)
        assert await _read(store) == job
        done = await store.fail_stale("a", NOW + 2, "stale", job.version)
        now = await _read(store)
    assert done is (before in (_S.PENDING, _S.RUNNING))
    if done:
        assert now.status is _S.FAILED
        assert [error.message for error in now.errors] == ["stale"]
    else:
        assert now == job
