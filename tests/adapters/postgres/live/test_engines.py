"""Several engines on one database: one owns it, the others pass connections on and stand by."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chaos.engines import Cluster, all_succeed, ended_at_last, free_port, submitting
from tests.support.cli.commands import said
from tests.support.postgres import PostgresServer
from tests.support.waiting import eventually

import penstock
from penstock.core.errors import StoreFailed


@pytest.fixture
def cluster(tmp_path: Path, url: str) -> Iterator[Cluster]:
    made = Cluster(tmp_path, url)
    try:
        yield made
    finally:
        made.close()


def test_every_engine_of_a_database_answers_with_its_own_token(cluster: Cluster) -> None:
    cluster.start("a")
    told = cluster.start("b")
    assert "stands by" in told
    second = cluster.command("b")
    assert second.out("submit", "job.text.shout", "--input", '{"text": "hi"}', "--wait") == '"HI!"'
    url = next(line.split()[1] for line in told.splitlines() if line.startswith("  http"))
    token = (second.data / "token").read_text().strip()
    with penstock.connect(url, token=token) as client:
        assert client.submit("job.text.shout", {"text": "web"}).result(timeout=30) == "WEB!"
    status = second.json("db", "status")
    assert status["owner"].endswith(f":{cluster.engines['a'].pid}")
    assert [one.split(":")[1] for one in status["standbys"]] == [str(cluster.engines["b"].pid)]


def test_a_killed_owner_is_replaced_and_its_callers_see_no_error(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.start("b")
    cluster.start("c")
    with submitting(cluster.command("c")) as ids:
        eventually(lambda: len(ids) > 20)
        cluster.engines["a"].kill()
        count = len(ids)
        eventually(lambda: len(ids) > count + 20, within=30)
    assert cluster.owner() in ("b", "c")
    all_succeed(cluster.command("b"), ids)


def test_an_owner_that_stops_is_replaced_at_once(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.start("b")
    with submitting(cluster.command("b")) as ids:
        eventually(lambda: len(ids) > 20)
        cluster.engines["a"].send_signal(signal.SIGTERM)
        assert "stopped" in cluster.engines["a"].communicate(timeout=30)[0]
        count = len(ids)
        eventually(lambda: len(ids) > count + 20, within=30)
    assert cluster.owner() == "b"
    all_succeed(cluster.command("b"), ids)


def test_a_paused_owner_is_replaced_and_stands_by_when_it_wakes(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.start("b")
    with submitting(cluster.command("b")) as ids:
        eventually(lambda: len(ids) > 20)
        cluster.engines["a"].send_signal(signal.SIGSTOP)
        eventually(lambda: cluster.owner() == "b", within=30)
        cluster.engines["a"].send_signal(signal.SIGCONT)
        said(cluster.engines["a"], "stands by")
        count = len(ids)
        eventually(lambda: len(ids) > count + 20, within=30)
    all_succeed(cluster.command("a"), ids)
    assert cluster.owner() == "b"


def test_a_worker_keeps_its_job_when_the_owner_is_replaced(cluster: Cluster) -> None:
    cluster.start("a", "--no-worker")
    cluster.start("b", "--no-worker")
    here = cluster.command("b")
    cluster.worker("b")
    job_id, gate = here.held("gate")
    cluster.engines["a"].kill()
    eventually(lambda: cluster.owner() == "b", within=30)
    gate.touch()
    assert here.out("result", job_id, "--timeout", "30s") == '"it came"'
    assert Path(f"{gate}.started").read_text() == "x"
    (attempt,) = [here.json("show", job_id)["attempt"]]
    assert attempt == 1


def test_a_worker_of_another_machine_keeps_its_job_when_the_owner_is_replaced(
    cluster: Cluster, tmp_path: Path
) -> None:
    """It joined the owner through an engine that stands by, and knows only that one."""
    for name in ("a", "b"):
        made = cluster.command(name)
        made.env["PENSTOCK_LINK__LISTEN"] = f"127.0.0.1:{free_port()}"
        made.env["PENSTOCK_LINK__AUTHORITY"] = str(tmp_path / "authority")
        cluster.start(name, "--no-worker")
    here, there = cluster.command("b"), cluster.command("elsewhere")
    token = here.json("worker", "token", "create")["token"]
    del there.env["PENSTOCK_STORE"]
    address = f"penstock://{here.env['PENSTOCK_LINK__LISTEN']}"
    worker = there.start(
        *("worker", "start", "--app", "jobs:app", "--connect", address, "--join", token),
        stderr=subprocess.STDOUT,
    )
    with ended_at_last(worker):
        eventually(lambda: here.json("worker", "list"))
        job_id, gate = here.held("gate")
        cluster.engines["a"].kill()
        eventually(lambda: cluster.owner() == "b", within=30)
        gate.touch()
        assert here.out("result", job_id, "--timeout", "30s") == '"it came"'
        assert Path(f"{gate}.started").read_text() == "x"


def test_what_a_killed_owner_ran_itself_is_not_run_twice(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.start("b")
    here = cluster.command("b")
    job_id, gate = here.held("gate")
    cluster.engines["a"].kill()
    eventually(lambda: here.state(job_id) == "TIMEOUT", within=40)
    assert here.json("show", job_id)["result"]["error_code"] == "WORKER_LOST"
    assert Path(f"{gate}.started").read_text() == "x"


def test_large_results_are_read_by_the_next_owner(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.start("b")
    here = cluster.command("b")
    job_id = here.submit("job.text.long", {"size": 100_000})
    assert len(here.out("result", job_id, "--timeout", "30s")) == 100_002
    cluster.engines["a"].kill()
    eventually(lambda: cluster.owner() == "b", within=30)
    assert len(here.out("result", job_id, "--timeout", "30s")) == 100_002


def test_an_engine_with_another_folder_of_payloads_is_refused(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.engines["a"].send_signal(signal.SIGTERM)
    cluster.engines["a"].communicate(timeout=30)
    other = cluster.command("b")
    other.env["PENSTOCK_STORAGE__BLOBS"] = str(other.folder / "others")
    told = other.start("up", stderr=subprocess.STDOUT).communicate(timeout=30)[0]
    assert "does not have the payloads of the jobs in this database" in told
    assert "set storage.blobs" in told


def test_a_database_that_crashes_loses_no_accepted_job(
    cluster: Cluster, server: PostgresServer
) -> None:
    """A submission that was under way may be refused: it is submitted again."""
    cluster.start("a")
    cluster.start("b")
    with submitting(cluster.command("b"), StoreFailed) as ids:
        eventually(lambda: len(ids) > 20)
        server.stop(signal.SIGQUIT)
        server.start()
        count = len(ids)
        eventually(lambda: len(ids) > count + 20, within=30)
    all_succeed(cluster.command("b"), ids)
