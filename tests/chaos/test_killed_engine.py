"""What becomes of jobs when the engine itself is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.chaos.cluster import Cluster, cluster, kill
from tests.support.waiting import eventually

import penstock
from penstock import JobState
from penstock.lifecycles.canonical import TERMINAL

CLIENT = """
import sys, penstock
data, name, count, acknowledged = sys.argv[1:]
with open(acknowledged, "a", buffering=1) as told:
    left = [f"{name}-{n}" for n in range(int(count))]
    while left:
        try:
            with penstock.connect(data=data) as ps:
                while left:
                    batch = left[:10]
                    jobs = [ps.submit("job.chaos.quick", {"n": 1}, job_id=job_id, idempotent=True)
                            for job_id in batch]
                    for job in jobs:
                        told.write(job.job_id + "\\n")
                    del left[:10]
        except penstock.PenstockError:
            import time; time.sleep(0.05)
"""


def start_clients(c: Cluster, clients: int, each: int) -> list[subprocess.Popen[bytes]]:
    """Clients that submit one by one, write down what was acknowledged, and go on after a
    crash with exactly the ids that were not."""
    started = []
    for number in range(clients):
        words = [sys.executable, "-c", CLIENT, str(c.data), f"client{number}", str(each)]
        process = subprocess.Popen(
            [*words, str(c.folder / f"acknowledged-{number}")],
            env=c.environment,
            start_new_session=True,
        )
        c.processes.append(process)
        started.append(process)
    return started


def all_ended(c: Cluster) -> bool:
    with c.client() as ps:
        status = ps._engine.portal.run(ps.api.status())
    return set(status.tally) <= TERMINAL


def check_every_job_ended_once(c: Cluster, expected: int) -> None:
    job_ids = c.acknowledged()
    assert len(set(job_ids)) == expected
    done = c.run("verify", "--json")
    assert done.returncode == 0, done.stdout
    verified = json.loads(done.stdout)
    assert verified["mismatches"] == []
    assert verified["jobs"] >= expected
    with c.client() as ps:
        for job_id in job_ids[:: max(1, len(job_ids) // 500)]:
            ends = [
                t
                for t in ps.get(job_id).history()
                if t.after in TERMINAL and t.before not in TERMINAL
            ]
            assert len(ends) == 1, job_id
        found = ps.jobs(tries=True, limit=expected * 2)
        states = {job.job_id: job.record.state for job in found}
    assert {states[job_id] for job_id in job_ids} <= TERMINAL


def test_ten_thousand_jobs_of_four_clients_survive_the_engines_death(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        engine = c.up("--app", "jobs:app")
        clients = start_clients(c, clients=4, each=2500)
        eventually(lambda: len(c.acknowledged()) > 3000, "3,000 jobs are acknowledged")
        kill(engine)
        c.up("--app", "jobs:app")
        for client in clients:
            assert client.wait(timeout=240) == 0
        eventually(lambda: all_ended(c), "every job has ended")
        check_every_job_ended_once(c, expected=10_000)
        c.check_history()


@pytest.mark.parametrize("point", ["before-commit", "after-commit", "after-dispatch"])
@pytest.mark.parametrize("time", [2, 40])
def test_an_engine_killed_at_a_named_point_loses_nothing(
    tmp_path: Path, point: str, time: int
) -> None:
    with cluster(tmp_path) as c:
        struck = c.start("up", "--app", "jobs:app", PENSTOCK_FAILPOINT=f"{point}:{time}")
        clients = start_clients(c, clients=2, each=100)
        eventually(lambda: struck.poll() is not None, f"the engine dies {point}")
        assert struck.returncode == -9
        c.up("--app", "jobs:app")
        for client in clients:
            assert client.wait(timeout=120) == 0
        eventually(lambda: all_ended(c), "every job has ended")
        check_every_job_ended_once(c, expected=200)
        c.check_history()


def test_a_worker_keeps_its_job_over_a_restart_of_the_engine(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with cluster(
        tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold", PENSTOCK_TIMEOUTS__LOST_GRACE="1.5"
    ) as c:
        engine = c.up("--no-worker")
        c.worker("keeper")
        with c.client() as ps:
            job_id = ps.submit("job.chaos.once", {"gate": str(gate)}, timeout=120).job_id
            eventually(lambda: c.began(job_id), "the job began")
        kill(engine)
        c.up("--no-worker")
        eventually(lambda: any(w["held"] == 1 for w in c.workers()), "the worker is back")
        gate.touch()
        with c.client() as ps:
            job = ps.get(job_id)
            assert job.result(timeout=30) == "through"
            assert job.refresh().attempt == 1
        c.check_history()


def test_a_result_made_while_the_engine_was_down_is_told_when_it_is_back(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with cluster(
        tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold", PENSTOCK_TIMEOUTS__LOST_GRACE="1.5"
    ) as c:
        engine = c.up("--no-worker")
        c.worker("keeper")
        with c.client() as ps:
            job_id = ps.submit("job.chaos.once", {"gate": str(gate)}, timeout=120).job_id
            eventually(lambda: c.began(job_id), "the job began")
        kill(engine)
        gate.touch()
        eventually(lambda: any(m[:2] == ("end", job_id) for m in c.marks()), "the job ran")
        c.up("--no-worker")
        with c.client() as ps:
            assert ps.get(job_id).result(timeout=30) == "through"


def test_a_second_engine_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        c.up("--app", "jobs:app")
        second = c.run("up", "--app", "jobs:app")
        assert second.returncode != 0
        assert "another engine" in second.stderr
        with c.client() as ps:
            job = ps.submit("job.chaos.quick", {"n": 21})
            assert job.result(timeout=30) == 42
            assert job.refresh().state is JobState.SUCCEEDED


def test_running_jobs_of_a_dead_engines_own_worker_are_not_lost(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path) as c:
        engine = c.up("--app", "jobs:app")
        with c.client() as ps:
            job_ids = {
                topic: ps.submit(f"job.chaos.{topic}", {"gate": str(gate)}, **options).job_id
                for topic, options in {
                    "gated": {"idempotent": True},
                    "once": {"timeout": 120},
                }.items()
            }
            eventually(lambda: all(c.began(j) for j in job_ids.values()), "both began")
        kill(engine)
        c.up("--app", "jobs:app")
        gate.touch()
        with c.client() as ps:
            assert ps.get(job_ids["gated"]).result(timeout=30) == "through"
            with pytest.raises(penstock.JobTimedOut):
                ps.get(job_ids["once"]).result(timeout=30)
        c.check_history()


def test_a_job_that_kills_the_engine_it_runs_in_is_not_begun_again(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        engine = c.up("--app", "jobs:app")
        with c.client() as ps:
            job_id = ps.submit("job.chaos.suicide", job_id="suicide").job_id
        assert engine.wait(timeout=30) == -9
        c.up("--app", "jobs:app")
        with c.client() as ps, pytest.raises(penstock.JobTimedOut):
            ps.get(job_id).result(timeout=30)
        assert [m[:3] for m in c.marks()] == [("begin", job_id, 1)]
