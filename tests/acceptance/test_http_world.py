"""The front door as the world meets it: a real engine, its HTTP API, and what outlives it."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tests.support.acceptance.front_door import PATIENCE, House, Person, house
from tests.support.chaos.cluster import kill
from tests.support.waiting import eventually

import penstock
from penstock.ports.engine_api import Progressed

RULES = 'default = "allow"\n'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with house(tmp_path_factory.mktemp("world"), RULES, ada="submit", root="admin") as made:
        yield made


def fetch(url: str, **headers: str) -> tuple[int, str, bytes]:
    with urlopen(Request(url, headers=headers), timeout=PATIENCE) as answer:
        return answer.status, answer.headers["Content-Type"], answer.read()


def read_events(
    person: Person, until: str, *, job_id: str, last_id: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(id, event) of a job from the stream of everything, up to a state."""
    headers = person.headers | ({"Last-Event-ID": last_id} if last_id else {})
    path = f"/v1/stream?kind=job&job_id={job_id}&after=0"
    with urlopen(Request(person.house.url + path, headers=headers), timeout=PATIENCE) as stream:
        for line in stream:
            name, _, value = line.decode().strip().partition(": ")
            if name == "id":
                last_id = value
            elif name == "data":
                event = json.loads(value)
                yield last_id, event
                if event["after"] == until:
                    return


# -- what is there without a key, and what is not ---------------------------------


def test_health_metrics_and_docs_are_served_by_the_process_itself(shared: House) -> None:
    for path in ("/healthz", "/readyz"):
        assert fetch(shared.url + path)[0] == 200
    _, kind, page = fetch(f"{shared.url}/docs")
    assert kind.startswith("text/html")
    assert b"https://" not in page.replace(b"https://jobs.example.org", b"")
    assert b"<script" not in page
    _, _, document = fetch(f"{shared.url}/openapi.json")
    assert json.loads(document)["openapi"].startswith("3.1")
    status, _, metrics = shared["root"].exchange("GET", "/metrics")
    assert (status, "# TYPE penstock_" in metrics) == (200, True)
    nobody = Person(shared, "nobody", "", Path())
    problem = nobody.ask("GET", "/v1/jobs", status=401)
    assert problem["type"] == "urn:penstock:problem:not-authenticated"


def test_the_owner_s_token_is_theirs_alone_and_used_without_being_named(shared: House) -> None:
    token = shared.data / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    done = shared.run("ps", "--connect", shared.url)
    assert done.returncode == 0, done.stderr
    with penstock.connect(shared.url, data=shared.data) as ps:
        assert ps.submit("job.chaos.quick", {"n": 21}).result(PATIENCE) == 42


@pytest.mark.parametrize("flag", ["0.0.0.0:0", "[::]:0"])
def test_the_whole_network_is_not_served_without_tls(flag: str, tmp_path: Path) -> None:
    made = House(tmp_path, RULES)
    done = made.run("up", "--http", flag)
    assert done.returncode == 2, done.stderr
    assert "without TLS" in done.stderr
    assert "http.insecure" in done.stderr
    assert "Traceback" not in done.stderr


# -- an engine elsewhere feels like one here --------------------------------------


def test_python_from_elsewhere_submits_follows_cancels_and_is_told_what_is_wrong(
    shared: House,
) -> None:
    ada, gate = shared["ada"], shared.gate("followed")
    with penstock.connect(shared.url, token=ada.token) as ps:
        assert ps.url == shared.url
        jobs = ps.submit_many("job.chaos.quick", [{"n": n} for n in range(20)])
        assert [job.result(PATIENCE) for job in jobs] == [n * 2 for n in range(20)]
        # An engine that has not got the function can't check its input.
        refused = penstock.JobFailed if shared.is_behind_nats else penstock.InvalidRequest
        with pytest.raises(refused, match=r"input\.n: expected int, got str"):
            ps.submit("job.chaos.quick", {"n": "one"}).result(PATIENCE)
        with pytest.raises(penstock.NotPermitted, match="role operate"):
            ps.pause_pool("default")
        held = ps.submit("job.chaos.gated", {"gate": str(gate)})
        eventually(lambda: held.refresh().state == "RUNNING", "it runs", PATIENCE)
        assert held.cancel("enough").ended
        assert held.record.request.principal == "ada"
        with pytest.raises(penstock.JobCancelled, match="enough"):
            held.result(PATIENCE)


