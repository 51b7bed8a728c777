"""Looking at the jobs of a folder: results as they are, exits of the original, tables."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
from tests.support.cli.spooling import Spool

from penstock.lifecycles.spool import Status

NEVER = "1736700000_12345_0"


# get: the original's 0, 1 and 2


def test_a_result_is_printed_as_it_is(spool: Spool) -> None:
    for result in (b"4", b"two\nlines\n", "Grüße\x1b[2J".encode(), b"", b"not \xff text"):
        job_id = spool.done({"result.txt": result})
        assert spool("get", job_id).out == result


def test_a_failed_job_tells_why_on_standard_error_and_is_1(spool: Spool) -> None:
    job_id = spool.failed("the prompt has 9000 tokens", code="CONTEXT_EXCEEDED")
    said = spool("get", job_id, code=1)
    assert said.out == b""
    assert said.err == (
        f"penstock: job {job_id} FAILED: CONTEXT_EXCEEDED: the prompt has 9000 tokens\n"
    )


def test_what_is_not_ready_or_not_there_is_2(spool: Spool) -> None:
    queued, running = spool.queued(), spool.running()
    assert f"job {queued} is QUEUED" in spool("get", queued, code=2).err
    assert f"job {running} is RUNNING" in spool("get", running, code=2).err
    assert f"there is no job {NEVER} here" in spool("get", NEVER, code=2).err


def test_what_can_be_no_id_is_1_so_that_nobody_asks_again(spool: Spool) -> None:
    spool.queued()
    for text in ("abc", "../output", "1__2", "_1"):
        said = spool("get", text, code=1)
        assert f"job id: {text!r} can't be one" in said.err


def test_the_id_may_come_on_standard_input(spool: Spool) -> None:
    job_id = spool.done({"result.txt": b"four"})
    assert spool("get", given=f"{job_id}\n".encode()).out == b"four"
    assert spool("get", "-", given=f"{job_id}\n".encode()).out == b"four"


def test_without_an_id_it_is_the_job_that_ended_last(spool: Spool) -> None:
    later = spool.running()
    spool.done({"result.txt": b"first"})
    assert spool("get").out == b"first"
    time.sleep(0.02)  # the file system's clock has ticks
    folder = spool.workspace.of(Status.RUNNING, later)
    (folder / "result.txt").write_bytes(b"second")
    folder.rename(spool.workspace.of(Status.DONE, later))
    assert spool("get").out == b"second"


def test_where_no_job_has_ended_there_is_no_last_one(spool: Spool) -> None:
    spool.queued()
    assert "no job of" in spool("get", code=3).err


@pytest.mark.seed("004", "13.11")
def test_results_of_several_jobs_are_told_apart_by_lines(spool: Spool) -> None:
    good, bad = spool.done({"result.txt": b"a\nb"}), spool.failed("no", code="INVALID_PROMPT")
    ids = f"{good}\n{bad}\n".encode()
    assert "say --jsonl" in spool("get", given=ids, code=2).err
    lines = spool("get", "--jsonl", given=ids, code=1).out.splitlines()
    first, second = map(msgspec.json.decode, lines)
    assert (first["job_id"], first["status"], first["result"]) == (good, "DONE", "a\nb")
    assert (second["status"], second["code"], second["error"]) == ("FAILED", "INVALID_PROMPT", "no")


def test_json_has_the_metadata_with_the_result(spool: Spool) -> None:
    job_id = spool.done(
        {"result.txt": b"four"}, completion_tokens=1, finish_reason="stop", duration_s=0.5
    )
    told = spool.json("get", job_id)
    assert told["result"] == "four"
    assert (told["completion_tokens"], told["finish_reason"], told["mode"]) == (1, "stop", "text")
    assert "tags" not in told
    assert spool.json("get", NEVER, code=2) == {"job_id": NEVER, "status": "MISSING"}


def test_an_embedding_is_its_file_and_in_json_a_value(spool: Spool) -> None:
    vector = b'{\n  "dim": 2,\n  "vector": [0.6, 0.8]\n}\n'
    job_id = spool.done({"embedding.json": vector}, mode="embed")
    assert spool("get", job_id).out == vector
    assert spool.json("get", job_id)["embedding"] == {"dim": 2, "vector": [0.6, 0.8]}


def test_what_a_running_job_has_said_can_be_read(spool: Spool) -> None:
    job_id = spool.running(partial="Once upon a")
    assert spool("get", job_id, "--partial").out == b"Once upon a"
    assert spool.json("get", job_id, "--partial")["partial"] == "Once upon a"


# status


def test_a_status_is_one_word(spool: Spool) -> None:
    ids = {
        spool.queued(): "QUEUED",
        spool.running(): "RUNNING",
        spool.done({"result.txt": b"x"}): "DONE",
        spool.failed(): "FAILED",
    }
    for job_id, word in ids.items():
        assert spool("status", job_id) == (f"{word}\n".encode(), "")
    assert spool("status", NEVER, code=3).text == "MISSING"


def test_a_status_in_json_has_the_place_in_the_queue(spool: Spool) -> None:
    first, second = spool.queued(), spool.queued()
    assert spool.json("status", first)["ahead"] == 0
    assert spool.json("status", second)["ahead"] == 1


def test_the_counts_of_a_workspace(spool: Spool) -> None:
    spool.queued()
    spool.failed()
    assert spool.json("status") == {"QUEUED": 1, "RUNNING": 0, "DONE": 0, "FAILED": 1}
    assert [line.split() for line in spool("status").text.splitlines()] == [
        ["STATUS", "JOBS", "FOLDER"],
        ["QUEUED", "1", "input/ready"],
        ["RUNNING", "0", "processing"],
        ["DONE", "0", "output"],
        ["FAILED", "1", "failed"],
    ]


# ls


def test_jobs_are_listed_newest_first(spool: Spool) -> None:
    old, new = spool.queued("first\x1b]0;title\x07\nline"), spool.done({"result.txt": b"x"})
    header, *rows = spool("list").text.splitlines()
    assert header.split() == ["ID", "STATUS", "AGE", "TOOK", "PROMPT"]  # no TOKENS: none has any
    assert [row.split()[:2] for row in rows] == [[new, "DONE"], [old, "QUEUED"]]
    assert rows[1].endswith("first]0;title line")
    assert [one["job_id"] for one in spool.json("list")] == [new, old]


def test_a_list_can_be_narrowed_and_fed_to_a_pipe(spool: Spool) -> None:
    spool.queued()
    bad = [spool.failed() for _ in range(3)]
    assert spool("list", "-q", "--state", "failed").text.split() == bad[::-1]
    assert spool("list", "-q", "--state", "FAILED", "-n", "1").text == bad[-1]
    assert spool("list", "--state", "done").err == "no jobs\n"


def test_jobs_with_ids_of_the_original_are_known(spool: Spool) -> None:
    spool.queued()
    padded = "00001736700000123456_00012345_000001"
    folder = spool.path / "output" / padded
    folder.mkdir()
    (folder / "prompt.txt").write_text("asked by another tool")
    (folder / "result.txt").write_text("answered")
    assert spool("get", padded).out == b"answered"
    assert padded in spool("list", "-q").text.split()
    assert "asked by another tool" in spool("list").text


# no workspace


@pytest.mark.parametrize(
    "args",
    [
        *(("get", NEVER), ("status",), ("list",), ("wait", NEVER), ("watch", NEVER)),
        *(("cancel", NEVER), ("retry", NEVER), ("prune", "--keep", "1")),
    ],
    ids=lambda args: args[0],
)
def test_where_there_is_no_workspace_it_says_so_and_makes_none(
    spool: Spool, args: tuple[str, ...]
) -> None:
    said = spool(*args, code=3)
    assert said.err.startswith(f"penstock: there is not a workspace {spool.path}\n")
    assert "creates one" in said.err
    assert not spool.path.exists()


def test_a_folder_that_is_no_workspace_is_left_alone(spool: Spool) -> None:
    spool.path.mkdir()
    assert "ws is not a workspace" in spool("list", code=3).err
    assert [*spool.path.iterdir()] == []


# wait


def test_ids_of_ended_jobs_are_passed_on_in_their_order(spool: Spool) -> None:
    good, bad = spool.done({"result.txt": b"x"}), spool.failed("why")
    said = spool("wait", given=f"{bad}\n{good}\n".encode(), code=1)
    assert said.text.split() == [bad, good]
    assert f"job {bad} FAILED: why" in said.err
    assert spool.json("wait", good) == [{"job_id": good, "status": "DONE"}]


def test_a_job_is_waited_for_until_it_ends(spool: Spool) -> None:
    job_id = spool.running()
    folder = spool.workspace.of(Status.RUNNING, job_id)
    ending = threading.Timer(0.2, folder.rename, [spool.workspace.of(Status.DONE, job_id)])
    ending.start()
    assert spool("wait", job_id, "--wait-timeout", "20s").text == job_id
    ending.join()


@pytest.mark.seed("004", "12.3")
@pytest.mark.parametrize(
    ("meta", "code"),
    [
        ({"code": "CANCELLED"}, 5),
        ({"code": "TIMEOUT"}, 7),
        ({"code": "DEADLINE_EXCEEDED"}, 7),
        ({}, 1),
    ],
    ids=lambda value: "-".join(value.values()) or "failed" if isinstance(value, dict) else "",
)
def test_the_exit_code_of_waiting_says_how_the_job_ended(
    spool: Spool, meta: dict[str, str], code: int
) -> None:
    spool("wait", spool.failed(**meta), code=code)


def test_patience_that_ends_is_9_and_a_job_that_is_not_there_3(spool: Spool) -> None:
    job_id = spool.queued()
    assert "did not end" in spool("wait", job_id, "--wait-timeout", "10ms", code=9).err
    assert f"no job {NEVER}" in spool("wait", NEVER, code=3).err
    assert "say which jobs" in spool("wait", code=2).err


def test_waiting_until_all_is_quiet_counts_what_failed_meanwhile(spool: Spool) -> None:
    spool.failed("long ago")
    assert spool("wait", "--idle").text == "0 done, 1 failed"
    job_id = spool.running()
    folder = spool.workspace.of(Status.RUNNING, job_id)
    ending = threading.Timer(0.2, folder.rename, [spool.workspace.of(Status.FAILED, job_id)])
    ending.start()
    assert spool("wait", "--idle", code=1).text == "0 done, 2 failed"
    ending.join()
    assert "takes no ids" in spool("wait", "--idle", job_id, code=2).err


# watch


@pytest.mark.seed("004", "11.3")
def test_watching_prints_the_text_as_it_comes_and_then_the_rest(spool: Spool) -> None:
    job_id = spool.running(partial="Once ")
    folder = spool.workspace.of(Status.RUNNING, job_id)

    def end() -> None:
        (folder / "result.txt").write_text("Once upon a time.")
        folder.rename(spool.workspace.of(Status.DONE, job_id))

    ending = threading.Timer(0.3, end)
    ending.start()
    lines = spool("watch", job_id, "--json").out.splitlines()
    ending.join()
    told = [msgspec.json.decode(line) for line in lines]
    assert [one["type"] for one in told] == ["status", "piece", "status", "piece", "end"]
    assert [one["text"] for one in told if one["type"] == "piece"] == ["Once ", "upon a time."]
    assert spool("watch", job_id).out == b"Once upon a time."


def test_watching_a_job_that_failed_or_is_not_there(spool: Spool) -> None:
    assert "FAILED: why" in spool("watch", spool.failed("why"), code=1).err
    assert "there is no job" in spool("watch", NEVER, code=3).err


# nobody there to do the work


def test_who_waits_at_a_terminal_is_told_that_no_server_is_there(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = spool.queued()
    said = "no server is seen here: 'penstock spool serve' starts one"
    assert said not in spool("wait", job_id, "--wait-timeout", "0s", code=9).err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for args in (("wait", job_id), ("wait", "--idle")):
        assert said in spool(*args, "--wait-timeout", "0s", code=9).err
    assert said in spool("status", job_id).err
    assert spool.json("status", job_id)["served"] is False
