"""`up`, `worker`, and the commands when no engine is running."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.support.cli.commands import Penstock, said, stop
from tests.support.nats import NatsServer
from tests.support.waiting import eventually

# up


def test_the_banner_says_where_and_how(penstock: Penstock) -> None:
    (penstock.folder / "rules.toml").write_text('default = "allow"')
    with penstock.up("--app", "jobs:app", "--durability", "os", "--rules", "rules.toml"):
        for words in (str(penstock.data), "os: ", "rules.toml", "penstock.sock", "job.text.shout"):
            assert words in penstock.banner
        assert "penstock submit job." in penstock.banner


def test_a_second_engine_on_the_same_folder_is_refused(penstock: Penstock) -> None:
    with penstock.up() as first:
        refusal = penstock.err("up", code=8)
        assert f"another engine (process {first.pid}) owns {penstock.data}" in refusal


def test_a_signal_lets_running_jobs_finish(penstock: Penstock) -> None:
    with penstock.up("--app", "jobs:app") as process:
        job_id, gate = penstock.held("gate")
        process.send_signal(signal.SIGTERM)
        said(process, "finishing what runs")
        gate.touch()
        assert "stopped" in process.communicate(timeout=30)[0]
        assert process.returncode == 0
    assert penstock.state(job_id) == "SUCCEEDED"


def test_a_second_signal_stops_it_at_once_and_the_next_start_tidies_up(
    penstock: Penstock,
) -> None:
    with penstock.up("--app", "jobs:app") as process:
        job_id, _ = penstock.held("gate", "job.wait.stubborn")
        process.send_signal(signal.SIGINT)
        said(process, "finishing what runs")
        assert "stopped at once" in stop(process, signal.SIGINT)
        assert process.returncode == 130
    assert penstock.state(job_id) == "RUNNING"
    with penstock.up("--app", "jobs:app"):
        assert "1 unfinished job of an earlier run" in penstock.banner
        assert "TIMEOUT" in penstock.err("result", "--wait", job_id, code=7)
        assert penstock.json("verify")["mismatches"] == []


def test_an_engine_whose_part_fails_ends_with_the_reason(penstock: Penstock) -> None:
    script = """
import asyncio
import sys
from penstock.cli import main
from penstock.control.pruner import Pruner

async def run(self):
    await asyncio.sleep(0.5)
    raise ZeroDivisionError("a bug")

