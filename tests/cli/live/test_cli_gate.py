"""Approvals, keys, schedules, limits, pools, the audit log and jobs in bulk, as typed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.cli.commands import Penstock
from tests.support.waiting import eventually

RULES = """
default = "allow"

[[rules]]
id = "two-people"
labels = { ask = "two" }
decision = "require_approval"
approval = { needed = 2, self_approval = true }

[[rules]]
id = "not-yourself"
labels = { ask = "other" }
decision = "require_approval"
approval = { approvers = ["team-*"] }

[[rules]]
id = "no"
labels = { ask = "never" }
decision = "deny"
reason = "not here"
"""


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    """An engine with rules, that this module's tests share."""
    shared = Penstock(tmp_path_factory.mktemp("gated"))
    (shared.folder / "rules.toml").write_text(RULES)
    with shared.up("--app", "jobs:app", "--rules", "rules.toml", "--http", "127.0.0.1:0"):
        yield shared


def address(penstock: Penstock) -> str:
    return next(word for word in penstock.banner.split() if word.startswith("http://"))


def key(penstock: Penstock, name: str, *args: str) -> tuple[str, ...]:
    """The options with which somebody comes in by the network."""
    token = penstock.out("key", "create", name, *args)
    return ("--connect", address(penstock), "--token", token)


def parked(penstock: Penstock, ask: str = "two") -> str:
    job_id = penstock.submit("job.text.shout", {"text": "hi"}, "--label", f"ask={ask}")
    eventually(lambda: penstock.json("ps", "--awaiting-approval", "--label", f"ask={ask}"))
    return job_id


# Approvals


def test_a_parked_job_goes_on_when_enough_people_said_yes(gated: Penstock) -> None:
    job_id = parked(gated)
    assert "0/2" in gated.out("job", "list", "--awaiting-approval")
    assert gated.out("approve", job_id) == f"{job_id} approved by 1 of 2: 1 more needed"
    assert "already" in gated.err("approve", job_id, code=4)
    bob = key(gated, "bob", "--role", "approve")
    assert gated.out("approve", job_id, *bob) == f"{job_id} approved: it goes on"
    assert gated.out("result", "--wait", job_id) == '"HI!"'
    assert gated.json("ps", "--awaiting-approval") == []


def test_show_tells_of_a_parked_job_whose_word_it_takes_until_when(gated: Penstock) -> None:
    job_id = parked(gated, "other")
    shown = gated.out("show", job_id)
    assert "require_approval by rule not-yourself, snapshot " in shown
    assert "0 of 1 approval; team-* may approve, until " in shown
    assert "team-*" in gated.out("job", "list", "--awaiting-approval")
    gated("cancel", job_id)


def test_whoever_is_not_asked_may_not_approve(gated: Penstock) -> None:
    job_id = parked(gated, "other")
    assert "owner" in gated.err("approve", job_id, code=6)
    team = key(gated, "team-a", "--role", "approve")
    gated("approve", job_id, *team)
    assert gated.out("result", "--wait", job_id) == '"HI!"'


def test_an_approval_of_other_rules_than_those_looked_at_is_refused(gated: Penstock) -> None:
    job_id = parked(gated)
    refusal = gated.err("approve", job_id, "--snapshot", "000000000000", code=4)
    assert job_id in refusal
    snapshot = gated.json("show", job_id)["hold"]["snapshot"]
    assert gated.out("approve", job_id, "--snapshot", snapshot)
    gated("reject", job_id)


def test_a_rejected_job_ends_denied_with_the_reason(gated: Penstock) -> None:
    job_id = parked(gated)
    assert gated.out("reject", job_id, "--reason", "too late") == f"{job_id} rejected"
    assert "too late" in gated.err("result", job_id, code=6)
    assert "DENIED" in gated.out("show", job_id)


def test_jobs_are_approved_and_rejected_by_what_they_have_in_common(gated: Penstock) -> None:
    label = ("--label", "ask=other")
    first, second = parked(gated, "other"), parked(gated, "other")
    assert "give --yes" in gated.err("approve", *label, code=2)
    assert "no jobs selected" in gated.err("approve", code=2)
    team = key(gated, "team-b", "--role", "approve")
    told = gated.out("approve", *label, "--yes", *team).splitlines()
    assert sorted(told) == sorted(f"{one} approved: it goes on" for one in (first, second))
    third = parked(gated, "other")
    assert gated.out("reject", *label, "--yes", *team) == f"{third} rejected"
    assert gated.out("reject", *label, "--yes", *team) == ""


