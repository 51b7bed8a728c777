"""Models of a hub: the library is the real one, the hub is on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.models.hub_server import COMMIT, HubServer, hub_server
from tests.models import gguf

from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    Misconfigured,
    NotFound,
    NotPermitted,
    StoreFull,
    Unavailable,
)
from penstock.workloads.llm.models.pulling import pull
from penstock.workloads.llm.models.shelf import ModelShelf
from penstock.workloads.llm.values import LlmCode, LlmFailure

MODEL = gguf(tensors=(((1024, 256), 0),))
"""A megabyte, so that it comes in several pieces."""
HALF = len(MODEL) // 2


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        server.files = {"README.md": b"hello", "m-Q8_0.gguf": MODEL}
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def shelf(tmp_path: Path) -> ModelShelf:
    return ModelShelf(tmp_path / "shelf")


def files(shelf: ModelShelf) -> set[str]:
    return set(os.listdir(shelf.folder)) - {".lock", ".pulling"}


def parts(shelf: ModelShelf) -> list[Path]:
    return list(shelf.unfinished.glob("*"))


def test_the_one_model_of_a_repository_is_fetched_and_told(
    hub: HubServer, shelf: ModelShelf
) -> None:
    told: list[tuple[str, int, int]] = []
    facts = pull("org/repo", shelf, lambda *said: told.append(said))

    assert facts.name == "m-Q8_0"
    assert Path(facts.path).read_bytes() == MODEL
    record = shelf.record("m-Q8_0")
    assert record is not None
    assert record.source == f"hf:org/repo:m-Q8_0.gguf@{COMMIT}"
    assert ("fetching", len(MODEL), len(MODEL)) in told
    assert ("checking", len(MODEL), len(MODEL)) in told
    assert parts(shelf) == []
    assert files(shelf) == {"m-Q8_0.gguf", "m-Q8_0.json"}


def test_what_is_there_is_not_fetched_again(hub: HubServer, shelf: ModelShelf) -> None:
    pull("org/repo", shelf)
    pull("org/repo", shelf)
    assert hub.downloads == [""]


def test_a_name_that_is_taken_is_told_before_anything_is_fetched(
    hub: HubServer, shelf: ModelShelf, tmp_path: Path
) -> None:
    (tmp_path / "other.gguf").write_bytes(gguf())
    shelf.add(tmp_path / "other.gguf", "m-Q8_0")
    with pytest.raises(Conflict):
        pull("org/repo", shelf)
    assert hub.downloads == []
    assert pull("org/repo", shelf, name="mine").name == "mine"


def test_one_of_several_is_fetched_by_how_it_is_stored(hub: HubServer, shelf: ModelShelf) -> None:
    hub.files["sub/m-Q4_K_M.gguf"] = gguf()
    assert pull("org/repo:Q4_K_M", shelf).name == "m-Q4_K_M"
    assert pull("hf:org/repo:m-Q8_0.gguf", shelf).name == "m-Q8_0"
    with pytest.raises(InvalidRequest, match="has 2 that may be meant"):
        pull("org/repo", shelf)
    with pytest.raises(NotFound, match="has no Q2_K"):
        pull("org/repo:Q2_K", shelf)


def test_a_projector_comes_with_its_model(hub: HubServer, shelf: ModelShelf) -> None:
    hub.files["mmproj-F16.gguf"] = gguf({"general.architecture": "clip"})
    assert pull("org/repo", shelf).vision
    assert files(shelf) == {"m-Q8_0.gguf", "m-Q8_0.json", "mmproj-m-Q8_0.gguf"}


def test_a_small_file_is_checked_by_its_git_checksum(hub: HubServer, shelf: ModelShelf) -> None:
    hub.small.add("m-Q8_0.gguf")
    hub.lie.add("m-Q8_0.gguf")
    with pytest.raises(LlmFailure, match="came damaged"):
        pull("org/repo", shelf)
    hub.lie.clear()
    assert pull("org/repo", shelf).name == "m-Q8_0"
    assert pull("org/repo", shelf).name == "m-Q8_0"


def test_a_download_that_breaks_off_goes_on_where_it_was(hub: HubServer, shelf: ModelShelf) -> None:
    hub.pause_at = HALF
    killed_while_pulling(hub, shelf)
    [part] = parts(shelf)
    have = part.stat().st_size
    assert 0 < have <= HALF
    assert shelf.list() == []

    hub.pause_at = None
    facts = pull("org/repo", shelf)
    assert Path(facts.path).read_bytes() == MODEL
    assert hub.downloads == ["", f"bytes={have}-"]
    assert parts(shelf) == []


def test_a_hub_that_knows_no_ranges_is_asked_for_all_of_it(
    hub: HubServer, shelf: ModelShelf
) -> None:
    hub.pause_at = HALF
    killed_while_pulling(hub, shelf)
    hub.pause_at, hub.ranges = None, False
    assert Path(pull("org/repo", shelf).path).read_bytes() == MODEL


def killed_while_pulling(hub: HubServer, shelf: ModelShelf) -> None:
    """Another program pulls, and is killed when half has come."""
    command = [sys.executable, "-m", "penstock.cli", "models", "pull", "org/repo"]
    pulling = subprocess.Popen([*command, "--models-dir", str(shelf.folder)])
    try:
        assert hub.paused.wait(30)
        deadline = time.monotonic() + 20
        while not any(part.stat().st_size for part in parts(shelf)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(pulling.pid, signal.SIGKILL)
        pulling.wait()
    hub.resume.set()


def test_a_hub_that_keeps_breaking_off_is_given_up_and_what_came_is_kept(
    hub: HubServer, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.break_at = HALF
    with pytest.raises(Unavailable, match="broke off after") as broken:
        pull("org/repo", shelf)
    assert "goes on from there" in broken.value.hint
    [part] = parts(shelf)
    assert part.stat().st_size == HALF
    hub.break_at = None
    assert Path(pull("org/repo", shelf).path).read_bytes() == MODEL
    assert hub.downloads[-1] == f"bytes={HALF}-"


def test_what_comes_damaged_is_not_kept(hub: HubServer, shelf: ModelShelf) -> None:
    hub.lie.add("m-Q8_0.gguf")
    with pytest.raises(LlmFailure) as damaged:
        pull("org/repo", shelf)
    assert damaged.value.code is LlmCode.MODEL_INVALID
    assert "nothing was kept" in damaged.value.message
    assert parts(shelf) == []
    assert files(shelf) == set()


def test_what_is_no_model_is_not_kept(hub: HubServer, shelf: ModelShelf) -> None:
    hub.files["m-Q8_0.gguf"] = b"GGUF, but not really"
    with pytest.raises(LlmFailure) as refused:
        pull("org/repo", shelf)
    assert refused.value.code is LlmCode.MODEL_INVALID
    assert parts(shelf) == []
    assert files(shelf) == set()


def test_two_at_once_don_t_write_the_same_file(hub: HubServer, shelf: ModelShelf) -> None:
    hub.pause_at = HALF
    command = [sys.executable, "-m", "penstock.cli", "models", "pull", "org/repo"]
    other = subprocess.Popen([*command, "--models-dir", str(shelf.folder)])
    try:
        assert hub.paused.wait(30)
        with pytest.raises(Conflict, match="another program"):
            pull("org/repo", shelf)
        hub.resume.set()
        assert other.wait(30) == 0
    finally:
        other.kill()
        other.wait()
    assert Path(pull("org/repo", shelf).path).read_bytes() == MODEL


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    hub: HubServer, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))  # type: ignore[attr-defined]
    with pytest.raises(StoreFull, match="no space left"):
        pull("org/repo", shelf)
    assert hub.downloads == []


def test_no_such_repository(hub: HubServer, shelf: ModelShelf) -> None:
    with pytest.raises(NotFound, match="no repository org/none"):
        pull("org/none", shelf)


@pytest.mark.parametrize(
    ("status", "headers", "error", "said"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, NotPermitted, "conditions"),
        (401, {"X-Error-Code": "RepoNotFound"}, NotFound, "no repository"),
        (500, {}, Unavailable, "can't be reached"),
        (400, {}, Unavailable, "can't be reached"),
    ],
    ids=["gated", "private", "broken", "confused"],
)
def test_what_the_hub_refuses_is_told(
    status: int,
    headers: dict[str, str],
    error: type[Exception],
    said: str,
    hub: HubServer,
    shelf: ModelShelf,
) -> None:
    hub.refuse = (status, headers)
    with pytest.raises(error, match=said):
        pull("org/repo", shelf)


def test_no_network(shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="can't be reached") as unreachable:
        pull("org/repo", shelf)
    assert "network" in unreachable.value.hint


def test_without_the_library_it_is_told_how_to_install_it(
    shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Misconfigured) as missing:
        pull("org/repo", shelf)
    assert "penstock[hub]" in missing.value.hint


@pytest.mark.parametrize(
    "what",
    ["", "word", "a/b/c", "http://x/y", "org/repo:", "../x", "a b/c", "x" * 5000],
    ids=range(8),
)
def test_what_can_t_be_pulled_is_refused(
    what: str, shelf: ModelShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # nobody knows what lies beside a clone
    with pytest.raises(InvalidRequest, match="nothing that can be pulled"):
        pull(what, shelf)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(shelf: ModelShelf) -> None:
    with pytest.raises(NotFound, match="no file folder/m"):
        pull("folder/m.gguf", shelf)
    with pytest.raises(LlmFailure, match="no file"):
        pull("file:m.gguf", shelf)


def test_a_file_is_pulled_as_well(shelf: ModelShelf, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf())
    assert pull(f"file:{tmp_path}/m.gguf", shelf).name == "m"
    assert pull(str(tmp_path / "m.gguf"), shelf, name="n").name == "n"
