"""`penstock spool` in the test's own process, on a workspace of its own, and jobs made for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from penstock.cli.program import run
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.disk.job import Meta, fail, finish, read_meta
from penstock.workloads.spool.disk.workspace import Workspace


class Said(NamedTuple):
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode().strip()


class Spool:
    """The command on one folder."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[bytes]
    ) -> None:
        self.folder, self.path = folder, folder / "ws"
        self._monkeypatch, self._captured = monkeypatch, captured
        monkeypatch.chdir(folder)

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.path)

    def __call__(self, name: str, *args: str, code: int = 0, given: bytes | None = None) -> Said:
        """`given`: what comes on standard input, from a pipe; None if nothing can."""
        source = self.folder / "stdin"
        source.write_bytes(given or b"")
        with open(os.devnull if given is None else source, encoding="utf-8") as stdin:
            self._monkeypatch.setattr("sys.stdin", stdin)
            ended = run(["spool", name, str(self.path), *args])
        out, err = self._captured.readouterr()
        said = Said(out, err.decode())
        assert ended == code, (ended, said)
        assert "unexpected" not in said.err, said
        return said

    def json(self, name: str, *args: str, code: int = 0, given: bytes | None = None) -> Any:
        return msgspec.json.decode(self(name, *args, "--json", code=code, given=given).out)

    def submit(self, *args: str) -> str:
        return self("submit", *args).text

    def file(self, job_id: str, name: str, status: Status = Status.QUEUED) -> bytes:
        return (self.workspace.of(status, job_id) / name).read_bytes()

    def options(self, job_id: str) -> Any:
        return msgspec.json.decode(self.file(job_id, "options.json"))

    # -- jobs in each state, as a server makes them --------------------------------------

    def queued(self, prompt: str = "a question") -> str:
        return Work(self.path).submit(prompt)

    def running(self, prompt: str = "a question", partial: str = "") -> str:
        job_id = self.queued(prompt)
        folder = self.workspace.of(Status.RUNNING, job_id)
        self.workspace.of(Status.QUEUED, job_id).rename(folder)
        (folder / "partial.txt").write_text(partial)
        return job_id

    def done(self, artifacts: Mapping[str, bytes], **facts: Any) -> str:
        job_id = self.running()
        finish(self.workspace, job_id, self._meta(job_id, facts), artifacts)
        return job_id

    def failed(self, error: str = "it broke", **facts: Any) -> str:
        job_id = self.running()
        fail(self.workspace, job_id, self._meta(job_id, facts), error)
        return job_id

    def _meta(self, job_id: str, facts: Mapping[str, Any]) -> Meta:
        meta = read_meta(self.workspace.of(Status.RUNNING, job_id))
        return msgspec.structs.replace(meta, **facts)
