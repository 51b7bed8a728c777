"""Nodes of this machine are found by files in the data folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from penstock.app.nodes import NodeFile, announced, node_files


def here(node_id: str = "a", pid: int = 0) -> NodeFile:
    return NodeFile(node_id=node_id, address="127.0.0.1:7500", pid=pid or os.getpid(), model="Smol")


def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_node_is_found_as_long_as_it_runs(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "pipes"
    with announced(folder, here()):
        assert node_files(folder) == [here()]
    assert node_files(folder) == []
    assert list(folder.iterdir()) == []


def test_the_youngest_is_first(tmp_path: Path) -> None:
    with announced(tmp_path, here("old")), announced(tmp_path, here("new")):
        os.utime(tmp_path / "old.json", (1, 1))
        assert [one.node_id for one in node_files(tmp_path)] == ["new", "old"]


def test_what_a_killed_node_left_is_passed_over_and_removed(tmp_path: Path) -> None:
    left = announced(tmp_path, here("gone", ended_pid()))
    left.__enter__()
    (tmp_path / "torn.json").write_text("{")
    assert node_files(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_node_leaves_the_file_of_its_successor(tmp_path: Path) -> None:
    first, second = announced(tmp_path, here()), announced(tmp_path, here(pid=1))
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        assert [one.pid for one in node_files(tmp_path)] == [1]


def test_without_a_folder_there_is_none(tmp_path: Path) -> None:
    assert node_files(tmp_path / "nowhere") == []
