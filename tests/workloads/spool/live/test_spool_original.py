"""The original's tools and ours on one workspace, in both directions.

Its programs are those of `original.py`, made after what is known of them; ours are real: a server
with a real model, and `penstock spool`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from tests.support.spool import original
from tests.support.spool.spool_server import GREEDY, LONG, Spool, served, spool_command
from tests.support.waiting import eventually

from penstock.lifecycles.spool import SPOOL, Status
from penstock.testing.clock import VirtualClock
from penstock.workloads.spool.client.changes import cancel, clean, retry
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import JobKind, SpoolOptions, Sync
from penstock.workloads.spool.disk import peers
from penstock.workloads.spool.disk.job import read_meta
from penstock.workloads.spool.disk.peers import Peers
from penstock.workloads.spool.disk.workspace import Workspace, is_job_id, order_of
from penstock.workloads.spool.server.recovery import GRACE, Recovery

PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


@pytest.fixture(scope="module")
def spool(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spool]:
    with served(tmp_path_factory.mktemp("original") / "work", model_file) as spool:
        yield spool


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(Workspace(tmp_path / "work", Sync.NONE))


def facts(spool_path: Path, job_id: str) -> dict[str, object]:
    return original.flw_facts(spool_path, job_id)


# -- Its jobs, our server -------------------------------------------------------------------


@pytest.mark.seed("004", "13.1")
def test_a_job_of_its_wrk_is_run_and_its_flw_reads_the_result(spool: Spool) -> None:
    job_id = original.wrk(spool.path, b"Say yes.", tags=["a", "b-c"])
    found = spool.ended(job_id)
    assert found.status is Status.DONE
    code, out, _ = original.flw(spool.path, job_id)
    assert (code, out) == (0, found.text.encode() + b"\n\n")
    told = facts(spool.path, job_id)
    assert (told["mode"], told["status"], told["tags"]) == ("text", "done", ["a", "b-c"])
    assert told["artifacts"] == ["result.txt"]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"type.txt": b""},
        {"type.txt": b"text"},
        {"type.txt": b"text\nmore"},
        {"meta.json": b'{"submitted_at":"2026-01-25T10:00:00.000000Z","mode":"text"}'},
    ],
    ids=["the prompt alone", "an empty type", "a type", "a type's first line", "compact metadata"],
)
def test_the_least_that_its_tools_may_write_is_a_job(spool: Spool, files: dict[str, bytes]) -> None:
    job_id = spool.put({"prompt.txt": b"Say yes.", **files})
    found = spool.ended(job_id)
    assert (found.status, found.error) == (Status.DONE, "")
    told = facts(spool.path, job_id)
    assert (told["mode"], told["status"]) == ("text", "done")


def test_an_embedding_is_written_as_it_writes_one(spool: Spool) -> None:
    job_id = original.wrk(spool.path, b"A fruit.", mode="embed")
    spool.ended(job_id)
    assert original.flw(spool.path, job_id)[0] == 0
    text = (spool.folder(job_id) / "embedding.json").read_text()
    vector = json.loads(text)["vector"]
    assert json.loads(text)["dim"] == len(vector) == 576
    assert abs(sum(one * one for one in vector) - 1) < 0.01
    numbers = [line for line in text.splitlines() if line.count(",") > 1]
    assert all(len(line.strip().rstrip(",").split(",")) == 10 for line in numbers[:-1])
    assert all(len(re.sub(r"e.*|[-.]", "", one).lstrip("0")) <= 6 for one in _numbers(text))
    assert facts(spool.path, job_id)["artifacts"] == ["embedding.json"]


def _numbers(text: str) -> list[str]:
    return re.findall(r"-?\d\S*?(?=[,\]\s])", text.partition("vector")[2])


@pytest.mark.seed("004", "14.13")
def test_what_it_can_and_we_can_not_fails_with_that_reason(spool: Spool, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(PNG)
    spoken = original.wrk(spool.path, b"Say yes.", mode="tts")
    seen = original.wrk(spool.path, b"What is it?", images=[image])
    for job_id, word in ((spoken, "tts"), (seen, "images")):
        spool.ended(job_id)
        code, out, said = original.flw(spool.path, job_id)
        assert (code, out) == (1, b"")
        assert word in said
        assert facts(spool.path, job_id)["status"] == "failed"


@pytest.mark.seed("004", "3.10")
def test_jobs_of_both_forms_of_id_run_in_the_order_in_which_they_came(spool: Spool) -> None:
    busy = [spool.submit(LONG, max_tokens=1500, sampling=GREEDY) for _ in range(4)]
    for job_id in busy:
        spool.running(job_id)
    second = int(time.time()) - 100
    ids = [
        f"{second}_7_2",
        f"{second}_7_10",
        f"{second * 1_000_000 + 500_000:020}_7_000011",
        f"{second + 1}_9_0",
        f"{(second + 2) * 1_000_000:020}_9_000001",
        f"{second + 3}_9_0",
    ]
    for job_id in reversed(ids):
        original.wrk(spool.path, b"Say yes.", job_id=job_id)
    for job_id in busy:
        cancel(spool.workspace, job_id)
    for job_id in ids:
        assert spool.ended(job_id).status is Status.DONE
    claimed = [one["job_id"] for one in spool.events("claimed") if one["job_id"] in ids]
    assert claimed == ids == sorted(ids, key=order_of)


@pytest.mark.seed("004", "2.7")
def test_a_job_that_its_wrk_is_still_writing_is_nobodys_business(spool: Spool) -> None:
    staging = spool.path / "input/writing" / original.new_id()
    staging.mkdir()
    (staging / "prompt.txt").write_text("Say y")
    spool.works()
    assert spool.where(staging.name) == [Status.STAGING]
    assert spool.flow.status(staging.name) is Status.MISSING
    assert original.flw(spool.path, staging.name)[0] == 2
    (staging / "prompt.txt").write_text("Say yes.")
    staging.rename(spool.path / "input/ready" / staging.name)
    assert spool.ended(staging.name).status is Status.DONE


@pytest.mark.seed("004", "13.1")
def test_its_exit_codes_are_those_of_penstock_spool_get(spool: Spool) -> None:
    done = spool.run("Say yes.", max_tokens=4).job_id
    failed = spool.run("Say yes.", model="nobody").job_id
    running = spool.submit(LONG, max_tokens=400, sampling=GREEDY)
    spool.running(running)
    for job_id in (done, failed, running, "1_2_3", "no-id"):
        theirs, out, _ = original.flw(spool.path, job_id)
        ours = spool_command("get", spool.path, job_id)
        assert ours.returncode == theirs, job_id
        assert ours.stdout == out.removesuffix(b"\n\n")
        assert bool(ours.stderr) == (theirs != 0)
    cancel(spool.workspace, running)
    spool.ended(running)


def test_its_counts_are_ours(spool: Spool) -> None:
    theirs = original.counts(spool.path)
    assert {str(status).lower(): n for status, n in spool.flow.counts().items()} == theirs


# -- Our jobs, its daemon -------------------------------------------------------------------


@pytest.mark.seed("004", "12.5", "13.1")
def test_its_reader_understands_all_that_we_write_for_it(spool: Spool) -> None:
    parent = spool.run("Say yes.", max_tokens=4).job_id
    tags = ["nightly", "A_1"]
    done = spool.run("Say it again.", max_tokens=4, parent=parent, tags=tags)
    told = facts(spool.path, done.job_id)
    assert told == {
        "mode": "text",
        "submitted_at": done.meta.submitted_at,
        "completed_at": done.meta.completed_at,
        "duration_s": f"{done.meta.duration_s:.2f}",
        "parent": parent,
        "status": "done",
        "tags": tags,
        "artifacts": ["result.txt"],
    }
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"
    assert re.fullmatch(stamp, done.meta.submitted_at)
    assert re.fullmatch(stamp, done.meta.completed_at)
    text = (spool.folder(done.job_id) / "meta.json").read_text()
    assert all(re.match(r'  "\w+": \S', line) for line in text.splitlines()[1:-1])
    assert json.loads(text)["tags"] == tags


def test_compact_metadata_is_what_its_reader_can_not_read() -> None:
    """So that the test above says something."""
    compact = json.dumps({"mode": "text", "tags": ["a"]}, separators=(",", ":"))
    assert (original.meta_value(compact, "mode"), original.meta_list(compact, "tags")) == ("", [])


@pytest.mark.seed("004", "13.1")
def test_our_ids_follow_its_rule_and_its_ids_ours(work: Work) -> None:
    assert original.is_valid_job_id(work.submit("Say yes."))
    assert is_job_id(original.new_id())
    for odd in ("", "_1", "1_", "1__2", "1" * 128, "1" * 129, "1.2", "a", "1/2", "1_2_3"):
        assert original.is_valid_job_id(odd) == is_job_id(odd)


@pytest.mark.seed("004", "13.1")
def test_its_daemon_runs_our_jobs_and_our_flow_reads_them(work: Work) -> None:
    flow = Flow(work.workspace)
    plain = work.submit("say yes", tags=["a"])
    asked = work.submit("say more", options=SpoolOptions(max_tokens=4, system="Be brief."))
    failing = work.submit("please fail")
    with original.nrvnad(work.workspace.path):
        assert flow.wait(plain, 20).text == "SAY YES"
        assert flow.wait(asked, 20).text == "SAY MORE"
        assert flow.wait(failing, 20).error == "inference exception"
        eventually(lambda: flow.get(plain).meta.status == "done", "its metadata comes afterwards")
    meta = flow.get(plain).meta
    assert (meta.tags, meta.artifacts, meta.mode) == (("a",), ("result.txt",), JobKind.TEXT)
    again = retry(work.workspace, failing)
    assert read_meta(work.workspace.of(Status.QUEUED, again)).retry_of == failing
    assert sorted(clean(work.workspace, keep=0)) == sorted([plain, asked, failing])


def test_its_daemon_ignores_our_private_folder(work: Work) -> None:
    before = set(work.workspace.private.rglob("*"))
    with original.nrvnad(work.workspace.path):
        Flow(work.workspace).wait(work.submit("say yes"), 20)
    assert set(work.workspace.private.rglob("*")) == before


@pytest.mark.seed("004", "14.7")
def test_a_job_is_read_while_its_metadata_is_not_yet_final(work: Work) -> None:
    """As the original leaves it for a moment, and for ever if it is killed then."""
    job_id = work.submit("say yes", tags=["a"])
    done = work.workspace.of(Status.DONE, job_id)
    work.workspace.of(Status.QUEUED, job_id).rename(done)
    (done / "result.txt").write_text("YES")
    (done / "meta.json.tmp").write_text('{\n  "submitt')
    found = Flow(work.workspace).get(job_id)
    assert (found.status, found.text, found.meta.status) == (Status.DONE, "YES", "")
    told = spool_command("get", work.workspace.path, job_id, "--json")
    assert json.loads(told.stdout)["result"] == "YES"


# -- Beside each other ----------------------------------------------------------------------


def look(workspace: Workspace, later: float) -> list[str]:
    """What a server of ours would take back, that much later."""
    clock = VirtualClock(time.time() + later)
    return list(Recovery(workspace, Peers(workspace.private, 30.0, clock), 3, clock).look())


@pytest.mark.seed("004", "14.5")
def test_a_daemon_at_work_is_not_robbed_of_its_job_however_long_it_takes(work: Work) -> None:
    workspace = work.workspace
    job_id = work.submit("say yes")
    with original.nrvnad(workspace.path, takes=60) as daemon:
        eventually(lambda: Flow(workspace).status(job_id) is Status.RUNNING, "it runs")
        for attempt in range(50):
            assert look(workspace, GRACE + attempt * 1000) == []
            assert Flow(workspace).status(job_id) is Status.RUNNING
        daemon.kill()
        daemon.wait()
        assert look(workspace, 0) == []  # a tool may just be ending it
        assert look(workspace, GRACE + 1) == [job_id]
    assert Flow(workspace).status(job_id) is Status.QUEUED


@pytest.mark.parametrize("lock", [False, True], ids=["by its process", "by its lock"])
def test_a_daemon_that_stops_ends_its_last_job_itself(
    work: Work, lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid file is gone by then."""
    if lock:  # as from another container, where its process is not seen
        monkeypatch.setattr(peers, "_PROC", Path("/nowhere"))
    workspace = work.workspace
    job_id = work.submit("say yes")
    with original.nrvnad(workspace.path, takes=1.5, lock=lock) as daemon:
        eventually(lambda: Flow(workspace).status(job_id) is Status.RUNNING, "it runs")
        daemon.send_signal(signal.SIGTERM)
        eventually(lambda: not (workspace.path / original.PID).exists(), "its pid file is gone")
        assert look(workspace, GRACE + 1) == []
        daemon.wait(20)
    assert Flow(workspace).get(job_id).text == "SAY YES"


