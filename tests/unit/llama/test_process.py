"""How a process for a model is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.workloads.spool.llama import process
from penstock.workloads.spool.llama.process import Purpose
from penstock.workloads.spool.llama.sizing import Size

SIZE = Size(slots=1, context=256, threads=1, memory=1)


def purpose(*, spin: bool) -> Purpose:
    return Purpose(model="m", path="m", size=SIZE, spin=spin)


def test_threads_sleep_while_they_wait_unless_spinning_is_wished_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    asleep = process._environment(purpose(spin=False))
    awake = process._environment(purpose(spin=True))

    assert (asleep["OMP_WAIT_POLICY"], asleep["GOMP_SPINCOUNT"]) == ("passive", "0")
    assert awake["OMP_WAIT_POLICY"] == "active"


def test_a_socket_has_a_short_path_even_where_temporary_files_have_a_long_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(process.tempfile, "tempdir", str(deep))
    folder = process._folder()
    folder.rmdir()

    assert len(str(folder / "llama.sock")) <= 104


def test_an_old_empty_folder_is_tidied_away_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, used = tmp_path / "penstock-llm-old", tmp_path / "penstock-llm-used"
    for folder in (old, used):
        folder.mkdir()
    (used / "llama.sock").touch()
    process._tidy(tmp_path)
    assert old.exists()
    monkeypatch.setattr(process, "_OLD", -1.0)
    process._tidy(tmp_path)

    assert not old.exists()
    assert used.exists()


def test_memory_that_cannot_be_read_is_none() -> None:
    assert process.resident(2**30) == 0
