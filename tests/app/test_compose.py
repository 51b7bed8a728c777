"""Many jobs at once: map, gather, as_completed, first_completed; inside a job and outside."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.waiting import soon

import penstock
from penstock import App, Client, InvalidRequest, JobCancelled, JobFailed, MapInterrupted
from penstock.core.pointer import encode_data
from penstock.testing.aio import run_async
from penstock.workloads.function import definition

app = App()
gates: dict[str, threading.Event] = {}


@dataclass
class Page:
    url: str
    size: int


@app.job("job.many.double")
async def double(n: int) -> int:
    if n < 0:
        raise ValueError(f"{n} is negative")
    return n * 2


@app.job("job.many.flaky", retries=penstock.RetryPolicy(retries=1, delay=0.01))
async def flaky(n: int) -> int:
    if penstock.current().request.retry_number == 0:
        raise OSError("once")
    return n


@app.job("job.many.second", retries=penstock.RetryPolicy(retries=1, delay=0.0))
async def second(name: str) -> str:
    if penstock.current().request.retry_number == 0:
        raise OSError("once")
    await asyncio.to_thread(gates[name].wait, 20)
    return name


@app.job("job.many.add")
async def add(a: int, b: int, c: int = 0) -> int:
    return a + b + c


@app.job("job.many.gated")
def gated(name: str) -> str:
    assert gates[name].wait(20)
    return name


@app.job("job.many.large")
async def large(n: int) -> str:
    return str(n) * 10_000


@app.job("job.many.parent")
async def parent(count: int) -> int:
    return sum(await penstock.agather(*await double.amap(range(count))))


@app.job("job.many.thread_parent")
def thread_parent(count: int) -> int:
    handles = double.map(range(count))
    ended = [handle.result() for handle in penstock.as_completed(handles)]
    return sum(ended) + sum(penstock.gather(*handles))


@pytest.fixture(params=["embedded", "link", "http"])
def ps(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    gates.clear()
    settings = {"http__listen": "127.0.0.1:0"} if request.param == "http" else {}
    with app.run(tmp_path, durability="memory", **settings) as embedded:
        if request.param == "embedded":
            yield embedded
        elif request.param == "link":
            with app.connect(data=tmp_path) as client:
                yield client
        else:
            with app.connect(embedded.url, data=tmp_path) as client:
                yield client


def test_map_submits_a_job_for_each_item_and_gather_gives_their_results(ps: Client) -> None:
    handles = double.map(range(50))
    assert penstock.gather(*handles, timeout=20) == [n * 2 for n in range(50)]
    assert penstock.gather(*handles) == [n * 2 for n in range(50)]
    assert handles[3].record.state is penstock.JobState.SUCCEEDED
    assert penstock.gather() == []
    assert double.map([]) == []


def test_starmap_gives_each_tuple_as_arguments(ps: Client) -> None:
    handles = add.options(labels={"of": "starmap"}).starmap([(1, 2), (3, 4)])
    assert penstock.gather(*handles, timeout=20) == [3, 7]
    assert len(ps.jobs(labels={"of": "starmap"})) == 2


def test_gather_follows_retries_and_reads_large_results(ps: Client) -> None:
    handles = [*flaky.map([1, 2]), *large.map([3])]
    assert penstock.gather(*handles, *handles[:1], timeout=20) == [1, 2, "3" * 10_000, 1]


def test_gather_raises_at_the_first_failure_and_the_others_go_on(ps: Client) -> None:
    gates["a"] = threading.Event()
    waiting = gated.submit("a")
    with pytest.raises(JobFailed, match="-1 is negative"):
        penstock.gather(waiting, double.submit(-1), timeout=20)
    gates["a"].set()
    assert waiting.result(20) == "a"


def test_gather_can_return_errors_among_the_results(ps: Client) -> None:
    handles = double.map([1, -1, 2])
    first, error, last = penstock.gather(*handles, return_exceptions=True, timeout=20)
    assert (first, last) == (2, 4)
    assert isinstance(error, JobFailed)


def test_gather_says_how_many_have_not_ended_in_time(ps: Client) -> None:
    gates["a"] = threading.Event()
    handles = [gated.submit("a"), double.submit(1)]
    handles[1].result(20)
    with pytest.raises(penstock.WaitTimedOut, match=r"1 of 2 jobs have not ended after 0\.1 s"):
        penstock.gather(*handles, timeout=0.1)
    gates["a"].set()
    assert penstock.gather(*handles, timeout=20) == ["a", 2]


def test_as_completed_gives_handles_in_the_order_of_the_ends_each_time(ps: Client) -> None:
    names = ["a", "b", "c"]
    gates.update({name: threading.Event() for name in names})
    handles = {gated.submit(name): name for name in names}
    order = []
    for name, handle in zip(["c", "a", "b"], _opening("cab", handles), strict=True):
        assert handles[handle] == name == handle.result()
        order.append(handle)
    assert list(penstock.as_completed(handles)) == order
    assert penstock.first_completed(*handles) == order[0]
    assert list(penstock.as_completed([])) == []


def _opening(
    names: str, handles: Iterable[penstock.JobHandle[str]]
) -> Iterator[penstock.JobHandle[str]]:
    """The ends, of which each lets the next one go."""
    doors = iter(names)
    gates[next(doors)].set()
    for handle in penstock.as_completed(handles, timeout=20):
        yield handle
        if (name := next(doors, None)) is not None:
            gates[name].set()


def test_a_retried_job_is_known_by_the_handle_that_was_given(ps: Client) -> None:
    handles = flaky.map([1, 2])
    ended = list(penstock.as_completed(handles, timeout=20))
    assert set(ended) == set(handles)
    assert sorted(handle.result() for handle in ended) == [1, 2]


@run_async
async def test_a_job_and_its_retry_may_be_waited_for_together(tmp_path: Path) -> None:
    gates["x"] = threading.Event()
    async with app.run(tmp_path, durability="memory") as client:
        first = await second.asubmit("x")
        async for _ in first.afollow():
            pass  # until this try has ended
        retry = (await first.arefresh()).successor
        assert retry is not None
        tries = [first.job_id, retry]
        waiting = asyncio.create_task(client.api.wait_many(tries, 2, timeout=20))
        await soon(lambda: bool(client.api._feed._waiters), "a wait")  # type: ignore[attr-defined]
        gates["x"].set()
        assert {(one.job_id, one.job.job_id) for one in await waiting} == {
            (first.job_id, retry),
            (retry, retry),
        }


def test_first_completed_also_tells_of_a_job_that_was_cancelled(ps: Client) -> None:
    gates.update({name: threading.Event() for name in "ab"})
    handles = [gated.submit("a"), gated.options(delay=3600).submit("b")]
    with pytest.raises(penstock.WaitTimedOut):
        penstock.first_completed(*handles, timeout=0.05)
    handles[1].cancel()
    first = penstock.first_completed(*handles, timeout=20)
    assert first == handles[1]
    with pytest.raises(JobCancelled):
        first.result()
    gates["a"].set()


def test_jobs_map_and_gather_in_async_code_and_in_threads(ps: Client) -> None:
    assert parent.submit(20).result(20) == 380
    assert thread_parent.submit(20).result(20) == 760


@run_async
async def test_all_of_it_can_be_awaited(tmp_path: Path) -> None:
    async with app.run(tmp_path, durability="memory"):
        handles = await double.amap(range(5))
        assert await penstock.agather(*handles, timeout=20) == [0, 2, 4, 6, 8]
        assert await penstock.agather() == []
        found = [await handle async for handle in penstock.as_completed(handles)]
        assert sorted(found) == [0, 2, 4, 6, 8]
        assert (await penstock.afirst_completed(*handles)).job_id in {h.job_id for h in handles}
        assert await penstock.agather(*await add.astarmap([(1, 2, 3)])) == [6]
        results = await penstock.agather(*await double.amap([-1]), return_exceptions=True)
        assert isinstance(results[0], JobFailed)


@run_async
async def test_a_wait_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    async with app.run(tmp_path, durability="memory") as client:
        handle = await gated.options(delay=3600).asubmit("x")
        waiting = asyncio.create_task(penstock.agather(handle))
        feed = client.api._feed  # type: ignore[attr-defined]
        await soon(lambda: bool(feed._waiters), "a wait")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not feed._waiters


# -- chunks ---------------------------------------------------------------------------------


def test_the_items_are_read_in_chunks(ps: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "_CHUNK", 10)
    read, behind = itertools.count(1), []

    def items() -> Iterator[int]:
        for _ in range(25):
            behind.append(next(read) - 10 - len(ps.jobs(topic="job.many.double", limit=100)))
            yield 1

    handles = double.map(items())
    assert max(behind) <= 0
    assert len(set(handles)) == 25
    assert all(handle._record is None for handle in handles)


def test_an_error_in_the_iterator_says_what_was_submitted(
    ps: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definition, "_CHUNK", 10)

    def items(broken: int) -> Iterator[int]:
        for n in range(30):
            if n == broken:
                raise OSError("no more lines")
            yield n

    with pytest.raises(MapInterrupted, match="20 jobs were submitted, then OSError: no") as found:
        double.map(items(25))
    assert penstock.gather(*found.value.submitted, timeout=20) == [n * 2 for n in range(20)]
    assert isinstance(found.value.__cause__, OSError)
    with pytest.raises(OSError, match="no more lines"):
        double.map(items(5))
    with pytest.raises(MapInterrupted, match=r"items\[15\]\.n: expected int, got str") as wrong:
        double.map([*range(15), "x"])
    assert len(wrong.value.submitted) == 10
    assert len(ps.jobs(topic="job.many.double", limit=100)) == 30


# -- wrong uses -----------------------------------------------------------------------------


def test_wrong_uses_are_refused_by_name(ps: Client) -> None:
    handle = double.submit(1)
    with pytest.raises(InvalidRequest, match=r"handles\[0\]: expected JobHandle, got list"):
        penstock.gather([handle])  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="there is no job to wait for"):
        penstock.first_completed()
    with pytest.raises(InvalidRequest, match=r"items\[0\]\.n: expected int, got str"):
        double.map(["x"])
    with pytest.raises(InvalidRequest, match=r"items\[1\]: expected a tuple or a dict"):
        add.starmap([(1, 2), 3])
    with pytest.raises(InvalidRequest, match="key: can't name more than one job"):
        double.options(key="k").map([1])
    stranger: penstock.JobHandle[int] = penstock.JobHandle(handle._engine, "no-such-job")
    with pytest.raises(penstock.NotFound, match="no-such-job"):
        penstock.gather(handle, stranger, timeout=5)


# -- results as inputs ----------------------------------------------------------------------


@app.job("job.many.page")
async def page(url: str) -> Page:
    if url == "broken":
        raise OSError("no such page")
    return Page(url, len(url))


@app.job("job.many.sizes")
async def sizes(pages: list[Page | None], factor: int = 1) -> list[int]:
    return [0 if one is None else one.size * factor for one in pages]


@app.job("job.many.show")
async def show(page: Page, note: dict[str, Any] | None = None) -> str:
    return f"{page.url}: {note}"


def test_a_result_is_passed_on_as_an_argument_and_within_one(ps: Client) -> None:
    pages = page.map(["a", "bb", "c" * 5000])
    whole = sizes.submit([penstock.value(one) for one in pages], factor=10)
    again = show.submit(penstock.value(pages[0]), {"sizes": penstock.value(whole)})
    assert whole.result(20) == [10, 20, 50_000]
    assert again.result(20) == "a: {'sizes': [10, 20, 50000]}"
    assert whole.record.request.after == tuple(one.job_id for one in pages)


def test_a_result_of_a_retried_or_large_job_is_passed_on(ps: Client) -> None:
    total = add.submit(penstock.value(flaky.submit(5)), 1)
    text = ps.submit("job.many.show", {"page": {"url": penstock.value(large.submit(7)), "size": 1}})
    assert total.result(20) == 6
    assert text.result(20) == "7" * 10_000 + ": None"


def test_a_parent_that_failed_cancels_the_child_or_gives_nothing(ps: Client) -> None:
    broken = page.submit("broken")
    strict = sizes.submit([penstock.value(broken)])
    lenient = sizes.options(if_parent_fails="run").submit([penstock.value(broken)])
    with pytest.raises(JobCancelled, match="which it waits for, ended FAILED"):
        strict.result(20)
    assert lenient.result(20) == [0]


def test_the_other_arguments_are_checked_at_once_and_the_results_when_it_starts(
    ps: Client,
) -> None:
    number = double.submit(1)
    with pytest.raises(InvalidRequest, match=r"input\.factor: expected int, got str"):
        sizes.submit([penstock.value(number)], factor="x")  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match=r"input\.factr: unexpected"):
        ps.submit("job.many.sizes", {"pages": [penstock.value(number)], "factr": 1})
    with pytest.raises(JobFailed, match=r"BAD_INPUT: input\.pages\[0\]: expected object"):
        sizes.submit([penstock.value(number)]).result(20)  # type: ignore[list-item]


def test_only_results_of_jobs_that_it_waits_for_are_put_in(ps: Client) -> None:
    secret = page.submit("secret")
    given = {"$result_of": secret.job_id}
    assert show.submit(Page("a", 1), {"note": given}).result(20) == f"a: {{'note': {given}}}"
    with pytest.raises(InvalidRequest, match=r"input\.note: the key '\$result_of' is for"):
        show.submit(penstock.value(page.submit("b")), {"note": given})
    request = penstock.JobRequest(
        job_id="",
        topic="job.many.show",
        context_ptr=encode_data(json.dumps({"page": given}).encode()),
        after=(page.submit("c").job_id,),
        takes_results=True,
    )
    with pytest.raises(InvalidRequest, match="takes_results: there is no job in after"):
        ps._engine.run(lambda api: api.submit([msgspec.structs.replace(request, after=())]))
    [job] = ps._engine.run(lambda api: api.submit([request]))
    with pytest.raises(JobFailed, match="which is not in after"):
        ps.get(job.job_id).result(20)


def test_a_job_can_wait_for_thousands(tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory") as ps:
        handles = double.map(range(3000))
        whole = total.submit([penstock.value(one) for one in handles])
        assert whole.result(40) == 3000 * 2999
        tidy = double.options(after=handles).submit(1)
        assert tidy.result(20) == 2
        with pytest.raises(InvalidRequest, match=r"after\[3000\]: there is no job 'nobody'"):
            ps.submit("job.many.double", {"n": 1}, after=[*handles, "nobody"])


@app.job("job.many.total")
async def total(numbers: list[int]) -> int:
    return sum(numbers)
