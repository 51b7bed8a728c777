"""The document, the page and the table that they are made from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from tests.support.rows import every

from penstock.api.openapi import document
from penstock.api.operation import REST, Operation
from penstock.api.operations import OPERATIONS
from penstock.api.submit import Submission
from penstock.api.table import job_json
from penstock.core.job import JobRequest
from penstock.lifecycles.canonical import JobState
from penstock.testing.samples import a_job

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT: dict[str, Any] = json.loads(msgspec.json.encode(document(OPERATIONS)))


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """With the components at hand, as a validator wants them."""
    return {**schema, "components": DOCUMENT["components"]}


def documented(operation: Operation) -> str:
    """Its path as OpenAPI has it, which knows no segment that stands for several."""
    return operation.path.replace(REST, "")


def test_every_operation_is_in_the_document() -> None:
    told = {
        (method.upper(), path) for path, entries in DOCUMENT["paths"].items() for method in entries
    }
    assert told == {(operation.method, documented(operation)) for operation in OPERATIONS}


def test_names_of_operations_are_unique() -> None:
    names = [operation.id for operation in OPERATIONS]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere() -> None:
    refs = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(DOCUMENT)))
    schemas = DOCUMENT["components"]["schemas"]
    assert refs
    assert [ref for ref in refs if ref.removeprefix("#/components/schemas/") not in schemas] == []


@every("operation", OPERATIONS)
def test_every_operation_says_what_it_does_who_may_and_what_can_go_wrong(
    operation: Operation,
) -> None:
    entry = DOCUMENT["paths"][documented(operation)][operation.method.lower()]
    assert entry["summary"]
    assert entry["description"]
    assert "default" in entry["responses"]
    assert str(operation.status) in entry["responses"]
    named = set(re.findall(r"\{(\w+)\}", documented(operation)))
    told = {one["name"] for one in entry.get("parameters", []) if one["in"] == "path"}
    assert named == told
    if operation.query is not None:
        asked = {one["name"] for one in entry.get("parameters", []) if one["in"] == "query"}
        assert asked == set(operation.query.__struct_fields__)


@pytest.mark.parametrize("state", list(JobState))
def test_a_job_is_as_the_document_says(state: JobState) -> None:
    schema = resolved({"$ref": "#/components/schemas/Job"})
    job = json.loads(job_json(a_job("a", state)))
    assert jsonschema_rs.is_valid(schema, job)
    assert not jsonschema_rs.is_valid(schema, {**job, "state": "DONE"})
    assert next(iter(job)) == "job_id"


def test_a_submission_has_what_a_caller_may_say_of_a_job() -> None:
    said_by_the_engine = {"first_try", "principal", "retry_number", "schedule", "try_number"}
    ours = set(JobRequest.__struct_fields__) - said_by_the_engine
    assert set(Submission.__struct_fields__) == ours | {"input", "delay"}


def test_a_submission_has_the_defaults_of_a_request() -> None:
    given, request = Submission(topic="job.a"), JobRequest(job_id="", topic="job.a")
    differ = {"tenant": (None, "default"), "retry": (None, request.retry)}
    for field in set(JobRequest.__struct_fields__) & set(Submission.__struct_fields__):
        pair = (getattr(given, field), getattr(request, field))
        assert pair[0] == pair[1] or pair == differ[field]


def test_the_fields_of_a_submission_are_explained() -> None:
    properties = DOCUMENT["components"]["schemas"]["Submission"]["properties"]
    assert properties["topic"]["description"]
    assert properties["after"]["description"]
