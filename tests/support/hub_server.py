"""As much of the Hugging Face hub as is needed to fetch a file, on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        """The files of the repository org/repo."""
        self.small: set[str] = set()
        """Those that git keeps itself."""
        self.lie: set[str] = set()
        """Those of which other bytes come than were announced."""
        self.break_at: int | None = None
        """After so many bytes of a file nothing more comes."""
        self.pause_at: int | None = None
        """After so many bytes of a file it goes on when `resume` is set."""
        self.paused, self.resume = threading.Event(), threading.Event()
        self.ranges = True
        self.refuse: tuple[int, dict[str, str]] | None = None
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        """Method, path and headers of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def downloads(self) -> list[str]:
        """The ranges in which files were asked for; "" for a whole one."""
        return [headers.get("range", "") for _, path, headers in self.asked if "/cdn/" in path]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked.append((self.command, path, headers))
        if self.server.refuse:
            status, more = self.server.refuse
            self._answer(status, b"{}", more)
        elif path == "/api/models/org/repo":
            self._answer(200, json.dumps(self._described()).encode())
        elif path.startswith(f"/org/repo/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/org/repo/resolve/{COMMIT}/")
            if name in self.server.files:
                self._answer(302, b"", {"Location": f"{self.server.url}/cdn/{name}"})
            else:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif path.startswith("/cdn/"):
            self._send(path.removeprefix("/cdn/"))
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _described(self) -> dict[str, object]:
        siblings = []
        for name, data in self.server.files.items():
            one: dict[str, object] = {"rfilename": name, "size": len(data)}
            one["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if name not in self.server.small:
                digest = hashlib.sha256(data).hexdigest()
                one["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 133}
            siblings.append(one)
        return {"id": "org/repo", "sha": COMMIT, "siblings": siblings}

    def _send(self, name: str) -> None:
        data = self.server.files[name]
        if name in self.server.lie:
            data = data[:-1] + bytes([data[-1] ^ 1])
        first, more = 0, {}
        asked = self.headers.get("Range", "")
        if asked and self.server.ranges:
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            more = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        self.send_response(206 if more else 200)
        for key, value in {"Content-Length": str(len(data) - first), **more}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self._write(data, first)

    def _write(self, data: bytes, first: int) -> None:
        stop, pause = self.server.break_at, self.server.pause_at
        if pause is not None and first < pause:
            self.wfile.write(data[first:pause])
            self.wfile.flush()
            first = pause
            self.server.paused.set()
            self.server.resume.wait(30)
        if stop is not None and first < stop:
            self.wfile.write(data[first:stop])
            self.close_connection = True
        elif stop is None:
            self.wfile.write(data[first:])
        else:
            self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.resume.set()
            server.shutdown()
            thread.join()
