"""A run as rows of its job: how items are packed and read, and the fold of job and rows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace
from tests.support.pipeline.pipeline_jobs import on_virtual_time
from tests.support.pipeline.pipeline_runs import MemoryEngine, Place, reasons, stage_of, statuses
from tests.support.rows import every

from penstock.core.job import Job, JobRequest
from penstock.core.pointer import encode_data
from penstock.core.steps import MAX_ROW, size_of
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.testing.clock import VirtualClock, VirtualLoop
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import (
    STALE_MESSAGE,
    ItemOutcome,
    ItemRecord,
    PipelineEventKind,
    StageKind,
    StageRecord,
)
from penstock.workloads.pipeline.rows import (
    ItemReport,
    RunRows,
    emit_note,
    emitted,
    fold,
    item_of,
    item_row,
    list_end_row,
    list_rows,
    listed_items,
    report_of,
)
from penstock.workloads.pipeline.summary import ended

_S = PipelineJobStatus
STAGE = StageRecord(name="s", index=0, kind=StageKind.MAP)
INLINE = encode_data(b'"x"')
BLOB = "blob:sha256:abc"


def _items(*inputs: str) -> list[ItemRecord]:
    return [ItemRecord(seq=seq, key=f"k{seq}", input=pointer) for seq, pointer in enumerate(inputs)]


# -- the list ---------------------------------------------------------------------


def test_many_items_are_listed_in_one_row() -> None:
    rows = list_rows("list/s/0", _items(*[INLINE] * 1200))
    assert [row.n for row in rows] == [499, 999, 1199]
    assert not any(row.input for row in rows)


def test_an_input_that_is_a_blob_has_a_row_of_its_own_that_refers_to_it() -> None:
    rows = list_rows("list/s/0", _items(INLINE, INLINE, BLOB, INLINE))
    assert [(row.n, row.input) for row in rows] == [(1, ""), (2, BLOB), (3, "")]


def test_long_inputs_make_short_rows() -> None:
    long = encode_data(b'"' + b"x" * 16_000 + b'"')
    rows = list_rows("list/s/0", _items(*[long] * 10))
    assert all(size_of(row) < MAX_ROW for row in rows)
    assert sum(len(listed_items(row)) for row in rows) == 10


@given(st.lists(st.sampled_from([INLINE, BLOB, "", encode_data(b"x" * 9_000)]), max_size=60))
def test_what_is_listed_is_read_back(inputs: list[str]) -> None:
    items = _items(*inputs)
    assert [item for row in list_rows("list/s/0", items) for item in listed_items(row)] == items


def test_an_ended_item_is_read_back_with_what_it_reported() -> None:
    item = replace(
        _items(INLINE)[0],
        outcome=ItemOutcome.OK,
        output=INLINE,
        output_count=2,
        attempts=3,
        duration_ms=1.5,
        finished_at=12.0,
        reused=True,
    )
    row = item_row("item/s/0", item, ItemReport({"a": 1}, {"b": "c"}, ["not stored"]))
    assert item_of(row) == item
    assert report_of(row) == ItemReport({"a": 1}, {"b": "c"}, [])
    assert report_of(item_row("item/s/0", item, ItemReport({}, {}, ["x"]))) is None


# -- reading ----------------------------------------------------------------------


def _engine(total: int, ended: set[int], blobs: set[int]) -> tuple[MemoryEngine, list[ItemRecord]]:
    engine = MemoryEngine(VirtualClock())
    items = _items(*(BLOB if seq in blobs else INLINE for seq in range(total)))
    rows = list_rows("list/s/0", items)
    rows.append(list_end_row("list/s/0", total, ItemReport({"asked": 1}, {}, [])))
    for seq in ended:
        outcome = ItemOutcome.OK if seq % 3 else ItemOutcome.FAILED
        items[seq] = replace(items[seq], outcome=outcome, finished_at=1.0)
        rows.append(item_row("item/s/0", items[seq]))
    rows += list_rows("list/s/1", _items(*[INLINE] * 5))  # of another generation
    engine.rows["job"] = {(row.name, row.n): row for row in rows}
    return engine, items


def _virtually(coroutine: Any) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


_POSITIONS = st.sets(st.integers(0, 39))


@settings(max_examples=50)
@given(
    _POSITIONS,
    _POSITIONS,
    st.integers(-1, 45),
    st.integers(1, 50),
    st.sampled_from([(), ("pending",), ("ok",), ("pending", "failed"), ("failed", "ok")]),
)
def test_any_page_of_items_is_that_part_of_all_of_them(
    done: set[int], blobs: set[int], after: int, limit: int, outcomes: tuple[str, ...]
) -> None:
    engine, items = _engine(40, done, blobs)
    wanted = tuple(map(ItemOutcome, outcomes))
    rows = RunRows(engine.read_steps, "job")
    stage = replace(STAGE, total=40, done=len(done), listed=True)
    found = _virtually(rows.items(stage, after=after, limit=limit, outcomes=wanted))
    fitting = [item for item in items if not wanted or item.outcome in wanted]
    assert found == [item for item in fitting if item.seq > after][:limit]
    assert _virtually(rows.list_report(stage)) == ItemReport({"asked": 1}, {}, [])


def test_going_through_a_long_list_reads_few_rows_more_than_there_are() -> None:
    engine, items = _engine(5_000, set(), set())
    rows, found, after = RunRows(engine.read_steps, "job"), 0, -1
    stage = replace(STAGE, total=5_000, listed=True)
    while page := _virtually(rows.items(stage, after=after, limit=500)):
        found, after = found + len(page), page[-1].seq
    assert found == len(items)
    assert engine.read_rows <= 3 * len(list_rows("list/s/0", items)) + 3


@on_virtual_time
async def test_a_step_has_one_item_from_its_start() -> None:
    one, seen = Definition("one"), []

    @one.step()
    async def only(results: Any) -> int:
        seen.extend(await place.items("only"))
        return 1

    @one.step()
    async def after(results: Any) -> int:
        seen.extend(await place.items("only"))
        return 2

    place = Place()
    ended = await place.run(one)
    # The start of the first stage is not written: until something is, it has no rows.
    assert [item.outcome for item in seen] == [ItemOutcome.OK]
    begun = stage_of(ended, "only")
    for outcomes, count in (((ItemOutcome.PENDING,), 0), ((ItemOutcome.OK,), 1), ((), 1)):
        assert len(await place.reader.items(ended, "only", -1, 10, outcomes)) == count
    assert await place.reader.items(ended, "only", 0, 10, ()) == []
    rows = RunRows(place.engine.read_steps, "another")
    assert await rows.items(begun) == [ItemRecord(seq=0, key="")]  # begun, and not ended


@every(
    "key",
    ["", "plain", "with a space", "100%", "%20", "a/b", "ключ", "\t", "k" * 256],
)
def test_an_event_keeps_its_key(key: str) -> None:
    said = emitted(emit_note("stage", key, '{"a": [1, " "]}'))
    assert said == {"stage": "stage", "key": key, "data": {"a": [1, " "]}}


# -- runs that ended without a runner ---------------------------------------------


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3)


def _pipeline() -> Definition:
    one = Definition(
        "one",
        config=Config,
        alerts=[ended("run_failed", "FAILED"), ended("run_cancelled", "CANCELLED")],
    )

    @one.step()
    async def before(results: Any) -> int:
        return 1

    @one.map(over="numbers", concurrency=1)
    async def slow(number: int) -> int:
        await asyncio.sleep(10)
        return number

    @one.step()
    async def after(results: Any) -> int:
        return 1

    return one


ENDS = [
    (JobState.CANCELLED, None, "no need", _S.CANCELLED, "CANCELLED", "no need", "cancelled"),
    (JobState.CANCELLED, None, None, _S.CANCELLED, "CANCELLED", "Job was cancelled", "cancelled"),
    (JobState.DENIED, "DENIED", "not at night", _S.FAILED, "DENIED", "not at night", None),
    (JobState.TIMEOUT, "TIMEOUT", "too late", _S.FAILED, "STALE", STALE_MESSAGE, None),
    (JobState.FAILED, "LOST", "no worker", _S.FAILED, "LOST", "no worker", None),
]


@every("state, code, message, status, said, why, reason", ENDS)
@on_virtual_time
async def test_a_run_that_ended_while_it_waited_is_complete(
    state: JobState,
    code: str | None,
    message: str | None,
    status: PipelineJobStatus,
    said: str,
    why: str,
    reason: str | None,
) -> None:
    place = Place()
    await place.create(_pipeline())
    place.engine.end("job", state, code, message)
    record = await place.record()
    assert (record.status, record.started_at, record.current_stage) == (status, None, None)
    assert statuses(record) == {"before": "skipped", "slow": "skipped", "after": "skipped"}
    assert set(reasons(record).values()) == {reason or why}
    assert [(error.stage, error.code, error.message) for error in record.errors] == [
        ("", said, why)
    ]
    assert record.summary is not None
    assert (record.summary.status, record.summary.finished_at) == (status, record.finished_at)
    assert record.summary.duration_ms == 0
    assert [alert.code for alert in record.alerts] == [f"run_{status.lower()}"]
    assert record.summary.alerts == (f"run_{status.lower()}",)
    events = await place.events()
    assert [event.kind for event in events] == [PipelineEventKind.JOB_COMPLETE]
    assert events[0].data["status"] == status
    cancelled = status is _S.CANCELLED
    assert (record.cancel_requested, record.cancel_effective) == (cancelled, cancelled or None)


@every("state, code, message, status, said, why, reason", ENDS)
@every("seconds, slow", [(5.0, "failed"), (15.0, "partial")])
@on_virtual_time
async def test_every_stage_of_a_run_that_lost_its_runner_has_an_end(
    state: JobState,
    code: str | None,
    message: str | None,
    status: PipelineJobStatus,
    said: str,
    why: str,
    reason: str | None,
    seconds: float,
    slow: str,
) -> None:
    place = Place()
    attempt = await place.begin(_pipeline())
    await asyncio.sleep(seconds)
    await place.crash(attempt)
    job = place.engine.end("job", state, code, message)
    record = await place.record()
    assert (record.status, record.current_stage) == (status, "slow")
    assert statuses(record) == {"before": "completed", "slow": slow, "after": "skipped"}
    assert reasons(record) == {"before": "", "slow": reason or why, "after": reason or why}
    assert stage_of(record, "slow").finished_at == job.finished_at
    assert stage_of(record, "slow").eta is None
    assert [(error.stage, error.code, error.message) for error in record.errors] == [
        ("slow", said, why)
    ]
    assert record.summary is not None
    assert record.summary.stages["slow"]["status"] == slow
    assert record.summary.duration_ms == pytest.approx(seconds * 1000)
    assert [alert.code for alert in record.alerts] == [f"run_{status.lower()}"]
    assert (await place.events())[-1].kind is PipelineEventKind.JOB_COMPLETE


@on_virtual_time
async def test_the_end_of_the_job_counts_where_its_run_says_another() -> None:
    place = Place()
    await place.run(_pipeline())
    job = place.engine.jobs["job"]
    place.engine.jobs["job"] = replace(job, state=JobState.RUNNING, finished_at=None)
    place.engine.end("job", JobState.CANCELLED, None, "too late")
    record = await place.record()
    assert (record.status, set(statuses(record).values())) == (_S.CANCELLED, {"completed"})
    assert [error.message for error in record.errors] == ["too late"]
    assert record.summary is not None
    assert record.summary.status is _S.CANCELLED


@on_virtual_time
async def test_a_run_of_a_pipeline_that_nobody_knows_has_an_end_too() -> None:
    place = Place()
    await place.create(_pipeline())
    place.state.values.clear()
    place.engine.end("job", JobState.DENIED, "DENIED", "no")
    record = await place.record()
    assert (record.status, record.stages, record.alerts) == (_S.FAILED, (), ())
    assert record.summary is not None


@on_virtual_time
async def test_a_run_whose_config_cant_be_read_fails_and_is_folded() -> None:
    place = Place()
    job = await place.create(_pipeline())
    pointer = encode_data(b"[" * 3000)
    place.engine.jobs["job"] = replace(job, request=replace(job.request, context_ptr=pointer))
    ended = await place.go_on(_pipeline())
    assert (ended.status, ended.config) == (_S.FAILED, {})
    assert ended.errors[0].code == "BAD_INPUT"


@every(
    "fields, retry_of, trigger",
    [
        ({}, None, "manual"),
        ({"parent_job_id": "p"}, "p", "retry"),
        ({"parent_job_id": "p"}, None, "child"),
        ({"schedule": "nightly"}, None, "schedule"),
    ],
)
def test_a_record_says_what_set_the_run_off(
    fields: dict[str, Any], retry_of: str | None, trigger: str
) -> None:
    request = JobRequest(job_id="job", topic="job.pipeline.one", **fields)
    job = Job(
        seq=1,
        request=request,
        state=JobState.PENDING,
        version=1,
        accepted_at=1.0,
        updated_at=1.0,
    )
    assert fold(job, {}, None, retry_of=retry_of).trigger == trigger