def test_the_first_that_does_not_work_out_decides_the_exit_code(gated: Penstock) -> None:
    one, two = parked(gated), parked(gated)
    done = gated("reject", "missing-job", "-", code=3, given=f"{one}\n{two}\n")
    assert done.stdout.split() == [one, "rejected", two, "rejected"]
    answers = gated.json("approve", one, code=4)
    assert answers[0]["error"] == "CONFLICT"


# Keys


def test_a_token_is_printed_once_and_alone(gated: Penstock) -> None:
    done = gated("key", "create", "ci", "--role", "submit", "--tenant", "acme", "--expires", "1d")
    token = done.stdout.strip()
    assert token.startswith("pst_")
    assert "not shown again" in done.stderr
    assert token not in done.stderr
    listed = gated.out("key", "list")
    _, key_id, secret = token.split("_", 2)  # a secret may have one, too
    assert key_id in listed
    assert secret not in listed
    (entry,) = [one for one in gated.json("key", "list") if one["name"] == "ci"]
    assert (entry["roles"], entry["tenant"]) == (["submit"], "acme")


def test_a_revoked_key_is_worth_nothing(gated: Penstock) -> None:
    eve = key(gated, "eve", "--role", "operate")
    assert gated.json("pool", "list", *eve)
    assert "(eve) revoked" in gated.out("key", "delete", "eve")
    assert "not valid" in gated.err("pool", "list", *eve, code=6)
    assert "revoked" in gated.out("key", "list")
    assert "no" in gated.err("key", "delete", "eve", code=3)


def test_a_key_that_is_given_over_the_socket_counts_and_not_the_owners_rights(
    gated: Penstock,
) -> None:
    token = gated.out("key", "create", "sue", "--role", "submit")
    job_id = gated.out("submit", "job.text.shout", "--input", '{"text": "x"}', "--token", token)
    assert gated.json("show", job_id)["request"]["principal"] == "sue"
    assert "admin" in gated.err("key", "list", "--token", token, code=6)
    assert "not valid" in gated.err("ps", "--token", "pk_wrong_one", code=6)


def test_a_key_without_the_role_is_told_which_it_takes(gated: Penstock) -> None:
    joe = key(gated, "joe", "--role", "submit")
    assert "role operate" in gated.err("pool", "pause", "default", *joe, code=6)
    assert "role" in gated.err("key", "create", "x", "--role", "king", code=2)


# Schedules


def test_a_schedule_fires_and_tells_of_it(gated: Penstock) -> None:
    given = ("--input", '{"text": "tick"}', "--label", "from=clock")
    put = gated.out("schedule", "create", "tick", "* * * * * *", "job.text.shout", *given)
    assert put.startswith("tick fires next ")
    assert " UTC (in " in put
    eventually(lambda: len(gated.json("ps", "--schedule", "tick")) > 1)
    assert gated.out("schedule", "pause", "tick") == "tick is paused"
    jobs = gated.json("ps", "--schedule", "tick", "--all")
    keys = [job["request"]["idempotency_key"] for job in jobs]
    assert len({*keys}) == len(keys)
    assert gated.out("result", "--wait", jobs[0]["job_id"]) == '"TICK!"'
    view = gated.json("schedule", "show", "tick")
    assert view["fired"] == len(jobs)
    assert "paused" in gated.out("schedule", "list")
    gated("schedule", "delete", "tick")
    assert "no schedule 'tick'" in gated.err("schedule", "show", "tick", code=3)


def test_a_schedule_is_shown_on_its_own_wall_clock(gated: Penstock) -> None:
    cron = ("30 7 * * *", "job.text.talk", "--timezone", "Europe/Berlin", "--no-overlap")
    gated("schedule", "create", "daily", *cron)
    shown = gated.out("schedule", "show", "daily")
    assert " 07:30:00 CE" in shown
    assert "no: a time is skipped" in shown
    job_id = gated.out("schedule", "fire", "daily")
    assert gated.out("result", "--wait", job_id) == "3"
    gated("schedule", "pause", "daily")
    assert gated.out("schedule", "resume", "daily").startswith("daily fires next ")
    gated("schedule", "delete", "daily")


