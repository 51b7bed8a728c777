"""What becomes of jobs whose worker is killed, stopped, or only looks dead."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from tests.support.chaos.cluster import cluster, kill
from tests.support.chaos.jobs import ONE_RETRY
from tests.support.waiting import eventually

from penstock import JobState, JobTimedOut


@pytest.mark.seed("001", "6.9")
def test_none_is_missing_and_none_is_applied_twice_after_a_worker_is_killed(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = c.worker("first", "--concurrency", "4")
        with c.client() as ps:
            jobs = ps.submit_many(
                "job.chaos.short", [{"n": n} for n in range(300)], idempotent=True
            )
            eventually(
                lambda: sum(m[0] == "end" for m in c.marks()) >= 77, "77 of 300 jobs have run"
            )
            kill(first)
            c.worker("second", "--concurrency", "4")
            assert [job.result(timeout=60) for job in jobs] == list(range(300))
            for job in jobs:
                ends = [t for t in job.history() if t.after is JobState.SUCCEEDED]
                assert len(ends) == 1
        c.check_history()
        assert c.run("verify").returncode == 0


@pytest.mark.seed("001", "5.5")
def test_an_idempotent_job_goes_on_under_the_same_id_with_the_next_attempt(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = c.worker("first")
        with c.client() as ps:
            job = ps.submit("job.chaos.gated", {"gate": str(gate)}, idempotent=True)
            eventually(lambda: c.began(job.job_id), "the job began")
            kill(first)
            c.worker("second")
            eventually(lambda: c.began(job.job_id, attempt=2), "attempt 2 began")
            gate.touch()
            assert job.result(timeout=30) == "through"
            assert [t.attempt for t in job.history() if t.event == "redispatch"] == [2]
        c.check_history()


@pytest.mark.seed("001", "5.6")
def test_any_other_job_ends_timeout_and_its_policy_retries_it_under_a_new_id(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = c.worker("first")
        with c.client() as ps:
            retried = ps.submit(
                "job.chaos.once_retried", {"gate": str(gate)}, retry=ONE_RETRY, timeout=120
            )
            alone = ps.submit("job.chaos.once", {"gate": str(gate)}, timeout=120)
            eventually(lambda: c.began(retried.job_id) and c.began(alone.job_id), "both began")
            kill(first)
            c.worker("second")
            with pytest.raises(JobTimedOut) as lost:
                alone.result(timeout=30)
            assert lost.value.error_code == "WORKER_LOST"
            gate.touch()
            assert retried.result(timeout=30) == "through"
            record = retried.refresh()
            assert record.state is JobState.TIMEOUT
            successor = ps.get(record.successor)
            assert successor.record.request.parent_job_id == retried.job_id
            assert successor.record.state is JobState.SUCCEEDED
        c.check_history()


@pytest.mark.seed("001", "6.4")
def test_a_worker_stopped_past_its_lease_is_fenced_when_it_wakes(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = c.worker("first")
        with c.client() as ps:
            job = ps.submit("job.chaos.gated", {"gate": str(gate)}, idempotent=True)
            eventually(lambda: c.began(job.job_id), "the job began")
            os.killpg(first.pid, signal.SIGSTOP)
            c.worker("second")
            eventually(lambda: c.began(job.job_id, attempt=2), "attempt 2 began")
            gate.touch()
            assert job.result(timeout=30) == "through"
            os.killpg(first.pid, signal.SIGCONT)
            eventually(
                lambda: any(t.event == "note" for t in job.history()), "the late result is noted"
            )
            record = job.refresh()
            assert (record.state, record.attempt) == (JobState.SUCCEEDED, 2)
            assert record.worker_id == "second"
        c.check_history()
        assert c.run("verify").returncode == 0


@pytest.mark.seed("001", "6.10")
def test_a_busy_worker_is_not_a_dead_one(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold", PENSTOCK_TIMEOUTS__LEASE="1") as c:
        c.up("--no-worker")
        c.worker("only")
        with c.client() as ps:
            job = ps.submit("job.chaos.hog", {"seconds": 3.0}, timeout=60)
            assert job.result(timeout=30) == "done"
            assert job.refresh().attempt == 1
        c.check_history()


def test_a_worker_told_to_terminate_finishes_what_it_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        worker = c.worker("only")
        with c.client() as ps:
            job = ps.submit("job.chaos.once", {"gate": str(gate)}, timeout=120)
            eventually(lambda: c.began(job.job_id), "the job began")
            worker.send_signal(signal.SIGTERM)
            eventually(lambda: c.workers()[0]["status"] == "draining", "the worker drains")
            gate.touch()
            assert job.result(timeout=30) == "through"
            assert worker.wait(timeout=30) == 0
            eventually(lambda: c.workers() == [], "the worker is gone")


def test_a_worker_that_was_given_up_for_lost_works_again_when_it_wakes(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        worker = c.worker("sleeper")
        os.killpg(worker.pid, signal.SIGSTOP)
        eventually(lambda: c.workers() == [], "the worker is given up")
        with c.client() as ps:
            job = ps.submit("job.chaos.quick", {"n": 21})
            os.killpg(worker.pid, signal.SIGCONT)
            assert job.result(timeout=30) == 42


def test_a_second_worker_of_the_same_name_is_sent_away_and_runs_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        c.worker("twin")
        second = c.run("worker", "--app", "jobs:app", "--id", "twin")
        assert second.returncode == 4
        assert "a worker twin is here already" in second.stderr
        with c.client() as ps:
            jobs = ps.submit_many("job.chaos.quick", [{"n": n} for n in range(20)])
            assert [job.result(timeout=30) for job in jobs] == [2 * n for n in range(20)]
        c.check_history()


def test_what_a_topic_offers_holds_for_a_caller_that_does_not_know_it(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        c.up("--app", "jobs:app")
        with c.client() as ps:
            request = ps.submit("job.chaos.once_retried", {"gate": str(tmp_path)}).record.request
            assert (request.timeout, request.retry) == (120, ONE_RETRY)
            assert ps.submit("job.chaos.quick", {"n": 1}).record.request.idempotent


def test_a_job_that_kills_its_worker_at_once_is_not_begun_again(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = c.worker("first")
        with c.client() as ps:
            job = ps.submit("job.chaos.suicide")
            assert first.wait(timeout=30) == -signal.SIGKILL
            c.worker("second")
            with pytest.raises(JobTimedOut):
                job.result(timeout=30)
        assert [m[:3] for m in c.marks()] == [("begin", job.job_id, 1)]


def test_nor_over_tcp_where_the_engine_is_asked_first(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        engine = c.up("--no-worker", "--listen", "unix:", "--listen", "tcp://127.0.0.1:0")
        eventually(lambda: "tcp://" in c.log_of(engine), "the engine says where it listens")
        (address,) = re.findall(r"tcp://\S+", c.log_of(engine))
        first = c.start("worker", "--app", "jobs:app", "--id", "first", "--connect", address)
        with c.client() as ps:
            job = ps.submit("job.chaos.suicide")
            assert first.wait(timeout=30) == -signal.SIGKILL
            c.worker("second", "--connect", address)
            with pytest.raises(JobTimedOut):
                job.result(timeout=30)
            assert ps.submit("job.chaos.quick", {"n": 21}).result(timeout=30) == 42
        assert c.marks()[0][:2] == ("begin", job.job_id)
        c.check_history()
