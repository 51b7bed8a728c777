"""A `penstock` of its own for a test, or one with an engine for a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cli.commands import Penstock
from tests.support.cli.spooling import Spool


@pytest.fixture
def penstock(tmp_path: Path) -> Penstock:
    return Penstock(tmp_path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    """An engine that a module's tests share."""
    shared = Penstock(tmp_path_factory.mktemp("running"))
    with shared.up("--app", "jobs:app"):
        yield shared


@pytest.fixture
def spool(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> Spool:
    return Spool(tmp_path, monkeypatch, capsysbinary)
