"""Models of a hub or a web server, both on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hub_server import COMMIT, HubServer, hub_server
from tests.support.models import gguf

from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    NotPermitted,
    StoreFull,
    Unavailable,
)
from penstock.models.pull import pull
from penstock.models.store import ModelStore
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
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def files(store: ModelStore) -> set[str]:
    return set(os.listdir(store.folder)) - {".lock", ".pulling"}


def parts(store: ModelStore) -> list[Path]:
    return list(store.partial.glob("*"))


def test_the_one_model_of_a_repository_is_fetched_and_told(
    hub: HubServer, store: ModelStore
) -> None:
    told: list[tuple[str, int, int]] = []
    facts = pull("org/repo", store, lambda *said: told.append(said))

    assert facts.name == "m-Q8_0"
    assert Path(facts.path).read_bytes() == MODEL
    record = store.record("m-Q8_0")
    assert record is not None
    assert record.source == f"hf:org/repo:m-Q8_0.gguf@{COMMIT}"
    assert ("fetching", len(MODEL), len(MODEL)) in told
    assert ("checking", len(MODEL), len(MODEL)) in told
    assert parts(store) == []
    assert files(store) == {"m-Q8_0.gguf", "m-Q8_0.json"}


def test_what_is_there_is_not_fetched_again(hub: HubServer, store: ModelStore) -> None:
    pull("org/repo", store)
    pull("org/repo", store)
    assert hub.downloads == [""]


def test_a_name_that_is_taken_is_told_before_anything_is_fetched(
    hub: HubServer, store: ModelStore, tmp_path: Path
) -> None:
    (tmp_path / "other.gguf").write_bytes(gguf())
    store.add(tmp_path / "other.gguf", "m-Q8_0")
    with pytest.raises(Conflict):
        pull("org/repo", store)
    assert hub.downloads == []
    assert pull("org/repo", store, name="mine").name == "mine"


def test_one_of_several_is_fetched_by_how_it_is_stored(hub: HubServer, store: ModelStore) -> None:
    hub.files["sub/m-Q4_K_M.gguf"] = gguf()
    assert pull("org/repo:Q4_K_M", store).name == "m-Q4_K_M"
    assert pull("hf:org/repo:m-Q8_0.gguf", store).name == "m-Q8_0"
    with pytest.raises(InvalidRequest, match="has 2 that may be meant"):
        pull("org/repo", store)
    with pytest.raises(NotFound, match="has no Q2_K"):
        pull("org/repo:Q2_K", store)


def test_a_projector_comes_with_its_model(hub: HubServer, store: ModelStore) -> None:
    hub.files["mmproj-F16.gguf"] = gguf({"general.architecture": "clip"})
    assert pull("org/repo", store).vision
    assert files(store) == {"m-Q8_0.gguf", "m-Q8_0.json", "mmproj-m-Q8_0.gguf"}


def test_a_small_file_is_checked_by_its_git_checksum(hub: HubServer, store: ModelStore) -> None:
    hub.small.add("m-Q8_0.gguf")
    hub.lie.add("m-Q8_0.gguf")
    with pytest.raises(LlmFailure, match="came damaged"):
        pull("org/repo", store)
    hub.lie.clear()
    assert pull("org/repo", store).name == "m-Q8_0"
    assert pull("org/repo", store).name == "m-Q8_0"


def test_a_download_that_breaks_off_goes_on_where_it_was(hub: HubServer, store: ModelStore) -> None:
    hub.pause_at = HALF
    killed_while_pulling(hub, store)
    [part] = parts(store)
    have = part.stat().st_size
    assert 0 < have <= HALF
    assert store.list() == []

    hub.pause_at = None
    facts = pull("org/repo", store)
    assert Path(facts.path).read_bytes() == MODEL
    assert hub.downloads == ["", f"bytes={have}-"]
    assert parts(store) == []


def test_a_hub_that_knows_no_ranges_is_asked_for_all_of_it(
    hub: HubServer, store: ModelStore
) -> None:
    hub.pause_at = HALF
    killed_while_pulling(hub, store)
    hub.pause_at, hub.ranges = None, False
    assert Path(pull("org/repo", store).path).read_bytes() == MODEL


def killed_while_pulling(hub: HubServer, store: ModelStore) -> None:
    """Another program pulls, and is killed when half has come."""
    command = [sys.executable, "-m", "penstock.cli", "model", "pull", "org/repo"]
    pulling = subprocess.Popen([*command, "--models-dir", str(store.folder)])
    try:
        assert hub.paused.wait(30)
        deadline = time.monotonic() + 20
        while not any(part.stat().st_size for part in parts(store)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(pulling.pid, signal.SIGKILL)
        pulling.wait()
    hub.resume.set()


def test_a_hub_that_keeps_breaking_off_is_given_up_and_what_came_is_kept(
    hub: HubServer, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.break_at = HALF
    with pytest.raises(Unavailable, match="broke off after") as broken:
        pull("org/repo", store)
    assert "goes on from there" in broken.value.hint
    [part] = parts(store)
    assert part.stat().st_size == HALF
    hub.break_at = None
    assert Path(pull("org/repo", store).path).read_bytes() == MODEL
    assert hub.downloads[-1] == f"bytes={HALF}-"


def test_what_comes_damaged_is_not_kept(hub: HubServer, store: ModelStore) -> None:
    hub.lie.add("m-Q8_0.gguf")
    with pytest.raises(LlmFailure) as damaged:
        pull("org/repo", store)
    assert damaged.value.code is LlmCode.MODEL_INVALID
    assert "nothing was kept" in damaged.value.message
    assert parts(store) == []
    assert files(store) == set()


def test_what_is_no_model_is_not_kept(hub: HubServer, store: ModelStore) -> None:
    hub.files["m-Q8_0.gguf"] = b"GGUF, but not really"
    with pytest.raises(LlmFailure) as refused:
        pull("org/repo", store)
    assert refused.value.code is LlmCode.MODEL_INVALID
    assert parts(store) == []
    assert files(store) == set()


def test_two_at_once_don_t_write_the_same_file(hub: HubServer, store: ModelStore) -> None:
    hub.pause_at = HALF
    command = [sys.executable, "-m", "penstock.cli", "model", "pull", "org/repo"]
    other = subprocess.Popen([*command, "--models-dir", str(store.folder)])
    try:
        assert hub.paused.wait(30)
        with pytest.raises(Conflict, match="another program"):
            pull("org/repo", store)
        hub.resume.set()
        assert other.wait(30) == 0
    finally:
        other.kill()
        other.wait()
    assert Path(pull("org/repo", store).path).read_bytes() == MODEL


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    hub: HubServer, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))  # type: ignore[attr-defined]
    with pytest.raises(StoreFull, match="no space left"):
        pull("org/repo", store)
    assert hub.downloads == []


def test_no_such_repository(hub: HubServer, store: ModelStore) -> None:
    with pytest.raises(NotFound, match="no repository org/none"):
        pull("org/none", store)


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
    store: ModelStore,
) -> None:
    hub.refuse = (status, headers)
    with pytest.raises(error, match=said):
        pull("org/repo", store)


def test_no_network(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="can't be reached") as unreachable:
        pull("org/repo", store)
    assert "network" in unreachable.value.hint


@pytest.mark.parametrize(
    "what",
    ["", "word", "a/b/c", "http://x/y", "org/repo:", "../x", "a b/c", "x" * 5000],
    ids=range(8),
)
def test_what_can_t_be_pulled_is_refused(
    what: str, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # nobody knows what lies beside a clone
    with pytest.raises(InvalidRequest, match="nothing that can be pulled"):
        pull(what, store)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(store: ModelStore) -> None:
    with pytest.raises(NotFound, match="no file folder/m"):
        pull("folder/m.gguf", store)
    with pytest.raises(LlmFailure, match="no file"):
        pull("file:m.gguf", store)


def test_a_file_is_pulled_as_well(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf())
    assert pull(f"file:{tmp_path}/m.gguf", store).name == "m"
    assert pull(str(tmp_path / "m.gguf"), store, name="n").name == "n"


def test_a_token_goes_to_the_hub_and_not_where_it_redirects_to(
    hub: HubServer, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull("org/repo", store)
    sent = {path: headers.get("authorization") for _, path, headers in hub.asked}
    assert sent["/api/models/org/repo"] == "Bearer hf_secret"
    assert sent["/cdn/m-Q8_0.gguf"] is None


def test_all_parts_of_a_split_model_are_fetched(hub: HubServer, store: ModelStore) -> None:
    parts = {f"m-Q2_K-0000{n}-of-00002.gguf": gguf({"split.count": 2, "n": n}) for n in (1, 2)}
    hub.files |= parts
    facts = pull("org/repo:Q2_K", store)
    assert (facts.name, facts.parts) == ("m-Q2_K", 2)
    assert files(store) == {"m-Q2_K.json", *parts}
    assert pull("org/repo:Q2_K", store) == facts
    assert len(hub.downloads) == 2


def test_a_model_is_pulled_from_a_url_and_once(hub: HubServer, store: ModelStore) -> None:
    url = f"{hub.url}/cdn/m-Q8_0.gguf?download=true"
    assert Path(pull(url, store).path).read_bytes() == MODEL
    assert pull(url, store).name == "m-Q8_0"
    record = store.record("m-Q8_0")
    assert record is not None
    assert record.source == f"{hub.url}/cdn/m-Q8_0.gguf"
    assert [method for method, *_ in hub.asked if method == "GET"] == ["GET"]


def test_a_url_that_breaks_off_resumes(
    hub: HubServer, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.break_at = HALF
    with pytest.raises(Unavailable, match=f"broke off after {HALF:,} of {len(MODEL):,}"):
        pull(f"{hub.url}/cdn/m-Q8_0.gguf", store)
    hub.break_at = None
    assert Path(pull(f"{hub.url}/cdn/m-Q8_0.gguf", store).path).read_bytes() == MODEL
    assert hub.downloads[-1] == f"bytes={HALF}-"


def test_a_url_without_a_file_is_told(hub: HubServer, store: ModelStore) -> None:
    with pytest.raises(NotFound, match="no file"):
        pull(f"{hub.url}/none.gguf", store)
    with pytest.raises(Unavailable, match="can't be reached"):
        pull("http://127.0.0.1:9/m.gguf", store)