def test_progress_reaches_a_client_elsewhere_while_the_job_runs(tmp_path: Path) -> None:
    (tmp_path / "talker.py").write_text(
        "import penstock\n"
        "app = penstock.App()\n"
        "@app.job('job.talk')\n"
        "async def talk(ctx: penstock.Context) -> None:\n"
        "    for n in range(3):\n"
        "        ctx.progress((n + 1) / 3, f'part {n}')\n"
        "        ctx.log(f'line {n}')\n"
    )
    made = House(tmp_path, RULES)
    made.environment["PYTHONPATH"] = str(tmp_path)
    try:
        made.open("talker:app")
        made.let_in(ada="submit")
        with penstock.connect(made.url, token=made["ada"].token) as ps:
            job = ps.submit("job.talk", delay=0.3)
            seen = [type(update).__name__ for update in job.follow()]
            assert seen.count("Logged") == 3
            assert Progressed.__name__ in seen
            assert [line.text for line in job.logs()] == ["line 0", "line 1", "line 2"]
    finally:
        made.stop()


def test_a_stream_of_submissions_is_answered_line_by_line(shared: House) -> None:
    ada = shared["ada"]
    good = '{"topic": "job.chaos.quick", "input": {"n": 1}}'
    bad = '{"topic": "job.chaos.quick", "input": {"n": 1}, "color": "red"}'
    request = Request(
        f"{shared.url}/v1/jobs/stream",
        "\n".join([good, bad, good]).encode(),
        ada.headers | {"Content-Type": "application/x-ndjson"},
    )
    with urlopen(request, timeout=PATIENCE) as answer:
        first, second, third = map(json.loads, answer)
    assert second["problem"]["field"] == "color"
    for line in (first, third):
        assert ada.end(line["job_id"])["state"] == "SUCCEEDED"


# -- what a killed engine leaves --------------------------------------------------
def test_events_are_resumed_over_a_killed_engine_without_gap_or_repeat(tmp_path: Path) -> None:
    with house(tmp_path, RULES, ada="submit") as made:
        ada, gate = made["ada"], made.gate("open")
        job_id = ada.submit("job.chaos.gated", {"gate": str(gate)})
        before = list(read_events(ada, "RUNNING", job_id=job_id))
        made.reopen()
        gate.touch()
        assert ada.end(job_id)["state"] == "SUCCEEDED"
        after = list(read_events(ada, "SUCCEEDED", job_id=job_id, last_id=before[-1][0]))
        history = ada.ask("GET", f"/v1/jobs/{job_id}/history")["transitions"]
        numbers = [event["n"] for _, event in before + after]
        assert numbers == [entry["n"] for entry in history]
        places = [int(place) for place, _ in before + after]
        assert places == sorted(set(places))


def test_a_request_sent_again_to_the_next_engine_is_the_same_job(tmp_path: Path) -> None:
    with house(tmp_path, RULES, ada="submit", eve="submit @eve") as made:
        ada, key = made["ada"], {"Idempotency-Key": "order-17"}
        body = {"topic": "job.chaos.quick", "input": {"n": 1}}
        status, _, first = ada.exchange("POST", "/v1/jobs", body, key)
        assert status == 201
        made.reopen()
        status, _, again = ada.exchange("POST", "/v1/jobs", body, key)
        assert (status, again["job_id"]) == (200, first["job_id"])
        other = {**body, "input": {"n": 2}}
        status, _, problem = ada.exchange("POST", "/v1/jobs", other, key)
        assert (status, problem["code"]) == (409, "CONFLICT")
        status, _, theirs = made["eve"].exchange("POST", "/v1/jobs", other, key)
        assert status == 201  # keys of two tenants do not meet
        assert theirs["job_id"] != first["job_id"]


def test_a_client_that_waits_outlives_the_engine_it_waits_for(tmp_path: Path) -> None:
    with house(tmp_path, RULES, ada="submit") as made:
        gate, results = made.gate("open"), []
        with penstock.connect(made.url, token=made["ada"].token) as ps:
            job = ps.submit("job.chaos.gated", {"gate": str(gate)})
            waiting = threading.Thread(target=lambda: results.append(job.result(PATIENCE)))
            waiting.start()
            eventually(lambda: made.began(job.job_id), "it runs", PATIENCE)
            kill(made.engine)
            made.open()
            gate.touch()
            waiting.join(PATIENCE)
        assert results == ["through"]
