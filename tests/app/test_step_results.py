"""`ctx.step`: what a later attempt and a retry get back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock import App, Client, Context, InvalidRequest, RetryPolicy, Step, StepFailed
from penstock.testing.context import RecordingContext

app = App()
runs: Counter[str] = Counter()
_TWICE = RetryPolicy(retries=2, delay=0.01)


@dataclass
class Page:
    url: str
    size: int


def fetch(url: str) -> Page:
    runs[url] += 1
    return Page(url, len(url))


async def afetch(url: str) -> Page:
    return fetch(url)


def fails_at_first(name: str) -> int:
    runs[name] += 1
    if runs[name] < 3:
        raise ValueError(f"{name} failed")
    return runs[name]


async def afails_at_first(name: str) -> int:
    return fails_at_first(name)


@app.job("job.step.thread", retries=_TWICE, ctx=True)
def in_thread(ctx: Context) -> list[int]:
    pages = [ctx.step("fetch", fetch, url) for url in ("a", "bb", "bb")]
    assert all(isinstance(page, Page) for page in pages)
    return [*(page.size for page in pages), ctx.step("late", fails_at_first, "late")]


@app.job("job.step.async", retries=_TWICE, ctx=True)
async def in_async(ctx: Context) -> list[int]:
    pages = [await ctx.step("fetch", afetch, url) for url in ("a", "bb", "bb")]
    return [*(page.size for page in pages), await ctx.step("late", afails_at_first, "late")]


@pytest.fixture
def ps(tmp_path: Path) -> Iterator[Client]:
    runs.clear()
    with app.run(tmp_path / "data") as client:
        yield client


@pytest.mark.parametrize("mode", ["thread", "async"])
def test_retries_get_the_results_of_the_tries_before_and_run_again_what_failed(
    ps: Client, mode: str
) -> None:
    job = ps.submit(f"job.step.{mode}")
    assert job.result(timeout=30) == [1, 2, 2, 3]
    assert runs == {"a": 1, "bb": 2, "late": 3}
    assert [row.outcome for row in job.steps("step:late")] == ["failed"]


def test_an_attempt_gets_the_failures_of_the_attempt_before_it_too() -> None:
    ctx = RecordingContext(attempt=2)
    for row in (
        Step("step:fetch", 1, outcome="ok", output='{"url":"kept","size":7}', attempt=1),
        Step("step:late", 1, outcome="failed", error="ValueError: no", attempt=1),
        Step("zebra", 1),
    ):
        ctx.checkpointed[row.name, row.n] = row
    runs.clear()
    assert ctx.step("fetch", fetch, "x") == Page("kept", 7)
    assert ctx.step("fetch", fetch, "x") == Page("x", 1)
    with pytest.raises(StepFailed, match="step 'late' failed in attempt 1: ValueError: no"):
        ctx.step("late", fails_at_first, "late")
    assert runs == {"x": 1}


def test_steps_that_run_together_read_what_is_kept_once() -> None:
    async def together() -> list[Page]:
        ctx = RecordingContext(attempt=2)
        ctx.checkpointed["step:0", 1] = Step(
            "step:0", 1, outcome="ok", output='{"url":"kept","size":7}'
        )
        return await asyncio.gather(*(ctx.step(str(n), afetch, str(n)) for n in range(3)))

    assert [page.url for page in asyncio.run(together())] == ["kept", "1", "2"]


@pytest.mark.parametrize("name", ["", "x" * 151])
def test_a_bad_name_is_refused(name: str) -> None:
    ctx = RecordingContext()
    with pytest.raises(InvalidRequest, match="name"):
        ctx.step(name, fetch, "x")
    assert not ctx.checkpointed


def test_a_result_that_cannot_be_stored_is_refused() -> None:
    def bad() -> object:
        return object()

    ctx = RecordingContext()
    with pytest.raises(InvalidRequest, match="the result of step 'bad'"):
        ctx.step("bad", bad)


def test_a_plain_function_in_async_code_is_refused_before_it_runs() -> None:
    async def job() -> None:
        ctx = RecordingContext()
        with pytest.raises(InvalidRequest, match="would block the event loop"):
            ctx.step("fetch", fetch, "x")
        assert runs == {}
        assert not ctx.checkpointed
        assert await asyncio.to_thread(ctx.step, "fetch", fetch, "x") == Page("x", 1)

    runs.clear()
    asyncio.run(job())
