"""Submitting jobs and asking about them, with a running engine."""

from __future__ import annotations

import re

import msgspec
from tests.support.cli.commands import Penstock

MISSING = "01" + "0" * 24


# Submitting


def test_submit_prints_the_id_and_nothing_else(running: Penstock) -> None:
    job_id = running.submit("job.text.shout", {"text": "hello"})
    assert running.out("result", "--wait", job_id) == '"HELLO!"'


def test_submit_and_wait_prints_the_result(running: Penstock) -> None:
    assert running.submit("job.text.shout", {"text": "hello"}, "--wait") == '"HELLO!"'


def test_a_failed_job_is_exit_code_1_and_its_error_is_told(running: Penstock) -> None:
    said = running.err("submit", "job.text.fail", "--input", '{"why": "tired"}', "--wait", code=1)
    assert said.startswith("penstock: job ")
    assert "FAILED: ValueError: tired" in said


def test_a_job_that_takes_too_long_is_exit_code_7(running: Penstock) -> None:
    given = f'{{"path": "{running.folder}/never"}}'
    args = ("job.wait.file", "--input", given, "--timeout", "50ms", "--wait")
    assert "TIMEOUT" in running.err("submit", *args, code=7)


def test_patience_that_ends_is_exit_code_9_and_the_job_goes_on(running: Penstock) -> None:
    job_id, gate = running.held("patience")
    assert "still RUNNING" in running.err("result", "--wait-timeout", "10ms", job_id, code=9)
    assert "--wait waits for it" in running.err("result", job_id, code=9)
    gate.touch()
    assert running.out("result", "--wait", job_id) == '"it came"'


def test_input_comes_from_a_file_or_from_standard_input(running: Penstock) -> None:
    (running.folder / "input.json").write_text('{"text": "file"}')
    args = ("submit", "job.text.shout", "--wait", "--input")
    assert running.out(*args, "@input.json") == '"FILE!"'
    assert running.out(*args, "-", given='{"text": "pipe"}') == '"PIPE!"'


def test_each_line_becomes_a_job(running: Penstock) -> None:
    lines = "\n".join(f'{{"text": "{n}"}}' for n in range(5))
    ids = running.out("submit", "job.text.shout", "--each", "-", given=lines).split()
    assert len({*ids}) == 5
    assert running.out("result", "--wait", ids[3]) == '"3!"'


def test_a_bad_line_is_named_and_nothing_is_submitted(running: Penstock) -> None:
    label = ("--label", "batch=bad")
    said = running.err(
        "submit", "job.text.shout", *label, "--each", "-", given='{"text": "a"}\n{oops', code=2
    )
    assert "--each: line 2: not valid JSON" in said
    assert running.json("ps", *label) == []


def test_what_is_wrong_with_an_option_is_said_with_its_name(running: Penstock) -> None:
    for args, words in {
        ("--input", "{"): "--input: not valid JSON",
        ("--input", "[1]"): "--input: expected a JSON object",
        ("--input", "@missing.json"): "--input: can't read missing.json",
        ("--timeout", "soon"): "'--timeout': 'soon' is not a duration",
        ("--timeout", "0"): "timeout: 0 is out of range",
        ("--deadline", "never"): "'--deadline': 'never' is not a time",
        ("--deadline", "2001-01-01"): "deadline: is already past",
        ("--label", "x"): "'--label': 'x' is not KEY=VALUE",
        ("--retries", "-1"): "--retries",
        ("--priority", "urgent"): "--priority",
        ("--id", "no good"): "job_id: 'no good' is not a valid id",
        ("--app", "jobs"): "'jobs' is not an application",
        ("--app", "jobs:ap"): "did you mean jobs:app?",
    }.items():
        assert words in running.err("submit", "job.text.shout", *args, code=2)


def test_an_unknown_topic_is_refused_with_the_nearest_one(running: Penstock) -> None:
    assert "did you mean job.text.shout?" in running.err("submit", "job.text.shot", code=2)