def test_a_newer_daemon_does_not_start_beside_ours(spool: Spool) -> None:
    held = spool.submit(LONG, max_tokens=400, sampling=GREEDY)
    spool.running(held)
    refused = subprocess.run(
        original.command(spool.path, lock=True), capture_output=True, text=True, timeout=20
    )
    assert refused.returncode == 1
    assert "already has a running nrvnad" in refused.stderr
    assert spool.where(held) == [Status.RUNNING]
    cancel(spool.workspace, held)
    spool.ended(held)


@pytest.mark.seed("004", "10.3")
def test_a_server_that_comes_later_leaves_a_living_daemons_job_and_takes_a_dead_ones(
    tmp_path: Path, model_file: Path
) -> None:
    workspace = tmp_path / "work"
    held = original.wrk(workspace, b"say yes")
    with original.nrvnad(workspace, takes=600) as daemon:
        eventually(lambda: original.status(workspace, held) == "running", "it has it")
        with served(workspace, model_file) as spool:
            before = (workspace / "processing" / held).stat().st_ctime_ns
            spool.works()  # beside it
            time.sleep(GRACE + 1.5)  # more than a job without a server is left in peace
            assert original.status(workspace, held) == "running"
            assert (workspace / "processing" / held).stat().st_ctime_ns == before
            assert (workspace / original.PID).read_text() == str(daemon.pid)
            daemon.kill()
            daemon.wait()
            found = spool.ended(held)
            assert found.status is Status.DONE
            assert found.text != "SAY YES"
            assert found.meta.attempts == 2
            assert spool.events("claimed", held)[0]