Pruner.run = run
sys.argv = ["penstock", "up"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=penstock.env,
        cwd=penstock.folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 8
    assert "penstock: the engine failed: " in done.stderr
    assert "pruner: ZeroDivisionError: a bug\n  start it again" in done.stderr


def test_a_failed_engine_does_not_wait_for_a_job_that_cannot_be_ended(penstock: Penstock) -> None:
    (penstock.folder / "broken.py").write_text("""
import asyncio, pathlib
from jobs import app
from penstock.app import engine
from penstock.control.pruner import Pruner

async def run(self):
    while not pathlib.Path("break").exists():
        await asyncio.sleep(0.01)
    raise ZeroDivisionError("a bug")

Pruner.run = run
engine._LAST_WORDS = 0.1
""")
    penstock.env.update(PENSTOCK_TIMEOUTS__KILL_GRACE="0.1", PENSTOCK_TIMEOUTS__DRAIN="0.1")
    with penstock.up("--no-http", "--app", "broken:app") as process:
        penstock.held("gate", "job.wait.stubborn")
        (penstock.folder / "break").touch()
        assert "pruner: ZeroDivisionError: a bug" in process.communicate(timeout=30)[0]
        assert process.returncode == 8


def test_what_is_wrong_is_said_before_anything_starts(penstock: Penstock) -> None:
    for args, words in {
        ("--app", "nothing:app"): "can't import nothing",
        ("--rules", "missing.toml"): "there is no file",
        ("--listen", "tcp://0.0.0.0:1"): "loopback",
        ("--concurrency", "0"): "concurrency",
        ("--durability", "paper"): "--durability",
    }.items():
        assert words in penstock.err("up", *args, code=2)
    assert not penstock.data.exists()


def test_a_denied_job_is_exit_code_6(penstock: Penstock) -> None:
    (penstock.folder / "rules.toml").write_text('default = "deny"')
    with penstock.up("--app", "jobs:app", "--rules", "rules.toml"):
        assert "DENIED" in penstock.err("submit", "job.text.talk", "--wait", code=6)


def test_an_engine_on_tcp_is_reached_with_its_token(penstock: Penstock) -> None:
    with penstock.up("--app", "jobs:app", "--listen", "tcp://127.0.0.1:0"):
        address = penstock.banner.split("listening  ")[1].split()[0]
        assert penstock.json("worker", "list", "--connect", address)
        elsewhere = ("--data", str(penstock.folder / "elsewhere"), "--connect", address)
        assert penstock.err(*elsewhere, "workers", code=6)
        assert penstock.json(*elsewhere, "--token", f"@{penstock.data}/token", "workers")


# worker


@pytest.mark.seed("001", "6.8")
def test_a_worker_waits_for_its_engine_serves_it_and_drains(penstock: Penstock) -> None:
    options = ("--app", "jobs:app", "--id", "w1", "--label", "gpu=a100", "--concurrency", "2")
    with penstock.start("worker", *options) as worker:
        said(worker, "waiting for an engine at unix:")
        with penstock.up():
            said(worker, "worker w1 in pool default, 2 at once")
            seen = eventually(lambda: penstock.json("worker", "list"))
            assert (seen[0]["worker_id"], seen[0]["labels"]) == ("w1", {"gpu": "a100"})
            job_id, gate = penstock.held("gate")
            worker.send_signal(signal.SIGTERM)
            said(worker, "finishing what runs")
            gate.touch()
            worker.communicate(timeout=30)
            assert worker.returncode == 0
            assert penstock.out("result", "--wait", job_id) == '"it came"'
            eventually(lambda: "no workers" in penstock("worker", "list").stderr)


def test_a_worker_joins_through_nats(penstock: Penstock, tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    try:
        bus = ("--bus", server.url)
        with (
            penstock.up("--no-worker", *bus),
            penstock.start("worker", "--app", "jobs:app", "--id", "w.1", *bus) as worker,
        ):
            said(worker, f"worker w.1 in pool default, 32 at once, serves {server.url}")
            seen = eventually(lambda: penstock.json("worker", "list"))
            assert [one["worker_id"] for one in seen] == ["w.1"]
            told = penstock.out("submit", "job.text.shout", "--input", '{"text": "hi"}', "--wait")
            assert "HI!" in told
            stop(worker)
            assert worker.returncode == 0
        told = penstock.err("worker", "--app", "jobs:app", "--join", "x", *bus, code=2)
        assert "--bus can't be used with --connect or --join" in told
    finally:
        server.kill()


def test_a_worker_tells_what_jobs_say_with_their_id_and_their_tracebacks(
    penstock: Penstock,
) -> None:
    with penstock.up("--no-worker"), penstock.start("worker", "--app", "jobs:app") as worker:
        said(worker, "in pool default")
        eventually(lambda: penstock.json("worker", "list"))
        job_id = penstock.submit("job.text.print", {"text": "hello \x1b[31m"})
        penstock("result", "--wait", job_id)
        wrong = penstock.submit("job.text.fail", {"why": "boom"})
        told = said(worker, "ValueError: boom")
        worker.send_signal(signal.SIGTERM)
        out, _ = worker.communicate(timeout=30)
    lines = [line.partition(" ")[2] for line in told.splitlines()]
    assert lines[:3] == [
        f"[{job_id}] hello [31m",
        f"[{job_id}] logged hello [31m",
        f"warning: [{job_id}] warned hello [31m",
    ]
    assert f"error: [{wrong}] Traceback (most recent call last):" in lines
    assert out == ""


def test_a_worker_with_nothing_to_serve_is_refused(penstock: Penstock) -> None:
    (penstock.folder / "empty.py").write_text("import penstock\napp = penstock.App()\n")
    with penstock.up():
        assert "has no jobs" in penstock.err("worker", "--app", "empty:app", code=2)


# no engine


def test_what_only_reads_works_without_an_engine_and_says_so(penstock: Penstock) -> None:
    with penstock.up("--app", "jobs:app") as process:
        job_id = penstock.submit("job.text.talk", {"lines": 1})
        penstock("result", "--wait", job_id)
        large = penstock.submit("job.text.large", {"size": 50_000})
        penstock("result", "--wait", large)
        waiting = penstock.submit("job.text.talk", {}, "--delay", "1h")
        stop(process)
    listed = penstock("ps", "-q")
    assert sorted(listed.stdout.split()) == sorted([job_id, large, waiting])
    assert f"no engine is running; reading {penstock.data}" in listed.stderr
    assert penstock.out("result", job_id) == "1"
    assert len(penstock.out("result", large)) == 50_002
    assert penstock.out("logs", job_id).splitlines() == ["line 0", "careful"]
    assert len(penstock.json("show", job_id)["history"]) == 5
    assert "no engine is running" in penstock.json("show", waiting)["why"]
    assert "no engine is running" in penstock("result", "--wait", waiting, code=9).stderr
    assert penstock.json("verify")["jobs"] == 3


def test_a_folder_left_by_a_kill_can_be_read_and_verified(penstock: Penstock) -> None:
    with penstock.up("--app", "jobs:app") as process:
        job_id, _ = penstock.held("gate")
        eventually(lambda: penstock.state(job_id) == "RUNNING")  # until the start is stored
        process.kill()
        process.wait()
    assert penstock.state(job_id) == "RUNNING"
    assert penstock.json("verify") == {"jobs": 1, "transitions": 4, "mismatches": []}


def test_what_needs_an_engine_says_how_to_start_one(penstock: Penstock) -> None:
    with penstock.up() as process:
        stop(process)
    for args in (
        ("submit", "job.a"),
        ("cancel", "x"),
        ("retry", "x"),
        ("watch", "x"),
        (
            "worker",
            "list",
        ),
        (
            "pool",
            "list",
        ),
        ("top",),
        ("prune",),
    ):
        refusal = penstock.err(*args, code=8)
        assert f"no engine answers at unix:{penstock.data}/penstock.sock" in refusal
        assert "penstock up" in refusal


def test_a_folder_that_never_was_is_not_made_by_looking(penstock: Penstock) -> None:
    for command in ("ps", "verify"):
        assert "no engine answers" in penstock.err(command, code=8)
    assert not penstock.data.exists()


def test_verify_finds_a_record_that_its_log_does_not_tell(penstock: Penstock) -> None:
    with penstock.up("--app", "jobs:app") as process:
        job_id = penstock.submit("job.text.talk", {})
        penstock("result", "--wait", job_id)
        stop(process)
    database = apsw.Connection(str(penstock.data / "penstock.db"))
    database.execute("UPDATE job SET finished_at = finished_at + 1")
    database.close()
    assert f"{job_id}: finished_at is" in penstock.out("verify", code=10)
    (mismatch,) = penstock.json("verify", code=10)["mismatches"]
    assert mismatch["job_id"] == job_id


def test_a_damaged_database_is_named(penstock: Penstock) -> None:
    penstock.data.mkdir()
    (penstock.data / "penstock.db").write_bytes(b"not a database at all" * 100)
    for command in ("ps", "up"):
        assert "is not a readable database" in penstock.err(command, code=8)


# doctor


def test_doctor_is_content_before_the_first_start(penstock: Penstock) -> None:
    checks = {check["what"]: check for check in penstock.json("doctor")}
    assert checks["data"]["health"] == "note"
    assert checks["engine"]["advice"] == "start one with 'penstock up'"
    assert not penstock.data.exists()


def test_doctor_looks_at_the_running_engine(penstock: Penstock) -> None:
    with penstock.up("--app", "jobs:app", "--durability", "os") as process:
        checks = {check["what"]: check for check in penstock.json("doctor")}
        assert f"process {process.pid}" in checks["engine"]["found"]
        assert checks["durability"]["found"] == "os"
        assert checks["disk flush"]["health"] in ("ok", "note")


def test_doctor_finds_a_token_that_others_can_read(penstock: Penstock) -> None:
    with penstock.up() as process:
        stop(process)
    (penstock.data / "token").chmod(0o644)
    assert "chmod 600" in penstock.out("doctor", code=1)


def test_doctor_names_a_setting_that_is_wrong(penstock: Penstock) -> None:
    (penstock.folder / "penstock.toml").write_text("leese = 1")
    assert "did you mean node.lease or timeouts.lease?" in penstock.out("doctor", code=1)


def test_doctor_lists_old_names_of_settings_and_variables_that_are_none(penstock: Penstock) -> None:
    penstock.env |= {"PENSTOCK_KILL_GRACE": "1", "PENSTOCK_SERVICE_HOST": "10.0.0.1"}
    checks = {check["what"]: check for check in penstock.json("doctor")}
    assert "PENSTOCK_KILL_GRACE is now PENSTOCK_TIMEOUTS__KILL_GRACE" in checks["settings"]["found"]
    assert checks["environment"]["found"] == "ignored: PENSTOCK_SERVICE_HOST"


def test_an_engine_names_variables_that_are_not_settings(penstock: Penstock) -> None:
    penstock.env["PENSTOCK_SERVICE_HOST"] = "10.0.0.1"
    with penstock.up():
        assert "not settings, so ignored: PENSTOCK_SERVICE_HOST" in penstock.banner


def test_a_container_whose_engine_is_lost_is_not_run_by_a_second_one(penstock: Penstock) -> None:
    (penstock.folder / "pretends.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "import penstock\n"
        "app = penstock.App()\n"
        "@app.job('job.container.run')\n"
        "def run(**job: object) -> None:\n"
        "    Path('began').touch()\n"
        "    time.sleep(3600)\n"
    )
    penstock.env["PENSTOCK_TIMEOUTS__RECONNECT"] = "2"
    with (
        penstock.up("--app", "pretends:app") as engine,
        penstock.start("run", "an-image", "true") as process,
    ):
        eventually((penstock.folder / "began").exists)
        engine.kill()
        engine.wait()
        out, err = process.communicate(timeout=30)
    assert "was lost" in err
    assert "Traceback" not in err
    assert (process.returncode, out) == (8, "")


def test_the_banner_has_a_link_that_signs_in_on_a_terminal_and_none_in_a_log(
    penstock: Penstock,
) -> None:
    with penstock.up("--http", "127.0.0.1:0"):
        assert "/sign-in?link=" not in penstock.banner
        assert "/dashboard/ (sign in with the link of 'penstock dashboard')" in penstock.banner
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "penstock.cli", "up", "--http", "127.0.0.1:0"]
    streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(command, cwd=penstock.folder, env=penstock.env, **streams) as process:
        os.close(theirs)
        told = b""
        while b"ready" not in told:
            told += os.read(ours, 1000)
        link = next(word for word in told.decode().split() if "/sign-in?link=" in word)
        with urllib.request.urlopen(link, timeout=30) as answer:
            assert answer.status == 200
        process.terminate()
        process.wait(30)
    os.close(ours)
