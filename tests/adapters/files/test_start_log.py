"""What a worker logged before it began is known after its death, and can be revoked."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.files import start_log
from penstock.adapters.files.start_log import FileStartLog, FileStartLogs


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[list[FileStartLog]]:
    made: list[FileStartLog] = []
    yield made
    for log in made:
        log.close(keep=False)


def test_what_is_in_a_log_has_begun_and_nothing_else(
    tmp_path: Path, logs: list[FileStartLog]
) -> None:
    logs.append(FileStartLog(str(tmp_path), "w"))
    assert logs[0].begin("a", 1)
    assert logs[0].begin("a", 10)
    known = FileStartLogs(tmp_path)
    assert not known.revoke("a", 1)
    assert not known.revoke("a", 10)
    assert known.revoke("a", 2)
    assert known.revoke("b", 1)
    assert known.revoke("aa", 1)


def test_what_was_revoked_can_not_begin_any_more(tmp_path: Path, logs: list[FileStartLog]) -> None:
    logs.append(FileStartLog(str(tmp_path), "w"))
    known = FileStartLogs(tmp_path)
    assert known.revoke("a", 1)
    assert known.revoke("b", 1)
    assert not logs[0].begin("a", 1)
    assert logs[0].begin("c", 1)
    assert not logs[0].begin("b", 1)
    assert not logs[0].begin("a", 1)
    assert logs[0].begin("a", 2)


def test_what_was_revoked_stays_so_when_it_is_asked_again(
    tmp_path: Path, logs: list[FileStartLog]
) -> None:
    logs.append(FileStartLog(str(tmp_path), "w"))
    known = FileStartLogs(tmp_path)
    assert known.revoke("a", 1)
    assert not logs[0].begin("a", 1)
    assert known.revoke("a", 1)


def test_the_logs_of_all_workers_are_read(tmp_path: Path, logs: list[FileStartLog]) -> None:
    for name, job_id in (("one", "a"), ("two", "b")):
        logs.append(FileStartLog(str(tmp_path), name))
        logs[-1].begin(job_id, 1)
    known = FileStartLogs(tmp_path)
    assert not known.revoke("a", 1)
    assert not known.revoke("b", 1)
    assert known.revoke("c", 1)


def test_without_any_log_nothing_has_begun(tmp_path: Path) -> None:
    assert FileStartLogs(tmp_path / "none").revoke("a", 1)


_RACER = """
import mmap, os, sys
from penstock.adapters.files import start_log
start_log._ROOM = start_log._MOST_ROOM = int(sys.argv[3])
log = start_log.FileStartLog(sys.argv[1], "w")
with open(sys.argv[2], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 0)
shared[0] = 255
for n in range(1, len(shared)):
    while shared[0] != n % 200:
        os.sched_yield()
    shared[n] = 1 + log.begin("a", n)
"""


@pytest.mark.parametrize("room", [1 << 20, 40])
def test_a_start_and_its_revocation_at_the_same_time_never_both_succeed(
    tmp_path: Path, room: int
) -> None:
    """Two processes, and in the second case a log that is replaced again and again."""
    rounds, shared_path = 1000, tmp_path / "shared"
    shared_path.write_bytes(bytes(rounds))
    argv = [sys.executable, "-c", _RACER, str(tmp_path), str(shared_path), str(room)]
    with (
        subprocess.Popen(argv) as worker,
        shared_path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as shared,
    ):
        try:
            while shared[0] != 255:
                assert worker.poll() is None
            known = FileStartLogs(tmp_path)
            revoked = {}
            for n in range(1, rounds):
                early = n % 10 == 0 and known.revoke("a", n)
                shared[0] = n % 200
                while n % 10 == 1 and not shared[n]:
                    os.sched_yield()
                revoked[n] = known.revoke("a", n) or early
                while not shared[n]:
                    os.sched_yield()
        finally:
            worker.kill()
        begun = {n: shared[n] == 2 for n in revoked}
    assert not any(begun[n] and revoked[n] for n in revoked)
    assert all(begun[n] for n in range(1, rounds, 10))
    assert all(revoked[n] for n in range(10, rounds, 10))


_VICTIM = """
import os, sys
from penstock.adapters.files.start_log import FileStartLog
n = 0
log = FileStartLog(sys.argv[1], "w", lambda: [("a", k) for k in range(max(0, n - 300), n)])
for n in range(10**9):
    log.begin("a", n)
    os.write(1, b"%d\\n" % n)
