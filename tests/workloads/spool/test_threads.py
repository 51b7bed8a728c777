"""File work in threads, what is told of a trouble, and parts of an answer."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from pathlib import Path

import pytest

from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.workloads.llm.values import Delta
from penstock.workloads.spool.disk.peers import NAME, original_runs, remove_pid, write_pid
from penstock.workloads.spool.server.pool import ServerHealth, Threads
from penstock.workloads.spool.server.processor import PartialWriter


@run_async
async def test_a_cancelled_caller_leaves_only_when_the_work_has_ended() -> None:
    threads, go, ended = Threads(1), threading.Event(), list[int]()

    def work() -> None:
        go.wait()
        ended.append(1)

    task = asyncio.create_task(threads.do(work))
    await asyncio.sleep(0.01)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1]
    threads.close()


@run_async
async def test_what_is_seen_through_tells_its_result_though_it_was_cancelled() -> None:
    threads, go = Threads(2), threading.Event()

    def well() -> str:
        go.wait()
        return "done"

    def badly() -> str:
        go.wait()
        raise OSError("no")

    good, bad = (asyncio.create_task(threads.see_through(work)) for work in (well, badly))
    await asyncio.sleep(0.01)
    good.cancel()
    bad.cancel()
    await asyncio.sleep(0.01)
    go.set()
    assert await good == "done"
    with pytest.raises(asyncio.CancelledError):
        await bad
    with pytest.raises(OSError, match="no"):
        await threads.see_through(badly)
    threads.close()


def test_a_trouble_is_told_when_it_comes_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    health = ServerHealth()
    assert health.is_well
    health.over("disk")
    for _ in range(3):
        health.trouble("disk", "full")
    assert health.troubles == {"disk": "full"}
    health.over("disk")
    assert health.is_well
    assert [record.message for record in caplog.records] == ["disk: full", "disk: goes on"]


@run_async
async def test_a_quick_answer_has_no_parts_and_a_slow_one_four_a_second(tmp_path: Path) -> None:
    clock, threads = VirtualClock(), Threads(1)
    partial = PartialWriter(tmp_path, 10, clock, threads)
    partial.tell(Delta(text="a"))
    await partial.close()
    assert os.listdir(tmp_path) == []
    clock.advance(0.5)
    partial.tell(Delta(text="b"))
    await partial.close()
    partial.tell(Delta(text="c"))
    await partial.close()
    assert (tmp_path / "partial.txt").read_text() == "ab"
    assert json.loads((tmp_path / "progress.json").read_text()) == {
        "tokens": 2,
        "tokens_per_second": 2.0,
        "max_tokens": 10,
        "eta_s": 4.0,
    }
    clock.advance(0.25)
    partial.tell(Delta(text="d"))
    await partial.close()
    assert (tmp_path / "partial.txt").read_text() == "abcd"
    threads.close()


@run_async
async def test_a_folder_that_is_gone_does_not_fail_an_answer(tmp_path: Path) -> None:
    clock, threads = VirtualClock(), Threads(1)
    partial = PartialWriter(tmp_path / "gone", 10, clock, threads)
    clock.advance(1.0)
    partial.tell(Delta(text="a"))
    await partial.close()
    threads.close()


def test_the_pid_file_is_ours_to_remove_only_while_it_is_ours(tmp_path: Path) -> None:
    write_pid(tmp_path)
    assert (tmp_path / NAME).read_text() == str(os.getpid())
    assert not original_runs(tmp_path)
    (tmp_path / NAME).write_text("1")
    remove_pid(tmp_path)
    assert (tmp_path / NAME).exists()
    assert not original_runs(tmp_path)
    (tmp_path / NAME).write_text("nonsense")
    assert not original_runs(tmp_path)
    write_pid(tmp_path)
    remove_pid(tmp_path)
    assert os.listdir(tmp_path) == []
