"""Checkpoints as a user of the Python API, the HTTP API and the command line sees them."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

import penstock
from penstock import App, Context, JobFailed, Step
from penstock.core.errors import InvalidRequest, PenstockError, TooLarge
from penstock.lifecycles.canonical import JobEvent

app = App()


@app.job("job.steps.async", idempotent=True)
async def write_async(ctx: Context, count: int) -> list[int]:
    await ctx.checkpoint([Step("page", n, key=f"k{n}", outcome="ok") for n in range(count)])
    return [row.n async for row in ctx.steps("page")]


@app.job("job.steps.thread", idempotent=True)
def write_in_thread(ctx: Context, count: int) -> list[int]:
    for n in range(count):
        ctx.checkpoint_sync([Step("page", n, key=f"k{n}", outcome="ok")])
    return [row.n for row in penstock.current().steps_sync("page", after=("page", 0))]


@app.job("job.steps.process", mode="process", idempotent=True)
def write_in_process(ctx: Context, count: int) -> list[int]:
    ctx.checkpoint_sync([Step("page", n, key=f"k{n}", outcome="ok") for n in range(count)])
    return [row.n for row in ctx.steps_sync("page")]


@app.job("job.notes.async")
async def note_async(ctx: Context) -> None:
    await ctx.checkpoint([Step("page", 0)], ["begun", "half way"])
    await ctx.checkpoint([], ["done"])


@app.job("job.notes.thread")
def note_in_thread(ctx: Context) -> None:
    ctx.checkpoint_sync([Step("page", 0)], ["begun", "half way"])
    ctx.checkpoint_sync([], ["done"])


@app.job("job.notes.process", mode="process")
def note_in_process(ctx: Context) -> None:
    ctx.checkpoint_sync([Step("page", 0)], ["begun", "half way"])
    ctx.checkpoint_sync([], ["done"])


@app.job("job.steps.bad")
def write_badly(ctx: Context, kind: str) -> list[str]:
    """Errors of bad rows; what is good is kept."""
    rows = {
        "large": Step("page", 1, output="x" * 70_000),
        "surrogate": Step("page", 1, output="\ud800"),
        "type": Step("page", "one"),  # type: ignore[arg-type]
        "negative": Step("page", -1),
        "nameless": Step("", 1),
    }
    try:
        ctx.checkpoint_sync([rows[kind]])
    except PenstockError as error:
        ctx.checkpoint_sync([Step("page", 2)])
        return [type(error).__name__, error.message, *(str(row.n) for row in ctx.steps_sync())]
    return []


@app.job("job.steps.blocking")
async def block(ctx: Context) -> str:
    try:
        ctx.checkpoint_sync([Step("page", 1)])
    except penstock.PenstockError as error:
        return error.code
    return "blocked"


@app.job("job.steps.many")
def write_too_many(ctx: Context) -> int:
    for n in range(1000):
        ctx.checkpoint_sync([Step("cursor", 0, output=str(n))])  # replaced: counted once
    for n in range(1000):
        ctx.checkpoint_sync([Step("page", n)])
    return 0


@app.job("job.steps.at_once")
async def write_at_once(ctx: Context, count: int) -> int:
    """Many small checkpoints at once share messages; a refused one fails alone."""
    import asyncio

    async def one(n: int) -> bool:
        try:
            await ctx.checkpoint([Step("page", n, output="\ud800" if n == 7 else str(n))])
        except InvalidRequest:
            return False
        return True

    return sum(await asyncio.gather(*map(one, range(count))))


@pytest.fixture(params=["disk", "memory"])
def durability(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("topic", ["async", "thread", "process"])
def test_a_job_reads_back_the_rows_that_it_checkpointed(
    tmp_path: Path, topic: str, durability: str
) -> None:
    with app.run(tmp_path, durability=durability) as ps:
        job = ps.submit(f"job.steps.{topic}", {"count": 1300 if topic != "thread" else 20})
        numbers = job.result(timeout=30)
        steps = list(job.steps("page"))
        assert numbers == [row.n for row in steps][len(steps) - len(numbers) :]
        assert len(steps) == (20 if topic == "thread" else 1300)
        assert (steps[7].key, steps[7].outcome, steps[7].attempt) == ("k7", "ok", 1)
        assert steps[7].at > 1e9
        assert list(job.steps("other")) == []


@pytest.mark.parametrize("elsewhere", [False, True], ids=["embedded", "over a link"])
@pytest.mark.parametrize("topic", ["async", "thread", "process"])
def test_what_a_job_notes_is_in_its_history(tmp_path: Path, topic: str, elsewhere: bool) -> None:
    with ExitStack() as stack:
        if elsewhere:  # then `app` joins it
            stack.enter_context(App().run(tmp_path))
        ps = stack.enter_context(app.run(tmp_path))
        job = ps.submit(f"job.notes.{topic}")
        job.result(timeout=30)
        entries = [entry for entry in job.history() if entry.event is JobEvent.NOTE]
        assert [entry.reason for entry in entries] == ["begun", "half way", "done"]
        assert {entry.actor for entry in entries} == {f"worker:{job.refresh().worker_id}"}
        assert [row.n for row in job.steps()] == [0]


def test_ten_thousand_rows_come_back_in_order_and_in_pages(tmp_path: Path, durability: str) -> None:
    with app.run(tmp_path, durability=durability) as ps:
        job = ps.submit("job.steps.async", {"count": 10_000})
        assert job.result(timeout=60) == list(range(10_000))
        assert [row.n for row in job.steps()] == list(range(10_000))


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("large", "TooLarge", "bytes; a checkpointed row may have 65536"),
        ("surrogate", "InvalidRequest", "can't be stored"),
        ("type", "InvalidRequest", "must be a penstock.Step"),
        ("negative", "InvalidRequest", "rows[0].n: must be from 0"),
        ("nameless", "InvalidRequest", "rows[0].name: must have 1 to 200 characters"),
    ],
)
def test_a_row_that_can_not_be_kept_fails_its_own_call_only(
    tmp_path: Path, kind: str, error: str, says: str
) -> None:
    with app.run(tmp_path, durability="memory") as ps:
        name, message, *kept = ps.submit("job.steps.bad", {"kind": kind}).result(timeout=20)
    assert (name, kept) == (error, ["2"])
    assert says in message


def test_rows_checkpointed_at_once_are_kept_together_but_for_a_bad_one(tmp_path: Path) -> None:
    with app.run(tmp_path) as ps:
        job = ps.submit("job.steps.at_once", {"count": 600})
        assert job.result(timeout=30) == 599
        assert [row.n for row in job.steps()] == [n for n in range(600) if n != 7]


def test_the_blocking_form_is_refused_in_the_event_loop(tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory") as ps:
        assert ps.submit("job.steps.blocking").result(timeout=20) == "MISCONFIGURED"


def test_a_job_may_have_so_many_rows_and_bytes(tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory", limits__max_checkpoint_rows=500) as ps:
        job = ps.submit("job.steps.many")
        with pytest.raises(JobFailed, match="max_steps = 500"):
            job.result(timeout=30)
        assert len(list(job.steps())) == 500
        result = job.refresh().result
        assert result is not None
        assert TooLarge.__name__ in result.error_kinds
    with app.run(tmp_path, durability="memory", limits__max_checkpoint_bytes=1000) as ps:
        job = ps.submit("job.steps.async", {"count": 100})
        with pytest.raises(JobFailed, match="max_step_bytes = 1000"):
            job.result(timeout=30)


def test_steps_are_pruned_with_their_job(tmp_path: Path) -> None:
    with app.run(tmp_path) as ps:
        job = ps.submit("job.steps.async", {"count": 11_000})
        job.result(timeout=60)
        assert ps.prune(0.0).jobs == 1
    with sqlite3.connect(tmp_path / "penstock.db") as db:
        assert db.execute("SELECT count(*) FROM step").fetchone() == (0,)


def test_the_command_line_and_http_show_them(tmp_path: Path) -> None:
    def cli(*words: str) -> str:
        command = [sys.executable, "-m", "penstock.cli", *words, "--data", str(tmp_path)]
        environment = {**os.environ, "NO_COLOR": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with app.run(tmp_path, http__listen="127.0.0.1:0") as ps:
        job = ps.submit("job.steps.async", {"count": 1500})
        job.result(timeout=30)
        assert "page: 1,500 ok" in cli("show", job.job_id)
        shown = json.loads(cli("show", job.job_id, "--json"))["steps"]
        assert [(one["name"], one["outcome"], one["rows"]) for one in shown] == [
            ("page", "ok", 1500)
        ]
        lines = cli("job", "steps", job.job_id, "--name", "page", "--after", "1497", "--json")
        assert [json.loads(line)["n"] for line in lines.splitlines()] == [1498, 1499]
        url = ps.url
        token = (tmp_path / "token").read_text().strip()
        with penstock.connect(url, token=token) as over_http:
            assert [row.n for row in over_http.get(job.job_id).steps()] == list(range(1500))
    assert "k99" in cli("job", "steps", job.job_id)  # without an engine


def test_threads_of_one_job_may_checkpoint_at_the_same_time(tmp_path: Path) -> None:
    threaded = App()

    @threaded.job("job.steps.threads")
    def write(ctx: Context) -> int:
        def some(first: int) -> None:
            for n in range(first, first + 25):
                ctx.checkpoint_sync([Step("page", n)])

        threads = [threading.Thread(target=some, args=(25 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(list(ctx.steps_sync()))

    with threaded.run(tmp_path) as ps:
        assert ps.submit("job.steps.threads").result(timeout=30) == 100
