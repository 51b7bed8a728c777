"""Container jobs under the control plane: from Python, the command line and as any job."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import needs_runtime
from tests.support.container.serving import Served
from tests.support.waiting import eventually

import penstock
from penstock.app.containers import ran, result_pointer
from penstock.ports.engine_api import Logged
from penstock.testing.container_engine import processes_with
from penstock.testing.images import IMAGE
from penstock.workloads.container.engines.oci.images import ImageStore

COMMAND = Path(sys.executable).with_name("penstock")


@pytest.fixture
def data(busybox: Path, tmp_path: Path) -> Path:
    """A data folder whose engine has the image."""
    needs_runtime("runc")
    store = ImageStore(tmp_path / "data" / "containers" / "oci" / "images")
    store.import_tree(busybox, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
    return tmp_path / "data"


@pytest.fixture
def ps(data: Path) -> Iterator[penstock.Client]:
    with penstock.App().run(data, containers__engine="oci") as client:
        yield client


def shell(script: str, **options: object) -> penstock.Container:
    return penstock.container(IMAGE, "sh", "-c", script, **options)


# -- ends ---------------------------------------------------------------------------------


@pytest.mark.seed("003", "9.12")
def test_a_container_gives_back_its_output_its_artifacts_and_what_it_used(
    ps: penstock.Client,
) -> None:
    wanted = shell(
        "cat /input/a/b.txt; echo err >&2; mkdir /output/d; echo made > /output/d/x",
        inputs={"a/b.txt": "given"},
        outputs=True,
    )
    ran = wanted.run(ps)
    assert ran.ok
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "given", "err\n")
    assert ran.read("d/x") == b"made\n"
    assert ran.peak_memory_bytes
    with pytest.raises(penstock.NotFound):
        ran.read("d/y")


@pytest.mark.parametrize(
    ("script", "options", "state", "code", "exit_code"),
    [
        ("exit 0", {}, "SUCCEEDED", None, 0),
        ("exit 9", {}, "FAILED", "NON_ZERO_EXIT", 9),
        ("sleep 60", {"timeout": 0.3}, "TIMEOUT", "TIMEOUT", None),
        (
            "x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo ${#x}",
            {"memory_mb": 32},
            "FAILED",
            "OOM_KILLED",
            137,
        ),
    ],
)
def test_an_end_inside_is_an_end_of_the_job(
    ps: penstock.Client,
    script: str,
    options: dict[str, float],
    state: str,
    code: str | None,
    exit_code: int | None,
) -> None:
    wanted = shell(script, **options)
    handle = wanted.submit(ps)
    job = handle.wait(30)
    assert job.state == state
    assert job.result is not None
    assert job.result.error_code == code
    assert job.result.result_ptr
    left = msgspec.json.decode(ps.read(job.result.result_ptr))
    assert left["exit_code"] == exit_code


def test_without_stdin_it_reads_the_whole_job_with_its_payload(ps: penstock.Client) -> None:
    payload = {"n": 1790847362514948097}  # no double
    ran = penstock.container(IMAGE, "cat", payload=payload).run(ps)
    job = msgspec.json.decode(ran.stdout)
    assert job["task"]["payload"] == payload
    assert job["protocol_version"] == 1
    assert penstock.container(IMAGE, "cat", stdin="text").run(ps).stdout == "text"
    assert penstock.container(IMAGE, "wc", "-c", stdin=b"\xff\x00\n").run(ps).stdout == "3\n"


def test_an_input_may_be_a_pointer_that_is_allowed(ps: penstock.Client, data: Path) -> None:
    (data / "files").mkdir(exist_ok=True)
    (data / "files" / "x").write_text("from a file")
    allowed = {"data:text/plain;base64,aGk=": "hi", (data / "files/x").as_uri(): "from a file"}
    for pointer, content in allowed.items():
        assert pointed(ps, pointer).stdout == content
    assert pointed(ps, "file:///etc/passwd").error_code == "INPUT_UNAVAILABLE"


def pointed(ps: penstock.Client, pointer: str) -> penstock.Ran:
    job = {
        "runtime": {"image": IMAGE, "cmd": ["cat", "/input/a"]},
        "inputs": [{"path": "a", "pointer": pointer}],
    }
    ended = ps.submit("job.container.run", job).wait(30)
    return ran(ps, ended, ps.read(result_pointer(ended)))


def test_what_the_policy_wants_sandboxed_has_a_kernel_of_its_own(
    data: Path, tmp_path: Path
) -> None:
    needs_runtime("runsc")
    file = tmp_path / "worker.yaml"
    file.write_text("images: {sandboxed: ['alpine:*']}\n")
    with penstock.App().run(data, containers__engine="oci", containers__config=str(file)) as ps:
        kernel = penstock.container(IMAGE, "uname", "-r").run(ps)
    assert kernel.ok
    assert kernel.stdout.strip() != os.uname().release


def test_a_worker_that_stands_alone_follows_pointers_below_its_sources(
    data: Path, tmp_path: Path
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "x").write_text("given")
    sources = [(tmp_path / "given").as_uri()]
    served = Served(tmp_path, "oci", inputs={"sources": sources}).start()
    try:
        for pointer, out in ((f"{sources[0]}/x", "given"), ("file:///etc/passwd", "")):
            name = f"job-{len(out)}"
            record = served.run(name, "cat", "/input/a", inputs=[{"path": "a", "pointer": pointer}])
            assert record["stdout"] == out
        assert record["error"]["code"] == "INPUT_UNAVAILABLE"
    finally:
        served.stop()


def test_its_lines_are_in_the_job_s_log_as_they_come(ps: penstock.Client) -> None:
    handle = shell("echo one; echo two >&2; sleep 60").submit(ps)
    seen = []
    for update in handle.follow():
        if isinstance(update, Logged):
            seen.append((update.line.level, update.line.text))
        if len(seen) == 2:
            break
    assert sorted(seen) == [("stderr", "two"), ("stdout", "one")]
    assert handle.cancel().job.state == "CANCELLED"


def test_a_cancel_that_is_answered_has_ended_the_container(ps: penstock.Client) -> None:
    mark = f"7{secrets.randbelow(10**9):09}"
    handle = shell(f"trap '' TERM; echo on; while :; do sleep {mark}; done").submit(ps)
    eventually(lambda: processes_with(f"sleep\0{mark}"))
    answer = handle.cancel(timeout=30)
    assert answer.job.state == "CANCELLED"
    assert processes_with(mark) == []


# -- refusals -----------------------------------------------------------------------------


def test_a_wrong_field_is_named_and_nothing_is_stored(ps: penstock.Client) -> None:
    with pytest.raises(penstock.InvalidRequest, match=r"runtime\.limits\.memory_mb"):
        shell("true", memory_mb=-1).submit(ps)
    with pytest.raises(penstock.InvalidRequest):
        penstock.container("--volume=/:/host", "alpine").submit(ps)
    with pytest.raises(penstock.InvalidRequest, match="runtime"):
        ps.submit("job.container.run", {})
    with pytest.raises(penstock.NotPermitted, match="NOT_ALLOWED"):
        shell("true", network=True).submit(ps)
    with pytest.raises(penstock.NotPermitted, match=r"runtime\.gpus: this engine gives .* no GPUs"):
        shell("true", gpus="all").submit(ps)
    assert ps.jobs() == []


def test_an_image_that_is_not_on_the_list_is_refused(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("images: {allowed: ['busybox:*'], pull: never}\n")
    with (
        penstock.App().run(data, containers__engine="oci", containers__config=str(file)) as ps,
        pytest.raises(penstock.NotPermitted, match="IMAGE_NOT_ALLOWED"),
    ):
        shell("true").submit(ps)


def test_without_an_engine_the_topic_is_unknown(tmp_path: Path) -> None:
    with (
        penstock.App().run(tmp_path / "data") as ps,
        pytest.raises(penstock.UnknownTopic),
    ):
        shell("true").submit(ps)


# -- rules --------------------------------------------------------------------------------


def test_a_safety_rule_s_memory_is_the_container_s(data: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        'default = "deny"\n[[rules]]\nid = "small"\ntopics = ["job.container.*"]\n'
        'decision = "allow_with_constraints"\n'
        'constraints = { max_memory = "32MiB", network = [] }\n'
    )
    with penstock.App().run(data, containers__engine="oci", rules=str(rules)) as ps:
        ran = shell("x=$(head -c 99000000 /dev/zero | tr '\\0' x); echo ${#x}").run(ps)
    assert ran.error_code == "OOM_KILLED"


# -- the command line ---------------------------------------------------------------------


def run(data: Path, *words: str, **options: object) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(
        [COMMAND, "--data", data, "run", *words],
        capture_output=True,
        timeout=50,
        check=False,
        **{"text": True, **options},  # type: ignore[call-overload]
    )


def test_run_shows_each_stream_and_ends_with_the_container_s_code(data: Path) -> None:
    ended = run(data, IMAGE, "--", "sh", "-c", "echo out; echo err >&2; exit 42")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("out\n", "err\n", 42)


def test_run_passes_input_environment_and_files(data: Path, tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("file")
    ended = run(
        data,
        *("-i", "--env", "NAME=value", "--input", f"{tmp_path / 'f.txt'}:in/x"),
        *("--output", str(tmp_path / "out"), IMAGE, "--"),
        *("sh", "-c", "cat; cat /input/in/x; echo $NAME > /output/n"),
        input="standard input\n",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "standard input\nfile"
    assert (tmp_path / "out" / "n").read_text() == "value\n"


def test_run_says_in_words_why_it_failed(data: Path) -> None:
    late = run(data, "--timeout", "0.2", IMAGE, "--", "sleep", "60")
    assert late.returncode == 7
    assert late.stderr.startswith("penstock: TIMEOUT: ran longer than 0.2 s")
    absent = run(data, IMAGE, "--", "no-such-command")
    assert absent.returncode == 127
    assert "COMMAND_NOT_FOUND" in absent.stderr
    wrong = run(data, "--memory", "1m", IMAGE, "--", "true")
    assert wrong.returncode == 2
    assert "runtime.limits.memory_mb" in wrong.stderr


def test_run_passes_output_on_byte_for_byte(data: Path) -> None:
    few = run(data, IMAGE, "printf", r"a\377\000\r\nb", text=False)
    assert (few.stdout, few.stderr) == (b"a\xff\x00\r\nb", b"")
    # More than the result has, and more lines than the log has.
    script = "head -c 15000000 /dev/urandom > /tmp/x; sha256sum /tmp/x >&2; cat /tmp/x; seq 30000"
    many = run(data, IMAGE, "sh", "-c", script, text=False)
    digest = hashlib.sha256(many.stdout[:15_000_000]).hexdigest()
    assert many.stderr.decode().split()[0] == digest
    assert many.stdout[15_000_000:] == b"".join(b"%d\n" % n for n in range(1, 30_001))
    assert many.returncode == 0


def test_run_gives_no_input_unless_it_is_asked_to(data: Path) -> None:
    assert run(data, IMAGE, "cat", input="not for it").stdout == ""
    assert run(data, "-i", IMAGE, "cat", input="for it").stdout == "for it"
    shell = run(data, IMAGE)
    assert (shell.stdout, shell.stderr, shell.returncode) == ("", "", 0)


def test_run_takes_the_flags_of_docker(data: Path) -> None:
    ended = run(
        data,
        *("--rm", "-e", "HERE", "-e", "GIVEN=1", "-e", "NOT_SET", "-w", "/tmp", "-u", "1000:1000"),
        *("-m", "64m", "--cpus", "0.5", "--network", "none", "--name", "named", IMAGE),
        *("sh", "-c", "echo $HERE $GIVEN ${NOT_SET-unset}; pwd; id -u; ls -A /sys/class/net"),
        env={**os.environ, "HERE": "from here"},
    )
    assert ended.stdout == "from here 1 unset\n/tmp\n1000\nlo\n", ended.stderr
    again = run(data, "--name", "named", IMAGE, "true")
    assert again.returncode == 4
    assert "already" in again.stderr


def test_run_takes_another_entrypoint(data: Path) -> None:
    ended = run(data, "--entrypoint", "echo", IMAGE, "in place of the image's own")
    assert (ended.stdout, ended.returncode) == ("in place of the image's own\n", 0), ended.stderr
    assert run(data, "--entrypoint", "", IMAGE, "echo", "none").stdout == "none\n"
    missing = run(data, "--entrypoint", "no-such-program", IMAGE)
    assert missing.returncode == 127
    assert "'no-such-program' (runtime.entrypoint) was not found in image" in missing.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-it"], "-t/--tty is not supported: a job has no terminal"),
        (["-p", "80:80"], "-p/--publish is not supported"),
        (["--privileged"], "--privileged is not supported"),
        (["-m", "64"], "write 64m"),
        (["-v", "/data:/data"], "write /data:/data:ro"),
        (["-v", "cache:/data:ro"], "no named volumes"),
        (["-d"], "penstock up --containers auto"),
    ],
)
def test_run_says_what_it_can_t_do(data: Path, words: list[str], said: str) -> None:
    ended = run(data, *words, IMAGE, "true")
    assert said in ended.stderr
    assert ended.returncode in (2, 8)


def test_run_with_json_is_one_document(data: Path) -> None:
    ended = run(data, "--json", IMAGE, "--", "echo", "hi")
    record = msgspec.json.decode(ended.stdout)
    assert (record["exit_code"], record["stdout"], record["state"]) == (0, "hi\n", "SUCCEEDED")


def test_ctrl_c_ends_the_container(data: Path) -> None:
    mark = f"6{secrets.randbelow(10**9):09}"
    running = subprocess.Popen(
        [COMMAND, "--data", data, "run", IMAGE, "--", "sh", "-c", f"echo on; sleep {mark}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "on\n"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=40)
    assert running.returncode == 130, said
    assert processes_with(mark) == []


def test_a_job_whose_run_was_killed_does_not_stay_running_without_its_container(
    data: Path,
) -> None:
    mark = f"6{secrets.randbelow(10**9):09}"
    words = ("--name", "killed", "--timeout", "100", IMAGE, "sh", "-c", f"echo on; sleep {mark}")
    command = [COMMAND, "--data", data, "run", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "on\n"
        running.kill()
    assert run(data, IMAGE, "echo", "next").stdout == "next\n"
    shown = subprocess.run(
        [COMMAND, "--data", data, "show", "killed", "--json"], capture_output=True, check=True
    )
    state = msgspec.json.decode(shown.stdout)["state"]
    assert state == "TIMEOUT" or (state == "RUNNING" and processes_with(f"sleep\0{mark}"))
    with penstock.App().run(data, containers__engine="oci") as ps:
        ps.get("killed").cancel(timeout=30)
        eventually(lambda: not processes_with(mark))


# -- a worker that dies -------------------------------------------------------------------


@pytest.fixture
def killed(data: Path) -> str:
    """A job whose engine and worker were killed while its container ran, and runs on."""
    engine = subprocess.Popen(
        [COMMAND, "--data", data, "up", "--containers", "oci", "--no-http"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait = "while [ ! -e /output/go ]; do sleep 0.02; done"
    try:
        client: Any = eventually(lambda: connected(data))
        with client as ps:
            script = f"echo one; {wait}; echo two; exit 4"
            handle = shell(script, timeout=100, outputs=True).submit(ps)
            eventually(lambda: any(line.text == "one" for line in handle.logs()))
    finally:
        engine.kill()
        engine.wait()
    return handle.job_id


def go_on(data: Path) -> None:
    (output,) = (data / "containers" / "jobs").glob("*/output")
    (output / "go").touch()


@pytest.mark.seed("003", "9.12")
def test_the_containers_of_a_killed_worker_are_reattached_to(data: Path, killed: str) -> None:
    go_on(data)  # while nobody is there
    with penstock.App().run(data, containers__engine="oci") as ps:
        job = ps.get(killed).wait(30)
        end = ran(ps, job, ps.read(result_pointer(job)))
        assert (end.exit_code, end.stdout, end.stderr) == (4, "one\ntwo\n", "")
        assert (job.attempt, job.uncharged) == (2, 1)
        assert [one.name for one in end.artifacts] == ["go"]
    assert list((data / "containers" / "jobs").iterdir()) == []


def test_a_job_that_was_cancelled_meanwhile_ends_with_its_container(
    data: Path, killed: str
) -> None:
    with penstock.App().run(data) as ps:
        assert ps.get(killed).cancel(timeout=2).job.state == "RUNNING"
    with penstock.App().run(data, containers__engine="oci") as ps:
        assert ps.get(killed).wait(30).state == "CANCELLED"
        eventually(lambda: not list((data / "containers" / "jobs").iterdir()))
        eventually(lambda: not list((data / "containers" / "oci" / "live" / "run").iterdir()))


def test_a_stop_of_the_engine_lets_its_containers_run(data: Path) -> None:
    with penstock.App().run(data, containers__engine="oci") as ps:
        handle = shell("echo on; while [ ! -e /output/go ]; do sleep 0.02; done", outputs=True)
        job_id = handle.submit(ps).job_id
        eventually(lambda: any(line.text == "on" for line in ps.get(job_id).logs()))
    go_on(data)
    with penstock.App().run(data, containers__engine="oci") as ps:
        assert ps.get(job_id).wait(30).state == "SUCCEEDED"


def connected(data: Path) -> object:
    try:
        session = penstock.connect(data=data)
        with session:
            return penstock.connect(data=data)
    except penstock.PenstockError:
        return None
