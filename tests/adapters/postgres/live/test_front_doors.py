"""Engines that don't own their database: they answer reads, and forward the rest."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.chaos.engines import Cluster
from tests.support.cli.commands import Penstock
from tests.support.postgres import PostgresServer
from tests.support.waiting import eventually

import penstock


class Pair(Cluster):
    """Engine `a` owns the database, engine `b` stands by."""

    def __init__(self, folder: Path, server: PostgresServer, url: str) -> None:
        super().__init__(folder, url)
        self._server, self._schema = server, url.rpartition("=")[2]
        self.start("a")
        told = self.start("b")
        self.url = next(x.split()[1] for x in told.splitlines() if x.startswith("  http"))
        self.here: Penstock = self.command("b")
        self.token = (self.here.data / "token").read_text().strip()

    def web(self, token: str = "") -> httpx.Client:
        headers = {"Authorization": f"Bearer {token or self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=20)

    def stop_owner(self) -> None:
        """Stop it, and let nobody replace it."""
        self.engines["a"].send_signal(signal.SIGSTOP)
        later = "clock_timestamp() + interval '1 hour'"
        self._server.sql(f"UPDATE {self._schema}.owner SET until = {later}")

    def replace_owner(self) -> None:
        self.engines["a"].kill()
        eventually(lambda: self.owner() == "b", within=30)


@pytest.fixture
def pair(tmp_path: Path, server: PostgresServer, url: str) -> Iterator[Pair]:
    made = Pair(tmp_path, server, url)
    try:
        yield made
    finally:
        made.close()


def test_reads_are_answered_while_the_owner_is_stopped(pair: Pair) -> None:
    here = pair.here
    done = here.submit("job.text.shout", {"text": "hi"})
    assert here.out("result", done, "--timeout", "30s") == '"HI!"'
    running, gate = here.held("gate")
    with pair.web() as web, penstock.connect(data=here.data) as client:
        assert client.get(running).state == "RUNNING"
        pair.stop_owner()
        assert client.get(running).state == "RUNNING"
        assert {handle.job_id for handle in client.jobs()} == {done, running}
        assert client.get(done).result(20) == "HI!"
        assert web.get(f"/v1/jobs/{done}").json()["state"] == "SUCCEEDED"
        moves = web.get(f"/v1/jobs/{running}/history").json()["transitions"]
        assert moves[-1]["after"] == "RUNNING"
        assert [job["job_id"] for job in web.get("/v1/jobs").json()["jobs"]] == [running, done]
        assert web.get("/v1/jobs?state=RUNNING&total=true").json()["total"]["count"] == 1
        assert web.get("/v1/counts").json()["states"] == {"SUCCEEDED": 1, "RUNNING": 1}
        assert web.get(f"/v1/jobs/{done}/logs").json()["lines"] == []
        assert web.get("/healthz").status_code == 200
        assert here.state(done) == "SUCCEEDED"
        assert here.out("logs", done) == ""
        assert len(here.json("ps", "--all")) == 2
        assert pair.owner() == "a"
    gate.touch()


def test_a_write_is_forwarded_and_read_back_at_once(pair: Pair) -> None:
    with pair.web() as web, penstock.connect(data=pair.here.data) as client:
        for n in range(20):
            answer = web.post(
                "/v1/jobs",
                json={"topic": "job.text.shout", "input": {"text": f"t{n}"}, "delay": 3600},
            )
            assert answer.status_code == 201
            job_id = answer.json()["job_id"]
            assert web.get(f"/v1/jobs/{job_id}").json()["state"] in ("PENDING", "SCHEDULED")
            assert client.get(job_id).cancel()
            assert web.get(f"/v1/jobs/{job_id}").json()["state"] == "CANCELLED"
        assert web.get("/v1/counts").json()["states"] == {"CANCELLED": 20}


def test_keys_limits_and_schedules_reach_all_engines(pair: Pair) -> None:
    there, here = pair.command("a"), pair.here
    job_id = here.submit("job.text.shout", {"text": "hi"})
    key = there.json("key", "create", "ann", "--role", "submit", "--tenant", "ann")
    with pair.web(key["token"]) as web:
        assert web.get("/v1/jobs").json()["jobs"] == []
        assert web.get(f"/v1/jobs/{job_id}").status_code == 404
        job = {"topic": "job.text.shout", "input": {"text": "hers"}}
        assert web.post("/v1/jobs", json=job).status_code == 201
        assert len(web.get("/v1/jobs").json()["jobs"]) == 1
        here("key", "delete", "ann")
        eventually(lambda: web.get("/v1/jobs").status_code == 401)
    here("limit", "create", "few", "--topic", "job.wait.*", "--concurrency", "1")
    here("schedule", "create", "nightly", "0 3 * * *", "job.text.shout")
    for name in ("a", "b"):
        assert [one["limit"]["name"] for one in pair.command(name).json("limit", "list")] == ["few"]
        schedules = pair.command(name).json("schedule", "list")
        assert [one["schedule"]["name"] for one in schedules] == ["nightly"]
    pair.replace_owner()
    assert [one["limit"]["name"] for one in here.json("limit", "list")] == ["few"]
    schedules = here.json("schedule", "list")
    assert [one["schedule"]["name"] for one in schedules] == ["nightly"]
    with pair.web(key["token"]) as web:
        assert web.get("/v1/jobs").status_code == 401
