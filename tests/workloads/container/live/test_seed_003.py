"""Seed 003, sentence by sentence, as a caller of a container worker meets it.

tests/seeds/003.md numbers the sentences; marks say which test holds which.
The worker is a process of
its own, asked over HTTP, on a real Docker, a real Podman and on runc.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support.container.leftovers import containers_of, leftovers, settled
from tests.support.container.serving import Served, a_job, new_id, serve_on

from penstock.testing.images import IMAGE

SLOTS = 4
"""The seed's own example of `max_concurrent_jobs`."""
NINE = (
    *("job_id", "state", "created_at", "started_at", "finished_at"),
    *("exit_code", "stdout", "stderr", "error"),
)
"""The keys of a record in the protocol, in its order."""
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture(scope="module", params=["docker", "podman", "runc"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(
    engine: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    served = serve_on(
        engine,
        tmp_path_factory.mktemp(engine),
        request,
        worker_id="worker-of-the-file",
        labels=["seed", "003"],
        max_concurrent_jobs=SLOTS,
        cpus=64,
        stop_grace=0.3,
        images={"allowed": [IMAGE, "nothing:*"], "pull": "never"},
        defaults={"max_runtime_seconds": 40},
    )
    served.environ["WORKER_ID"] = "worker003"
    yield served.start()
    served.stop()


@pytest.fixture
def full(served: Served) -> Iterator[list[str]]:
    """Jobs that take every slot until they are deleted."""
    names = [served.begin("echo up; sleep 50") for _ in range(SLOTS)]
    yield names
    for name in names:
        if served.stored(name)["state"] == "running":
            served.cancel(name)


def left(served: Served, mark: str, request: pytest.FixtureRequest, engine: str) -> list[str]:
    found = leftovers(mark, served.jobs_dir)
    if engine != "runc":
        found += containers_of(request.getfixturevalue(f"{engine}_socket"), served.jobs_dir)
    return found


# -- States ---------------------------------------------------------------------------------


@pytest.mark.seed("003", "1.1", "2.1", "2.8", "2.9", "2.10")
def test_a_job_that_is_accepted_is_stored_as_queued_with_an_empty_record(
    served: Served, full: list[str]
) -> None:
    name = new_id()
    answer = served.submit(name, "true")
    assert answer == (202, {"accepted": True, "job_id": name, "state": "queued"})
    record = served.stored(name)
    assert tuple(record)[: len(NINE)] == NINE
    assert {key: record[key] for key in NINE[1:] if key != "created_at"} == {
        "state": "queued",
        "started_at": None,
        "finished_at": None,
        "exit_code": None,
        "stdout": "",
        "stderr": "",
        "error": None,
    }
    assert TIME.fullmatch(record["created_at"])
    served.cancel(name)


@pytest.mark.seed("003", "1.2", "4.1", "4.2")
def test_a_job_is_running_while_its_container_executes(served: Served, engine: str) -> None:
    name = served.begin("echo up; sleep 50")
    record = served.stored(name)
    assert record["state"] == "running"
    assert record["created_at"] <= record["started_at"]
    assert (record["finished_at"], record["exit_code"], record["error"]) == (None, None, None)
    assert served.ask("GET", "/health")[1]["running_jobs"] == 1
    served.cancel(name)


@pytest.mark.seed("003", "1.3", "4.2", "6.2", "6.3", "6.7", "7.2")
def test_exit_code_0_is_finished(served: Served) -> None:
    record = served.shell("echo done")
    assert (record["state"], record["exit_code"], record["error"]) == ("finished", 0, None)
    assert (record["stdout"], record["stderr"]) == ("done\n", "")
    times = [record[key] for key in ("created_at", "started_at", "finished_at")]
    assert all(TIME.fullmatch(one) for one in times)
    assert times == sorted(times)


@pytest.mark.seed("003", "1.4", "6.2", "6.4", "6.8", "6.13", "6.14", "6.16", "7.4")
def test_any_other_exit_code_is_failed(served: Served) -> None:
    record = served.shell("echo before; echo why >&2; exit 3")
    assert (record["state"], record["exit_code"]) == ("failed", 3)
    assert record["error"] == {"code": "NON_ZERO_EXIT", "message": "exited with 3"}
    assert (record["stdout"], record["stderr"]) == ("before\n", "why\n")
    assert record["started_at"] <= record["finished_at"]


@pytest.mark.seed("003", "1.10")
def test_a_job_that_is_not_stored_here_is_not_found(served: Served) -> None:
    name = new_id()
    for method in ("GET", "DELETE"):
        answer = served.ask(method, f"/jobs/{name}")
        assert answer == (404, {"job_id": name, "state": "not_found"})


# -- Submission -----------------------------------------------------------------------------


def without(*path: str, put: Any = None) -> Any:
    """A job of which a field is missing, or another value."""
    job = a_job(new_id(), "true")
    inner = job
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    if put is not None:
        inner[path[-1]] = put
    return job


REFUSED = {
    "a protocol_version of 2": (
        without("protocol_version", put=2),
        "UNSUPPORTED_PROTOCOL_VERSION",
    ),
    "a protocol_version that is a text": (
        without("protocol_version", put="1"),
        "UNSUPPORTED_PROTOCOL_VERSION",
    ),
    "no protocol_version": (without("protocol_version"), "UNSUPPORTED_PROTOCOL_VERSION"),
    "no job_id": (without("job_id"), "MISSING_JOB_ID"),
    "a job_id that is empty": (without("job_id", put=""), "MISSING_JOB_ID"),
    "a job_id of two lines": (without("job_id", put="a\nb"), "INVALID_JOB_ID"),
    "no runtime": (without("runtime"), "MISSING_RUNTIME"),
    "no mode": (without("runtime", "mode"), "BAD_RUNTIME_MODE"),
    "a mode that nobody knows": (without("runtime", "mode", put="vm"), "BAD_RUNTIME_MODE"),
    "mode build": (without("runtime", "mode", put="build"), "RUNTIME_NOT_SUPPORTED"),
    "no image": (without("runtime", "image"), "MISSING_IMAGE"),
    "an image that is an option": (without("runtime", "image", put="-it"), "INVALID_IMAGE"),
    "an image that is not allowed": (
        without("runtime", "image", put="else:1"),
        "IMAGE_NOT_ALLOWED",
    ),
    "a limit above what is allowed": (
        a_job(new_id(), "true", limits={"memory_mb": 1_000_000}),
        "NOT_ALLOWED",
    ),
    "a limit that is none": (a_job(new_id(), "true", limits={"memory_mb": -1}), "INVALID_FIELD"),
}


@pytest.mark.seed(
    "003", "1.9", "2.2", "2.3", "2.4", "2.5", "2.7", "2.11", "2.12", "2.13", "2.15", "9.5"
)
@pytest.mark.parametrize("what", REFUSED)
def test_a_submission_that_is_not_valid_is_rejected_with_an_error_and_not_stored(
    served: Served, what: str
) -> None:
    job, code = REFUSED[what]
    before = served.ids()
    status, answer = served.ask("POST", "/jobs", job)
    assert status == 400
    assert tuple(answer) == ("accepted", "job_id", "state", "error")
    assert (answer["accepted"], answer["state"]) == (False, "rejected")
    assert answer["job_id"] == job.get("job_id")
    assert answer["error"]["code"] == code
    assert len(answer["error"]["message"]) > 10
    assert served.ids() == before


@pytest.mark.seed("003", "2.5", "1.9")
def test_gpus_are_refused_with_a_reason_where_there_are_none(served: Served) -> None:
    if served.ask("GET", "/info")[1]["gpus"]:
        pytest.skip("this machine has GPUs")
    for asked in ("all", 1, "device=0"):
        job = a_job(new_id(), "true", gpus=asked)
        status, answer = served.ask("POST", "/jobs", job)
        assert (status, answer["error"]["field"]) == (400, "runtime.gpus"), answer
        assert "GPU" in answer["error"]["message"]
        assert served.ask("GET", f"/jobs/{job['job_id']}")[0] == 404


@pytest.mark.seed("003", "2.14", "2.17")
def test_the_refusal_that_the_seed_shows_is_answered_to_the_letter(served: Served) -> None:
    job = a_job("job-123", mode="build")
    status, answer = served.send("POST", "/jobs", json.dumps(job).encode())
    shown = """{
      "accepted": false,
      "job_id": "job-123",
      "state": "rejected",
      "error": {
        "code": "RUNTIME_NOT_SUPPORTED",
        "message": "runtime.mode=build not supported on this worker"
      }
    }"""
    assert (status, answer) == (400, json.dumps(json.loads(shown), separators=(",", ":")).encode())
    assert served.ask("GET", "/jobs/job-123")[0] == 404


@pytest.mark.seed("003", "2.16")
def test_an_id_that_exists_is_rejected_and_the_first_job_stays_as_it_is(served: Served) -> None:
    name = new_id()
    first = served.run(name, "echo", "first")
    status, answer = served.submit(name, "echo", "second")
    assert (status, answer["accepted"], answer["state"]) == (409, False, "rejected")
    assert answer["error"]["code"] == "JOB_ID_ALREADY_EXISTS"
    assert served.stored(name) == first


# -- Queue ----------------------------------------------------------------------------------


@pytest.mark.seed("003", "3.2", "3.3", "3.4")
def test_no_more_run_than_may_and_the_rest_start_in_the_order_in_which_they_came(
    served: Served, full: list[str]
) -> None:
    waiting = [new_id() for _ in range(3)]
    for name in waiting:
        assert served.submit(name, "echo", "ran")[0] == 202
    health = served.ask("GET", "/health")[1]
    assert (health["max_concurrent_jobs"], health["running_jobs"]) == (SLOTS, SLOTS)
    assert health["queued_jobs"] == len(waiting)
    assert [served.stored(name)["state"] for name in waiting] == ["queued"] * 3
    served.cancel(full[0])  # room for one at a time
    ended = [served.ended(name) for name in waiting]
    assert [record["state"] for record in ended] == ["finished"] * 3
    for earlier, later in pairwise(ended):
        assert earlier["finished_at"] <= later["started_at"]


@pytest.mark.seed("003", "3.1")
def test_what_is_queued_is_there_after_the_worker_was_killed(
    served: Served, full: list[str]
) -> None:
    waiting = [new_id() for _ in range(2)]
    for name in waiting:
        assert served.submit(name, "echo", "ran")[0] == 202
    before = [served.stored(name) for name in waiting]
    served.kill()
    served.start()
    assert [served.stored(name)["created_at"] for name in waiting] == [
        record["created_at"] for record in before
    ]
    served.cancel(full[0])
    assert [served.ended(name)["stdout"] for name in waiting] == ["ran\n"] * 2


# -- Execution ------------------------------------------------------------------------------


@pytest.mark.seed("003", "4.3", "5.1", "8.1", "9.6")
def test_a_job_has_a_sandbox_folder_that_is_gone_when_it_has_ended(served: Served) -> None:
    there = served.jobs_dir / "jobs"
    name = served.begin(
        "cat /input/a.txt; while [ ! -e /output/go ]; do sleep 0.02; done; echo made > /output/b",
        inputs=[{"path": "a.txt", "text": "given"}],
        outputs=True,
    )
    (given,), (output,) = there.glob("*/input/a.txt"), there.glob("*/output")
    assert given.read_text() == "given"
    (output / "go").touch()
    record = served.ended(name)
    assert (record["state"], record["stdout"]) == ("finished", "given")
    assert sorted(one["path"] for one in record["artifacts"]) == ["b", "go"]
    assert served.send("GET", f"/jobs/{name}/artifacts/b") == (200, b"made\n")

    def folders() -> list[str]:
        return [str(one) for kind in ("input", "output") for one in there.glob(f"*/{kind}")]

    assert settled(folders) == []


@pytest.mark.seed("003", "4.4", "4.5")
def test_mode_image_runs_the_image_with_its_own_command_or_the_jobs(served: Served) -> None:
    of_the_image = served.run(new_id(), stdin={"text": "echo a shell; exit 4"})
    assert (of_the_image["stdout"], of_the_image["exit_code"]) == ("a shell\n", 4)
    of_the_job = served.run(new_id(), "echo", "a b", "$HOME", "-v")
    assert of_the_job["stdout"] == "a b $HOME -v\n"


@pytest.mark.seed("003", "1.6", "2.14", "4.6", "9.7")
def test_mode_build_builds_an_image_and_runs_it_or_says_that_it_failed(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    builds = {"enabled": True, "bases": [IMAGE]}
    served = serve_on(engine, tmp_path, request, build=builds).start()
    try:
        good = f"FROM {IMAGE}\nCOPY a.txt /a.txt\nRUN cat /a.txt /a.txt > /twice.txt\n"
        context = [{"path": "a.txt", "text": "built "}]
        job = {"mode": "build", "image": "", "limits": {"max_runtime_seconds": 60}}
        if engine == "runc":
            status, answer = served.submit("built", **job, build={"dockerfile": good})
            assert (status, answer["error"]["code"]) == (400, "RUNTIME_NOT_SUPPORTED")
            return
        built = {"dockerfile": good, "context": context}
        record = served.run("built", "cat", "/twice.txt", **job, build=built)
        assert (record["state"], record["stdout"]) == ("finished", "built built ")
        broken = {"dockerfile": f"FROM {IMAGE}\nRUN echo broken; exit 9\n"}
        record = served.run("broken", "true", **job, build=broken)
        assert (record["state"], record["error"]["code"]) == ("failed", "BUILD_FAILED")
        assert record["exit_code"] is None
    finally:
        served.stop()


@pytest.mark.seed("003", "5.1")
def test_the_container_reads_the_whole_job_on_its_standard_input(served: Served) -> None:
    task = {"type": "sum", "payload": {"numbers": [1, 2.5], "name": "größer"}}
    job = a_job(new_id(), "cat", task=task)
    assert served.ask("POST", "/jobs", job)[0] == 202
    written = json.dumps(job, separators=(",", ":"), ensure_ascii=False)
    assert served.ended(job["job_id"])["stdout"] == written


@pytest.mark.seed("003", "5.2")
def test_the_variables_of_the_job_are_those_of_the_container(served: Served) -> None:
    env = {"GREETING": "good day", "EMPTY": "", "LINES": "one\ntwo"}
    script = 'echo "$GREETING|$EMPTY|$LINES|${WORKER_ID-not ours}"'
    record = served.shell(script, env=env)
    assert record["stdout"] == "good day||one\ntwo|not ours\n"


@pytest.mark.seed("003", "5.6", "6.1", "7.3")
def test_exit_code_and_both_streams_are_captured_each_for_itself(served: Served) -> None:
    script = "for i in 1 2 3; do echo out $i; echo err $i >&2; done; exit 7"
    record = served.shell(script)
    assert record["exit_code"] == 7
    assert record["stdout"] == "out 1\nout 2\nout 3\n"
    assert record["stderr"] == "err 1\nerr 2\nerr 3\n"


# -- Ends -----------------------------------------------------------------------------------


@pytest.mark.seed("003", "1.5", "5.4", "6.5", "6.11", "6.13", "6.14", "9.2")
def test_a_job_over_its_time_is_failed_and_its_container_is_gone(
    served: Served, engine: str, request: pytest.FixtureRequest
) -> None:
    mark = f"9{secrets.randbelow(10**10):010}"
    script = f"echo begun; echo slow >&2; sleep 50; : {mark}"
    before = time.monotonic()
    record = served.shell(script, limits={"max_runtime_seconds": 1})
    assert time.monotonic() - before < 30
    assert (record["state"], record["exit_code"]) == ("failed", None)
    assert record["error"]["code"] == "TIMEOUT"
    assert "1 s" in record["error"]["message"]
    assert record["stdout"] == "begun\n"
    assert record["stderr"].startswith("slow\n")
    assert record["finished_at"] is not None
    assert settled(lambda: left(served, mark, request, engine)) == []


@pytest.mark.seed("003", "5.3", "6.12", "9.3")
def test_a_job_over_its_memory_is_failed_and_says_so(served: Served) -> None:
    record = served.shell("x=a; while :; do x=$x$x; done", limits={"memory_mb": 16})
    assert (record["state"], record["exit_code"]) == ("failed", 137)
    assert record["error"]["code"] == "OOM_KILLED"
    assert "memory" in record["error"]["message"]


@pytest.mark.seed("003", "6.6", "6.9", "6.13", "9.4")
@pytest.mark.parametrize(
    ("fields", "cmd", "code", "exit_code"),
    [
        ({"image": "nothing:1"}, ("true",), "IMAGE_NOT_FOUND", 125),
        ({}, ("no-such-command",), "COMMAND_NOT_FOUND", 127),
    ],
)
def test_what_the_engine_can_not_run_is_failed_with_its_own_code(
    served: Served, fields: dict[str, Any], cmd: tuple[str, ...], code: str, exit_code: int
) -> None:
    record = served.run(new_id(), *cmd, **fields)
    assert (record["state"], record["exit_code"]) == ("failed", exit_code)
    assert record["error"]["code"] == code
    assert (fields.get("image") or cmd[0]) in record["error"]["message"]
    assert record["finished_at"] is not None


# -- Afterwards -----------------------------------------------------------------------------


@pytest.mark.seed("003", "7.1")
def test_a_record_is_answered_in_the_protocols_keys_and_stays_what_it_is(served: Served) -> None:
    record = served.shell("echo kept")
    assert tuple(record)[: len(NINE)] == NINE
    assert served.stored(record["job_id"]) == record
    served.kill()
    served.start()
    assert served.stored(record["job_id"]) == record


@pytest.mark.seed("003", "8.1", "8.2")
def test_nothing_of_an_ended_job_is_left_but_its_record(
    served: Served, engine: str, request: pytest.FixtureRequest
) -> None:
    mark = f"9{secrets.randbelow(10**10):010}"
    cancelled = served.begin(f"echo up; sleep 50; : {mark}", outputs=True)
    served.shell(f"(sleep 50; : {mark}) & exit 0", inputs=[{"path": "a", "text": "a"}])
    served.shell(f"exit 1; : {mark}", outputs=True)
    served.cancel(cancelled)
    assert served.stored(cancelled)["error"]["code"] == "CANCELLED"
    assert settled(lambda: left(served, mark, request, engine)) == []


@pytest.mark.seed("003", "9.13")
def test_the_workers_file_and_the_environment_say_what_it_is(served: Served) -> None:
    info = served.ask("GET", "/info")[1]
    assert info["worker_id"] == "worker003"
    assert (info["labels"], info["protocol_version"]) == (["seed", "003"], 1)
    assert info["limits"]["defaults"]["max_runtime_seconds"] == 40