"""


def test_every_start_is_known_after_the_process_was_killed(tmp_path: Path) -> None:
    for kill in range(5):
        argv = [sys.executable, "-c", _VICTIM, str(tmp_path / str(kill))]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            told = [worker.stdout.readline() for _ in range(1000 * (kill + 1))]
            worker.kill()
            last = int([*told, *worker.stdout.read().splitlines()][-1])
        known = FileStartLogs(tmp_path / str(kill))
        assert not any(known.revoke("a", n) for n in range(last - 250, last + 1))
        assert known.revoke("a", last + 2)


def test_after_a_boot_nobody_can_tell_so_everything_counts_as_begun(
    tmp_path: Path, logs: list[FileStartLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.append(FileStartLog(str(tmp_path), "w"))
    boot = tmp_path / "boot_id"
    boot.write_text("another-boot\n")
    monkeypatch.setattr(start_log, "_BOOT", boot)
    assert not FileStartLogs(tmp_path).revoke("never-heard-of", 1)


def test_a_full_log_is_replaced_by_one_with_what_counts(
    tmp_path: Path, logs: list[FileStartLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_log, "_ROOM", 100)
    monkeypatch.setattr(start_log, "_MOST_ROOM", 100)
    running = [("job-49", 1)]
    logs.append(log := FileStartLog(str(tmp_path), "w", lambda: running))
    known = FileStartLogs(tmp_path)
    assert known.revoke("given-up", 1)
    for n in range(60):
        assert log.begin(f"job-{n}", 1)
    assert known.revoke("job-0", 1)
    assert not known.revoke("job-49", 1)
    assert not known.revoke("job-59", 1)
    assert not log.begin("given-up", 1)
    assert (tmp_path / "w.starts").stat().st_size < 5000


def test_many_running_jobs_make_a_log_larger(tmp_path: Path, logs: list[FileStartLog]) -> None:
    running = [(f"job-{n}", 1) for n in range(200_000)]
    logs.append(log := FileStartLog(str(tmp_path), "w", lambda: running))
    assert log.begin("a", 1)
    assert not FileStartLogs(tmp_path).revoke("job-199999", 1)
    assert not FileStartLogs(tmp_path).revoke("a", 1)


def test_a_log_for_which_there_is_no_space_says_so_and_goes_on_later(
    tmp_path: Path, logs: list[FileStartLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_log, "_ROOM", 10)
    logs.append(log := FileStartLog(str(tmp_path), "w"))
    assert log.begin("a", 1)

    def full(handle: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as disk, pytest.raises(OSError, match="no space left"):
        disk.setattr(os, "posix_fallocate", full)
        for n in range(10):
            log.begin("b", n)
    assert not FileStartLogs(tmp_path).revoke("a", 1)
    assert log.begin("c", 1)
    assert not FileStartLogs(tmp_path).revoke("c", 1)


def test_a_worker_that_ends_well_takes_its_log_with_it(tmp_path: Path) -> None:
    log = FileStartLog(str(tmp_path), "w")
    log.begin("a", 1)
    log.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_with_something_untold_leaves_its_log(tmp_path: Path) -> None:
    log = FileStartLog(str(tmp_path), "w")
    log.begin("a", 1)
    log.close(keep=True)
    assert not FileStartLogs(tmp_path).revoke("a", 1)


def test_the_logs_of_the_dead_are_deleted_and_what_they_say_is_kept(
    tmp_path: Path, logs: list[FileStartLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("earlier-boot\n")
    monkeypatch.setattr(start_log, "_BOOT", boot)
    logs.append(FileStartLog(str(tmp_path), "dead"))
    logs[0].begin("a", 1)
    boot.write_text("this-boot\n")
    logs.append(FileStartLog(str(tmp_path), "alive"))
    logs[1].begin("b", 1)
    known = FileStartLogs(tmp_path)
    known.take_over([("a", 1), ("b", 1)])
    assert [path.name for path in tmp_path.glob("*.starts")] == ["alive.starts"]
    assert not known.revoke("a", 1)
    assert not known.revoke("b", 1)
    assert known.revoke("c", 1)


def test_a_log_of_another_version_is_read_and_what_may_still_be_written_is_not_trusted(
    tmp_path: Path,
) -> None:
    boot = start_log._boot_id().decode()
    path = tmp_path / "w.starts"
    path.write_text(f"{boot} {os.getpid()}\na 1\n")
    assert not FileStartLogs(tmp_path).revoke("b", 1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    path.write_text(f"{boot} {gone.pid}\na 1\n")
    assert not FileStartLogs(tmp_path).revoke("a", 1)
    assert FileStartLogs(tmp_path).revoke("b", 1)


def test_without_a_memory_barrier_or_a_boot_id_workers_are_offered_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FileStartLogs(tmp_path).folder == str(tmp_path)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(platform, "machine", lambda: "unheard-of")
        assert FileStartLogs(tmp_path).folder == ""
        with pytest.raises(OSError, match="membarrier"):
            FileStartLog(str(tmp_path), "w")
    monkeypatch.setattr(start_log, "_BOOT", tmp_path / "none")
    assert FileStartLogs(tmp_path).folder == ""
