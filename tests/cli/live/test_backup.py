"""`penstock backup` and `penstock restore`: the backup is another process than the engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import apsw
import pytest

import penstock
from penstock.adapters.files.start_log import FileStartLogs
from penstock.adapters.sqlite.schema import APPLICATION_ID, migrations
from penstock.cli.program import run

RULES = """
default = "allow"

[[rules]]
id = "ask"
labels = { ask = "yes" }
decision = "require_approval"
approval = { self_approval = true }
"""
LINE = {
    "custom_id": "one",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "absent", "messages": [{"role": "user", "content": "hi"}]},
}
FORM = (
    '--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    '--B\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    f"{json.dumps(LINE)}\n\r\n--B--\r\n"
)
OLD_RUNS = Path(__file__).parents[2] / "support" / "old_runs" / "2ab6b18.zip"
BLOB = 9000
"""Characters of a result that is kept as a blob."""
app = penstock.App()
gate = threading.Event()


@app.job("job.text.large")
async def large(size: int) -> str:
    return "x" * size


@app.job("job.text.fail")
async def fail() -> None:
    raise ValueError("no reason")


@app.job("job.wait.gate")
def wait_for_gate() -> str:
    gate.wait()
    return "open"


shop = penstock.Pipeline("shop")


@shop.map(over=lambda config, ctx: ["tea", "ghost", "x" * BLOB])
async def price(name: str, ctx: Any) -> str:
    if name == "ghost":
        raise KeyError(name)
    return name * 2


@shop.step()
async def total(results: Any, ctx: Any) -> int:
    return sum([len(one) async for one in results])


app.add(shop)


class Place:
    """A folder with a data directory and backups."""

    def __init__(self, folder: Path, captured: pytest.CaptureFixture[str]) -> None:
        self.folder, self.data, self._captured = folder, folder / "data", captured
        (folder / "rules.toml").write_text(RULES)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def open(self, data: Path | None = None, **flags: Any) -> Any:
        return app.run(data or self.data, unknown_topics="hold", **flags)

    def gated(self, data: Path | None = None) -> Any:
        return self.open(
            data, rules=str(self.folder / "rules.toml"), http__listen=f"127.0.0.1:{self.port}"
        )

    def apart(self, *args: str, code: int = 0, **env: str) -> str:
        """Run the command in a process of its own; returns all that it says."""
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli", *args, "--data", str(self.data)],
            cwd=self.folder,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done
        return done.stdout + done.stderr

    def __call__(self, *args: str, code: int = 0, data: Path | None = None) -> str:
        """Run the command in this process."""
        before = os.getcwd()
        os.chdir(self.folder)
        try:
            assert run([*args, "--data", str(data or self.data)]) == code
        finally:
            os.chdir(before)
            said = self._captured.readouterr()
        assert "unexpected" not in said.err
        return str(said.out + said.err)

    def http(self, path: str, data: bytes | None = None, **headers: str) -> bytes:
        url = f"http://127.0.0.1:{self.port}{path}"
        with urlopen(
            Request(url, data, {"Authorization": f"Bearer {self.token}"} | headers)
        ) as got:
            return bytes(got.read())

    def fill(self, ps: Any) -> None:
        """Make one of everything that lasts."""
        self.token = ps.keys.create("ann", ["submit", "operate"]).token
        ended = [
            ps.submit("job.text.large", {"size": BLOB}, job_id="large"),
            ps.submit("job.text.fail", {}, job_id="failed"),
        ]
        ps.submit("job.text.large", {"size": 1}, job_id="asks", labels={"ask": "yes"})
        ps.submit("job.text.large", {"size": 2}, job_id="later", delay=36_000)
        ps.submit("job.text.large", {"size": 3}, job_id="after", after=["later"])
        ended.append(ps.get(ps.pipelines.start("shop").id))
        self("schedule", "create", "nightly", "0 3 * * *", "job.text.large", "--paused")
        self("limit", "create", "few", "--concurrency", "3", "--topic", "job.text.*")
        (self.data / "files").mkdir()
        (self.data / "files" / "note.txt").write_text("read me")
        (self.data / "pipe.key").write_text("secret")
        kind = {"Content-Type": "multipart/form-data; boundary=B"}
        self.file = json.loads(self.http("/v1/files", FORM.encode(), **kind))["id"]
        wanted = {
            "input_file_id": self.file,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        kind = {"Content-Type": "application/json"}
        self.batch = json.loads(self.http("/v1/batches", json.dumps(wanted).encode(), **kind))["id"]
        for job in ended:
            job.wait()
        until(lambda: ps.jobs(workflow_id=self.batch) and ps.jobs(awaiting_approval=True))

    def view(self, ps: Any) -> dict[str, Any]:
        """What a user sees of all that."""
        batch = json.loads(self.http(f"/v1/batches/{self.batch}"))
        return {
            "jobs": {job.job_id: job.state for job in ps.jobs(limit=100)},
            "history": [ps.get(name).history() for name in ("large", "failed")],
            "result": ps.get("large").result(),
            "runs": [
                (run.id, run.status, run.config)
                for run in ps.pipelines.runs(penstock.RunQuery(limit=1000))
            ],
            "parked": [job.job_id for job in ps.jobs(awaiting_approval=True)],
            "schedules": [one.schedule for one in ps.schedules.list()],
            "limits": [one.limit for one in ps.limits.list()],
            "keys": ps.keys.list(),
            "file": self.http(f"/v1/files/{self.file}/content"),
            "batch": (batch["status"], batch["request_counts"]),
        }


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, capsys)


def until(holds: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def kept_files(folder: Path) -> dict[str, bytes]:
    """Files that stay as they are, by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for top in ("blobs", "files", "token", "pipe.key")
        for path in [folder / top, *(folder / top).rglob("*")]
        if path.is_file() and path.name != ".lock"
    }


