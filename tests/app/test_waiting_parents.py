"""Parents that wait for their children hold no slot, no limit and no thread meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import pytest
from tests.support.waiting import eventually

import penstock
from penstock import App, JobState, Limit
from penstock.control import workers

app = App()
_lock = threading.Lock()
running: dict[str, int] = {}
most: dict[str, int] = {}
order: list[str] = []
gate = threading.Event()


class counted:
    """Counts who runs at once; never what waits."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        with _lock:
            order.append(self._kind)
            running[self._kind] = running.get(self._kind, 0) + 1
            most[self._kind] = max(most.get(self._kind, 0), running[self._kind])

    def __exit__(self, *error: object) -> None:
        with _lock:
            running[self._kind] -= 1


@pytest.fixture(autouse=True)
def clean() -> None:
    running.clear()
    most.clear()
    order.clear()
    gate.clear()


@app.job("job.wait.deep")
async def deep(depth: int) -> int:
    if depth == 0:
        return 0
    with counted("all"):
        await asyncio.sleep(0.005)
    below = await (await deep.asubmit(depth - 1))
    with counted("all"):
        await asyncio.sleep(0.005)
    return int(below) + 1


@app.job("job.wait.thread")
def deep_thread(depth: int) -> int:
    if depth == 0:
        return 0
    with counted("all"):
        time.sleep(0.005)
    below = deep_thread.submit(depth - 1).result()
    with counted("all"):
        time.sleep(0.005)
    return int(below) + 1


@app.job("job.wait.process", mode="process")
def deep_process(depth: int) -> int:
    if depth == 0:
        return 0
    with penstock.connect(data=penstock.current().request.env["data"]) as ps:
        env = {"data": penstock.current().request.env["data"]}
        return int(ps.submit("job.wait.process", {"depth": depth - 1}, env=env).result()) + 1


@app.job("job.wait.gated")
async def gated() -> None:
    with counted("child"):
        while not gate.is_set():  # noqa: ASYNC110 another thread sets it
            await asyncio.sleep(0.01)


@app.job("job.wait.parent")
async def parent(children: int) -> None:
    with counted("parent"):
        handles = [await gated.asubmit() for _ in range(children)]
    await asyncio.gather(*handles)


@app.job("job.wait.thread_parent")
def thread_parent() -> None:
    gated.submit().result()


@app.job("job.wait.quick")
async def quick(n: int) -> None:
    with counted(f"child {n}"):
        await asyncio.sleep(0.01)


@app.job("job.wait.in_order")
async def in_order(n: int) -> None:
    with counted(f"parent {n}"):
        handle = await quick.asubmit(n)
    await handle


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("kind", ["deep", "thread", "process"])
def test_no_depth_of_parents_deadlocks_at_any_concurrency(
    tmp_path: Path, slots: int, kind: str
) -> None:
    parents, depth = (2, 2) if kind == "process" else (6, 4)
    with app.run(tmp_path / "data", concurrency=slots) as ps:
        env = {"data": str(tmp_path / "data")}
        given = [{"depth": depth}] * parents
        jobs = ps.submit_many(f"job.wait.{kind}", given, env=env)
        assert [job.result(timeout=60) for job in jobs] == [depth] * parents
    assert most.get("all", 0) <= slots


def test_why_names_the_children_that_a_parent_waits_for(tmp_path: Path) -> None:
    with app.run(tmp_path / "data", concurrency=1) as ps:
        job = parent.submit(5)
        eventually(lambda: "and 2 more" in job.why(), "it waits")
        children = {one.job_id for one in ps.jobs(child_of=job.job_id)}
        said = job.why()
        assert "and 2 more, and holds no slot meanwhile" in said
        assert sum(child in said for child in children) == 3
        assert job.state is JobState.RUNNING
        gate.set()
        job.result(timeout=30)