def test_with_the_application_at_hand_arguments_are_checked_first(running: Penstock) -> None:
    args = ("submit", "job.text.shout", "--app", "jobs:app", "--input")
    assert "text" in running.err(*args, '{"txt": "a"}', code=2)
    assert running.out(*args, '{"text": "a"}', "--wait") == '"A!"'


def test_the_same_id_is_the_same_job_and_another_request_is_a_conflict(running: Penstock) -> None:
    first = running.submit("job.text.shout", {"text": "a"}, "--id", "mine")
    assert first == "mine"
    assert running.submit("job.text.shout", {"text": "a"}, "--id", "mine") == "mine"
    args = ("submit", "job.text.shout", "--input", '{"text": "b"}', "--id", "mine")
    assert "is taken by a different request" in running.err(*args, code=4)


def test_every_field_of_a_request_can_be_said(running: Penstock) -> None:
    options = (
        *("--priority", "critical", "--env", "A=1", "--env", "B=x=y", "--label", "k=v"),
        *("--key", "once", "--timeout", "5m", "--deadline", "+1h", "--delay", "0", "--retries"),
        *("2", "--idempotent", "--tenant", "acme", "--parent", "p", "--workflow", "w"),
        *("--step", "3", "--id", "full", "--detached"),
    )
    running.submit("job.text.shout", {"text": "a"}, *options, "--wait")
    request = running.json("show", "full")["request"]
    deadline, run_at = request.pop("deadline"), request.pop("run_at")
    assert 3500 < deadline - run_at < 3700
    assert request.pop("context_ptr").startswith("data:")
    assert request == {
        "job_id": "full",
        "topic": "job.text.shout",
        "complete": True,
        "priority": "critical",
        "env": {"A": "1", "B": "x=y"},
        "parent_job_id": "p",
        "child_of": "p",
        "detached": True,
        "workflow_id": "w",
        "step_index": 3,
        "tenant": "acme",
        "labels": {"k": "v"},
        "idempotency_key": "once",
        "timeout": 300.0,
        "retry": {"retries": 2},
        "idempotent": True,
        "principal": "owner",
    }


# Looking


def test_ps_lists_the_newest_first_and_filters(running: Penstock) -> None:
    options = ("--tenant", "lister", "--label", "round=1")
    ids = ["la", "lb", "lc"]
    for job_id in ids:
        running.submit("job.text.shout", {"text": "a"}, *options, "--id", job_id)
    running.submit("job.text.fail", {}, "--tenant", "lister", "--id", "ld")
    running("result", "--wait", "ld", code=1)

    def listed(*args: str) -> list[str]:
        return [job["job_id"] for job in running.json("ps", "--tenant", "lister", *args)]

    assert listed() == ["ld", "lc", "lb", "la"]
    assert listed("--label", "round=1") == ids[::-1]
    assert listed("--state", "failed") == ["ld"]
    assert listed("--topic", "job.*.fail") == ["ld"]
    assert listed("--limit", "2") == ["ld", "lc"]
    before = running.json("ps", "--tenant", "lister", "--limit", "2")[-1]["seq"]
    assert listed("--before", str(before)) == ["lb", "la"]
    assert listed("--all", "--limit", "1") == ["ld", "lc", "lb", "la"]
    assert listed("--active") == []
    assert running.out("ps", "-q", "--tenant", "lister").split() == ["ld", "lc", "lb", "la"]


def test_a_table_in_a_pipe_is_not_cut_short(running: Penstock) -> None:
    why = "a very long reason " * 20
    job_id = running.submit("job.text.fail", {"why": why}, "--tenant", "long")
    running("result", "--wait", job_id, code=1)
    assert f"{job_id}  FAILED" in running.out("ps", "--tenant", "long")
    assert why.strip() in running.out("ps", "--tenant", "long")
    assert "\x1b" not in running.out("ps", "--tenant", "long")


