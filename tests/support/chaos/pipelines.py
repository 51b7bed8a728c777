"""Real processes with an engine of their own that run a pipeline, to be killed.

`Stable` starts one that has everything imported and forks the others, so that a death costs
milliseconds and not a start of Python. Each of them opens the data directory, or joins the engine
that another one has there, waits for the end of the run `one` and is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

import penstock
from penstock.app.offline import offline
from penstock.config import load
from penstock.core.errors import StoreFailed
from penstock.ports import process
from penstock.workloads.pipeline.records import ItemOutcome
from penstock.workloads.pipeline.rows import RunRows

KEY = "one"
STAGES = ("fetch", "double", "total")
KILLED = -signal.SIGKILL
SECONDS = 0.003
"""How long a call takes."""


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3, 4)
    seconds: float = SECONDS


class Plan(Struct):
    """One process to be."""

    folder: str
    failpoint: str = ""
    count: int = 0
    seconds: float = SECONDS


def crashing(journal: Path) -> penstock.Pipeline:
    """Two stages of items, one of them in threads and with one that fails, and a sum."""
    pipeline = penstock.Pipeline(
        "crashing",
        config=Config,
        cancel_grace=0.4,
        on_end=lambda record: mark("hook", record.status, journal.with_name("hooks")),
    )

    def mark(stage: str, key: str, file: Path = journal) -> None:
        line = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(line, f"{stage} {key} {os.getpid()}\n".encode())
        os.fsync(line)
        os.close(line)

    @pipeline.map(over="numbers", key=str, concurrency=2)
    async def fetch(number: int, ctx: Any) -> list[int]:
        mark("fetch", ctx.key)
        await asyncio.sleep(ctx.config.seconds)
        return [number, number + 100]

    @pipeline.map(over=fetch, concurrency=3)
    def double(number: int, ctx: Any) -> dict[str, Any]:
        mark("double", ctx.key)
        ctx.cancel.wait(ctx.config.seconds)
        if number == 103:
            raise ValueError("that one can't be doubled")
        # Above what a row holds for some, so that blobs are part of it.
        return {"twice": 2 * number, "padding": "x" * (20_000 if number == 2 else 0)}

    @pipeline.step()
    async def total(results: Any, ctx: Any) -> int:
        mark("total", "")
        return sum([one["twice"] async for one in results])

    return pipeline


async def work(plan: Plan) -> None:
    folder = Path(plan.folder)
    app = penstock.App()
    app.add(crashing(folder / "journal"))
    async with app.run(folder / "data", timeouts__lost_grace=0.05, timeouts__lease=1.0) as ps:
        config = {"seconds": plan.seconds}
        run = await ps.pipelines.astart("crashing", config, idempotency_key=KEY)
        await (await ps.aget(run.id)).await_end()


# -- looking at what is left ------------------------------------------------------


class Left(Struct):
    """What a folder holds."""

    record: Any
    items: dict[str, Any]
    """By `stage/key`: outcome, output, error class and number of outputs; and never a time."""


def left_in(folder: Path) -> Left | None:
    """None where nothing was accepted."""
    if not (folder / "data" / "penstock.db").exists():
        return None
    try:
        return asyncio.run(_left_in(folder))
    except StoreFailed as error:
        if type(error) is not StoreFailed or "start an engine on it once" not in (error.hint or ""):
            raise
        return None  # killed before its database had all its tables


async def _left_in(folder: Path) -> Left | None:
    async with offline(load(flags={"data_dir": str(folder / "data")})) as api:
        found = await api.pipelines.runs(penstock.RunQuery())
        if not found:
            return None
        (record,) = found
        items = {
            f"{stage}/{item.key}": (
                item.outcome,
                item.output,
                item.error_class,
                item.error,
                item.output_count,
            )
            for stage in STAGES
            for item in await api.pipelines.items(record.id, stage)
        }
    return Left(record, items)


def ended_in(folder: Path) -> set[str]:
    """The items whose end is durable."""
    left = left_in(folder)
    items = {} if left is None else left.items
    return {name for name, item in items.items() if item[0] != ItemOutcome.PENDING}


def hook_kept_in(folder: Path) -> bool:
    """Whether it is durable that the hook was called."""
    return asyncio.run(_hook_kept_in(folder))


async def _hook_kept_in(folder: Path) -> bool:
    async with offline(load(flags={"data_dir": str(folder / "data")})) as api:
        (record,) = await api.pipelines.runs(penstock.RunQuery())
        state, _, _ = await RunRows(api.read_steps, record.id).head()
    return state is not None and state.hooks_called


def result_in(folder: Path) -> Any:
    """What a run came to, with nothing in it that depends on when and how often it ran."""
    left = left_in(folder)
    assert left is not None
    stages = [
        (s.name, s.status, s.total, s.done, s.ok, s.failed, s.skipped, s.listed, s.reason)
        for s in left.record.stages
    ]
    return left.record.status, stages, left.record.errors, sorted(left.items.items())


def calls_in(folder: Path) -> list[tuple[str, int]]:
    """(`stage/key`, process) of every call that began, in order."""
    journal = folder / "journal"
    lines = journal.read_text().splitlines() if journal.exists() else []
    split = [line.split(" ") for line in lines]
    return [(f"{stage}/{key}", int(pid)) for stage, key, pid in split]


def hooks_in(folder: Path) -> list[str]:
    """The status that each call of the hook was told, in order."""
    hooks = folder / "hooks"
    lines = hooks.read_text().splitlines() if hooks.exists() else []
    return [line.split(" ")[1] for line in lines]


# -- processes --------------------------------------------------------------------


class Stable:
    """Where processes are forked from."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.chaos.pipelines"],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def start(self, folder: Path, **plan: Any) -> int:
        folder.mkdir(exist_ok=True)
        return self._ask({"start": {"folder": str(folder), **plan}})

    def join(self, pid: int) -> int:
        """Its exit code; minus the signal that killed it."""
        return self._ask({"join": pid})

    def run(self, folder: Path, **plan: Any) -> int:
        return self.join(self.start(folder, **plan))

    def _ask(self, question: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _serve() -> None:
    for line in sys.stdin:
        question = json.loads(line)
        if "join" in question:
            _, status = os.waitpid(question["join"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = _fork(Plan(**question["start"]))
        print(answer, flush=True)


def _fork(plan: Plan) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # As PENSTOCK_FAILPOINT would have done before the fork.
        process._ARMED, process._left = plan.failpoint, plan.count
        asyncio.run(work(plan))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
