"""The gate as its users meet it: a real engine, a rule file, keys, HTTP and the command line."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tests.support.acceptance.front_door import PATIENCE, House, house
from tests.support.chaos.cluster import PENSTOCK
from tests.support.waiting import eventually

RULES = """\
default = "allow"

[[rules]]
id = "never"
decision = "deny"
labels = { ask = "never" }
reason = "not here"

[[rules]]
id = "two-people"
decision = "require_approval"
labels = { ask = "two" }
approval = { needed = 2 }

[[rules]]
id = "soon"
decision = "require_approval"
labels = { ask = "soon" }
approval = { expires = "300ms" }

[[rules]]
id = "slowly"
decision = "throttle"
labels = { ask = "slowly" }
rate = "2/500ms"

[[rules]]
id = "briefly"
decision = "allow_with_constraints"
labels = { ask = "briefly" }
constraints = { max_runtime = "200ms", max_retries = 0 }

[[rules]]
id = "one-by-one"
decision = "allow_with_constraints"
labels = { ask = "alone" }
constraints = { max_concurrent = 1 }
"""

STAFF = {
    "ada": "submit approve",
    "bob": "approve",
    "cy": "approve",
    "olga": "submit operate",
    "root": "admin",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """An engine for the tests that neither kill it nor change its rules."""
    with house(tmp_path_factory.mktemp("gate"), RULES, **STAFF) as made:
        yield made


# -- denial -----------------------------------------------------------------------


def test_a_denied_job_says_which_rule_refused_it_and_never_runs(shared: House) -> None:
    ada = shared["ada"]
    job_id = ada.submit("job.chaos.quick", {"n": 1}, labels={"ask": "never"})
    job = ada.end(job_id)
    assert job["state"] == "DENIED"
    assert (job["verdict"]["decision"], job["verdict"]["rule_id"]) == ("deny", "never")
    assert job["result"]["error_message"] == "rule never: not here"
    assert job["verdict"]["snapshot"] == shared["olga"].ask("GET", "/v1/policy")["snapshot"]
    assert "labels.ask" in ada.cli("policy", "explain", job_id)
    assert not shared.began(job_id)


# -- approvals --------------------------------------------------------------------


def test_two_people_must_say_yes_none_of_them_twice_nor_who_submitted_it(shared: House) -> None:
    ada, bob, cy = shared["ada"], shared["bob"], shared["cy"]
    job_id = ada.parked(labels={"ask": "two"})
    said = ada.why(job_id)
    assert "2 approvals by anybody with the role approve until" in said
    assert "(rule two-people)" in said
    path = f"/v1/jobs/{job_id}/approve"
    assert "ada submitted" in ada.ask("POST", path, {}, status=403)["detail"]
    assert "requires a key with the role" in ada.cli("pool", "pause", "default", code=6)
    bob.ask("POST", path, {"reason": "I looked"})
    assert bob.ask("POST", path, {}, status=409)["code"] == "CONFLICT"
    assert not shared.began(job_id)
    assert "goes on" in cy.cli("approve", job_id)
    assert ada.end(job_id)["state"] == "SUCCEEDED"
    assert bob.ask("POST", path, {}, status=409)["code"] == "CONFLICT"
    history = ada.ask("GET", f"/v1/jobs/{job_id}/history")["transitions"]
    votes = [(one["actor"], one["reason"]) for one in history if one["event"] == "approve"]
    assert votes == [
        ("gateway:bob", "approved by bob (1 of 2): I looked"),
        ("gateway:cy", "approved by cy (2 of 2)"),
    ]
    audit = shared["root"].ask("GET", f"/v1/audit?subject={job_id}&action=*approve")["entries"]
    assert ("ada", "refused") in {(one["principal"], one["outcome"]) for one in audit}
    assert {one["principal"] for one in audit if one["outcome"] == "done"} == {"bob", "cy"}


def test_a_no_ends_a_job_with_its_reason(shared: House) -> None:
    ada = shared["ada"]
    job_id = ada.parked(labels={"ask": "two"})
    shared["bob"].ask("POST", f"/v1/jobs/{job_id}/approve", {})
    assert "rejected" in shared["cy"].cli("reject", job_id, "--reason", "too risky")
    job = ada.get(job_id)
    assert (job["state"], job["result"]["error_code"]) == ("DENIED", "APPROVAL_REJECTED")
    assert job["result"]["error_message"] == "rejected by cy: too risky"


def test_what_nobody_approves_in_time_is_denied_and_a_late_yes_is_refused(shared: House) -> None:
    ada = shared["ada"]
    job_id = ada.parked(labels={"ask": "soon"})
    job = ada.end(job_id)
    assert (job["state"], job["result"]["error_code"]) == ("DENIED", "APPROVAL_EXPIRED")
    shared["bob"].ask("POST", f"/v1/jobs/{job_id}/approve", {}, status=409)
    assert not shared.began(job_id)


# -- throttle, constraints, limits ------------------------------------------------


def test_a_throttled_rule_lets_no_more_through_than_its_rate(shared: House) -> None:
    ada = shared["ada"]
    one = {"topic": "job.chaos.quick", "input": {"n": 1}, "labels": {"ask": "slowly"}}
    made = ada.ask("POST", "/v1/jobs/batch", {"jobs": [one] * 5}, status=201)["jobs"]
    ended = [ada.end(job["job_id"]) for job in made]
    assert {job["verdict"]["rule_id"] for job in ended} == {"slowly"}
    given = sorted(job["dispatched_at"] for job in ended)
    windows = [later - earlier for earlier, later in zip(given, given[2:], strict=False)]
    assert min(windows) > 0.45  # of three, never within the half second in which two may go


def test_constraints_hold_whatever_the_job_asked_for(shared: House) -> None:
    ada = shared["ada"]
    job_id = ada.submit(
        "job.chaos.gated",
        {"gate": str(shared.gate("never"))},
        timeout=60,
        retry={"retries": 5, "delay": 0.01},
        labels={"ask": "briefly"},
    )
    job = ada.end(job_id)
    assert (job["job_id"], job["state"]) == (job_id, "TIMEOUT")  # max_retries: no successor
    assert job["verdict"]["constraints"] == {"max_runtime": 0.2, "max_retries": 0}
    assert "0.2 s" in job["result"]["error_message"]


def test_a_rule_s_concurrency_is_kept(shared: House) -> None:
    ada, gate = shared["ada"], shared.gate("alone")
    given = {"gate": str(gate)}
    ids = [ada.submit("job.chaos.gated", given, labels={"ask": "alone"}) for _ in range(3)]
    eventually(lambda: any(map(shared.began, ids)), "one of them runs", PATIENCE)
    ada.until(ids[-1], lambda job: job["state"] == "SCHEDULED", "the others are judged")
    assert "one-by-one" in ada.why(ids[-1])
    gate.touch()
    for job_id in ids:
        assert ada.end(job_id)["state"] == "SUCCEEDED"
    assert most_at_once(shared, ids) == 1


def most_at_once(house: House, ids: list[str]) -> int:
    """How many of these jobs were seen to run at the same time, by the marks they left."""
    running: set[str] = set()
    most = 0
    for word, job_id, _, _ in house.marks():
        if job_id in ids:
            running.add(job_id) if word == "begin" else running.discard(job_id)
            most = max(most, len(running))
    return most


def test_a_full_queue_answers_429_and_says_when_to_come_back(shared: House) -> None:
    olga, gate = shared["olga"], shared.gate("full")
    cap = {"labels": {"queue": "short"}, "concurrency": 1, "max_waiting": 1}
    olga.ask("PUT", "/v1/limits/short", cap)
    body = {
        "topic": "job.chaos.gated",
        "input": {"gate": str(gate)},
        "labels": {"queue": "short"},
    }
    first = olga.ask("POST", "/v1/jobs", body, status=201)["job_id"]
    olga.until(first, lambda job: job["state"] == "RUNNING", "the first runs")
    second = olga.ask("POST", "/v1/jobs", body, status=201)["job_id"]
    status, headers, problem = olga.exchange("POST", "/v1/jobs", body)
    assert (status, problem["code"]) == (429, "TOO_MANY")
    assert int(headers["Retry-After"]) >= 1
    assert "limit short" in problem["detail"]
    gate.touch()
    for job_id in (first, second):
        assert olga.end(job_id)["state"] == "SUCCEEDED"
    olga.ask("DELETE", "/v1/limits/short", status=204)


# -- pools, and jobs in bulk ------------------------------------------------------


def test_a_paused_pool_takes_nothing_new_and_is_drained_when_it_holds_nothing(
    shared: House,
) -> None:
    olga, gate = shared["olga"], shared.gate("drained")
    held = olga.submit("job.chaos.gated", {"gate": str(gate)})
    olga.until(held, lambda job: job["state"] == "RUNNING", "it runs")
    assert "still holds 1 job" in olga.cli(
        "pool", "drain", "default", "--wait-timeout", "0", code=9
    )
    try:
        late = olga.submit("job.chaos.quick", {"n": 1})
        eventually(lambda: "paused" in olga.why(late), "it waits for the pool", PATIENCE)
        gate.touch()
        assert "holds nothing" in olga.cli("pool", "drain", "default")
        assert olga.get(held)["state"] == "SUCCEEDED"
        assert olga.get(late)["state"] == "SCHEDULED"
    finally:
        olga.ask("POST", "/v1/pools/default/resume")
    assert olga.end(late)["state"] == "SUCCEEDED"


def test_dead_letters_are_retried_together_with_every_field_and_judged_again(
    shared: House,
) -> None:
    olga, gate = shared["olga"], shared.gate("mended")
    fields = {"labels": {"batch": "may"}, "timeout": 0.3, "estimated_cost": 2.5}
    given = {"gate": str(gate)}
    dead = [olga.submit("job.chaos.once", given, **fields) for _ in range(3)]
    assert {olga.end(job_id)["state"] for job_id in dead} == {"TIMEOUT"}
    listed = olga.ask("GET", "/v1/dead?label=batch%3Dmay")["jobs"]
    assert {job["job_id"] for job in listed} == {*dead}
    gate.touch()
    bulk = olga.ask("POST", "/v1/jobs:retry", {"label": ["batch=may"]})
    assert (bulk["matched"], bulk["done"], bulk["refused"]) == (3, 3, [])
    for job_id in dead:
        again = olga.end(job_id)
        assert again["state"] == "SUCCEEDED"
        assert again["request"]["parent_job_id"] == job_id
        assert {name: again["request"][name] for name in fields} == fields
        assert again["verdict"]["rule_id"] == "default"
    assert "no dead jobs" in olga.cli("job", "list", "--dead", "--label", "batch=may")


def test_jobs_are_cancelled_by_what_they_have_in_common(shared: House) -> None:
    olga = shared["olga"]
    given, doomed = {"gate": str(shared.gate("no-gate"))}, {"batch": "doomed"}
    ids = [olga.submit("job.chaos.gated", given, labels=doomed) for _ in range(2)]
    ids.append(olga.submit("job.chaos.quick", {"n": 1}, labels=doomed, delay=3600))
    spared = olga.submit("job.chaos.quick", {"n": 1}, labels={"batch": "spared"}, delay=3600)
    assert olga.ask("POST", "/v1/jobs:cancel", {}, status=422)["field"] == "all"
    said = olga.cli("cancel", "--label", "batch=doomed", "--reason", "doom", "--yes")
    assert said == "asked 3 of 3 jobs to end"
    assert {olga.end(job_id)["state"] for job_id in ids} == {"CANCELLED"}
    assert olga.get(spared)["state"] == "SCHEDULED"
    olga.ask("POST", f"/v1/jobs/{spared}/cancel", {})


# -- keys -------------------------------------------------------------------------


def test_a_revoked_key_is_worth_nothing_from_that_moment_on(shared: House) -> None:
    shared.let_in(eve="submit")
    eve = shared["eve"]
    eve.ask("GET", "/v1/status")
    request = Request(f"{shared.url}/v1/stream", headers=eve.headers)
    with urlopen(request, timeout=PATIENCE) as stream:
        assert stream.readline().startswith(b"retry:")
        assert "(eve) revoked" in shared["root"].cli("key", "delete", "eve")
        status, headers, problem = eve.exchange("GET", "/v1/status")
        assert (status, problem["code"]) == (401, "NOT_AUTHENTICATED")
        assert headers["WWW-Authenticate"].startswith("Bearer")
        eve.ask("POST", "/v1/jobs", {"topic": "job.chaos.quick"}, status=401)
        stream.read()  # comes to an end: a stream that was open is broken off


def test_a_tenant_s_key_can_t_tell_another_s_job_from_none(shared: House) -> None:
    shared.let_in(acme="submit operate @acme", globex="submit operate @globex")
    acme, globex = shared["acme"], shared["globex"]
    job_id = acme.submit("job.chaos.quick", {"n": 1})
    assert acme.end(job_id)["request"]["tenant"] == "acme"
    for method, path in {
        ("GET", "/v1/jobs/{}"),
        ("GET", "/v1/jobs/{}/history"),
        ("GET", "/v1/jobs/{}/result"),
        ("GET", "/v1/jobs/{}/updates"),
        ("POST", "/v1/jobs/{}/cancel"),
        ("POST", "/v1/jobs/{}/retry"),
    }:
        theirs = globex.ask(method, path.format(job_id), status=404)
        nobody_s = globex.ask(method, path.format("no-such-job"), status=404)
        assert str(theirs).replace(job_id, "X") == str(nobody_s).replace("no-such-job", "X")
    assert globex.ask("GET", "/v1/jobs")["jobs"] == []
    assert globex.ask("POST", "/v1/jobs:cancel", {"all": True})["matched"] == 0


def test_no_token_is_in_logs_errors_or_the_list_of_processes(shared: House) -> None:
    ada = shared["ada"]
    wrong = ada.token[:-4] + "oops"
    request = {"Authorization": f"Bearer {wrong}"}
    _, _, problem = ada.exchange("GET", "/v1/status", None, request)
    _, _, lost = ada.exchange("GET", f"/v1/nowhere?token={ada.token}")
    ada.exchange("POST", f"/v1/jobs?access_token={ada.token}", {"topic": "job.chaos.quick"})
    told = shared.log_of(shared.engine) + str(problem) + str(lost)
    told += ada.cli("show", "no-such-job", code=3)
    told += str(shared["root"].ask("GET", "/v1/keys")) + shared["root"].cli("audit")
    told += Path(f"/proc/{shared.engine.pid}/cmdline").read_text()
    with subprocess.Popen(
        [PENSTOCK, "top", "--connect", shared.url, "--token", f"@{ada.file}"],
        env=shared.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as client:
        told += Path(f"/proc/{client.pid}/cmdline").read_text()
        client.kill()
    tokens = [wrong, *(person.token for person in shared.people.values())]
    secrets = [token.split("_", 2)[2] for token in tokens]
    secrets.append((shared.data / "token").read_text().strip())
    assert min(map(len, secrets)) > 20
    assert [secret for secret in secrets if secret in told] == []


# -- changing rules ---------------------------------------------------------------

BROKEN = RULES + '\n[[rules]]\nid = "odd"\ndecision = "throttle"\nrate = "now and then"\n'


def test_a_broken_rule_file_refuses_a_start_and_names_rule_and_field(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(BROKEN)
    made = House(tmp_path, BROKEN)
    done = made.run("up", "--app", "jobs:app", "--rules", str(rules))
    assert done.returncode != 0
    assert "rules.toml: rule 7 (odd): rate: 'now and then' is not a rate" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (made.data / "penstock.db").exists()


def test_rules_change_under_way_a_broken_file_does_not_and_an_old_yes_counts_no_more(
    tmp_path: Path,
) -> None:
    with house(tmp_path, RULES, ada="submit", bob="approve", cy="approve", root="admin") as made:
        ada, bob, cy, root = (made[name] for name in ("ada", "bob", "cy", "root"))
        old = root.ask("GET", "/v1/policy")["snapshot"]
        job_id = ada.parked(labels={"ask": "two"})
        bob.ask("POST", f"/v1/jobs/{job_id}/approve", {"snapshot": old})

        made.rules.write_text(BROKEN)
        assert "rate: 'now and then'" in root.cli("policy", "reload", code=2)
        shown = root.cli("policy", "show")
        assert f"snapshot {old}" in shown
        assert "the current file was not accepted" in shown
        assert "rate: 'now and then'" in ada.ask("GET", "/v1/status")["policy_problem"]
        denied = ada.submit("job.chaos.quick", {"n": 1}, labels={"ask": "never"})
        assert ada.end(denied)["verdict"]["snapshot"] == old
        assert len(ada.get(job_id)["hold"]["votes"]) == 1

        made.rules.write_text(RULES.replace("needed = 2", "needed = 2, approvers = ['cy', 'b*']"))
        root.cli("policy", "reload")
        new = root.ask("GET", "/v1/policy")["snapshot"]
        assert new != old
        assert ada.ask("GET", "/v1/status")["policy_problem"] == ""
        ada.until(job_id, lambda job: job["hold"]["snapshot"] == new, "it is parked anew")
        assert not ada.get(job_id)["hold"].get("votes")
        path = f"/v1/jobs/{job_id}/approve"
        stale = cy.ask("POST", path, {"snapshot": old}, status=409)
        assert stale["code"] == "STALE_APPROVAL"
        cy.ask("POST", path, {"snapshot": new})
        assert not made.began(job_id)
        bob.ask("POST", path, {"snapshot": new})
        assert ada.end(job_id)["state"] == "SUCCEEDED"


# -- killed engines ---------------------------------------------------------------
def test_parked_jobs_and_their_votes_and_a_paused_pool_outlive_a_killed_engine(
    tmp_path: Path,
) -> None:
    people = {"ada": "submit operate", "bob": "approve", "cy": "approve"}
    with house(tmp_path, RULES, **people) as made:
        ada, bob, cy = made["ada"], made["bob"], made["cy"]
        job_id = ada.parked(labels={"ask": "two"})
        bob.ask("POST", f"/v1/jobs/{job_id}/approve", {})
        ada.ask("POST", "/v1/pools/default/pause")
        before = ada.get(job_id)["hold"]
        made.reopen()
        assert ada.get(job_id)["hold"] == before
        assert [vote["by"] for vote in before["votes"]] == ["bob"]
        bob.ask("POST", f"/v1/jobs/{job_id}/approve", {}, status=409)
        assert "approved: it goes on" in cy.cli("approve", job_id)
        eventually(lambda: "paused" in ada.why(job_id), "it waits for the pool", PATIENCE)
        made.reopen()
        eventually(lambda: "paused" in ada.why(job_id), "it still waits for it", PATIENCE)
        ada.ask("POST", "/v1/pools/default/resume")
        assert ada.end(job_id)["state"] == "SUCCEEDED"


def test_limits_hold_over_a_killed_engine(tmp_path: Path) -> None:
    with house(tmp_path, RULES, olga="submit operate") as made:
        olga, gate = made["olga"], made.gate("open")
        olga.ask("PUT", "/v1/limits/one", {"labels": {"of": "one"}, "concurrency": 1})
        hourly = {"labels": {"of": "hour"}, "rate": {"count": 2, "per": 3600}}
        olga.ask("PUT", "/v1/limits/hourly", hourly)
        given = {"gate": str(gate)}
        single = [olga.submit("job.chaos.gated", given, labels={"of": "one"}) for _ in range(3)]
        rated = [olga.submit("job.chaos.gated", given, labels={"of": "hour"}) for _ in range(3)]
        eventually(lambda: began(made, single, 1) == 1, "one of them runs", PATIENCE)
        eventually(lambda: began(made, rated, 1) == 2, "two of them run", PATIENCE)
        made.reopen()
        eventually(lambda: began(made, single + rated, 2) == 3, "they run again", PATIENCE)
        for waiting, limit in ((single[-1], "limit one"), (rated[-1], "limit hourly")):
            assert limit in olga.why(waiting)
            assert not made.began(waiting)
        gate.touch()
        for job_id in single + rated[:2]:
            assert olga.end(job_id)["state"] == "SUCCEEDED"
        assert most_at_once(made, single) == 1
        assert not made.began(rated[-1])


def began(house: House, ids: list[str], attempt: int) -> int:
    return sum(house.began(job_id, attempt) for job_id in ids)


def test_a_schedule_outlives_a_killed_engine_and_fires_no_time_twice(tmp_path: Path) -> None:
    with house(tmp_path, RULES, olga="submit operate") as made:
        olga = made["olga"]
        put = {"topic": "job.chaos.quick", "input": {"n": 1}}
        olga.ask(
            "PUT", "/v1/schedules/tick", {"cron": "* * * * * *", "job": put, "catch_up": "all"}
        )
        for fired in (1, 3):
            eventually(
                lambda fired=fired: olga.ask("GET", "/v1/schedules/tick")["fired"] >= fired,  # type: ignore[misc]
                "it fires",
                PATIENCE,
            )
            made.reopen()
        olga.cli("schedule", "pause", "tick")
        jobs = olga.ask("GET", "/v1/jobs?schedule=tick&order=oldest")["jobs"]
        keys = [job["request"]["idempotency_key"] for job in jobs]
        times = [int(datetime.fromisoformat(key.split(":", 2)[2]).timestamp()) for key in keys]
        assert times == [*range(times[0], times[0] + len(times))]
        assert len(times) >= 3
        assert olga.ask("GET", "/v1/schedules/tick")["fired"] == len(times)