def test_what_is_wrong_with_a_schedule_is_named(gated: Penstock) -> None:
    for args, words in {
        ("61 * * * *", "job.text.talk"): "cron: '61 * * * *': minute '61' is not valid",
        ("0 0 30 2 *", "job.text.talk"): "never fires",
        ("@daily", "talk"): "request.topic: 'talk' is not a valid topic",
        ("@daily", "job.text.talk", "--timezone", "Berlin"): "did you mean Europe/Berlin?",
        ("@daily", "job.text.talk", "--input", "["): "--input",
        ("@daily", "job.text.talk", "--timeout", "0"): "timeout",
    }.items():
        assert words in gated.err("schedule", "create", "bad", *args, code=2)
    assert gated.json("schedule", "list") == []


# Limits


def test_a_limit_holds_jobs_back_and_says_so(gated: Penstock) -> None:
    args = ("--per", "tenant", "--topic", "job.wait.*", "--concurrency", "1", "--max-waiting", "1")
    assert gated.out("limit", "create", "one", *args) == "one: 1 at once, 1 waiting"
    first, gate = gated.held("limited")
    second = gated.submit("job.wait.file", {"path": str(gate)})
    eventually(lambda: "limit one" in gated.json("show", second)["why"])
    refusal = gated.err("submit", "job.wait.file", "--input", f'{{"path": "{gate}"}}', code=11)
    assert "one" in refusal
    (view,) = gated.json("limit", "list")
    assert (view["uses"][0]["running"], view["uses"][0]["waiting"]) == (1, 1)
    assert "job.wait.*, by tenant" in gated.out("limit", "list")
    gate.touch()
    for job_id in (first, second):
        assert gated.out("result", "--wait", job_id) == '"it came"'
    gated("limit", "delete", "one")
    assert "no limit 'one'" in gated.err("limit", "delete", "one", code=3)


def test_a_limit_that_limits_nothing_is_refused(gated: Penstock) -> None:
    assert "--concurrency" in gated.err("limit", "create", "x", code=2)
    assert "10/m" in gated.err("limit", "create", "x", "--rate", "often", code=2)
    assert "label:NAME" in gated.err(
        "limit", "create", "x", "--rate", "1/s", "--per", "age", code=2
    )


# Pools


def test_a_drained_pool_holds_nothing_and_takes_nothing(gated: Penstock) -> None:
    job_id, gate = gated.held("drained")
    with gated.start("pool", "drain", "default") as draining:
        eventually(lambda: gated.json("pool", "list")[0]["paused"])
        late = gated.submit("job.text.shout", {"text": "late"})
        gate.touch()
        out, _ = draining.communicate(timeout=30)
    assert (draining.returncode, out.strip()) == (0, "default is paused and holds nothing")
    assert gated.state(job_id) == "SUCCEEDED"
    assert "paused" in gated.json("show", late)["why"]
    assert gated.out("pool", "resume", "default") == "default resumed"
    assert gated.out("result", "--wait", late) == '"LATE!"'


def test_patience_and_ctrl_c_leave_a_pool_paused(gated: Penstock) -> None:
    job_id, gate = gated.held("impatient")
    assert "still holds 1 job" in gated.out(
        "pool", "drain", "default", "--wait-timeout", "0", code=9
    )
    with gated.start("pool", "drain", "default") as draining:
        eventually(lambda: _drains(gated, job_id))
        draining.send_signal(signal.SIGINT)
        _, err = draining.communicate(timeout=30)
    assert draining.returncode == 130
    assert "default stays paused" in err
    assert gated.json("pool", "list")[0]["paused"]
    gate.touch()
    gated("pool", "resume", "default")
    gated.out("result", "--wait", job_id)


def _drains(penstock: Penstock, job_id: str) -> bool:
    actions = [entry["action"] for entry in penstock.json("audit", "--action", "pool.*")]
    return actions[:2] == ["pool.pause", "pool.pause"] and penstock.state(job_id) == "RUNNING"


# Jobs in bulk


def test_dead_jobs_are_listed_and_retried_together(gated: Penstock) -> None:
    label = ("--label", "batch=dead")
    for _ in range(3):
        gated("submit", "job.text.fail", *label, "--wait", code=1)
    dead = gated.out("job", "list", "--dead", "-q", *label).split()
    assert len(dead) == 3
    assert "give --yes" in gated.err("job", "retry", *label, code=2)
    assert "filters or --all" in gated.err("job", "retry", "--yes", code=2)
    assert gated.out("job", "retry", *label, "--yes") == "retried 3 of 3 jobs"
    eventually(lambda: len(gated.json("job", "list", "--dead", *label)) == 3)
    again = gated.json("job", "list", "--dead", *label)
    assert {job["request"]["parent_job_id"] for job in again} == {*dead}
    assert "ValueError" in gated.out("job", "list", "--dead", *label)


