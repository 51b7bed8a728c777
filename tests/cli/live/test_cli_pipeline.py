"""Pipelines as typed: started, watched, cancelled, retried, with an engine and without."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.cli.commands import Penstock, said
from tests.support.waiting import eventually

PIPES = """
    import asyncio
    import time
    from pathlib import Path
    from typing import Annotated

    import msgspec

    import penstock


    class Words(msgspec.Struct):
        words: tuple[str, ...] = ("one", "two", "three")
        size: Annotated[int, msgspec.Meta(ge=1, le=9)] = 3
        title: str = ""
        loud: bool = False
        gate: str = ""


    words = penstock.Pipeline("words", config=Words, single_flight=False, doc="Shouts words.")


    @words.map(over="words", concurrency=2)
    async def shout(word: str, ctx) -> str:
        if word.startswith("bad") and not Path(ctx.config.gate or "/nowhere").exists():
            raise ValueError(f"{word} can't be shouted")
        return word.upper()


    @words.map(over=shout)
    def measure(word: str, ctx) -> int:
        ctx.metric("letters", len(word))
        return len(word)


    @words.step(enabled="loud")
    async def announce(results, ctx) -> str:
        return "all shouted"


    slow = penstock.Pipeline("slow", config=Words)


    @slow.map(over="words", concurrency=1)
    async def crawl(word: str, ctx) -> str:
        await asyncio.sleep(0.4)
        return word


    held = penstock.Pipeline("held", config=Words, cancel_grace=0.2)


    @held.map(over="words", concurrency=1)
    async def wait(word: str, ctx) -> str:
        Path(f"{ctx.config.gate}.started").touch()
        while not Path(ctx.config.gate).exists():
            await asyncio.sleep(0.01)
        return word


    stubborn = penstock.Pipeline("stubborn", config=Words, cancel_grace=0.1)


    @stubborn.map(over="words", key=lambda word: word)
    def sit(word: str, ctx) -> str:
        Path(f"{ctx.config.gate}.started").touch()
        while not Path(ctx.config.gate).exists():
            time.sleep(0.01)
        return word


    broken = penstock.Pipeline("broken", single_flight=False)


    @broken.step(critical=True, breaker="db", when_open="fail")
    async def connect(ctx) -> None:
        raise ConnectionError("nobody there")


    app = penstock.App()


    @app.job("job.text.plain")
    async def plain() -> None:
        pass


    app.add(words, slow, held, stubborn, broken)
"""


def with_pipes(folder: Path) -> Penstock:
    made = Penstock(folder)
    (folder / "pipes.py").write_text(textwrap.dedent(PIPES))
    return made


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    """An engine that serves pipelines, that this module's tests share."""
    shared = with_pipes(tmp_path_factory.mktemp("piped"))
    with shared.up("--app", "pipes:app", "--http", "127.0.0.1:0"):
        yield shared


def ended(penstock: Penstock, job_id: str) -> Any:
    return eventually(
        lambda: (record := penstock.json("pipeline", "status", job_id))["finished_at"] and record
    )


def started(penstock: Penstock, name: str, gate: str, *args: str) -> tuple[str, Path]:
    """A run that waits for a file; its first item has begun when this returns."""
    path = penstock.folder / gate
    given = ("--set", f"gate={path}", "--set", 'words=["a"]')
    job_id = penstock.out("pipeline", "start", name, *given, *args)
    eventually(lambda: Path(f"{path}.started").exists())
    return job_id, path


# What there is


def test_pipelines_are_listed_and_drawn(piped: Penstock) -> None:
    assert [one["name"] for one in piped.json("pipeline", "list")] == [
        *("broken", "held", "slow", "stubborn", "words")
    ]
    listed = piped.out("pipeline", "list")
    assert "shout → measure → announce" in listed
    assert "Shouts words." in listed
    shown = piped.out("pipeline", "show", "words")
    for words in (
        r"╭ shout +map over config.words +2",
        r"├ measure +map over shout +5 +mode=thread",
        r"╰ announce +step of measure +enabled=loud",
        r"size +integer +3 +minimum 1, maximum 9",
        "topic +job.pipeline.words",
    ):
        assert re.search(words, shown), words
    assert piped.json("pipeline", "show", "words")["topic"] == "job.pipeline.words"