def assert_private(root: Path) -> None:
    for path in [root, *root.rglob("*")]:
        if path.name != "penstock.lock":
            wanted = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_backup_restores_jobs_of_every_kind(place: Place) -> None:
    with place.gated() as ps:
        place.fill(ps)
        seen = place.view(ps)
        place.apart("backup", "running")
    place("backup", "stopped")
    files = kept_files(place.data)
    tops = {path.split("/")[0] for path in files}
    assert tops == {"blobs", "files", "token", "pipe.key"}
    for name in ("running", "stopped"):
        assert_private(place.folder / name)
        data = place.folder / f"{name}-data"
        assert "every record matches its log" in place("restore", name, data=data)
        assert_private(data)
        assert kept_files(data) == files
        with place.gated(data) as ps:
            assert place.view(ps) == seen
            ps.approvals.approve("asks")
            assert ps.get("asks").result() == "x"


def test_jobs_that_ran_at_the_backup_are_treated_as_after_a_crash(place: Place) -> None:
    gate.clear()
    with place.open(concurrency=2) as ps:
        for name, idempotent in (("once", False), ("again", True)):
            ps.submit("job.wait.gate", {}, job_id=name, idempotent=idempotent)
        until(lambda: len(ps.jobs(states=["RUNNING"])) == 2)
        ps.submit("job.text.large", {"size": 1}, job_id="waits")
        place.apart("backup", "copy")
        gate.set()
        assert ps.get("waits").result() == "x"
    data = place.folder / "elsewhere"
    place("restore", "copy", data=data)
    starts = FileStartLogs(data / "starts")
    starts.take_over([("held", 1)])
    assert not starts.revoke("held", 1), "a dispatched job may have begun since the backup"
    place("restore", "copy", "--replace", data=data)
    with place.open(data) as ps:
        assert ps.get("waits").result() == "x"
        assert ps.get("again").result() == "open"
        assert ps.get("again").record.attempt == 2
        assert ps.get("once").wait().state == "TIMEOUT"


def test_backups_of_a_busy_engine_show_one_moment_each(place: Place) -> None:
    """Jobs, runs and blobs are made while backups are written."""
    over = threading.Event()

    def work(ps: Any) -> None:
        number = BLOB
        while not over.is_set():
            jobs = ps.submit_many("job.text.large", [{"size": number + n} for n in range(20)])
            run = ps.pipelines.start("shop")
            for job in [*jobs, ps.get(run.id)]:
                job.wait()
            number += 20

    with place.open() as ps:
        worker = threading.Thread(target=work, args=(ps,))
        worker.start()
        try:
            for name in ("one", "two"):
                until(lambda: ps.jobs(topic="job.pipeline.shop"))
                said = place.apart("backup", name)
                assert "payload" not in said
        finally:
            over.set()
            worker.join()
    for name in ("one", "two"):
        data = place.folder / f"{name}-data"
        assert "every record matches its log" in place("restore", name, data=data)
        with place.open(data) as ps:
            runs = {run.id: run.status for run in ps.pipelines.runs(penstock.RunQuery(limit=1000))}
            for job in ps.jobs(states=["SUCCEEDED"], limit=1000):
                if job.record.request.topic == "job.pipeline.shop":
                    assert runs[job.job_id] == "PARTIAL"
                assert job.result() is not None


def test_payloads_that_are_pruned_during_a_backup_are_in_it(place: Place) -> None:
    with place.open() as ps:
        for job in ps.submit_many("job.text.large", [{"size": BLOB + n} for n in range(300)]):
            job.wait()
        blobs = [path for path in (place.data / "blobs").rglob("*") if path.is_file()]
        for path in blobs:
            os.utime(path, (0, 0))  # the pruner leaves young ones alone
        command = [sys.executable, "-m", "penstock.cli", "backup", "copy", "--data", place.data]
        with subprocess.Popen(command, cwd=place.folder, stderr=subprocess.PIPE) as backup:
            until(lambda: list(place.folder.glob("copy.partial-*/penstock.db")))
            assert ps.prune(0.0).blobs == 300
            assert backup.communicate()[1] == b""
        assert ps.jobs() == []
    data = place.folder / "elsewhere"
    place("restore", "copy", data=data)
    with place.open(data) as ps:
        assert {len(job.result()) for job in ps.jobs(limit=1000)} == {BLOB + n for n in range(300)}


