"""The document and the reference page of a container worker's HTTP API."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec import Struct
from tests.support.rows import every

from penstock.api.container.facade import ContainerFacade, WorkerHealth, WorkerInfo
from penstock.api.container.server import INFO, http_options, operations
from penstock.api.container.views import JobRecord, JobSummary
from penstock.api.openapi import document
from penstock.api.operation import Operation
from penstock.core.errors import Misconfigured
from penstock.workloads.container.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[3]
OPERATIONS = operations(cast("ContainerFacade", None))
DOCUMENT: dict[str, Any] = json.loads(msgspec.json.encode(document(OPERATIONS, INFO)))


def test_names_of_operations_are_unique() -> None:
    names = [operation.id for operation in OPERATIONS]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere() -> None:
    refs = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(DOCUMENT)))
    schemas = DOCUMENT["components"]["schemas"]
    assert refs
    assert [ref for ref in refs if ref.removeprefix("#/components/schemas/") not in schemas] == []


@every("operation", OPERATIONS)
def test_every_operation_says_what_it_does_and_what_can_go_wrong(operation: Operation) -> None:
    path = operation.path.replace("...", "")
    entry = DOCUMENT["paths"][path][operation.method.lower()]
    assert entry["summary"]
    assert entry["description"]
    assert "default" in entry["responses"]
    assert str(operation.status) in entry["responses"]
    told = {one["name"] for one in entry.get("parameters", []) if one["in"] == "path"}
    assert told == set(re.findall(r"\{(\w+)\}", path))


INFO_KEYS = """worker_id hostname os os_architecture protocol_version cpu_model cpu_cores
    cpu_threads memory_mb labels"""
HEALTH_KEYS = """status uptime_seconds load_average running_jobs max_concurrent_jobs temperature_c
    health_protocol_version timestamp_unix_ms cpu_threads dedicated_reserved_cpu_ids
    dedicated_reserved_count memory_total_mb memory_available_mb jobs_path jobs_disk_total_mb
    jobs_disk_available_mb docker_root_dir docker_disk_total_mb docker_disk_available_mb"""
SUMMARY_KEYS = "job_id state created_at started_at finished_at exit_code"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (WorkerInfo, INFO_KEYS),
        (WorkerHealth, HEALTH_KEYS),
        (JobRecord, f"{SUMMARY_KEYS} stdout stderr error"),
        (JobSummary, f"{SUMMARY_KEYS} error"),
    ],
)
def test_the_protocols_keys_come_first(kind: type[Struct], keys: str) -> None:
    expected = tuple(keys.split())
    assert kind.__struct_fields__[: len(expected)] == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_needs_no_token(host: str) -> None:
    http_options(WorkerConfig(host=host))
    with pytest.raises(Misconfigured, match="token"):
        http_options(WorkerConfig(host="0.0.0.0"))