def test_an_unknown_pipeline_is_answered_with_the_nearest(piped: Penstock) -> None:
    assert "did you mean words?" in piped.err("pipeline", "show", "wrods", code=3)
    assert "did you mean words?" in piped.err("pipeline", "start", "wrods", code=3)


# Starting


def test_a_start_prints_the_id_and_returns(piped: Penstock) -> None:
    job_id, gate = started(piped, "held", "returns")
    assert piped.json("pipeline", "status", job_id)["status"] == "RUNNING"
    gate.touch()
    assert ended(piped, job_id)["status"] == "COMPLETED"
    assert piped.state(job_id) == "SUCCEEDED"


def test_a_config_comes_from_a_file_and_from_fields(piped: Penstock) -> None:
    (piped.folder / "w.toml").write_text('words = ["four"]\nsize = 5\n')
    args = ("--input", "w.toml", "--set", "size=6", "--set", "title=a b", "--set", "loud=true")
    record = piped.json("pipeline", "start", "words", *args)
    config = ended(piped, record["job_id"])["config"]
    assert (config["words"], config["size"], config["title"]) == (["four"], 6, "a b")
    assert config["loud"] is True
    shown = piped.out("pipeline", "status", record["job_id"])
    assert "size = 6" in shown
    assert "gate =" not in shown


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("size=10", "config.size: must be at most 9"),
        ("sise=1", "config.sise: unknown field"),
        ("title=5", """--set 'title="5"'"""),
        ("size", "KEY=VALUE"),
        ("a..b=1", "OUTER.INNER"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(piped: Penstock, given: str, words: str) -> None:
    assert words in piped.err("pipeline", "start", "words", "--set", given, code=2)


def test_the_same_key_is_the_same_run(piped: Penstock) -> None:
    first = piped.out("pipeline", "start", "words", "--key", "once")
    assert piped.out("pipeline", "start", "words", "--key", "once") == first


def test_a_pipeline_that_runs_once_at_a_time_is_busy(piped: Penstock) -> None:
    job_id, gate = started(piped, "held", "busy")
    refusal = piped.err("pipeline", "start", "held", code=4)
    assert job_id in refusal
    gate.touch()
    ended(piped, job_id)


# Following


def test_a_followed_run_is_a_line_a_stage_and_ends_with_its_code(piped: Penstock) -> None:
    done = piped("pipeline", "start", "words", "--wait")
    lines = [re.sub(r"^[\d:.]+  ", "", line) for line in done.stdout.splitlines()]
    assert lines[0].startswith("pipeline words, job ")
    assert lines[1] == "shout  started"
    assert lines[2].startswith("shout  completed  3/3  ")
    assert lines[3:5] == ["measure  started", lines[4]]
    assert "announce  skipped  (disabled)" in lines
    assert lines[-1].startswith("words COMPLETED after ")
    assert done.stderr == ""


def test_a_partial_run_is_a_warning_and_with_strict_an_error(piped: Penstock) -> None:
    given = ("pipeline", "start", "words", "--wait", "--set", 'words=["fine","bad"]')
    done = piped(*given)
    assert "words PARTIAL" in done.stdout
    assert "ended PARTIAL: 1 of 2 items of shout failed" in done.stderr
    piped(*given, "--strict", code=1)
    record = msgspec.json.decode(piped(*given, "--json").stdout)
    assert record["status"] == "PARTIAL"


def test_a_failed_run_ends_with_one_and_its_reason(piped: Penstock) -> None:
    done = piped("pipeline", "start", "broken", "--wait", code=1)
    assert "ended FAILED: connect failed" in done.stderr
    job_id = done.stdout.split()[3]
    assert "nobody there" in piped.out("pipeline", "status", job_id)


def test_ctrl_c_cancels_a_run_that_a_command_started_and_waits_for(piped: Penstock) -> None:
    gate = piped.folder / "interrupted"
    given = ("--set", f"gate={gate}", "--set", 'words=["a"]')
    with piped.start("pipeline", "start", "held", "--wait", *given) as following:
        eventually(lambda: Path(f"{gate}.started").exists())
        following.send_signal(signal.SIGINT)
        out, err = following.communicate(timeout=30)
    assert following.returncode == 130
    job_id = out.split()[3]
    assert "cancelling; Ctrl-C once more leaves at once" in err
    assert f"job {job_id} ended CANCELLED" in err


def test_the_time_to_wait_ends_the_waiting_and_not_the_run(piped: Penstock) -> None:
    gate = piped.folder / "longer"
    given = ("--set", f"gate={gate}", "--set", 'words=["a"]')
    done = piped("pipeline", "start", "held", "--wait-timeout", "100ms", *given, code=9)
    assert "has not ended yet" in done.stderr
    gate.touch()
    piped("pipeline", "watch", done.stdout.split()[3])


def test_ctrl_c_leaves_a_run_alone_that_is_only_watched(piped: Penstock) -> None:
    gate = piped.folder / "left"
    given = ("--set", f"gate={gate}", "--set", 'words=["a"]')
    job_id = piped.out("pipeline", "start", "held", *given)
    eventually(lambda: Path(f"{gate}.started").exists())
    with piped.start("pipeline", "watch", job_id) as following:
        assert following.stdout is not None
        assert "pipeline held" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        following.communicate(timeout=30)
    assert following.returncode == 130
    with piped.start("pipeline", "watch", job_id[-8:]) as watching:
        gate.touch()
        out, _ = watching.communicate(timeout=30)
    assert watching.returncode == 0
    assert "wait  completed  1/1" in out
    again = piped("pipeline", "watch", job_id)
    assert again.stdout == out


def test_watched_by_a_program_it_is_json_lines(piped: Penstock) -> None:
    job_id = piped.out("pipeline", "start", "words")
    piped("pipeline", "watch", job_id)
    lines = piped.out("pipeline", "watch", job_id, "--json").splitlines()
    events = [msgspec.json.decode(line) for line in lines]
    assert (events[0]["kind"], events[-1]["kind"]) == ("job_start", "job_complete")
    assert [one["id"] for one in events] == sorted({one["id"] for one in events})


def test_every_event_of_a_live_run_has_an_id_of_its_own_except_progress(piped: Penstock) -> None:
    job_id = piped.out("pipeline", "start", "slow")
    live, later = (
        [msgspec.json.decode(line) for line in piped.out(*watching).splitlines()]
        for watching in [("pipeline", "watch", job_id, "--json")] * 2
    )
    progress = [one for one in live if one["kind"] == "stage_progress"]
    stored = [one for one in live if one["kind"] != "stage_progress"]
    assert progress
    assert {one["id"] for one in progress} == {None}
    assert [one["id"] for one in stored] == sorted({one["id"] for one in stored})
    assert stored == later


def test_over_http_it_is_all_the_same(piped: Penstock) -> None:
    url = next(word for word in piped.banner.split() if word.startswith("http://"))
    there = ("--connect", url, "--token", f"@{piped.data / 'token'}")
    done = piped("pipeline", "start", "words", "--wait", "--set", 'words=["bad","a"]', *there)
    assert "words PARTIAL" in done.stdout
    job_id = done.stdout.split()[3]
    status = ("pipeline", "status", job_id[-8:])
    assert piped.json(*status, *there) == piped.json(*status)
    items = ("pipeline", "items", job_id, "shout")
    assert piped.json(*items, *there) == piped.json(*items)
    assert "config.size" in piped.err(
        "pipeline", "start", "words", "--set", "size=0", *there, code=2
    )
    assert "had already ended" in piped.out("pipeline", "cancel", job_id, *there, code=4)


def test_on_a_terminal_a_run_is_a_live_board(piped: Penstock) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = ("pipeline", "start", "words", "--wait", "--set", 'words=["fine","bad"]')
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *command],
        cwd=piped.folder,
        env={**piped.env, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        screen = b""
        try:
            while chunk := os.read(ours, 10_000):
                screen += chunk
        except OSError:  # the other end is closed
            pass
        assert process.wait(30) == 0
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.decode())
    assert re.search(r"shout +partial +━+ +2/2 +1 ", text)
    assert re.search(r"announce +skipped +disabled", text)
    assert "words PARTIAL after " in text


