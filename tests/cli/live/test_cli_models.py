"""`penstock model`, as a program."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hub_server import HubServer, hub_server
from tests.support.models import gguf

from penstock.cli.exits import Exit
from penstock.models.store import ModelStore


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "Tiny-1B.gguf"
    file.write_bytes(gguf({"llama.context_length": 32_768}))
    return file


def penstock(
    store: ModelStore, *args: str | Path, largest: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if largest:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", "model", *map(str, args)],
        env={**os.environ, "PENSTOCK_MODELS__DIR": str(store.folder), **environ},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_an_empty_shelf_says_how_to_fill_it(store: ModelStore) -> None:
    ran = penstock(store, "list")
    assert ran.returncode == Exit.OK
    assert ran.stdout == ""
    assert "penstock model pull smollm2" in ran.stderr
    assert json.loads(penstock(store, "list", "--json").stdout) == []


def test_a_model_is_added_listed_and_removed(store: ModelStore, source: Path) -> None:
    added = penstock(store, "add", source)
    assert added.returncode == Exit.OK, added.stderr
    assert added.stderr == ""
    assert added.stdout == penstock(store, "list").stdout
    header, row = added.stdout.splitlines()
    assert header.split() == ["NAME", "ARCH", "PARAMS", "QUANT", "SIZE", "CONTEXT", "CAPABILITIES"]
    assert row.split() == ["Tiny-1B", "llama", "2.1K", "F32", "8.4", "KiB", "32,768", "completion"]

    removed = penstock(store, "delete", "Tiny-1B", "--json")
    assert json.loads(removed.stdout) == {"removed": ["Tiny-1B"], "unfinished": 0}
    assert store.list() == []


def test_json_tells_all_there_is_to_know(store: ModelStore, source: Path) -> None:
    told = json.loads(penstock(store, "add", source, "--name", "mine", "--json").stdout)
    assert told["name"] == "mine"
    assert told["train_context"] == 32_768
    assert told["source"] == str(source)
    assert len(told["sha256"]) == 64
    assert json.loads(penstock(store, "list", "--json").stdout) == [told]


def test_one_model_is_shown_with_where_it_came_from(store: ModelStore, source: Path) -> None:
    penstock(store, "add", source, "--name", "mine")
    shown = penstock(store, "show", "min")
    assert shown.returncode == Exit.OK, shown.stderr
    lines = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert lines["name"] == "mine"
    assert lines["context"] == "32,768"
    assert lines["capabilities"] == "completion"
    assert lines["source"].strip() == str(source)
    assert len(lines["sha256"].strip()) == 64
    listed = json.loads(penstock(store, "list", "--json").stdout)
    assert [json.loads(penstock(store, "show", "mine", "--json").stdout)] == listed
    assert penstock(store, "show", "none").returncode == Exit.NOT_FOUND


def test_the_folder_can_be_named(store: ModelStore, source: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    assert penstock(store, "add", source, "--models-dir", elsewhere).returncode == Exit.OK
    assert (elsewhere / "Tiny-1B.gguf").is_file()
    assert not store.folder.exists()


def test_what_can_t_be_used_is_listed_with_its_reason(store: ModelStore, source: Path) -> None:
    penstock(store, "add", source)
    (store.folder / "half.gguf").write_bytes(gguf()[:-1])
    ran = penstock(store, "list")
    assert ran.returncode == Exit.OK
    assert "Tiny-1B" in ran.stdout
    assert "half" not in ran.stdout
    assert "half.gguf is cut off" in ran.stderr


def test_every_refusal_is_a_line_and_a_code(
    store: ModelStore, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.gguf").write_bytes(gguf({"extra": 1}))
    penstock(store, "add", source, "--name", "mine")
    for args, code, said in (
        (("add", "/etc/passwd"), Exit.USAGE, "passwd is not a GGUF file"),
        (("add", tmp_path / "none.gguf"), Exit.NOT_FOUND, "there is no file"),
        (("add", tmp_path / "other.gguf", "--name", "mine"), Exit.CONFLICT, "another model"),
        (("add", source, "--name", "a b"), Exit.USAGE, "can't be called"),
        (("delete", "none"), Exit.NOT_FOUND, "no model 'none'"),
        (("delete",), Exit.USAGE, "name a model"),
        (("pull", "nonsense"), Exit.USAGE, "nothing that can be pulled"),
    ):
        ran = penstock(store, *args)
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


def test_a_model_is_pulled_from_a_hub(store: ModelStore, hub: HubServer) -> None:
    ran = penstock(store, "pull", "org/repo", HF_ENDPOINT=hub.url)
    assert ran.returncode == Exit.OK, ran.stderr
    assert ran.stderr == ""
    assert "m-Q8_0" in ran.stdout
    assert [one.name for one in store.list()] == ["m-Q8_0"]


def test_a_full_disk_is_told_and_what_came_is_kept_for_the_next_time(
    store: ModelStore, hub: HubServer
) -> None:
    ran = penstock(store, "pull", "org/repo", HF_ENDPOINT=hub.url, largest=300_000)
    assert ran.returncode == Exit.UNAVAILABLE
    assert "no space left" in ran.stderr
    assert store.list() == []
    [part] = store.partial.glob("*")
    assert 0 < part.stat().st_size <= 300_000

    assert penstock(store, "delete", "--unfinished").returncode == Exit.OK
    assert list(store.partial.glob("*")) == []


STEPS = [f"models.{step}:{n}" for n in (1, 2, 3) for step in ("move", "moved")]


@pytest.mark.parametrize("step", STEPS)
def test_a_model_is_there_whole_or_not_at_all_wherever_its_adding_is_killed(
    step: str, store: ModelStore, source: Path, tmp_path: Path
) -> None:
    eyes = tmp_path / "eyes.gguf"
    eyes.write_bytes(gguf({"general.architecture": "clip"}))
    args = ("add", source, "--projector", eyes)
    assert penstock(store, *args, PENSTOCK_FAILPOINT=step).returncode == -9

    found = store.list()
    assert len(found) == (1 if step == "models.moved:3" else 0)
    assert all(one.vision and store.record(one.name) for one in found)
    assert store.unusable() == []

    assert penstock(store, *args).returncode == Exit.OK
    assert set(os.listdir(store.folder)) == {
        *(".lock", "Tiny-1B.gguf", "Tiny-1B.json", "mmproj-Tiny-1B.gguf")
    }


def test_a_model_whose_removal_was_killed_is_gone_and_may_come_again(
    store: ModelStore, source: Path
) -> None:
    penstock(store, "add", source)
    killed = penstock(store, "delete", "Tiny-1B", PENSTOCK_FAILPOINT="models.removed")
    assert killed.returncode == -9
    assert store.list() == []
    assert penstock(store, "add", source).returncode == Exit.OK
    assert len(store.list()) == 1