def test_a_kill_leaves_no_half_backup_and_no_half_restore(place: Place) -> None:
    with place.open() as ps:
        ps.submit("job.text.large", {"size": BLOB}, job_id="kept").wait()
    for point in ("backup-database", "backup-file:1", "backup-manifest", "backup-written"):
        place.apart("backup", "copy", code=-signal.SIGKILL, PENSTOCK_FAILPOINT=point)
        (part,) = place.folder.glob("copy*")
        assert part.name.startswith("copy.partial-")
        if point != "backup-written":
            assert "is not a backup" in place("restore", part.name, "--replace", code=3)
        shutil.rmtree(part)
    place("backup", "copy")
    for point in ("restore-move:1", "restore-move:5"):
        place.apart("restore", "copy", "--replace", code=-signal.SIGKILL, PENSTOCK_FAILPOINT=point)
        place("restore", "copy", "--replace")
        assert place("result", "kept").count("x") == BLOB


def test_bad_backups_and_bad_targets_are_refused_and_named(place: Place) -> None:
    folder = place.folder
    assert "no database in" in place("backup", "copy", code=3)
    with place.open() as ps:
        ps.submit("job.text.large", {"size": BLOB}).wait()
        place.apart("backup", "copy")
        assert "copy already exists" in place("backup", "copy", code=4)
        assert "inside the data directory" in place("backup", "data/copy", code=4)
        assert "no such folder" in place("backup", "no/where", code=3)
        assert "another engine" in place("restore", "copy", "--replace", code=8)
    assert "--connect can't be used" in place("backup", "x", "--connect", "unix:/x", code=2)
    assert "is not empty" in place("restore", "copy", code=4)
    assert "no such folder" in place("restore", "nowhere", code=3)
    assert "is not a backup" in place("restore", ".", "--replace", code=3)
    before = {entry.name: entry.stat().st_ino for entry in place.data.iterdir()}

    def refused(change: Any, *wanted: str) -> None:
        shutil.rmtree(folder / "bad", ignore_errors=True)
        shutil.copytree(folder / "copy", folder / "bad")
        change(folder / "bad")
        said = place("restore", "bad", "--replace", code=8)
        assert all(word in said for word in wanted), said

    def edit(**fields: Any) -> Any:
        def change(bad: Path) -> None:
            manifest = json.loads((bad / "manifest.json").read_bytes())
            (bad / "manifest.json").write_text(json.dumps(manifest | fields))

        return change

    blob = next(path for path in (folder / "copy" / "blobs").rglob("*") if path.is_file())
    inside = blob.relative_to(folder / "copy")
    refused(lambda bad: (bad / inside).unlink(), "damaged", str(inside), "missing")
    refused(lambda bad: (bad / inside).write_bytes(b"x"), "damaged", str(inside), "changed")
    refused(lambda bad: os.truncate(bad / "penstock.db", 4096), "damaged", "penstock.db")
    refused(lambda bad: (bad / "manifest.json").write_text("{"), "manifest.json", "damaged")
    refused(edit(format=2, penstock="9.1"), "written by Penstock 9.1", "format")
    stray = {"path": "blobs/../../escape", "size": 0, "sha256": ""}
    refused(edit(files=[stray]), "damaged", "escape")
    assert {entry.name: entry.stat().st_ino for entry in place.data.iterdir()} == before


def test_a_backup_of_an_older_penstock_is_brought_up_to_date(place: Place) -> None:
    place.data.mkdir()
    old = apsw.Connection(str(place.data / "penstock.db"))
    old.execute(migrations()[0])
    old.pragma("application_id", APPLICATION_ID)
    old.pragma("user_version", 1)
    old.close()
    place("backup", "copy")
    data = place.folder / "elsewhere"
    assert "0 jobs" in place("restore", "copy", data=data)
    assert "no such jobs" in place("ps", data=data)


def test_pipeline_runs_of_an_older_penstock_are_in_the_backup_and_moved_after_it(
    place: Place,
) -> None:
    with zipfile.ZipFile(OLD_RUNS) as archive:
        archive.extractall(place.data)
    assert "pipelines" not in place("backup", "copy")
    assert (place.folder / "copy" / "pipelines.db").is_file()
    data = place.folder / "elsewhere"
    place("restore", "copy", data=data)
    with place.open(data, storage__retention=0) as ps:
        runs = ps.pipelines.runs(penstock.RunQuery(limit=1000))
        assert sorted(run.status for run in runs if run.is_final)[-1] == "PARTIAL"
        assert len(runs) == 7
    assert "not backed up: pipelines.db.migrated" in place("backup", "after", data=data)
    assert not list((place.folder / "after").glob("pipelines*"))


def test_a_database_of_a_newer_penstock_is_refused(place: Place) -> None:
    with place.open():
        pass
    database = apsw.Connection(str(place.data / "penstock.db"))
    database.pragma("user_version", 99)
    database.close()
    assert "written by a newer Penstock" in place("backup", "copy", code=8)
    assert not list(place.folder.glob("copy*"))