# Looking


def test_runs_are_listed_by_pipeline_and_status(piped: Penstock) -> None:
    job_id = piped.out("pipeline", "start", "words", "--set", 'words=["bad"]')
    assert ended(piped, job_id)["status"] == "FAILED"
    given = ("pipeline", "runs", "--pipeline", "words", "--state", "failed")
    assert job_id in piped.out(*given, "-q").split()
    assert {one["status"] for one in piped.json(*given)} == {"FAILED"}
    listed = piped(*given, "-n", "1")
    assert "of 1 item of shout failed" in listed.stdout
    assert f"--before {job_id[-8:]}" in listed.stderr
    assert job_id not in piped.out(*given, "-q", "--before", job_id[-8:])


def test_items_tell_how_each_ended_and_why(piped: Penstock) -> None:
    job_id = piped.out("pipeline", "start", "words", "--set", 'words=["fine","bad"]')
    ended(piped, job_id)
    listed = piped.out("pipeline", "items", job_id, "shout")
    assert re.search(r'0 +0 +ok +1 .* "fine"', listed)
    assert re.search(r"""1 +1 +failed +1 +\w+ .*bad can't be shouted +"bad\"""", listed)
    (item,) = piped.json("pipeline", "items", job_id, "shout", "--outcome", "failed")
    assert (item["key"], item["input"], item["attempts"]) == ("1", "bad", 1)
    (item,) = piped.json("pipeline", "items", job_id, "shout", "-n", "1")
    assert (item["key"], item["output"]) == ("0", "FINE")
    assert "there are: shout" in piped.err("pipeline", "items", job_id, "shut", code=3)