@pytest.mark.seed("004", "14.5")
def test_a_daemon_that_takes_our_running_job_for_its_own_harms_nothing(spool: Spool) -> None:
    """It puts all that it finds in `processing` back when it starts, and we can't keep it."""
    held = spool.submit(LONG, max_tokens=400, sampling=GREEDY)
    spool.running(held)
    with original.nrvnad(spool.path, scan=60) as daemon:
        eventually(lambda: bool(spool.events("let go", held)), "our server lets go of it")
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(20)
    eventually((spool.path / original.PID).exists, "our pid file, which it took along, is back")
    found = spool.ended(held)
    assert found.status is Status.DONE
    assert spool.where(held) == [Status.DONE]
    assert len(spool.events("done", held)) <= 1
    spool.works()


@pytest.mark.parametrize("repeat", range(5))
def test_a_daemon_and_ours_share_a_queue_and_each_job_ends_once(spool: Spool, repeat: int) -> None:
    ids: list[str] = []

    def submit(one: Callable[[int], str]) -> None:
        ids.extend(one(number) for number in range(10))

    ours = Thread(target=submit, args=(lambda n: spool.submit(f"say {n}", max_tokens=2),))
    theirs = Thread(target=submit, args=(lambda n: original.wrk(spool.path, b"say %d" % n),))
    with original.nrvnad(spool.path, takes=0.01):
        for thread in (ours, theirs):
            thread.start()
        for thread in (ours, theirs):
            thread.join()
        found = [spool.ended(job_id) for job_id in ids]
    assert len(set(ids)) == 20
    assert [one.status for one in found] == [Status.DONE] * 20
    assert [spool.where(job_id) for job_id in ids] == [[Status.DONE]] * 20
    by_theirs = {one.job_id for one in found if one.text.startswith("SAY ")}

    def by_ours() -> set[str]:
        return {one["job_id"] for one in spool.events("done")} & set(ids)

    # A job is in its folder a moment before the server prints that it is.
    eventually(lambda: by_ours() | by_theirs == set(ids), "each job is ended by one of both")


@pytest.mark.parametrize("repeat", range(50))
def test_its_wrk_and_ours_submit_to_one_workspace_at_once(work: Work, repeat: int) -> None:
    path = work.workspace.path
    ids: list[str] = []
    threads = [
        Thread(target=lambda: ids.extend(work.submit("ours") for _ in range(10))),
        Thread(target=lambda: ids.extend(original.wrk(path, b"theirs") for _ in range(10))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 20
    assert set(os.listdir(path / "input/ready")) == set(ids)
    assert original.counts(path)["queued"] == 20
    assert os.listdir(path / "input/writing") == []


def test_moves_of_both_are_those_of_the_table() -> None:
    """Its daemon makes no move that ours would not."""
    moves = {(before, after) for before, _, after in SPOOL if before is not Status.MISSING}
    assert moves >= {
        (Status.STAGING, Status.QUEUED),
        (Status.QUEUED, Status.RUNNING),
        (Status.RUNNING, Status.DONE),
        (Status.RUNNING, Status.FAILED),
        (Status.RUNNING, Status.QUEUED),
    }
