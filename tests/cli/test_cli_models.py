"""`penstock models`, as a program."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.models.hub_server import HubServer, hub_server
from tests.models import gguf

from penstock.cli.exits import Exit
from penstock.workloads.llm.models.shelf import ModelShelf


@pytest.fixture
def shelf(tmp_path: Path) -> ModelShelf:
    return ModelShelf(tmp_path / "shelf")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "Tiny-1B.gguf"
    file.write_bytes(gguf({"llama.context_length": 32_768}))
    return file


def penstock(
    shelf: ModelShelf, *args: str | Path, largest: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if largest:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", "models", *map(str, args)],
        env={**os.environ, "PENSTOCK_MODELS_DIR": str(shelf.folder), **environ},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_an_empty_shelf_says_how_to_fill_it(shelf: ModelShelf) -> None:
    ran = penstock(shelf, "list")
    assert ran.returncode == Exit.OK
    assert ran.stdout == ""
    assert "penstock models pull smollm2" in ran.stderr
    assert json.loads(penstock(shelf, "list", "--json").stdout) == []


def test_a_model_is_added_listed_and_removed(shelf: ModelShelf, source: Path) -> None:
    added = penstock(shelf, "add", source)
    assert added.returncode == Exit.OK, added.stderr
    assert added.stderr == ""
    assert added.stdout == penstock(shelf, "list").stdout
    header, row = added.stdout.splitlines()
    assert header.split() == ["model", "kind", "weights", "stored", "context", "size", "can"]
    assert row.split() == ["Tiny-1B", "llama", "2.1K", "F32", "32,768", "8.4", "KiB", "complete"]

    removed = penstock(shelf, "rm", "Tiny-1B", "--json")
    assert json.loads(removed.stdout) == {"removed": ["Tiny-1B"], "unfinished": 0}
    assert shelf.list() == []


def test_json_tells_all_there_is_to_know(shelf: ModelShelf, source: Path) -> None:
    told = json.loads(penstock(shelf, "add", source, "--name", "mine", "--json").stdout)
    assert told["name"] == "mine"
    assert told["train_context"] == 32_768
    assert told["source"] == str(source)
    assert len(told["sha256"]) == 64
    assert json.loads(penstock(shelf, "list", "--json").stdout) == [told]


def test_the_folder_can_be_named(shelf: ModelShelf, source: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    assert penstock(shelf, "add", source, "--models-dir", elsewhere).returncode == Exit.OK
    assert (elsewhere / "Tiny-1B.gguf").is_file()
    assert not shelf.folder.exists()


def test_what_can_t_be_used_is_listed_with_its_reason(shelf: ModelShelf, source: Path) -> None:
    penstock(shelf, "add", source)
    (shelf.folder / "half.gguf").write_bytes(gguf()[:-1])
    ran = penstock(shelf, "list")
    assert ran.returncode == Exit.OK
    assert "Tiny-1B" in ran.stdout
    assert "half" not in ran.stdout
    assert "half.gguf is cut off" in ran.stderr


def test_every_refusal_is_a_line_and_a_code(
    shelf: ModelShelf, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.gguf").write_bytes(gguf({"extra": 1}))
    penstock(shelf, "add", source, "--name", "mine")
    for args, code, said in (
        (("add", "/etc/passwd"), Exit.USAGE, "passwd is no GGUF file"),
        (("add", tmp_path / "none.gguf"), Exit.NOT_FOUND, "there is no file"),
        (("add", tmp_path / "other.gguf", "--name", "mine"), Exit.CONFLICT, "another model"),
        (("add", source, "--name", "a b"), Exit.USAGE, "can't be called"),
        (("rm", "none"), Exit.NOT_FOUND, "no model 'none'"),
        (("rm",), Exit.USAGE, "name a model"),
        (("pull", "nonsense"), Exit.USAGE, "nothing that can be pulled"),
    ):
        ran = penstock(shelf, *args)
        assert ran.returncode == code, ran.stderr
        assert ran.stderr.startswith("penstock: ")
        assert said in ran.stderr
        assert "Traceback" not in ran.stderr
        assert ran.stdout == ""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        server.files = {"m-Q8_0.gguf": gguf(tensors=(((1024, 256), 0),))}
        yield server


def test_a_model_is_pulled_from_a_hub(shelf: ModelShelf, hub: HubServer) -> None:
    ran = penstock(shelf, "pull", "org/repo", HF_ENDPOINT=hub.url)
    assert ran.returncode == Exit.OK, ran.stderr
    assert ran.stderr == ""
    assert "m-Q8_0" in ran.stdout
    assert [one.name for one in shelf.list()] == ["m-Q8_0"]


def test_a_full_disk_is_told_and_what_came_is_kept_for_the_next_time(
    shelf: ModelShelf, hub: HubServer
) -> None:
    ran = penstock(shelf, "pull", "org/repo", HF_ENDPOINT=hub.url, largest=300_000)
    assert ran.returncode == Exit.UNAVAILABLE
    assert "no space left" in ran.stderr
    assert shelf.list() == []
    [part] = shelf.unfinished.glob("*")
    assert 0 < part.stat().st_size <= 300_000

    assert penstock(shelf, "rm", "--unfinished").returncode == Exit.OK
    assert list(shelf.unfinished.glob("*")) == []


STEPS = [f"shelf.{step}:{n}" for n in (1, 2, 3) for step in ("move", "moved")]


@pytest.mark.parametrize("step", STEPS)
def test_a_model_is_there_whole_or_not_at_all_wherever_its_adding_is_killed(
    step: str, shelf: ModelShelf, source: Path, tmp_path: Path
) -> None:
    eyes = tmp_path / "eyes.gguf"
    eyes.write_bytes(gguf({"general.architecture": "clip"}))
    args = ("add", source, "--projector", eyes)
    assert penstock(shelf, *args, PENSTOCK_FAILPOINT=step).returncode == -9

    found = shelf.list()
    assert len(found) == (1 if step == "shelf.moved:3" else 0)
    assert all(one.vision and shelf.record(one.name) for one in found)
    assert shelf.unfit() == []

    assert penstock(shelf, *args).returncode == Exit.OK
    assert set(os.listdir(shelf.folder)) == {
        *(".lock", "Tiny-1B.gguf", "Tiny-1B.json", "mmproj-Tiny-1B.gguf")
    }


def test_a_model_whose_removal_was_killed_is_gone_and_may_come_again(
    shelf: ModelShelf, source: Path
) -> None:
    penstock(shelf, "add", source)
    killed = penstock(shelf, "rm", "Tiny-1B", PENSTOCK_FAILPOINT="shelf.removed")
    assert killed.returncode == -9
    assert shelf.list() == []
    assert penstock(shelf, "add", source).returncode == Exit.OK
    assert len(shelf.list()) == 1
