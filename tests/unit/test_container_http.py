"""The document and the reference page of a container worker's HTTP API."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tests.support.rows import every

from penstock.api.container.facade import ContainerFacade, WorkerHealth, WorkerInfo
from penstock.api.container.reference import page as reference
from penstock.api.container.server import TELLING, http_options, operations
from penstock.api.container.views import HEALTH_KEYS, INFO_KEYS, Presenter
from penstock.api.openapi import document
from penstock.api.operation import Operation
from penstock.core.errors import Misconfigured
from penstock.workloads.container.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = operations(cast("ContainerFacade", None), Presenter())
DOCUMENT: dict[str, Any] = json.loads(msgspec.json.encode(document(OPERATIONS, TELLING)))


def test_the_reference_page_is_in_step_with_the_table() -> None:
    kept = (ROOT / "docs/reference/container-http.md").read_text("utf-8")
    assert kept == reference(), (
        "run: python -m penstock.api.container.reference docs/reference/container-http.md"
    )


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


def test_the_protocols_keys_come_first() -> None:
    assert WorkerHealth.__struct_fields__[: len(HEALTH_KEYS)] == HEALTH_KEYS
    assert WorkerInfo.__struct_fields__[: len(INFO_KEYS)] == INFO_KEYS


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_needs_no_token(host: str) -> None:
    http_options(WorkerConfig(host=host))
    with pytest.raises(Misconfigured, match="token"):
        http_options(WorkerConfig(host="0.0.0.0"))
