"""One grammar: a verb, an option and Ctrl-C mean the same for every noun."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import click
import msgspec
import pytest
from tests.cli.live.test_cli_help import commands
from tests.support.cli.commands import Penstock, said
from tests.support.rows import every
from tests.support.waiting import eventually

from penstock.cli.exits import Exit
from penstock.cli.options import SIZE

VERBS = {
    *("list", "show", "create", "delete", "start", "submit", "run", "status", "watch", "result"),
    *("cancel", "retry", "pause", "resume", "drain", "prune", "approve", "reject", "logs"),
    *("serve", "wait", "up", "add", "pull", "load", "import", "fire", "check", "reload", "reset"),
    *("explain", "simulate", "prepare", "migrate", "copy", "verify"),
}
PARTS = {"artifacts", "steps", "runs", "items", "engines", "key"}
"""What a noun has, where the command lists or prints it."""
SHOWN = [name for name in commands() if name.split()[-1] in ("list", "show", "ps", "runs")]
SHOWN += ["audit", "job steps", "job artifacts", "pipeline items", "pipeline status"]
LISTS = ["job list", "worker list", "pool list", "topic list", "schedule list", "limit list"]
LISTS += ["key list", "pipeline list", "pipeline runs", "batch list", "model list", "audit"]


def options(name: str) -> dict[str, click.Option]:
    return {
        opt: option
        for option in commands()[name].params
        if isinstance(option, click.Option)
        for opt in option.opts
    }


@every("name", [name for name in commands() if " " in name])
def test_what_follows_a_noun_is_one_of_few_verbs(name: str) -> None:
    assert name.split()[-1] in VERBS | PARTS


@every("name", SHOWN)
def test_every_list_and_show_has_json_and_a_format(name: str) -> None:
    assert {"--json", "-o", "--format"} <= {*options(name)}


@every("name", commands())
def test_an_option_means_the_same_everywhere(name: str) -> None:
    given = options(name)
    if "--key" in given:
        assert (given["--key"].help or "").startswith("Idempotency key")
    if "--timeout" in given:
        assert given["--timeout"].help == "Maximum run time of one attempt."
    if "--memory" in given:
        assert given["--memory"].type is SIZE
    if "-n" in given:
        assert "--limit" in given["-n"].opts
    if "--wait-timeout" in given:
        assert given["--wait-timeout"].name == "wait_timeout"
    assert "--config" not in given  # the settings file, before the command


FILTERS = {"--topic", "--tenant", "--label", "--workflow", "--newer-than", "--older-than"}


@every("name", ["ps", "cancel", "retry", "approve", "reject"])
def test_every_act_on_several_jobs_has_the_filters_of_the_list(name: str) -> None:
    assert {*FILTERS, "--all"} <= {*options(name)}
    assert name == "ps" or "--yes" in options(name)


@every("name", commands())
def test_what_several_commands_share_is_the_same_option(name: str) -> None:
    shared = {"json", "form", "quiet", "reason", "yes", "verbose", "wait_timeout", "states"}
    for parameter in commands()[name].params:
        if parameter.name in shared and name != "spool list":
            assert parameter.opts == SAME.setdefault(parameter.name, parameter.opts)
            assert parameter.type.name == TYPES.setdefault(parameter.name, parameter.type.name)


SAME: dict[str, list[str]] = {}
TYPES: dict[str, str] = {}


@every("name", [name for name in commands() if name.endswith(" list")])
def test_what_can_be_listed_can_be_shown(name: str) -> None:
    noun = name.removesuffix(" list")
    shown = {f"{noun} show", f"{noun} status", f"{noun} result"}
    assert noun in ("topic", "container image") or shown & {*commands()}


@every("name", ["submit", "run", "pipeline start", "pipeline retry", "batch submit"])
def test_what_starts_something_can_wait_or_detach(name: str) -> None:
    wait = options(name)["--wait"]
    assert wait.secondary_opts == ["--detach", "-d"]
    assert "--wait-timeout" in options(name) or name == "run"


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_printed_as_names_wide_or_json(running: Penstock, name: str) -> None:
    running.submit("job.text.shout", {"text": "x"}, "--wait")
    words = name.split()
    values = running.json(*words)
    assert isinstance(values, list)
    assert running.json(*words, "-o", "json") == values or name == "worker list"
    if name != "audit":
        names = running.out(*words, "-o", "name").splitlines()
        assert len(names) == len(values)
        assert running.out(*words, "-q").splitlines() == names
    running(*words, "-o", "wide")


def test_the_status_tells_that_no_engine_runs_and_how_to_start_one(penstock: Penstock) -> None:
    told = penstock("status", code=8).stdout
    assert "not running" in told
    assert "penstock up --app" in told
    assert penstock.json("status", code=8)["running"] is False


def test_the_status_tells_what_needs_a_person(penstock: Penstock) -> None:
    with penstock.up("--app", "jobs:app") as process:
        assert "needs attention" not in penstock.out("status")
        penstock("submit", "job.text.fail", "--wait", code=1)
        penstock("pool", "pause", "default")
        told = penstock.out("status")
        assert f"process {process.pid}" in told
        assert "FAILED 1" in told
        assert "1 job failed or timed out, not retried: penstock ps --dead" in told
        assert "pool default is paused: penstock pool resume default" in told
        view = penstock.json("status")
        assert (view["running"], view["dead"], len(view["needs"])) == (True, 1, 2)


def test_down_lets_a_running_job_finish_and_waits_for_the_end(penstock: Penstock) -> None:
    with penstock.up("--app", "jobs:app") as process:
        job_id, gate = penstock.held("slow")
        with penstock.start("down") as stopping:
            eventually(lambda: "finishing" in said(process, "finishing"))
            assert stopping.poll() is None
            gate.touch()
            assert stopping.wait(30) == 0
        assert process.wait(30) == 0
        assert penstock.state(job_id) == "SUCCEEDED"
    assert "no engine answers" in penstock.err("down", code=8)


def test_down_says_when_the_engine_takes_longer(penstock: Penstock) -> None:
    with penstock.up("--app", "jobs:app") as process:
        _, gate = penstock.held("longer")
        assert "has not ended yet" in penstock.err("down", "--wait-timeout", "100ms", code=9)
        gate.touch()
        assert process.wait(30) == 0


def test_topics_are_listed_with_their_pools(running: Penstock) -> None:
    told = {one["topic"]: one["pools"] for one in running.json("topic", "list")}
    assert told["job.text.shout"] == "default"


def test_a_worker_is_shown_and_drained(penstock: Penstock) -> None:
    with penstock.up("--no-worker"):
        with penstock.start("worker", "--app", "jobs:app", "--id", "one") as worker:
            eventually(lambda: penstock.json("worker", "list"))
            assert penstock.json("worker", "show", "one")["worker_id"] == "one"
            assert "job.text.shout" in penstock.out("worker", "show", "one")
            assert "one is draining" in penstock.out("worker", "drain", "one")
            assert worker.wait(30) == 0
        assert "no worker 'one'" in penstock.err("worker", "show", "one", code=3)


def test_events_tell_what_happens_to_every_job(running: Penstock) -> None:
    with running.start("events", "--json", "--topic", "job.text.*") as following:
        assert following.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(following.stdout), daemon=True)
        reader.start()

        def seen() -> bool:
            running.submit("job.text.shout", {"text": "x"}, "--wait")
            return any('"SUCCEEDED"' in line for line in lines)

        eventually(seen)
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 130
        reader.join(10)
    events = [msgspec.json.decode(line) for line in lines]
    assert {one["topic"] for one in events} == {"job.text.shout"}
    assert all(isinstance(one["cursor"], int) for one in events)


def test_ctrl_c_cancels_the_job_that_a_command_submitted_and_waits_for(running: Penstock) -> None:
    gate = running.folder / "interrupted"
    given = msgspec.json.encode({"path": str(gate)}).decode()
    args = ("job.wait.file", "--input", given, "--id", "interrupted", "--wait")
    # A job may start before its caller has the answer, and the caller is to be interrupted after.
    with running.start("submit", *args, "--delay", "1s") as waiting:
        eventually(lambda: Path(f"{gate}.started").exists())
        waiting.send_signal(signal.SIGINT)
        _, err = waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    assert "cancelling" in err
    assert running.state("interrupted") == "CANCELLED"


def test_ctrl_c_leaves_a_job_alone_that_is_only_watched(running: Penstock) -> None:
    job_id, gate = running.held("watched")
    with running.start("watch", job_id, stderr=subprocess.DEVNULL) as watching:
        said(watching, "RUNNING")
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=30)
    assert running.state(job_id) == "RUNNING"
    gate.touch()


def test_a_pipeline_that_no_worker_serves_says_how_to_serve_one(running: Penstock) -> None:
    told = running("pipeline", "start", "nope", "-d", code=Exit.NOT_FOUND).stderr
    hint = "no worker serves a pipeline: start one with 'penstock up --app MODULE:APP'"
    assert told == f"penstock: no pipeline 'nope'\n  {hint}\n"