def test_status_tells_stages_figures_and_where_to_look(piped: Penstock) -> None:
    job_id = piped.out("pipeline", "start", "words", "--set", 'words=["fine","bad"]')
    ended(piped, job_id)
    shown = piped.out("pipeline", "status", job_id[-8:])
    for words in (
        rf"words +job {job_id} +PARTIAL",
        r"shout +partial +2/2 +1 +1 ",
        r"announce +skipped +disabled",
        r"measure +letters 4",
        rf"pipeline items {job_id[-8:]} shout --outcome failed",
        rf"pipeline retry {job_id[-8:]}",
    ):
        assert re.search(words, shown), words
    assert re.search(r"shout +partial +2/2 +1 +1", piped.out("show", job_id))


def test_a_job_that_is_no_run_is_not_taken_for_one(piped: Penstock) -> None:
    assert "no job" in piped.err("pipeline", "status", "nobody", code=3)
    job_id = piped.submit("job.text.plain")
    assert "is not a run of a pipeline" in piped.err("pipeline", "status", job_id, code=3)


# Ending and trying again


def test_a_cancellation_says_which_won(piped: Penstock) -> None:
    job_id, _ = started(piped, "held", "cancelled")
    assert piped.out("pipeline", "cancel", job_id[-8:]) == f"{job_id} cancelled"
    assert piped.json("pipeline", "status", job_id)["cancel_effective"] is True
    again = piped.out("pipeline", "cancel", job_id, code=4)
    assert again == f"{job_id} had already ended CANCELLED"
    done = piped.out("pipeline", "start", "words")
    ended(piped, done)
    assert "had already ended COMPLETED" in piped.out("pipeline", "cancel", done, code=4)
    piped("pipeline", "watch", job_id, code=5)


def test_what_would_not_stop_is_told(piped: Penstock) -> None:
    job_id, gate = started(piped, "stubborn", "sits")
    try:
        answer = piped.out("pipeline", "cancel", job_id, "--wait-timeout", "20s")
        assert answer.splitlines() == [
            f"{job_id} cancelled",
            "  abandoned, it would not stop: sit/a",
        ]
    finally:
        gate.touch()


def test_what_failed_runs_again_and_the_rest_is_taken_over(piped: Penstock) -> None:
    gate = piped.folder / "mended"
    given = ("--set", 'words=["fine","bad"]', "--set", f"gate={gate}")
    job_id = piped.out("pipeline", "start", "words", *given)
    ended(piped, job_id)
    gate.touch()
    done = piped("pipeline", "retry", job_id[-8:], "--wait")
    assert "words COMPLETED" in done.stdout
    (again,) = piped.json("pipeline", "runs", "--retry-of", job_id)
    assert again["retry_of"] == job_id
    assert again["stage_progress"]["shout"]["reused"] == 1
    refusal = piped.err("pipeline", "retry", again["job_id"], code=2)
    assert "nothing failed" in refusal


# Breakers