def test_a_workflow_comes_in_the_order_of_its_steps(running: Penstock) -> None:
    for step in "201":
        options = ("--workflow", "flow", "--step", step, "--id", f"flow@{step}")
        running.submit("job.text.shout", {"text": "a"}, *options)
    assert running.out("ps", "-q", "--workflow", "flow").split() == ["flow@0", "flow@1", "flow@2"]


def test_a_waiting_job_says_what_it_waits_for(running: Penstock) -> None:
    job_id = running.submit("job.text.shout", {"text": "a"}, "--delay", "1h", "--tenant", "later")
    assert "delayed:" in running.out("ps", "--tenant", "later")
    assert "delayed:" in running.json("show", job_id)["why"]
    assert "delayed:" in running.out("top")


def test_top_shows_the_last_hour_its_failures_and_what_needs_a_person(running: Penstock) -> None:
    running.err("submit", "job.text.fail", "--input", '{"why": "tired"}', "--wait", code=1)
    shown = running.out("top")
    assert re.search(r"last hour: ended [1-9]", shown)
    assert "wait p50" in shown
    assert re.search(r"job\.text\.fail +ValueError", shown)
    assert "needs attention" in shown
    assert re.search("not retried: penstock .*ps --dead", shown)


def test_show_tells_the_whole_history(running: Penstock) -> None:
    job_id = running.submit("job.text.shout", {"text": "a"})
    running("result", "--wait", job_id)
    told = running.json("show", job_id)
    assert [entry["after"] for entry in told["history"]] == [
        "PENDING",
        "SCHEDULED",
        "DISPATCHED",
        "RUNNING",
        "SUCCEEDED",
    ]
    page = running.out("show", job_id)
    for words in (job_id, '{"text":"a"}', '"A!"', "dispatch 1", "worker:local-", "scheduler"):
        assert words in page


def test_a_retried_job_shows_its_chain_and_its_result_is_the_last_ones(running: Penstock) -> None:
    first = running.submit("job.text.fail", {})
    running("result", "--wait", first, code=1)
    second = running.out("retry", first)
    running("result", "--wait", second, code=1)
    assert running.json("show", first)["chain"] == [first, second]
    assert running.json("show", second)["chain"] == [first, second]
    assert f"job {second} ended FAILED" in running.err("result", first, code=1)
    third = running.out("retry", first)
    assert running.json("show", third)["chain"] == [first, second, third]


def test_a_listing_has_one_line_for_a_job_and_its_retries(running: Penstock) -> None:
    only = ("--topic", "job.text.fail", "--tenant", "folded")
    first = running.submit("job.text.fail", {}, "--tenant", "folded")
    running("result", "--wait", first, code=1)
    second = running.out("retry", first)
    running("result", "--wait", second, code=1)
    other = running.submit(
        "job.text.fail", {}, "--tenant", "folded", "--parent", second, "--detached"
    )
    running("result", "--wait", other, code=1)
    assert running.out("ps", "-q", *only).split() == [other, first]
    assert running.out("ps", "-q", "--state", "failed", *only).split() == [other, first]
    assert running.out("job", "list", "--dead", "-q", *only).split() == [other, first]
    assert running.out("ps", "-q", "--tries", *only).split() == [other, second, first]
    assert [job["job_id"] for job in running.json("ps", *only)] == [other, second]
    header, _, line = running.out("ps", *only).splitlines()
    assert "TRIES" in header
    assert line.split()[:5] == [first, "FAILED", "job.text.fail", "batch", "folded"]
    assert line.split()[5] == "2"
    for name in (first, second):
        assert running.out("ps", "-q", "--parent", name) == other
        page = running.out("show", name)
        assert page.startswith(f"job {first}  FAILED  2 tries\n")
        assert f"retry of {first}" in page, "the history is the newest try's"
        assert f"retried as {second}" not in page
        tries = [line.split()[:3] for line in page.splitlines() if line.startswith("  ")]
        assert [["1", first, "FAILED"], ["2", second, "FAILED"]] == tries[-2:]
        assert re.search(rf"^  children +1 FAILED$.*^{other} ", page, re.M | re.S)
        assert running.json("show", name)["children"] == {"FAILED": 1}
        assert f"retried as {second}" in running.out("show", name, "--tries")


