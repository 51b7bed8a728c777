"""The original's three programs, as far as files and exit codes go: `wrk`, `flw`, and `nrvnad`.

They can't be had here, so they are rebuilt from what is known of them, with their faults: nothing
is flushed, metadata is found by looking for text, a daemon takes everything in `processing` for
its own when it starts and removes its pid file before its last job has ended, and a job is DONE
before its metadata says so. Newer versions hold a lock from their start to their end. Instead of a
model there is `str.upper`.

Run as a file it is a daemon: `original.py WORKSPACE SECONDS_PER_JOB SECONDS_BETWEEN_SCANS [lock]`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

FOLDERS = ("input/writing", "input/ready", "processing", "output", "failed")
PID, LOCK = ".nrvnad.pid", ".nrvnad.lock"
_PR_SET_NAME = 15
_counter = count()


def is_valid_job_id(name: str) -> bool:
    """Its rule, written out: no regular expression there."""
    if not 1 <= len(name) <= 128 or name[0] == "_" or name[-1] == "_":
        return False
    return all(one in "0123456789_" for one in name) and "__" not in name


def make_workspace(workspace: Path) -> None:
    for name in FOLDERS:
        (workspace / name).mkdir(parents=True, exist_ok=True)


# -- meta.json ------------------------------------------------------------------------------


def meta_value(text: str, key: str) -> str:
    """A string or a number, found as it finds it: one space after the colon, or not at all."""
    mark = f'"{key}": '
    at = text.find(mark)
    if at < 0:
        return ""
    rest = text[at + len(mark) :]
    if rest.startswith('"'):
        return rest[1 : rest.index('"', 1)]
    found = re.match(r"[-+.0-9eE]+", rest)
    return found[0] if found else ""


def meta_list(text: str, key: str) -> list[str]:
    mark = f'"{key}": ['
    at = text.find(mark)
    if at < 0:
        return []
    rest = text[at + len(mark) :]
    return re.findall(r'"([^"]*)"', rest[: rest.index("]")])


def write_meta(folder: Path, fields: Sequence[tuple[str, str]]) -> None:
    lines = ",\n".join(f'  "{key}": {value}' for key, value in fields)
    draft = folder / "meta.json.tmp"
    draft.write_text("{\n" + lines + "\n}\n")
    draft.rename(folder / "meta.json")


def now_text() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _listed(words: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


# -- wrk ------------------------------------------------------------------------------------


def new_id() -> str:
    """Its later form: 20 digits of microseconds, the pid, 6 digits of a counter."""
    return f"{time.time_ns() // 1000:020}_{os.getpid()}_{next(_counter):06}"


def wrk(
    workspace: Path,
    prompt: bytes,
    *,
    mode: str = "text",
    images: Sequence[Path] = (),
    parent: str = "",
    tags: Sequence[str] = (),
    job_id: str = "",
) -> str:
    """Submit; the id."""
    make_workspace(workspace)
    job_id = job_id or new_id()
    staging = workspace / "input/writing" / job_id
    staging.mkdir(exist_ok=True)
    (staging / "prompt.txt").write_bytes(prompt)
    for number, image in enumerate(images):
        (staging / "images").mkdir(exist_ok=True)
        shutil.copyfile(image, staging / "images" / f"image_{number:06}{image.suffix}")
    if mode != "text" or images:
        (staging / "type.txt").write_text("vision" if images and mode == "text" else mode)
    fields = [("submitted_at", f'"{now_text()}"'), ("mode", f'"{mode}"')]
    fields += [("parent", f'"{parent}"')] if parent else []
    fields += [("tags", _listed(tags))] if tags else []
    write_meta(staging, fields)
    staging.rename(workspace / "input/ready" / job_id)
    return job_id


# -- flw ------------------------------------------------------------------------------------


def status(workspace: Path, job_id: str) -> str:
    """Four looks, and no second one."""
    for name, word in (
        ("output", "done"),
        ("failed", "failed"),
        ("processing", "running"),
        ("input/ready", "queued"),
    ):
        if (workspace / name / job_id).exists():
            return word
    return "missing"


def counts(workspace: Path) -> dict[str, int]:
    words = {"input/ready": "queued", "processing": "running"}
    return {
        words.get(name, {"output": "done"}.get(name, name)): len(os.listdir(workspace / name))
        for name in FOLDERS[1:]
    }


def flw(workspace: Path, job_id: str) -> tuple[int, bytes, str]:
    """Its exit code, standard output, and what it says on standard error."""
    if not is_valid_job_id(job_id):
        return 1, b"", f"invalid job id {job_id}"
    state = status(workspace, job_id)
    if state == "done":
        for name in ("result.txt", "embedding.json"):
            file = workspace / "output" / job_id / name
            if file.exists():
                return 0, file.read_bytes() + b"\n\n", ""
        return 1, b"", "no artifact"
    if state == "failed":
        return 1, b"", (workspace / "failed" / job_id / "error.txt").read_text()
    return 2, b"", f"not ready: {state}"


def flw_facts(workspace: Path, job_id: str) -> dict[str, object]:
    """What its --json tells from the metadata."""
    folders = {"done": "output", "failed": "failed", "running": "processing"}
    state = status(workspace, job_id)
    text = (workspace / folders.get(state, "input/ready") / job_id / "meta.json").read_text()
    words = ("mode", "submitted_at", "completed_at", "duration_s", "parent", "status")
    found: dict[str, object] = {word: meta_value(text, word) for word in words}
    return {**found, "tags": meta_list(text, "tags"), "artifacts": meta_list(text, "artifacts")}


# -- nrvnad ---------------------------------------------------------------------------------


class Daemon:
    """One worker thread of it."""

    def __init__(self, workspace: Path, takes: float, scan: float, locks: bool) -> None:
        self._locks = locks
        self._workspace, self._takes, self._scan = workspace, takes, scan
        self._stopped = False

    def run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"nrvnad", 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        make_workspace(self._workspace)
        if self._locks:
            self._lock()
        self._recover()
        (self._workspace / PID).write_text(str(os.getpid()))
        while not self._stopped:
            for job_id in self._ready():
                if self._stopped:
                    break
                self._process(job_id)
            self._sleep(self._scan)

    def _lock(self) -> None:
        self._held = os.open(self._workspace / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"Error: workspace already has a running nrvnad: {self._workspace}")
        os.ftruncate(self._held, 0)
        os.write(self._held, b"%d\n" % os.getpid())

    def _stop(self, *_: object) -> None:
        self._stopped = True
        (self._workspace / PID).unlink(missing_ok=True)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopped and time.monotonic() < until:
            time.sleep(0.01)

    def _recover(self) -> None:
        """Whoever may be at work there."""
        for entry in list((self._workspace / "processing").iterdir()):
            entry.rename(self._workspace / "input/ready" / entry.name)

    def _ready(self) -> list[str]:
        folder = self._workspace / "input/ready"
        return sorted(name for name in os.listdir(folder) if self._is_job(folder / name))

    def _is_job(self, folder: Path) -> bool:
        prompt = folder / "prompt.txt"
        try:
            return is_valid_job_id(folder.name) and prompt.stat().st_size > 0
        except OSError:
            return False

    def _process(self, job_id: str) -> None:
        folder = self._workspace / "processing" / job_id
        try:
            (self._workspace / "input/ready" / job_id).rename(folder)
        except OSError:
            return  # somebody else has it
        began = time.monotonic()
        prompt = (folder / "prompt.txt").read_bytes()
        until = time.monotonic() + self._takes
        while time.monotonic() < until:  # a signal does not cut it short
            time.sleep(0.005)
        failed = b"please fail" in prompt
        if failed:
            (folder / "error.txt").write_text("inference exception")
        else:
            (folder / "result.txt.tmp").write_bytes(prompt.upper())
            (folder / "result.txt.tmp").rename(folder / "result.txt")
        ended = self._workspace / ("failed" if failed else "output") / job_id
        folder.rename(ended)
        self._tell_end(ended, time.monotonic() - began, failed)

    def _tell_end(self, folder: Path, seconds: float, failed: bool) -> None:
        """What it does not know is gone afterwards."""
        before = (folder / "meta.json").read_text() if (folder / "meta.json").exists() else ""
        fields = [
            (key, f'"{meta_value(before, key)}"')
            for key in ("submitted_at", "mode", "parent")
            if meta_value(before, key)
        ]
        if tags := meta_list(before, "tags"):
            fields.append(("tags", _listed(tags)))
        fields += [
            ("completed_at", f'"{now_text()}"'),
            ("duration_s", f"{seconds:.2f}"),
            ("artifacts", _listed(["error.txt" if failed else "result.txt"])),
            ("status", '"failed"' if failed else '"done"'),
        ]
        write_meta(folder, fields)


def command(
    workspace: Path, takes: float = 0.0, scan: float = 0.02, *, lock: bool = False
) -> list[str]:
    more = ["lock"] if lock else []
    return [sys.executable, __file__, str(workspace), str(takes), str(scan), *more]


@contextmanager
def nrvnad(
    workspace: Path, *, takes: float = 0.0, scan: float = 0.02, lock: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon's process, that is ready; it is killed in the end if it still runs."""
    (workspace / PID).unlink(missing_ok=True)
    daemon = subprocess.Popen(command(workspace, takes, scan, lock=lock))
    try:
        until = time.monotonic() + 20
        while not (workspace / PID).exists():
            assert daemon.poll() is None
            assert time.monotonic() < until
            time.sleep(0.005)
        yield daemon
    finally:
        if daemon.poll() is None:
            daemon.kill()
        daemon.wait()


if __name__ == "__main__":
    where, each, pause, *more = sys.argv[1:]
    Daemon(Path(where), float(each), float(pause), "lock" in more).run()