def test_jobs_are_cancelled_by_what_they_have_in_common(gated: Penstock) -> None:
    label = ("--label", "batch=doomed")
    ids = [
        gated.submit("job.wait.file", {"path": str(gated.folder / "never")}, *label)
        for _ in range(3)
    ]
    other, gate = gated.held("spared")
    assert "give --yes" in gated.err("cancel", *label, code=2)
    assert "no jobs selected" in gated.err("cancel", *label, *ids, code=2)
    assert "no jobs selected" in gated.err("cancel", code=2)
    assert "FAILED" in gated.err("cancel", "--state", "failed", "--yes", code=2)
    assert gated.out("cancel", *label, "--yes", "--reason", "doom") == "asked 3 of 3 jobs to end"
    eventually(lambda: {gated.state(job_id) for job_id in ids} == {"CANCELLED"})
    assert gated.state(other) == "RUNNING"
    gate.touch()
    gated.out("result", "--wait", other)


def test_on_a_terminal_one_is_asked_first(gated: Penstock) -> None:
    label = ("--label", "batch=asked")
    job_id = gated.submit("job.text.shout", {"text": "a"}, *label, "--delay", "1h")
    for answer, state in ((b"n\n", "SCHEDULED"), (b"y\n", "CANCELLED")):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", "cancel", *label],
            cwd=gated.folder,
            env=gated.env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        ) as process:
            os.close(theirs)
            asked = b""
            while b"?" not in asked:
                asked += os.read(ours, 1000)
            assert b"cancel 1 job?" in asked
            os.write(ours, answer)
            assert process.wait(30) == 0
        os.close(ours)
        eventually(lambda state=state: gated.state(job_id) == state)  # type: ignore[misc]


# Submitting


def test_a_job_waits_for_its_parents(gated: Penstock) -> None:
    parent, gate = gated.held("parent")
    child = gated.submit("job.text.shout", {"text": "child"}, "--after", parent[-8:])
    shown = gated.out("show", child)
    assert f"{parent[-8:]} RUNNING; if one fails: cancel" in shown
    gate.touch()
    assert gated.out("result", "--wait", child) == '"CHILD!"'
    assert "after[0]" in gated.err("submit", "job.text.talk", "--after", "nobody", code=2)
    assert "--after" in gated.err("submit", "job.text.talk", "--if-parent-fails", "run", code=2)


def test_a_unique_job_is_there_once(gated: Penstock) -> None:
    first = gated.submit("job.text.shout", {"text": "a"}, "--unique", "k", "--unique-for", "1h")
    again = gated.submit("job.text.shout", {"text": "a"}, "--unique", "k", "--unique-for", "1h")
    assert first == again
    assert "k, for 1h 00m" in gated.out("show", first)
    assert "--unique KEY" in gated.err("submit", "job.text.talk", "--unique-for", "1h", code=2)


def test_what_rules_look_at_is_kept_and_the_verdict_is_shown(gated: Penstock) -> None:
    given = ("--capability", "repo.write", "--risk-tag", "net", "--cost", "2.5", "--label")
    done = gated("submit", "job.text.talk", *given, "ask=never", "--wait", "--json", code=6)
    assert "not here" in done.stderr
    (job,) = gated.json("ps", "--label", "ask=never")
    shown = gated.out("show", job["job_id"])
    for words in ("deny by rule no, snapshot", "not here", "repo.write", "net", "2.5"):
        assert words in shown


# The audit log


def test_the_audit_log_tells_who_did_what_and_what_was_refused(gated: Penstock) -> None:
    key(gated, "oscar", "--role", "submit")  # so that there are older entries, whatever ran before
    mallory = key(gated, "mallory", "--role", "submit")
    gated.err("key", "list", *mallory, code=6)
    gated.err("pool", "pause", "default", *mallory, code=6)
    entries = gated.json("audit", "--who", "mallory")
    assert ("pool.pause", "refused") in {(one["action"], one["outcome"]) for one in entries}
    made = gated.json("audit", "--action", "key.*", "--subject", "mallory")
    assert [one["principal"] for one in made] == ["owner"]
    assert "refused" in gated.out("audit", "--who", "mallory")
    newest = gated.json("audit", "--limit", "2")
    older = gated.json("audit", "--limit", "2", "--before", str(newest[-1]["n"]))
    assert older[0]["n"] < newest[-1]["n"]
