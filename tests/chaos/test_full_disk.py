"""An engine whose disk is full says so, loses nothing, and goes on when there is room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chaos.cluster import cluster
from tests.support.chaos.disks import tmpfs
from tests.support.waiting import eventually


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "size=8m") as disk:
        yield disk


def test_a_full_disk_refuses_new_jobs_keeps_the_old_and_recovers(
    small_disk: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with cluster(small_disk) as c:
        c.up("--app", "jobs:app")
        filler = small_disk / "filler"
        with c.client() as ps:
            running = ps.submit("job.chaos.once", {"gate": str(gate)})
            eventually(lambda: c.began(running.job_id), "a job runs")
            acknowledged: list[str] = []
            job = ("job.chaos.quick", "--input", '{"n": 1}', "--delay", "3600")
            words = ("submit", *job, "--label", "note=" + "x" * 4000)
            filler.write_bytes(bytes(_free(small_disk) - 200_000))
            while True:
                done = c.run(*words)
                if done.returncode:
                    break
                acknowledged.append(done.stdout.strip())
                assert len(acknowledged) < 1000
            assert "no space left" in done.stderr
            assert done.returncode == 8

            gate.touch()
            eventually(
                lambda: any(m[:2] == ("end", running.job_id) for m in c.marks()), "the job ran"
            )
            filler.unlink()
            assert running.result(timeout=30) == "through"
            later = ps.submit("job.chaos.quick", {"n": 21})
            assert later.result(timeout=30) == 42
            known = {job.job_id for job in ps.jobs(limit=2000)}
            assert known == {*acknowledged, running.job_id, later.job_id}
        assert c.run("verify").returncode == 0


def test_a_backup_to_a_full_disk_says_so_and_leaves_nothing(
    small_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir()
    with cluster(tmp_path / "jobs") as c:
        c.up("--app", "jobs:app")
        for free in (50_000, 150_000):
            filler = small_disk / "filler"
            filler.write_bytes(bytes(_free(small_disk) - free))
            done = c.run("backup", str(small_disk / "copy"))
            assert (done.returncode, "no space left" in done.stderr) == (8, True), done
            assert os.listdir(small_disk) == ["filler"]
            filler.unlink()
        assert c.run("backup", str(small_disk / "copy")).returncode == 0
        assert (
            c.run("restore", str(small_disk / "copy"), "--data", str(tmp_path / "new")).returncode
            == 0
        )


def _free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
