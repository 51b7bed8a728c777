"""Runs and items as they are shown, and back."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.openapi import document
from penstock.api.operations import OPERATIONS
from penstock.core.errors import InvalidRequest, PipelineBusy, revived
from penstock.core.pointer import encode_data
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.operations import cursor, position
from penstock.workloads.pipeline.interface import INLINE, ItemView, item_of, item_view
from penstock.workloads.pipeline.records import (
    Alert,
    ItemOutcome,
    ItemRecord,
    PipelineRecord,
    RunSummary,
    StageError,
    StageKind,
    StageRecord,
    StageStatus,
)

PLACE = tuple[float, str] | None
DOCUMENT: dict[str, Any] = json.loads(msgspec.json.encode(document(OPERATIONS)))
NEW = PipelineRecord(id="a", trace_id="t", pipeline="news", created_at=1.5)
ENDED = PipelineRecord(
    id="a",
    trace_id="t",
    pipeline="news",
    fingerprint="f",
    config={"feeds": ["x"], "depth": 1.5},
    status=PipelineJobStatus.PARTIAL,
    created_at=1.0,
    started_at=2.0,
    finished_at=3.0,
    stage_progress={
        "z": StageRecord(
            name="z", index=0, kind=StageKind.MAP, status=StageStatus.PARTIAL, total=2, failed=1
        ),
        "a": StageRecord(
            name="a", index=1, kind=StageKind.STEP, metrics={"n": 1, "s": "x", "ok": True}
        ),
    },
    errors=(StageError("z", "no", "DEAD"),),
    cancel_requested=True,
    cancel_effective=False,
    abandoned_items=("z/1",),
    summary=RunSummary(
        trace_id="t",
        started_at=2.0,
        finished_at=3.0,
        duration_ms=1000.0,
        stages_ms=900.0,
        status=PipelineJobStatus.PARTIAL,
        stages={"z": {"total": 2}},
        alerts=("SLOW",),
    ),
    alerts=(Alert(code="SLOW", message="slow", value=2.0, threshold=1.0),),
    retry_of="b",
    tenant="acme",
    worker_id="w1",
    attempt=3,
)


def is_told(kind: str, value: bytes) -> bool:
    schema = {"$ref": f"#/components/schemas/{kind}", "components": DOCUMENT["components"]}
    return jsonschema_rs.is_valid(schema, json.loads(value))


@pytest.mark.parametrize("record", [NEW, ENDED], ids=["new", "ended"])
def test_a_run_is_shown_as_the_document_says_and_can_be_read_back(record: PipelineRecord) -> None:
    shown = msgspec.json.encode(record)
    assert is_told("PipelineRecord", shown)
    assert not is_told("PipelineRecord", shown.replace(b'"status":"', b'"status":"X'))
    assert msgspec.json.decode(shown, type=PipelineRecord) == record


def test_stages_are_shown_by_name_and_read_back_in_their_order() -> None:
    progress = json.loads(msgspec.json.encode(ENDED))["stage_progress"]
    assert {name: stage["index"] for name, stage in progress.items()} == {"z": 0, "a": 1}
    assert progress["z"].keys() == progress["a"].keys()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
POINTERS = st.one_of(
    st.just(""),
    JSON.map(lambda value: encode_data(json.dumps(value, indent=1).encode())),
    st.binary().map(encode_data),
    st.binary().map(lambda data: encode_data(data, "text/plain")),
    st.text(max_size=50).map(lambda text: f"data:{text}"),
    st.just("blob:sha256-" + "0" * 64),
)


@given(POINTERS, POINTERS)
def test_any_item_is_shown_as_json_and_read_back_as_it_was(given_: str, gave: str) -> None:
    item = ItemRecord(seq=3, key="k", input=given_, output=gave, outcome=ItemOutcome.OK)
    shown = msgspec.json.encode(item_view(item))
    assert is_told("ItemView", shown)
    back = item_of(msgspec.json.decode(shown, type=ItemView))
    assert msgspec.structs.replace(back, input=given_, output=gave) == item
    assert (_behind(back.input), _behind(back.output)) == (_behind(given_), _behind(gave))


def _behind(pointer: str) -> Any:
    """Pointers that carry the same bytes are the same; white space around a value is no part."""
    shown = item_view(ItemRecord(seq=0, key="", input=pointer)).input
    return json.loads(bytes(shown)) if isinstance(shown, msgspec.Raw) else pointer


@pytest.mark.parametrize(("size", "is_value"), [(INLINE, True), (INLINE + 1, False)])
def test_a_value_is_shown_up_to_its_limit(size: int, is_value: bool) -> None:
    pointer = encode_data(b'"' + b"x" * (size - 2) + b'"')
    shown = json.loads(msgspec.json.encode(item_view(ItemRecord(seq=0, key="", input=pointer))))
    assert ("input" in shown, "input_ptr" in shown) == (is_value, not is_value)


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=128))
def test_a_place_among_runs_is_read_back_as_it_was(created_at: float, job_id: str) -> None:
    assert position("runs", PLACE, cursor("runs", (created_at, job_id))) == (created_at, job_id)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "é",
        cursor("n", 5),
        cursor("runs", (float("nan"), "a")),
        cursor("runs", (1.0, "a" * 2000)),
    ],
)
def test_a_place_that_no_page_of_runs_gave_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="cursor"):
        position("runs", PLACE, text)


def test_a_busy_pipeline_is_revived_with_the_job_that_runs() -> None:
    error = PipelineBusy("busy", running="j1", hint="wait")
    again = revived(error.code, error.message, error.hint, error.facts)
    assert isinstance(again, PipelineBusy)
    assert (again.running, again.hint) == ("j1", "wait")
