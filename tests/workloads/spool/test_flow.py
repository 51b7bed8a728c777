"""Flow: where a job is, what came of it, and how long it may take."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path

import pytest
from tests.support.spool.spooled import new_workspace, put, queued

from penstock.core.errors import InvalidRequest, NotFound, WaitTimedOut
from penstock.core.job import Priority
from penstock.lifecycles.spool import VISIBLE, Status
from penstock.workloads.spool.client.changes import clean
from penstock.workloads.spool.client.flow import Flow, Listed, Progress
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import SpoolOptions
from penstock.workloads.spool.disk import watching
from penstock.workloads.spool.disk.files import Unfit
from penstock.workloads.spool.disk.job import Meta, fail, finish
from penstock.workloads.spool.disk.peers import Claims
from penstock.workloads.spool.disk.workspace import Workspace

JOB = "1736700000_12345_0"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return new_workspace(tmp_path)


@pytest.fixture
def flow(workspace: Workspace) -> Flow:
    return Flow(workspace)


@pytest.mark.seed("004", "12.5")
@pytest.mark.parametrize("status", sorted(VISIBLE))
def test_the_folder_a_job_lies_in_is_its_status(
    workspace: Workspace, flow: Flow, status: Status
) -> None:
    put(workspace, status, JOB)
    assert flow.status(JOB) is status
    assert flow.get(JOB).status is status


@pytest.mark.seed("004", "2.2")
def test_a_job_that_is_being_written_is_missing(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.STAGING, JOB)
    assert flow.status(JOB) is Status.MISSING
    assert not flow.exists(JOB)


@pytest.mark.seed("004", "8.9")
def test_of_two_folders_the_seed_s_order_decides(workspace: Workspace, flow: Flow) -> None:
    order = (Status.DONE, Status.FAILED, Status.RUNNING, Status.QUEUED)
    for status in order:
        put(workspace, status, JOB)
    for status in order:
        assert flow.status(JOB) is status
        workspace.of(status, JOB).rename(workspace.path / status)


@pytest.mark.parametrize("bad", ["../x", "", "7" * 5000, "1\x002", "1__2", "a/b", ".."])
def test_what_is_no_id_is_refused_by_every_question(flow: Flow, bad: str) -> None:
    for ask in (flow.status, flow.get, flow.prompt, flow.partial, flow.position, flow.wait):
        with pytest.raises(InvalidRequest):
            ask(bad)


# -- what came of it ----------------------------------------------------------------


@pytest.mark.seed("004", "5.6")
def test_a_result_is_byte_by_byte_what_was_written(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.RUNNING, JOB)
    finish(workspace, JOB, Meta(submitted_at="s"), {"result.txt": b"four \xff\n\n"})
    found = flow.get(JOB)
    assert found.content == b"four \xff\n\n"
    assert found.text == "four \N{REPLACEMENT CHARACTER}\n\n"
    assert found.artifacts == ("result.txt",)
    assert found.meta.status == "done"


def test_a_result_of_the_original_is_read(workspace: Workspace, flow: Flow) -> None:
    put(
        workspace,
        Status.DONE,
        "00001736700000123456_12345_000000",
        {
            "prompt.txt": "p",
            "type.txt": "embed",
            "embedding.json": '{"dim":2,"vector":[1,0]}',
            "meta.json": '{\n  "submitted_at": "s",\n  "mode": "embed",\n  "status": "done"\n}\n',
        },
    )
    found = flow.get("00001736700000123456_12345_000000")
    assert json.loads(found.text)["dim"] == 2
    assert found.meta.mode == "embed"


@pytest.mark.seed("004", "6.7")
def test_a_failed_job_tells_its_error(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.RUNNING, JOB)
    fail(workspace, JOB, Meta(), "the prompt\nis too long")
    assert flow.get(JOB).error == "the prompt is too long"
    assert flow.get(JOB).content is None


def test_a_done_job_without_its_result_has_no_content(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.DONE, JOB)
    assert flow.get(JOB).content is None
    assert flow.get(JOB).text == ""


def test_nothing_is_read_through_a_link(workspace: Workspace, flow: Flow, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = put(workspace, Status.DONE, JOB, {"meta.json": '{"artifacts": ["../../secret"]}'})
    (folder / "result.txt").symlink_to(tmp_path / "secret")
    assert flow.get(JOB).content is None
    elsewhere = put(workspace, Status.STAGING, JOB, {"result.txt": "secret"})
    workspace.of(Status.DONE, "1").symlink_to(elsewhere)
    assert flow.get("1").content is None


def test_metadata_that_is_nonsense_does_not_hide_a_result(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.DONE, JOB, {"result.txt": "r", "meta.json": "{nonsense"})
    assert flow.get(JOB).text == "r"


def test_the_prompt_is_text_or_says_why_not(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.FAILED, "1", {"prompt.txt": "héllo"})
    put(workspace, Status.FAILED, "2", {"prompt.txt": b"\xff"})
    put(workspace, Status.FAILED, "3", {"meta.json": "{}"})
    assert flow.prompt("1") == "héllo"
    with pytest.raises(Unfit, match="not UTF-8"):
        flow.prompt("2")
    with pytest.raises(NotFound, match=r"no prompt\.txt"):
        flow.prompt("3")


# -- lists --------------------------------------------------------------------------


def test_jobs_are_listed_newest_first_whatever_their_form(workspace: Workspace, flow: Flow) -> None:
    jobs = {
        "1736700000_1_2": Status.QUEUED,
        "1736700000_1_10": Status.DONE,
        "00001736700000500000_1_000000": Status.FAILED,
        "1736700001_1_0": Status.RUNNING,
    }
    for job_id, status in jobs.items():
        put(workspace, status, job_id)
    newest = ["1736700001_1_0", "00001736700000500000_1_000000", "1736700000_1_10"]
    assert flow.list() == [Listed(one, jobs[one]) for one in (*newest, "1736700000_1_2")]
    assert [one.job_id for one in flow.list(limit=2)] == newest[:2]
    assert [one.job_id for one in flow.list([Status.DONE])] == ["1736700000_1_10"]


@pytest.mark.seed("004", "14.12")
def test_a_long_list_looks_into_no_job(
    workspace: Workspace, flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        workspace.of(Status.QUEUED, f"1_1_{number}").mkdir()
    for name in ("stat", "lstat", "open", "access"):
        monkeypatch.setattr(os, name, lambda *args, **more: pytest.fail("looked into a job"))
    assert len(flow.list()) == 200
    assert flow.counts()[Status.QUEUED] == 200


def test_the_latest_is_the_one_that_ended_last(workspace: Workspace, flow: Flow) -> None:
    assert flow.latest() is None
    for job_id, ended in (("1", 300), ("2", 200), ("3", 100)):
        os.utime(put(workspace, Status.DONE, job_id), (ended, ended))
    os.utime(put(workspace, Status.FAILED, "4"), (250, 250))
    latest = flow.latest()
    assert latest is not None
    assert latest.job_id == "1"


# -- how far it is ------------------------------------------------------------------


@pytest.mark.seed("004", "3.2")
def test_a_place_counts_those_whose_turn_is_before(workspace: Workspace, flow: Flow) -> None:
    work = Work(workspace)
    first, second = work.submit("a"), work.submit("b")
    urgent = work.submit("c", options=SpoolOptions(priority=Priority.INTERACTIVE))
    assert [flow.position(one).ahead for one in (urgent, first, second)] == [0, 1, 2]
    assert flow.position(second).queued == 3


def test_an_estimate_is_made_of_those_that_ended(workspace: Workspace, flow: Flow) -> None:
    job_id = queued(workspace)
    assert flow.position(job_id).eta_s is None
    for number in range(3):
        put(workspace, Status.RUNNING, f"{number}")
        finish(workspace, f"{number}", Meta(duration_s=2.0), {"result.txt": b""})
    assert flow.position(job_id).eta_s == pytest.approx(2.0)
    queued(workspace)
    assert flow.position(queued(workspace)).eta_s == pytest.approx(6.0)


def test_a_job_that_no_server_will_take_says_so(workspace: Workspace, flow: Flow) -> None:
    job_id = queued(workspace)
    assert not flow.is_served()
    assert not flow.position(job_id).served
    claims = Claims(workspace.private)
    claims.enter()
    assert flow.is_served()
    assert flow.position(job_id).served
    claims.leave()
    assert not flow.is_served()


def test_a_job_that_runs_is_nobody_s_behind(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.RUNNING, JOB, {"progress.json": '{"tokens": 3, "eta_s": 1.5}'})
    position = flow.position(JOB)
    assert (position.status, position.ahead, position.eta_s) == (Status.RUNNING, 0, 1.5)


def test_options_that_can_t_be_read_don_t_spoil_the_places(
    workspace: Workspace, flow: Flow
) -> None:
    put(workspace, Status.QUEUED, "1", {"options.json": "{"})
    put(workspace, Status.QUEUED, "2")
    assert flow.position("2").ahead == 1


def test_what_was_said_so_far_ends_with_a_whole_character(workspace: Workspace, flow: Flow) -> None:
    folder = put(workspace, Status.RUNNING, JOB, {"partial.txt": "größe".encode()[:4]})
    assert flow.partial(JOB).text == "grö"
    (folder / "partial.txt").write_bytes("größe".encode()[:5])
    (folder / "progress.json").write_text('{"tokens": 2, "tokens_per_second": 9.5, "new": 1}')
    partial = flow.partial(JOB)
    assert partial.text == "grö"
    assert partial.progress == Progress(tokens=2, tokens_per_second=9.5)


def test_the_partial_text_of_one_that_ended_is_all_of_it(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.RUNNING, JOB, {"partial.txt": "fo"})
    assert flow.partial(JOB).text == "fo"
    finish(workspace, JOB, Meta(), {"result.txt": b"four"})
    assert flow.partial(JOB).text == "four"
    with pytest.raises(NotFound):
        flow.partial("1_2_3")


def test_of_a_job_that_waits_nothing_is_said(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.QUEUED, JOB, {"partial.txt": "left by an attempt"})
    assert flow.partial(JOB).text == ""


# -- waiting ------------------------------------------------------------------------


@pytest.fixture(params=["told", "polling"])
def told_or_polling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "polling":
        monkeypatch.setattr(watching, "_libc", lambda: None)


def _end_soon(workspace: Workspace, job_id: str) -> threading.Thread:
    def end() -> None:
        time.sleep(0.05)
        finish(workspace, job_id, Meta(), {"result.txt": b"four"})

    thread = threading.Thread(target=end)
    thread.start()
    return thread


@pytest.mark.seed("004", "11.2", "14.1")
@pytest.mark.usefixtures("told_or_polling")
def test_who_waits_gets_the_result(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.RUNNING, JOB)
    thread = _end_soon(workspace, JOB)
    assert flow.wait(JOB, timeout=30).text == "four"
    thread.join()


@pytest.mark.seed("004", "12.1")
@pytest.mark.usefixtures("told_or_polling")
def test_who_waits_in_a_loop_gets_the_result(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.RUNNING, JOB)
    thread = _end_soon(workspace, JOB)
    assert asyncio.run(flow.await_end(JOB, timeout=30)).text == "four"
    thread.join()


@pytest.mark.usefixtures("told_or_polling")
def test_patience_ends_and_the_job_goes_on(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.RUNNING, JOB)
    with pytest.raises(WaitTimedOut):
        flow.wait(JOB, timeout=0.05)
    with pytest.raises(WaitTimedOut):
        asyncio.run(flow.await_end(JOB, timeout=0.05))
    with pytest.raises(WaitTimedOut):
        flow.wait_idle(timeout=0.05)
    assert flow.status(JOB) is Status.RUNNING


def test_nobody_waits_for_a_job_that_is_not_there(workspace: Workspace, flow: Flow) -> None:
    with pytest.raises(NotFound):
        flow.wait(JOB)


def test_who_waits_for_a_job_that_is_taken_away_is_told(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.RUNNING, JOB)
    thread = threading.Timer(
        0.05, lambda: workspace.of(Status.RUNNING, JOB).rename(workspace.path / "x")
    )
    thread.start()
    with pytest.raises(NotFound):
        flow.wait(JOB, timeout=30)
    thread.join()


def test_idle_is_when_nothing_waits_or_runs(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.DONE, "1")
    put(workspace, Status.RUNNING, JOB)
    thread = _end_soon(workspace, JOB)
    assert flow.wait_idle(timeout=30)[Status.DONE] == 2
    thread.join()


@pytest.mark.seed("004", "7.5")
def test_a_job_that_was_cleaned_is_missing(workspace: Workspace, flow: Flow) -> None:
    put(workspace, Status.DONE, JOB)
    assert clean(workspace, keep=0) == [JOB]
    assert flow.get(JOB).status is Status.MISSING