@pytest.mark.parametrize("where", ["limit", "pool"])
def test_a_parent_gives_back_what_its_children_need_and_takes_it_again(
    tmp_path: Path, where: str
) -> None:
    pools = {"default": {"capacity": 1}} if where == "pool" else {}
    with app.run(tmp_path / "data", concurrency=8, pools=pools) as ps:
        if where == "limit":
            ps.limits.put(Limit(name="one", topics=("job.wait.*",), concurrency=1))
        jobs = [deep.submit(3) for _ in range(3)]
        assert [job.result(timeout=30) for job in jobs] == [3] * 3
    assert most["all"] == 1


def test_children_go_before_new_parents(tmp_path: Path) -> None:
    with app.run(tmp_path / "data", concurrency=1) as ps:
        ps.pause_pool("default")
        jobs = in_order.submit_many([(n,) for n in range(100)])
        ps.resume_pool("default")
        for job in jobs:
            job.result(timeout=30)
    ahead = [order.index(f"child {n}") - order.index(f"parent {n}") for n in range(100)]
    assert max(ahead) <= 50, order  # a worker holds some short jobs ahead


@app.job("job.wait.patient")
async def patient() -> None:
    order.append("parent")
    await (await gated.options(delay=3600).asubmit())


def test_so_many_parents_wait_and_no_more_are_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_WAITING", 4)
    with app.run(tmp_path / "data", concurrency=2) as ps:
        jobs = patient.submit_many([()] * 12)
        eventually(lambda: len(order) >= 4, "parents wait")
        eventually(lambda: "wait for their children" in jobs[-1].why(), "others don't begin")
        assert len(order) <= 4 + 2
        for job in jobs[:6]:
            job.cancel()
        eventually(lambda: len(order) >= 8, "others begin when those have ended")
        ps.cancel_many()


@pytest.mark.parametrize("topic", ["job.wait.parent", "job.wait.thread_parent"])
def test_a_parent_that_waits_ends_at_once_when_it_is_cancelled(tmp_path: Path, topic: str) -> None:
    with app.run(tmp_path / "data", concurrency=1) as ps:
        job = ps.submit(topic, {"children": 1} if topic.endswith("t.parent") else None)
        eventually(lambda: order.count("child"), "its child runs")
        cancelled = job.cancel(timeout=5)
        assert cancelled.job.state is JobState.CANCELLED
        (child,) = ps.jobs(child_of=job.job_id)
        assert child.wait(timeout=10).state is JobState.CANCELLED


@app.job("job.wait.impatient")
async def impatient() -> str:
    child = await gated.asubmit()
    with contextlib.suppress(penstock.WaitTimedOut):
        await child.aresult(timeout=0.2)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await child
    gate.set()
    await child
    return "done"


def test_a_wait_that_times_out_goes_on(tmp_path: Path) -> None:
    with app.run(tmp_path / "data", concurrency=1):
        assert impatient.submit().result(timeout=30) == "done"


def test_threads_that_wait_make_room_for_others(tmp_path: Path) -> None:
    """More of them than there are threads."""
    with app.run(tmp_path / "data", concurrency=16):
        jobs = thread_parent.submit_many([()] * 80)
        eventually(lambda: order.count("child") > 10, "children run")
        gate.set()
        for job in jobs:
            job.result(timeout=60)


@app.job("job.wait.composed")
def composed(how: str) -> list[int]:
    handles = [deep_thread.submit(0) for _ in range(5)]
    if how == "gather":
        return penstock.gather(*handles)
    return [handle.result() for handle in penstock.as_completed(handles)]


@app.job("job.wait.acomposed")
async def acomposed(how: str) -> list[int]:
    handles = [await deep.asubmit(0) for _ in range(5)]
    if how == "gather":
        return await penstock.agather(*handles)
    return [await handle async for handle in penstock.as_completed(handles)]


@pytest.mark.parametrize("how", ["gather", "as_completed"])
def test_gather_and_as_completed_hold_no_slot_either(tmp_path: Path, how: str) -> None:
    with app.run(tmp_path / "data", concurrency=1):
        jobs = [composed.submit(how), acomposed.submit(how)]
        assert [job.result(timeout=30) for job in jobs] == [[0] * 5] * 2