def test_logs_go_on_with_what_the_retries_wrote(running: Penstock) -> None:
    first = running.submit("job.text.fail", {})
    running("result", "--wait", first, code=1)
    second = running.out("retry", first)
    running("result", "--wait", second, code=1)
    for follow in ((), ("--follow",)):
        assert running.out("logs", first, *follow).count("Traceback") == 2
        assert f"try 2 is {second}" in running("logs", first, *follow).stderr
        assert running.out("logs", second, *follow).count("Traceback") == 1


def test_a_job_can_be_named_by_its_end_or_its_beginning(running: Penstock) -> None:
    job_id = running.submit("job.text.shout", {"text": "a"}, "--id", "a-name-of-its-own")
    assert running.json("show", "its-own")["job_id"] == job_id
    assert running.json("show", "a-name-of")["job_id"] == job_id


def test_a_name_that_could_be_several_jobs_is_refused(running: Penstock) -> None:
    for n in "12":
        running.submit("job.text.shout", {"text": "a"}, "--id", f"twin-{n}")
    said = running.err("show", "twin", code=2)
    assert "twin-1" in said
    assert "twin-2" in said


def test_what_is_not_there_is_exit_code_3(running: Penstock) -> None:
    for command in ("show", "result", "logs", "watch", "cancel", "retry"):
        assert f"no job '{MISSING}'" in running.err(command, MISSING, code=3)


def test_logs_prints_what_a_job_wrote(running: Penstock) -> None:
    job_id = running.submit("job.text.talk", {"lines": 2})
    running("result", "--wait", job_id)
    assert running.out("logs", job_id).splitlines() == ["line 0", "line 1", "careful"]
    assert running.out("logs", "-f", job_id).splitlines() == ["line 0", "line 1", "careful"]
    lines = running.out("logs", "--json", job_id).splitlines()
    assert [msgspec.json.decode(line)["level"] for line in lines] == ["info", "info", "warning"]


def test_watch_tells_moves_and_ends_with_the_job(running: Penstock) -> None:
    job_id, gate = running.held("watched")
    with running.start("watch", "--json", job_id) as process:
        assert process.stdout is not None
        seen = ""
        while '"progress"' not in seen:
            seen += process.stdout.readline()
        gate.touch()
        seen += process.communicate(timeout=30)[0]
    assert process.returncode == 0
    updates = [msgspec.json.decode(line) for line in seen.splitlines()]
    moves = [u["transition"]["n"] for u in updates if u["type"] == "moved"]
    assert moves == [1, 2, 3, 4, 5]
    assert running.out("watch", job_id).splitlines()[-1].split()[1:] == ["SUCCEEDED", "succeed"]


def test_watching_a_job_that_fails_is_exit_code_1(running: Penstock) -> None:
    job_id = running.submit("job.text.fail", {})
    assert "FAILED" in running("watch", job_id, code=1).stdout


def test_a_result_can_be_written_to_a_file_as_it_is(running: Penstock) -> None:
    job_id = running.submit("job.text.large", {"size": 100_000})
    running("result", "--wait", job_id, "--output", "result.json")
    assert (running.folder / "result.json").read_text() == '"' + "x" * 100_000 + '"'
    said = running.err("result", job_id, "--output", "no/such/folder", code=2)
    assert "--output: can't write no/such/folder" in said


def test_a_string_can_be_printed_without_its_quotes(running: Penstock) -> None:
    job_id = running.submit("job.text.shout", {"text": "hello"})
    assert running.out("result", "--wait", "-r", job_id) == "HELLO!"
    assert running.json("result", job_id)["value"] == "HELLO!"


# Ending


