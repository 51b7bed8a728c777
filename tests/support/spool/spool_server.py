"""`penstock spool serve` as a real process with a real model, and what a client does to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import children_of
from tests.support.waiting import eventually

from penstock.lifecycles.spool import Status
from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.client.flow import Flow, JobView
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import SpoolOptions, Sync
from penstock.workloads.spool.disk.workspace import Workspace

PENSTOCK = Path(sys.executable).with_name("penstock")
PATIENCE = 40.0
GREEDY = Sampling(temperature=0)
LONG = "Tell me a very long story about the sea."
"""With enough tokens it runs until somebody ends it."""
_counter = count(1)


class Spool:
    """A server's process on a workspace; it can be killed and started again."""

    def __init__(
        self,
        workspace: Path,
        model: Path | str,
        *options: str,
        before: Sequence[str] = (),
        workers: int = 4,
        context: int = 512,
    ) -> None:
        self.look_at(workspace)
        self._args = [
            *(*before, PENSTOCK, "spool", "serve", workspace, "--json", "--model", model),
            *("--workers", str(workers), "--context", str(context), "--max-tokens", "16"),
            *("--threads", "2", "--no-sync", *options),
        ]
        self._log = workspace.with_name(f"{workspace.name}.{next(_counter)}.log")
        self._process: subprocess.Popen[bytes] | None = None

    # -- the process ----------------------------------------------------------------------

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def begin(self) -> Spool:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._args, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def start(self) -> Spool:
        before = len(self.events("ready"))
        self.begin()

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            return len(self.events("ready")) > before

        eventually(is_ready, "the server is ready")
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def events(self, what: str = "", job_id: str = "") -> list[dict[str, Any]]:
        """The JSON lines that it has printed."""
        lines = self.log.splitlines(keepends=True)
        told = [json.loads(line) for line in lines if line[0] == "{" and line[-1] == "\n"]
        wanted = {"what": what, "job_id": job_id}
        return [one for one in told if all(one.get(key) == on for key, on in wanted.items() if on)]

    def engines(self) -> list[int]:
        """The processes that compute for it."""
        return children_of(self.pid)

    def look_at(self, path: Path) -> None:
        """As a client, by this path: there may be another one to the same workspace."""
        self.path = path
        self.workspace = Workspace(path, Sync.NONE)
        self.work, self.flow = Work(self.workspace), Flow(self.workspace)

    # -- a client -------------------------------------------------------------------------

    def submit(self, prompt: str | bytes, **options: Any) -> str:
        beside = {key: options.pop(key) for key in list(options) if key in _BESIDE}
        return self.work.submit(prompt, options=SpoolOptions(**options), **beside)

    def run(self, prompt: str | bytes, **options: Any) -> JobView:
        return self.ended(self.submit(prompt, **options))

    def ended(self, job_id: str) -> JobView:
        return self.flow.wait(job_id, PATIENCE)

    def folder(self, job_id: str) -> Path:
        return self.workspace.of(self.flow.status(job_id), job_id)

    def running(self, job_id: str) -> Path:
        """Its folder once it has said something."""
        eventually(lambda: self.flow.partial(job_id).text != "", f"{job_id} runs and talks")
        return self.workspace.of(Status.RUNNING, job_id)

    def put(self, files: Mapping[str, bytes], job_id: str = "") -> str:
        """A job made by hand, by any program that can make a folder."""
        job_id = job_id or new_id()
        folder = self.workspace.folder(Status.STAGING) / job_id
        folder.mkdir()
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        folder.rename(self.workspace.folder(Status.QUEUED) / job_id)
        return job_id

    def where(self, job_id: str) -> list[Status]:
        """Every folder that it lies in."""
        return [
            status
            for status in Status
            if status is not Status.MISSING
            and os.path.lexists(self.workspace.folder(status) / job_id)
        ]

    def works(self) -> None:
        """It goes on: a good job is DONE."""
        found = self.run("Say yes.", max_tokens=2, sampling=GREEDY)
        assert (found.status, found.error) == (Status.DONE, "")
        assert found.text


_BESIDE = ("kind", "images", "parent", "tags", "retry_of")


def new_id() -> str:
    return f"{int(time.time())}_{os.getpid()}_{next(_counter):03}"


@contextmanager
def served(workspace: Path, model: Path | str, *options: str, **how: Any) -> Iterator[Spool]:
    spool = Spool(workspace, model, *options, **how).start()
    try:
        yield spool
    finally:
        if spool.process.poll() is None:
            spool.kill()


def spool_command(*args: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [PENSTOCK, "spool", *args], input=stdin, capture_output=True, timeout=PATIENCE, check=False
    )


def needs_mounts() -> None:
    """A namespace in which a test may mount: else it is skipped, and in CI it fails."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        why = "nobody but root may mount, and not everywhere"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
