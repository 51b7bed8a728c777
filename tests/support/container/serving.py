"""`penstock container serve` as a real process, and a caller of its HTTP API."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.conftest import needs_runtime

from penstock.testing.images import IMAGE
from penstock.workloads.container.engines.oci.images import ImageStore
from penstock.workloads.container.protocol.schema import RuntimeBody


def serve_on(engine: str, folder: Path, request: pytest.FixtureRequest, **config: Any) -> Served:
    """A worker, not yet started, on `docker`, `podman` or a runtime, which has the image."""
    if engine in ("docker", "podman"):
        return Served(folder, f"unix://{request.getfixturevalue(f'{engine}_socket')}", **config)
    needs_runtime(engine)
    served = Served(folder, "oci", runtime=engine, **config)
    store = ImageStore(served.jobs_dir / "oci" / "images")
    tree = request.getfixturevalue("busybox")
    store.import_tree(tree, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
    return served


class Served:
    """A worker's process on a folder; it can be killed and started again."""

    def __init__(self, folder: Path, engine: str, *, runtime: str = "", **config: Any) -> None:
        self.data = folder / "data"
        self._folder = folder
        self._file = folder / "worker.yaml"
        settings = {"engine": engine, "runtime": runtime, "port": 0, **config}
        self._file.write_text(json.dumps(settings))  # JSON is YAML, too
        self._log = folder / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.environ: dict[str, str] = {}
        self.program: tuple[str | Path, ...] = (Path(sys.executable).with_name("penstock"),)
        self.url = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def jobs_dir(self) -> Path:
        return self.data / "containers"

    def start(self) -> Served:
        with self._log.open("ab") as log:
            before = log.tell()
            self._process = subprocess.Popen(
                [
                    *(*self.program, "--data", self.data),
                    *("container", "serve", "--worker-config", self._file),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environ},
                start_new_session=True,
            )
        until = time.monotonic() + 30
        while True:
            said = self._log.read_bytes()[before:].decode()
            if found := re.search(r"(http://\S+).*ready; Ctrl-C", said, re.S):
                self.url = found[1]
                return self
            assert self._process.poll() is None, said
            assert time.monotonic() < until, said
            time.sleep(0.01)

    def kill(self) -> None:
        """As a power cut would: nothing can be tidied up."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30)

    # -- as a caller --------------------------------------------------------------

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, answer = self.send(
            method, path, None if body is None else json.dumps(body).encode()
        )
        return status, json.loads(answer)

    def send(
        self, method: str, path: str, data: bytes | None = None, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """A body as it is."""
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": kind}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=50) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def submit(self, job_id: str, *cmd: str, **fields: Any) -> tuple[int, Any]:
        return self.ask("POST", "/jobs", a_job(job_id, *cmd, **fields))

    def ended(self, job_id: str, patience: float = 40) -> dict[str, Any]:
        """Its record when it is final."""
        status, record = self.ask("GET", f"/jobs/{job_id}?wait={patience:g}")
        assert status == 200, record
        assert record["state"] in ("finished", "failed"), record
        return dict(record)

    def run(self, job_id: str, *cmd: str, **fields: Any) -> dict[str, Any]:
        status, answer = self.submit(job_id, *cmd, **fields)
        assert status == 202, answer
        return self.ended(job_id)

    def shell(self, script: str, **fields: Any) -> dict[str, Any]:
        """The record of a job that ran it."""
        return self.run(new_id(), "sh", "-c", script, **fields)

    def begin(self, script: str, **fields: Any) -> str:
        """The id of a job that runs it, and whose container has said something by now."""
        name = new_id()
        fields = {"limits": {"max_runtime_seconds": 60}, **fields}
        status, answer = self.submit(name, "sh", "-c", script, **fields)
        assert status == 202, answer
        page = self.ask("GET", f"/jobs/{name}/logs?stream=stdout&limit=10&wait=40")[1]
        assert page["text"], str(self.stored(name))
        return name

    def cancel(self, job_id: str) -> None:
        """Its container is gone when this returns."""
        status, answer = self.ask("DELETE", f"/jobs/{job_id}?wait=40")
        assert (status, answer["state"]) == (200, "failed"), answer

    def stored(self, job_id: str) -> dict[str, Any]:
        status, record = self.ask("GET", f"/jobs/{job_id}")
        assert status == 200, record
        return dict(record)

    def ids(self) -> list[str]:
        """Of all jobs that are stored."""
        found: list[str] = []
        query = "/jobs?limit=500"
        while True:
            page = self.ask("GET", query)[1]
            found += [job["job_id"] for job in page["jobs"]]
            if page["next"] is None:
                return found
            query = f"/jobs?limit=500&cursor={quote(page['next'])}"

    # -- as its neighbour ---------------------------------------------------------

    def containers(self) -> set[str]:
        """What the containers of all its jobs are called."""
        with closing(sqlite3.connect(self.data / "penstock.db")) as database:
            rows = database.execute("SELECT body FROM step WHERE name = 'container'").fetchall()
        names = (re.search(rb"penstock-[0-9a-f]{24}", body) for (body,) in rows)
        return {name[0].decode() for name in names if name is not None}

    def peak_memory(self) -> int:
        """Bytes that its process has had in memory at most."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def disk_use(self) -> int:
        """Bytes on the disk of all that its jobs brought and left."""
        found = 0
        for folder, _, names in os.walk(self.jobs_dir / "jobs"):
            for name in names:
                with suppress(OSError):
                    found += os.lstat(os.path.join(folder, name)).st_blocks * 512
        return found

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """For what no client library would send."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as line:
            yield line


def new_id() -> str:
    return f"job-{secrets.token_hex(6)}"


def code_of(record: dict[str, Any]) -> str:
    return str((record["error"] or {}).get("code", "finished"))


def a_job(job_id: str, *cmd: str, limits: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The protocol's Job object; fields of `runtime` are those that belong there."""
    inner = RuntimeBody.__struct_fields__
    runtime: dict[str, Any] = {"mode": "image", "image": IMAGE, "cmd": list(cmd)}
    runtime |= {name: fields.pop(name) for name in inner if name in fields}
    if limits is not None:
        runtime["limits"] = limits
    return {"protocol_version": 1, "job_id": job_id, "runtime": runtime, **fields}