def test_breakers_are_listed_and_reset(piped: Penstock) -> None:
    for _ in range(5):
        piped("pipeline", "start", "broken", "--wait", code=1)
    (breaker,) = piped.json("pipeline", "breaker", "list")
    assert (breaker["name"], breaker["state"]) == ("db", "open")
    assert re.search(r"db +open +\d+ +5 .* in ", piped.out("pipeline", "breaker", "list"))
    assert piped.out("pipeline", "breaker", "reset", "db") == "db is closed"
    assert "no breaker 'dd'" in piped.err("pipeline", "breaker", "reset", "dd", code=3)


# Without an engine


def test_a_lost_engine_ends_the_following_but_not_the_run(tmp_path: Path) -> None:
    penstock = with_pipes(tmp_path)
    penstock.env["PENSTOCK_TIMEOUTS__RECONNECT"] = "2"
    gate = tmp_path / "lost"
    given = ("held", "--wait", "--set", f"gate={gate}")
    with penstock.up("--app", "pipes:app", "--no-http") as engine:
        with penstock.start("pipeline", "start", *given) as following:
            eventually(lambda: Path(f"{gate}.started").exists())
            engine.kill()
            out, err = following.communicate(timeout=30)
        assert following.returncode == 8
    job_id = out.split()[3]
    assert f"pipeline watch {job_id[-8:]}" in err
    gate.touch()
    with penstock.up("--app", "pipes:app", "--no-http"):
        assert "held COMPLETED" in penstock.out("pipeline", "watch", job_id)


def test_without_an_engine_it_runs_here(tmp_path: Path) -> None:
    penstock = with_pipes(tmp_path)
    done = penstock("pipeline", "start", "pipes:words", "--set", 'words=["fine","bad"]')
    assert "no engine is running" in done.stderr
    assert "words PARTIAL" in done.stdout
    assert (
        "config.size"
        in penstock("pipeline", "start", "pipes:words", "--set", "size=0", code=2).stderr
    )
    assert "there is no pipeline 'x'" in penstock("pipeline", "start", "x", code=2).stderr
    assert "no engine" in penstock.err("pipeline", "start", "pipes:words", "--detach", code=8)


def test_what_ran_here_can_be_read_without_an_engine(tmp_path: Path) -> None:
    penstock = with_pipes(tmp_path)
    given = ("pipes:words", "--set", 'words=["fine","bad"]', "--json")
    record = msgspec.json.decode(penstock("pipeline", "start", *given).stdout)
    job_id = record["job_id"]
    assert penstock.json("pipeline", "status", job_id[-8:])["status"] == "PARTIAL"
    assert penstock.out("pipeline", "runs", "-q") == job_id
    (item,) = penstock.json("pipeline", "items", job_id, "shout", "--outcome", "failed")
    assert item["input"] == "bad"
    assert "there are: shout, measure" in penstock("pipeline", "items", job_id, "x", code=3).stderr
    assert "shout  partial  2/2  1 failed" in penstock.out("pipeline", "watch", job_id)
    assert penstock.json("pipeline", "breaker", "list") == []
    assert "no engine answers" in penstock.err("pipeline", "cancel", job_id, code=8)
    assert "no engine answers" in penstock.err("pipeline", "retry", job_id, code=8)


def test_without_an_engine_pipelines_are_told_as_they_are_installed(tmp_path: Path) -> None:
    penstock = with_pipes(tmp_path)
    assert "no engine answers" in penstock.err("pipeline", "list", code=8)
    assert "shout" in penstock.out("pipeline", "show", "pipes:words")
    assert "can't import nowhere" in penstock("pipeline", "show", "nowhere:x", code=2).stderr


def test_here_the_first_ctrl_c_cancels_the_run(tmp_path: Path) -> None:
    penstock = with_pipes(tmp_path)
    gate = tmp_path / "here"
    with penstock.start("pipeline", "start", "pipes:held", "--set", f"gate={gate}") as process:
        eventually(lambda: Path(f"{gate}.started").exists())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "held CANCELLED" in out
    assert "Ctrl-C once more leaves at once" in err


def test_here_the_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    penstock = with_pipes(tmp_path)
    (tmp_path / "pipes.py").write_text(
        (tmp_path / "pipes.py").read_text().replace("cancel_grace=0.1", "cancel_grace=60")
    )
    gate = tmp_path / "here"
    with penstock.start("pipeline", "start", "pipes:stubborn", "--set", f"gate={gate}") as process:
        eventually(lambda: Path(f"{gate}.started").exists())
        process.send_signal(signal.SIGINT)
        said(process, "Ctrl-C once more")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
