"""Servers of models that lie, speak nonsense, or answer another question."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.models import gguf

from penstock.core.errors import InvalidRequest, Unavailable
from penstock.models import download
from penstock.models.pull import pull
from penstock.models.store import ModelStore
from penstock.workloads.llm.values import LlmFailure

HEAD = gguf(tensors=(((1024, 64), 0),), data=False)
MODEL = HEAD + bytes(range(256)) * 1024
HALF = len(MODEL) // 2


class LyingServer(ThreadingHTTPServer):
    daemon_threads = True
    breaks_off = False
    """Whether it sends only half of the next file."""
    shift = 0
    """By how many bytes the part that it sends is not the one that was asked for."""
    tells_length = True
    checksum = ""
    """Of the model, as its hub says it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: LyingServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._begin(200, len(MODEL))

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            lfs = {"sha256": self.server.checksum, "size": len(MODEL)}
            body = json.dumps({"sha": "main", "siblings": [{"rfilename": "m.gguf", "lfs": lfs}]})
            self._begin(200, len(body))
            self.wfile.write(body.encode())
            return
        first = int(self.headers.get("Range", "bytes=0-")[6:-1])
        if first >= len(MODEL):
            self._begin(416, 0)
            return
        first = max(0, first - self.server.shift)
        data = MODEL[first:]
        part = f"bytes {first}-{len(MODEL) - 1}/{len(MODEL)}"
        self._begin(206 if "Range" in self.headers else 200, len(data), part)
        self.wfile.write(data[:HALF] if self.server.breaks_off else data)
        self.server.breaks_off = False

    def _begin(self, status: int, length: int, part: str = "") -> None:
        self.send_response(status)
        if self.server.tells_length or status != 200:
            self.send_header("Content-Length", str(length))
        if part:
            self.send_header("Content-Range", part)
        self.end_headers()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LyingServer]:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with LyingServer(("127.0.0.1", 0), _Handler) as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "a" / "models")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_part_that_was_not_asked_for_is_no_part_of_the_file(
    server: LyingServer, store: ModelStore
) -> None:
    server.breaks_off, server.shift = True, 1000
    assert Path(pull(f"{server.url}/m.gguf", store).path).read_bytes() == MODEL


def test_a_pull_that_was_killed_when_all_had_come_goes_on(
    server: LyingServer, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.tells_length = False  # so it can't be seen that all is there
    with monkeypatch.context() as patch:
        patch.setattr(download, "_check", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull(f"{server.url}/m.gguf", store)
    [part] = store.partial.glob("*")
    assert part.stat().st_size == len(MODEL)

    assert Path(pull(f"{server.url}/m.gguf", store).path).read_bytes() == MODEL


def test_a_checksum_that_is_a_path_touches_no_other_file(
    server: LyingServer, store: ModelStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.checksum = "../../../victim"
    victim = tmp_path / "victim.part"
    victim.write_bytes(b"precious")
    with pytest.raises(LlmFailure, match="came damaged"):
        pull("org/repo", store)
    assert victim.read_bytes() == b"precious"


def test_a_server_that_does_not_speak_http_can_t_be_reached(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def chatter() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"hello there\r\n\r\n")

        thread = threading.Thread(target=chatter)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(Unavailable, match="hello there"):
            pull(f"{url}/m.gguf", store)
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(Unavailable, match="hello there"):
            pull("org/repo", store)
        thread.join()


def test_what_is_no_url_is_refused(store: ModelStore) -> None:
    with pytest.raises(InvalidRequest, match="is not a URL"):
        pull("http://[::1/m.gguf", store)
    with pytest.raises(Unavailable, match="port"):
        pull("http://127.0.0.1:none/m.gguf", store)
