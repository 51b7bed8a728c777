"""Makes a data directory with an old version of Penstock: see README.md."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from tests.support.old_runs import sample_pipelines as sample

import penstock

_LEFT_OUT = (".sock", ".lock", ".starts", "-shm", "token", "hold", "calls")


def work(data: Path) -> None:
    """Runs that end by themselves."""
    with sample.app.run(data) as ps:

        def run(name: str, config: dict[str, Any], **options: Any) -> None:
            started = ps.pipelines.start(name, config, **options)
            ps.get(started.id).wait()
            print(name, ps.pipelines.get(started.id).status, started.id, flush=True)

        run("orders", {"orders": ["a", "bb", sample.LARGE]})
        run("orders", {"orders": ["c", "bad-1", "dd", "bad-2"]})
        run("orders", {"orders": ["acme"]}, tenant="acme")
        run("feeds", {"urls": ["one", "two", "three"]})
        run("apart", {"words": ["tea", "rye"]})


def cut(data: Path) -> None:
    """A run that is cancelled, and one during whose stage the process kills itself."""
    Path(os.environ["OLD_RUNS_HOLD"]).touch()
    with sample.app.run(data) as ps:
        cancelled = ps.pipelines.start("orders", {"orders": ["e", sample.HOLD, "f"]})
        _until(ps, cancelled.id, done=1)
        ps.pipelines.cancel(cancelled.id, reason="not needed")
        print("cancelled", ps.pipelines.get(cancelled.id).status, flush=True)
        wanted = [*(f"order-{n}" for n in range(5)), sample.HOLD, "y", sample.LARGE]
        started = ps.pipelines.start("orders", {"orders": wanted})
        _until(ps, started.id, done=5)
        time.sleep(0.5)
        print("cut off", started.id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def _until(ps: Any, job_id: str, *, done: int) -> None:
    while (stage := ps.pipelines.get(job_id).stage("fetch")) is None or stage.done < done:
        time.sleep(0.02)


def alone(data: Path) -> None:
    """A run of the old PipelineJobManager on the same file: no job of the engine belongs to it."""

    async def work() -> None:
        async with penstock.pipeline_jobs(data / "pipelines.db", sample.orders) as manager:
            record = await manager.start_job("orders", {"orders": ["alone"]})
            print("alone", (await manager.wait(record.id)).status, flush=True)

    asyncio.run(work())


PARTS = {"alone": alone, "work": work, "cut": cut}


def main(data: Path, target: Path) -> None:
    environment = {
        **os.environ,
        "OLD_RUNS_HOLD": str(data / "hold"),
        "OLD_RUNS_CALLS": str(data / "calls"),
    }
    for part in PARTS:
        data.mkdir(mode=0o700, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "tests.support.old_runs.make", part, data], env=environment
        )
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(data.rglob("*")):
            name = path.relative_to(data).as_posix()
            if path.is_file() and not any(map(name.endswith, _LEFT_OUT)):
                entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_LZMA)


if __name__ == "__main__":
    if sys.argv[1] in PARTS:
        PARTS[sys.argv[1]](Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