def test_cancel_ends_running_work_and_says_so(running: Penstock) -> None:
    job_id, _ = running.held("cancelled")
    assert running.out("cancel", job_id, "--reason", "enough") == f"{job_id} cancelled"
    assert running.out("cancel", job_id) == f"{job_id} cancelled"
    assert "CANCELLED: enough" in running.err("result", job_id, code=5)


def test_cancel_that_comes_too_late_says_which_won(running: Penstock) -> None:
    job_id = running.submit("job.text.shout", {"text": "a"})
    running("result", "--wait", job_id)
    assert running.out("cancel", job_id, code=4) == f"{job_id} had ended already: SUCCEEDED"


def test_work_that_does_not_end_in_time_is_exit_code_9(running: Penstock) -> None:
    job_id, gate = running.held("unwilling", "job.wait.stubborn")
    said = running.out("cancel", "--wait-timeout", "50ms", job_id, code=9)
    assert said == f"{job_id} was asked to end and is still RUNNING"
    gate.touch()


def test_ids_come_from_standard_input_too(running: Penstock) -> None:
    options = ("--delay", "1h", "--tenant", "many")
    ids = [running.submit("job.text.shout", {"text": "a"}, *options) for _ in range(3)]
    listed = running.out("ps", "-q", "--active", "--tenant", "many")
    assert sorted(listed.split()) == sorted(ids)
    assert running.out("cancel", "-", given=listed).count("cancelled") == 3


def test_of_several_jobs_the_good_are_done_and_the_bad_decide_the_code(running: Penstock) -> None:
    good = running.submit("job.text.shout", {"text": "a"}, "--delay", "1h")
    done = running("cancel", MISSING, good, code=3)
    assert done.stdout == f"{good} cancelled\n"
    assert f"no job '{MISSING}'" in done.stderr


# The engine


def test_every_listing_is_json_when_asked(running: Penstock) -> None:
    assert running.json("worker", "list")[0]["status"] == "ready"
    assert running.json("pool", "list")[0]["name"] == "default"
    assert running.json("verify")["mismatches"] == []
    assert running.json("top")["status"]["durability"] == "disk"
    assert running.json("prune", "--older-than", "1d")["jobs"] == 0
    assert "penstock" in running.json("version")
    assert {check["health"] for check in running.json("doctor")} <= {"ok", "note"}


def test_children_are_listed_by_any_name_of_their_parent(running: Penstock) -> None:
    parent = running.submit("job.text.shout", {"text": "a"}, "--id", "the-parent-of-all")
    child = running.submit("job.text.shout", {"text": "b"}, "--parent", "of-all")
    assert running.json("show", child)["request"]["parent_job_id"] == parent
    assert running.out("ps", "-q", "--parent", "the-parent") == child


def test_options_can_stand_before_the_command_and_after_it(running: Penstock) -> None:
    address = f"unix:{running.data}/penstock.sock"
    assert running.json("--connect", address, "workers")
    assert running.json("worker", "list", "--connect", address)
    assert "no engine answers at unix:/nowhere" in running.err(
        "--connect", address, "workers", "--connect", "unix:/nowhere", code=8
    )


def test_a_command_that_does_not_exist_is_exit_code_2(running: Penstock) -> None:
    assert "did you mean submit?" in running.err("submt", code=2)


def test_no_command_at_all_gets_the_list_of_them(running: Penstock) -> None:
    assert "Usage: penstock" in running.err(code=2)


def test_a_reader_that_leaves_early_is_no_accident(running: Penstock) -> None:
    with running.start("ps", "--all", "--json") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_an_input_that_is_nested_too_deeply_is_refused(running: Penstock) -> None:
    deep = '{"text":' + "[" * 50_000
    assert "nested too deeply" in running.err(
        "submit", "job.text.shout", "--input", "-", code=2, given=deep
    )


def test_a_container_that_no_worker_runs_is_refused_with_what_to_start(running: Penstock) -> None:
    told = running.err("run", "alpine:latest", "true", code=2)
    assert "no worker serves 'job.container.run'" in told
    assert "worker start --containers auto" in told
