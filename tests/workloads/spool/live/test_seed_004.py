"""Seed 004, sentence by sentence, as a client of a folder meets it.

tests/seeds/004.md numbers the sentences; marks say which test holds which.
The server is a process of
its own with a real model, on a real workspace.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from tests.support.spool.spool_server import (
    GREEDY,
    LONG,
    PENSTOCK,
    Spool,
    new_id,
    served,
    spool_command,
)

from penstock.core.errors import InvalidRequest
from penstock.lifecycles.spool import FOLDERS, Status
from penstock.testing.clock import VirtualClock
from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.client import work as work_module
from penstock.workloads.spool.client.changes import cancel
from penstock.workloads.spool.client.flow import Flow, WaitBackoff
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import ServerConfig, SpoolOptions, Sync
from penstock.workloads.spool.disk.files import move
from penstock.workloads.spool.disk.watching import Names
from penstock.workloads.spool.disk.workspace import Workspace, order_of

WORKERS, CONTEXT = 2, 256
ORDER = (Status.DONE, Status.FAILED, Status.RUNNING, Status.QUEUED)
"""In which the seed looks for a job."""


@pytest.fixture(scope="module")
def spool(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spool]:
    folder = tmp_path_factory.mktemp("seed") / "work"
    with served(folder, model_file, workers=WORKERS, context=CONTEXT) as spool:
        yield spool


@pytest.fixture
def full(spool: Spool) -> Iterator[list[str]]:
    """Jobs that keep every worker busy until they are cancelled."""
    ids = [spool.submit(LONG, max_tokens=400, sampling=GREEDY) for _ in range(WORKERS)]
    for job_id in ids:
        spool.running(job_id)
    yield ids
    for job_id in ids:
        cancel(spool.workspace, job_id)
        spool.ended(job_id)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """A client of a workspace that nobody serves."""
    return Work(Workspace(tmp_path / "work", Sync.NONE))


def put(workspace: Workspace, status: Status, job_id: str) -> Path:
    folder = workspace.of(status, job_id)
    folder.mkdir()
    (folder / "prompt.txt").write_text("Say yes.")
    return folder


# -- Overview -------------------------------------------------------------------------------


@pytest.mark.seed("004", "1.1", "1.2")
@pytest.mark.parametrize("status", FOLDERS)
def test_the_path_of_a_jobs_directory_is_its_state(work: Work, status: Status) -> None:
    names = ["input/writing", "input/ready", "processing", "output", "failed"]
    assert dict(zip(FOLDERS, names, strict=True)) == FOLDERS
    folder = work.workspace.path / FOLDERS[status] / "1736700000_12345_0"
    folder.mkdir()
    seen = Flow(work.workspace.path).status("1736700000_12345_0")
    assert seen is (Status.MISSING if status is Status.STAGING else status)


@pytest.mark.seed("004", "1.3", "3.4")
def test_there_is_no_database_and_nothing_else_tracks_a_state(spool: Spool) -> None:
    found = spool.run("Say yes.", max_tokens=4)
    files = [path for path in spool.path.rglob("*") if path.is_file()]
    outside = [path for path in files if found.job_id not in path.parts]
    assert [path for path in outside if found.job_id.encode() in path.read_bytes()] == []
    suffixes = {path.suffix for path in files}
    assert suffixes <= {".txt", ".json", ".pid", ".lock", ""}
    # Whoever moves the directory has changed the state.
    elsewhere = spool.workspace.of(Status.FAILED, found.job_id)
    spool.folder(found.job_id).rename(elsewhere)
    assert spool.flow.status(found.job_id) is Status.FAILED


@pytest.mark.seed("004", "1.1", "1.4", "5.3", "8.4")
def test_a_job_goes_forward_through_its_states_and_has_one_at_a_time(spool: Spool) -> None:
    for _ in range(5):
        job_id = spool.submit("Count to three.", max_tokens=8)
        seen = [spool.flow.status(job_id)]
        while seen[-1] not in (Status.DONE, Status.FAILED):
            if (status := spool.flow.status(job_id)) is not seen[-1]:
                seen.append(status)
        assert seen in (
            [Status.QUEUED, Status.RUNNING, Status.DONE],
            [Status.RUNNING, Status.DONE],
        )
        assert spool.where(job_id) == [Status.DONE]


# -- STAGING --------------------------------------------------------------------------------


@pytest.mark.seed("004", "2.1", "2.2", "2.4", "2.5", "2.6", "2.8", "8.1", "8.2", "8.8")
def test_a_job_is_assembled_in_writing_and_becomes_queued_by_one_rename(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, moves = Flow(work.workspace), []

    def look(staged: str, queued: str, *, sync: Sync) -> None:
        source, target = Path(staged), Path(queued)
        before = {path.name: path.read_bytes() for path in source.iterdir()}
        moves.append((source, target))
        assert before["prompt.txt"] == b"Say yes."
        assert json.loads(before["meta.json"])["mode"] == "text"
        assert flow.status(source.name) is Status.MISSING
        assert os.listdir(target.parent) == []
        move(source, target, sync=sync)
        after = {path.name: path.read_bytes() for path in target.iterdir()}
        assert (after, source.exists()) == (before, False)

    monkeypatch.setattr(work_module, "move", look)
    job_id = work.submit("Say yes.")
    at = work.workspace.path
    assert moves == [(at / "input/writing" / job_id, at / "input/ready" / job_id)]
    assert flow.status(job_id) is Status.QUEUED


@pytest.mark.seed("004", "2.4", "2.7")
def test_what_is_staged_is_invisible_to_the_scanner(spool: Spool) -> None:
    job_id = new_id()
    folder = put(spool.workspace, Status.STAGING, job_id)
    spool.works()
    time.sleep(1.2)  # a scan has been by
    assert spool.where(job_id) == [Status.STAGING]
    assert job_id not in [one.job_id for one in spool.flow.list()]
    folder.rename(spool.workspace.of(Status.QUEUED, job_id))
    assert spool.ended(job_id).status is Status.DONE


@pytest.mark.seed("004", "2.3")
def test_staging_takes_milliseconds(tmp_path: Path) -> None:
    work = Work(tmp_path / "work")  # every file and folder is flushed
    took = []
    for _ in range(20):
        began = time.perf_counter()
        work.submit("Say yes.")
        took.append(time.perf_counter() - began)
    assert statistics.median(took) < 0.2
    assert os.listdir(tmp_path / "work/input/writing") == []


# -- QUEUED ---------------------------------------------------------------------------------


@pytest.mark.seed("004", "3.1", "3.2", "3.3", "3.7", "3.9", "3.10", "4.3")
def test_jobs_wait_in_ready_until_a_worker_is_available_and_run_in_their_order(
    spool: Spool, full: list[str]
) -> None:
    waiting = [spool.submit("Say yes.", max_tokens=4) for _ in range(5)]
    time.sleep(0.3)  # they have been discovered by now
    assert [spool.flow.status(job_id) for job_id in waiting] == [Status.QUEUED] * 5
    assert set(waiting) <= set(os.listdir(spool.path / "input/ready"))
    assert [spool.flow.position(job_id).ahead for job_id in waiting] == [0, 1, 2, 3, 4]
    for job_id in full:
        cancel(spool.workspace, job_id)
    assert [spool.ended(job_id).status for job_id in waiting] == [Status.DONE] * 5
    claimed = [one["job_id"] for one in spool.events("claimed") if one["job_id"] in waiting]
    assert claimed == waiting


@pytest.mark.seed("004", "3.5", "13.2")
def test_a_job_is_discovered_at_once_and_the_scan_of_each_second_is_the_net(spool: Spool) -> None:
    assert ServerConfig(workspace=spool.path).scan == 1.0
    late = []
    for _ in range(10):
        job_id = spool.submit("Say yes.", max_tokens=1)
        queued = time.time()
        spool.ended(job_id)
        late.append(spool.events("claimed", job_id)[0]["at"] - queued)
    assert statistics.median(late) < 0.1


@pytest.mark.seed("004", "3.8", "4.4", "8.3", "8.8", "13.5")
def test_a_worker_takes_a_job_by_a_rename_that_only_one_can_make(
    spool: Spool, model_file: Path
) -> None:
    with served(spool.path, model_file, workers=WORKERS) as second:
        ids = [spool.submit("Say yes.", max_tokens=2) for _ in range(30)]
        assert [spool.ended(job_id).status for job_id in ids] == [Status.DONE] * 30
        told = [*spool.events("claimed"), *second.events("claimed")]
        claimed = [one["job_id"] for one in told if one["job_id"] in ids]
        assert sorted(claimed) == sorted(ids)
        assert second.stop() == 0
    spool.works()


# -- RUNNING --------------------------------------------------------------------------------


@pytest.mark.seed("004", "4.1", "4.2", "4.7")
def test_a_running_job_lies_in_processing_and_its_tokens_are_accumulated(spool: Spool) -> None:
    # The most likely words: a chance end of the story would make it shorter.
    job_id = spool.submit(LONG, max_tokens=80, sampling=Sampling(temperature=0.0))
    folder = spool.running(job_id)
    assert folder == spool.path / "processing" / job_id
    assert spool.where(job_id) == [Status.RUNNING]
    assert (folder / "prompt.txt").read_text() == LONG
    texts: list[Any] = []
    while (part := spool.flow.partial(job_id)).status is Status.RUNNING:
        if part.text != (texts or [""])[-1]:
            texts.append(part.text)
    found = spool.ended(job_id)
    assert len(texts) > 1
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert found.text.startswith(texts[-1])
    assert found.meta.completion_tokens == 80


@pytest.mark.seed("004", "4.5", "4.6")
def test_the_processor_reads_the_prompt_and_the_runner_executes_llama_cpp(spool: Spool) -> None:
    options = b'{"max_tokens": 8, "sampling": {"temperature": 0}}'
    prompts = [b"Which animal barks?", b"Which animal barks?", b"Name a colour of the sky."]
    jobs = [spool.put({"prompt.txt": one, "options.json": options}) for one in prompts]
    first, again, other = [spool.ended(job_id) for job_id in jobs]
    assert first.text == again.text != other.text
    assert first.text
    assert first.meta.engine.startswith("xllamacpp ")
    assert first.meta.model == "SmolLM2-135M-Instruct"
    assert (first.meta.prompt_tokens or 0) < (other.meta.prompt_tokens or 0)
    assert (first.meta.completion_tokens or 0) <= 8


# -- DONE and FAILED ------------------------------------------------------------------------


@pytest.mark.seed("004", "5.1", "5.2", "5.3", "5.4", "5.6", "5.7")
def test_a_done_job_has_its_result_in_output_and_stays_until_it_is_cleaned_up(
    spool: Spool,
) -> None:
    found = spool.run("Say yes.", max_tokens=4)
    folder = spool.path / "output" / found.job_id
    assert spool.where(found.job_id) == [Status.DONE]
    assert (folder / "result.txt").read_bytes() == found.content
    assert sorted(os.listdir(folder)) == ["meta.json", "options.json", "prompt.txt", "result.txt"]
    assert spool.flow.get(found.job_id) == found
    spool.works()
    assert spool.flow.get(found.job_id) == found
    done = spool_command("prune", spool.path, "--keep", "0", "--done")
    assert done.returncode == 0, done.stderr
    assert spool.flow.status(found.job_id) is Status.MISSING


@pytest.mark.seed("004", "6.1", "6.2", "6.3", "6.5", "6.7", "8.5")
def test_a_failed_job_has_its_error_in_failed_and_stays_until_it_is_cleaned_up(
    spool: Spool,
) -> None:
    found = spool.run("Say yes.", model="nobody")
    folder = spool.path / "failed" / found.job_id
    assert spool.where(found.job_id) == [Status.FAILED]
    assert (folder / "error.txt").read_text() == found.error
    assert "nobody" in found.error
    assert not (folder / "result.txt").exists()
    assert spool.flow.get(found.job_id) == found
    spool.works()
    assert spool.flow.get(found.job_id) == found


@pytest.mark.seed("004", "4.8", "5.5", "6.6", "13.7", "14.7")
def test_everything_is_there_the_moment_a_job_is_seen_to_have_ended(spool: Spool) -> None:
    """Not as in the original, where the metadata comes after the rename."""
    halves: list[str] = []
    over = Event()

    def watch() -> None:
        seen: set[str] = set()
        while not over.is_set():
            for status, file in ((Status.DONE, "result.txt"), (Status.FAILED, "error.txt")):
                for job_id in set(spool.workspace.ids(status)) - seen:
                    seen.add(job_id)
                    folder = spool.workspace.of(status, job_id)
                    meta = json.loads((folder / "meta.json").read_text())
                    if meta.get("status") != str(status).lower() or not (folder / file).exists():
                        halves.append(job_id)

    spool_command("prune", spool.path, "--keep", "0")
    watcher = Thread(target=watch)
    watcher.start()
    ids = [spool.submit("Say yes.", max_tokens=2) for _ in range(15)]
    ids += [spool.submit("Say yes.", model="nobody") for _ in range(10)]
    for job_id in ids:
        spool.ended(job_id)
    time.sleep(0.05)
    over.set()
    watcher.join()
    assert halves == []


@pytest.mark.seed("004", "6.10", "6.11", "13.8", "14.3")
def test_a_context_that_is_exceeded_and_an_invalid_prompt_have_reasons_of_their_own(
    spool: Spool,
) -> None:
    long = spool.run("word " * 350)
    assert (long.status, long.meta.code) == (Status.FAILED, "CONTEXT_EXCEEDED")
    counts = [int(number) for number in re.findall(r"\d+", long.error)]
    assert (long.meta.prompt_tokens in counts, CONTEXT in counts) == (True, True)
    assert (long.meta.prompt_tokens or 0) > 350
    invalid = spool.ended(spool.put({"prompt.txt": b"\xff\xfe"}))
    assert (invalid.status, invalid.meta.code) == (Status.FAILED, "INVALID_PROMPT")
    assert "UTF-8" in invalid.error
    spool.works()


@pytest.mark.seed("004", "13.8", "14.4")
def test_an_answer_that_has_hardly_any_room_is_never_silently_empty(spool: Spool) -> None:
    """The original leaves 64 tokens free, and is done without a word where they are not."""
    first = spool.run("word", max_tokens=1).meta.prompt_tokens or 0
    found = spool.run("word " * (CONTEXT - first - 6), max_tokens=50)
    assert CONTEXT - 10 <= (found.meta.prompt_tokens or 0) < CONTEXT
    assert found.status is Status.DONE
    assert found.meta.finish_reason in ("length", "stop")
    assert (found.meta.completion_tokens or 0) >= 1
    assert found.text or found.meta.finish_reason == "stop"


# -- MISSING --------------------------------------------------------------------------------


@pytest.mark.seed("004", "7.1", "7.2", "7.3", "7.4", "7.5")
def test_a_job_that_is_in_no_folder_is_missing_whatever_the_reason(work: Work) -> None:
    flow = Flow(work.workspace)
    assert flow.status("1736700000_12345_9") is Status.MISSING  # mistyped, or not submitted yet
    assert flow.get("1736700000_12345_9").status is Status.MISSING
    deleted = work.submit("Say yes.")
    put(work.workspace, Status.DONE, "1_1_1")
    assert flow.status(deleted) is Status.QUEUED
    subprocess.run(["rm", "-r", work.workspace.of(Status.QUEUED, deleted)], check=True)
    assert flow.status(deleted) is Status.MISSING
    subprocess.run(["rm", "-r", work.workspace.path], check=True)  # the workspace was cleared
    assert flow.status("1_1_1") is Status.MISSING
    assert flow.counts() == dict.fromkeys(ORDER, 0)
    with pytest.raises(InvalidRequest):
        flow.status("1736700000_12345_0.")


# -- Status ---------------------------------------------------------------------------------


@pytest.mark.seed("004", "8.9")
def test_a_status_is_detected_in_the_seeds_order(work: Work) -> None:
    job_id = "1736700000_12345_0"
    flow = Flow(work.workspace)
    for status in reversed(ORDER):
        put(work.workspace, status, job_id)
        assert flow.status(job_id) is status
    for status, following in zip(ORDER, (*ORDER[1:], Status.MISSING), strict=True):
        (work.workspace.of(status, job_id) / "prompt.txt").unlink()
        work.workspace.of(status, job_id).rmdir()
        assert flow.status(job_id) is following


@pytest.mark.seed("004", "8.11")
def test_the_words_for_a_status_are_the_seeds() -> None:
    assert [*Status] == ["STAGING", "QUEUED", "RUNNING", "DONE", "FAILED", "MISSING"]


# -- Ids ------------------------------------------------------------------------------------


@pytest.mark.seed("004", "9.1", "9.4")
def test_an_id_is_seconds_process_and_counter(work: Work) -> None:
    before = int(time.time())
    client = subprocess.Popen(
        [PENSTOCK, "spool", "submit", work.workspace.path, "Say yes."], stdout=subprocess.PIPE
    )
    out, _ = client.communicate(timeout=30)
    found = re.fullmatch(rb"(\d+)_(\d+)_(\d+)\n", out)
    assert found
    seconds, pid, counter = map(int, found.groups())
    assert before <= seconds <= time.time()
    assert (pid, counter) == (client.pid, 0)
    ours = [work.submit("Say yes.") for _ in range(12)]
    assert {one.split("_")[1] for one in ours} == {str(os.getpid())}
    counters = [int(one.split("_")[2]) for one in ours]
    assert counters == list(range(counters[0], counters[0] + 12))


@pytest.mark.seed("004", "9.2", "9.3")
def test_ids_are_unique_across_processes_and_sort_by_time(tmp_path: Path) -> None:
    script = (
        "import sys; from penstock.workloads.spool.client.work import Work\n"
        "from penstock.workloads.spool.disk.workspace import Workspace\n"
        "from penstock.workloads.spool.config import Sync\n"
        "work = Work(Workspace(sys.argv[1], Sync.NONE))\n"
        "for _ in range(100): print(work.submit('x'), flush=True)"
    )
    args = [str(PENSTOCK.with_name("python")), "-c", script, str(tmp_path / "work")]
    clients = [subprocess.Popen(args, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [client.communicate(timeout=30)[0].split() for client in clients]
    ids = [one for some in told for one in some]
    assert len(ids) == len(set(ids)) == 300
    assert set(os.listdir(tmp_path / "work/input/ready")) == set(ids)
    for some in told:  # each client's in the order in which it submitted them
        assert sorted(some, key=order_of) == some
    listed = [one.job_id for one in Flow(tmp_path / "work").list()]
    times = [int(one.split("_")[0]) for one in listed]
    assert times == sorted(times, reverse=True)


# -- Orphans --------------------------------------------------------------------------------


@pytest.mark.seed("004", "8.6", "10.1", "10.2")
def test_orphans_of_a_crash_are_found_when_the_server_starts(spool: Spool) -> None:
    running = spool.submit(LONG, max_tokens=60)
    spool.running(running)
    hopeless = new_id()
    spool.kill()
    assert spool.where(running) == [Status.RUNNING]
    folder = put(spool.workspace, Status.RUNNING, hopeless)
    (folder / "attempts.txt").write_text("lost its server\nlost its server\n")
    os.utime(folder, (1, 1))
    spool.start()
    found = spool.ended(running)
    assert (found.status, found.meta.attempts) == (Status.DONE, 2)
    assert found.meta.completion_tokens == 60
    assert spool.where(running) == [Status.DONE]
    failed = spool.ended(hopeless)
    assert failed.status is Status.FAILED
    assert "lost its server 3 times" in failed.error


# -- Monitoring -----------------------------------------------------------------------------


@pytest.mark.seed("004", "11.1")
def test_progress_can_be_seen_in_the_file_system(spool: Spool) -> None:
    with Names([spool.path / "output"]) as names:
        job_id = spool.submit("Say yes.", max_tokens=4)
        names.wait_for(job_id, 30)
    assert job_id in os.listdir(spool.path / "output")
    counts = {name: len(os.listdir(spool.path / name)) for name in FOLDERS.values()}
    assert [counts[FOLDERS[status]] for status in ORDER] == [
        spool.flow.counts()[status] for status in ORDER
    ]


@pytest.mark.seed("004", "4.2", "4.3", "11.2", "13.11")
def test_progress_can_be_seen_from_a_program(spool: Spool, full: list[str]) -> None:
    job_id = spool.submit("Say yes.", max_tokens=4)
    assert spool.flow.status(job_id) is Status.QUEUED
    place = spool.flow.position(job_id)
    assert (place.ahead, place.running) == (0, WORKERS)
    part = spool.flow.partial(full[0])
    assert part.progress.tokens > 0
    assert part.progress.max_tokens == 400
    cancel(spool.workspace, full[0])
    assert spool.flow.wait(job_id, 30).status is Status.DONE


@pytest.mark.seed("004", "11.3")
def test_progress_can_be_seen_on_the_command_line(spool: Spool) -> None:
    submitted = spool_command("submit", spool.path, "--max-tokens", "4", stdin=b"Say yes.\n")
    job_id = submitted.stdout.decode().strip()
    assert submitted.stdout == f"{job_id}\n".encode()
    assert spool_command("wait", spool.path, stdin=submitted.stdout).stdout == submitted.stdout
    assert spool_command("status", spool.path, job_id).stdout.decode().strip() == "DONE"
    result = spool_command("get", spool.path, stdin=submitted.stdout).stdout
    assert result == (spool.folder(job_id) / "result.txt").read_bytes()
    assert job_id in spool_command("list", spool.path).stdout.decode()
    counts = json.loads(spool_command("status", spool.path, "--json").stdout)
    assert counts["DONE"] == spool.flow.counts()[Status.DONE]


@pytest.mark.seed("004", "13.11", "14.10")
def test_what_is_told_as_json_is_json_whatever_a_model_says(work: Work) -> None:
    folder = put(work.workspace, Status.DONE, "1736700000_12345_0")
    (folder / "result.txt").write_bytes(b'\x00\x01\x1b[2J "\\ \xff \xe2\x80\xa8')
    told = spool_command("get", work.workspace.path, folder.name, "--json")
    assert json.loads(told.stdout)["result"].startswith('\x00\x01\x1b[2J "\\ ')


# -- Best practices -------------------------------------------------------------------------


@pytest.mark.seed("004", "12.1")
def test_who_waits_backs_off_to_one_look_a_second() -> None:
    clock = VirtualClock()
    patience = WaitBackoff(60.0, clock)
    pauses = []
    for _ in range(20):
        pauses.append(patience.next("it did not end"))
        clock.advance(pauses[-1])
    assert pauses == sorted(pauses)
    assert (pauses[0] <= 0.1, pauses[-1]) == (True, 1.0)


@pytest.mark.seed("004", "12.2", "14.11")
def test_completed_jobs_are_cleaned_up_by_age_or_by_count(spool: Spool) -> None:
    ids = [spool.run("Say yes.", max_tokens=1).job_id for _ in range(3)]
    os.utime(spool.folder(ids[0]), (1, 1))
    old = spool_command("prune", spool.path, "--older-than", "1d")
    assert (old.returncode, spool.flow.status(ids[0])) == (0, Status.MISSING)
    spool_command("prune", spool.path, "--keep", "1")
    assert [spool.flow.status(job_id) for job_id in ids[1:]] == [Status.MISSING, Status.DONE]
    assert os.listdir(spool.path / ".penstock/trash") == []


@pytest.mark.seed("004", "12.3")
def test_a_client_can_not_miss_that_a_job_failed(spool: Spool) -> None:
    job_id = spool.submit("Say yes.", model="nobody")
    waited = spool_command("wait", spool.path, job_id)
    assert waited.returncode == 1
    assert b"nobody" in waited.stderr
    got = spool_command("get", spool.path, job_id)
    assert (got.returncode, got.stdout) == (1, b"")
    assert b"nobody" in got.stderr


@pytest.mark.seed("004", "13.9", "14.11")
def test_a_running_job_is_cancelled_within_a_token_and_the_server_goes_on(spool: Spool) -> None:
    job_id = spool.submit(LONG, max_tokens=400, sampling=GREEDY)
    spool.running(job_id)
    assert spool_command("cancel", spool.path, job_id).returncode == 0
    found = spool.ended(job_id)
    assert (found.status, found.meta.code) == (Status.FAILED, "CANCELLED")
    spool.works()


@pytest.mark.seed("004", "13.10")
def test_options_are_checked_at_submit_and_kept_by_the_job(spool: Spool) -> None:
    before = os.listdir(spool.path / "input/ready")
    refused = spool_command("submit", spool.path, "x", "--temperature", "9")
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert b"temperature" in refused.stderr
    assert os.listdir(spool.path / "input/ready") == before
    asked = SpoolOptions(schema={"enum": ["red", "green"]}, max_tokens=8)
    found = spool.ended(spool.work.submit("Which colour is grass?", options=asked))
    assert json.loads(found.text) in ("red", "green")


@pytest.mark.seed("004", "13.10")
def test_a_conversation_goes_on_from_its_parent(spool: Spool) -> None:
    parent = spool.run("My name is Ada.", max_tokens=8)
    child = spool.run("What is my name?", max_tokens=8, parent=parent.job_id)
    alone = spool.run("What is my name?", max_tokens=8)
    assert (child.status, child.meta.parent) == (Status.DONE, parent.job_id)
    grown = (child.meta.prompt_tokens or 0) - (alone.meta.prompt_tokens or 0)
    assert grown >= (parent.meta.completion_tokens or 0)
