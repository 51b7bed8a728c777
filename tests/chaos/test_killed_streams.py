"""A streamed answer goes on when its engine or its worker is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from openai import OpenAI
from tests.support.chaos.cluster import Cluster, cluster, kill
from tests.support.waiting import eventually

from penstock.lifecycles.canonical import JobState


def client_of(c: Cluster, engine: subprocess.Popen[bytes]) -> OpenAI:
    eventually(lambda: "ready;" in c.log_of(engine), "the engine tells its address")
    found = re.search(r"http://127\.0\.0\.1:\d+", c.log_of(engine))
    assert found is not None
    token = (c.data / "token").read_text().strip()
    return OpenAI(base_url=f"{found[0]}/v1", api_key=token, max_retries=0)


def streamed(client: OpenAI, at: int, hurt: Callable[[], None]) -> str:
    """The answer; after so many of its parts something is hurt."""
    parts: list[str] = []
    chunks = client.chat.completions.create(
        model="auto",
        messages=[{"role": "user", "content": "Tell a story about a river."}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            parts.append(chunk.choices[0].delta.content)
            if len(parts) == at:
                hurt()
    assert len(parts) > at
    return "".join(parts)


def kill_engine_of(worker: subprocess.Popen[bytes]) -> None:
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    (engine,) = [pid for pid in children if b"llama" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(engine), signal.SIGKILL)


def test_a_stream_goes_on_after_its_engine_and_after_its_worker_is_killed(
    tmp_path: Path, model_file: Path
) -> None:
    small = {f"PENSTOCK_MODELS__{name}": "1" for name in ("SLOTS", "THREADS")}
    with cluster(tmp_path, PENSTOCK_MODELS__CONTEXT="256", **small) as c:
        words = ("worker", "--app", "jobs:app", "--model", str(model_file), "--id")
        workers = {name: c.start(*words, name) for name in ("first", "second")}
        engine = c.up("--no-worker", "--http", "127.0.0.1:0")

        with client_of(c, engine) as client, c.client() as ps:

            def busy() -> subprocess.Popen[bytes]:
                (job,) = ps.jobs(states=(JobState.DISPATCHED, JobState.RUNNING))
                assert job.record.worker_id is not None
                return workers[job.record.worker_id]

            eventually(lambda: client.models.list().data, "the model is served")
            one = streamed(client, 5, lambda: kill_engine_of(busy()))
            other = streamed(client, 12, lambda: kill(busy()))
            assert one == other
        c.check_history()
