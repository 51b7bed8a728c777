"""Penstock's side: through the folders, and through the OpenAI API."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any

from processes import HERE, cpu_seconds, percentile, stop
from spooled.prompts import PROMPTS, TOKENS, body
from web.served import figures_of

from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import SpoolOptions, Sync
from penstock.workloads.spool.disk.workspace import Workspace

GREEDY = SpoolOptions(max_tokens=TOKENS, sampling=Sampling(temperature=0))


@contextmanager
def started(script: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A process of ours, and what it says."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "spooled" / script), *arguments],
        stdout=subprocess.PIPE,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}:{HERE.parent / 'src'}"},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        stop(process)


# -- the spool ------------------------------------------------------------------------


def spool(folder: Path, model: str) -> dict[str, Any]:
    """The prompts, submitted, computed and read again; the processor time of all of it."""
    workspace = Workspace(folder)
    work, flow = Work(workspace), Flow(workspace)
    with started("serve.py", str(folder), model, "full", "8") as (process, said):
        assert said.readline() == b"ready\n"
        flow.wait(work.submit("Hello.", options=GREEDY))
        wall, own, cpu = time.perf_counter(), time.process_time(), cpu_seconds(process.pid)
        ids = [work.submit(prompt, options=GREEDY) for prompt in PROMPTS]
        found = [flow.wait(job_id) for job_id in ids]
        wall = time.perf_counter() - wall
        cpu = cpu_seconds(process.pid) - cpu + time.process_time() - own
    return {
        "wall": wall,
        "cpu": cpu,
        "tokens": sum(one.meta.completion_tokens or 0 for one in found),
        "texts": [one.text for one in found],
    }


def queue(folder: Path, count: int, sync: Sync) -> float:
    """Jobs a second that are submitted, claimed and ended, with nothing computed."""
    workspace = Workspace(folder, sync)
    work, flow = Work(workspace), Flow(workspace)
    with started("serve.py", str(folder), "none", sync.value, "32") as (_, said):
        assert said.readline() == b"ready\n"
        flow.wait(work.submit("Hello."))
        begun = time.perf_counter()
        for _ in range(count):
            last = work.submit("Hello.")
        flow.wait(last)
        flow.wait_idle()
        return count / (time.perf_counter() - begun)


def latency(folder: Path, count: int) -> dict[str, float]:
    """From the call of submit to RUNNING, one job at a time."""
    workspace = Workspace(folder)
    work, flow = Work(workspace), Flow(workspace)
    times = []
    with started("serve.py", str(folder), "none", "full", "8", "claims") as (_, said):
        assert said.readline() == b"ready\n"
        for _ in range(count):
            begun = time.time_ns()
            job_id = work.submit("Hello.")
            claimed, at = said.readline().split()
            assert claimed.decode() == job_id
            times.append((int(at) - begun) / 1e6)
            flow.wait(job_id)
    return {"p50_ms": median(times), "p99_ms": percentile(times, 0.99)}


# -- the OpenAI API -------------------------------------------------------------------


@contextmanager
def door(folder: Path, model: str) -> Iterator[tuple[int, dict[str, str]]]:
    with started("door.py", str(folder), model) as (process, said):
        yield process.pid, json.loads(said.readline())


async def asked(address: dict[str, str], at_once: int, *, stream: bool) -> list[dict[str, Any]]:
    """The prompts, so many at once, with OpenAI's own client."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=address["url"] + "/v1", api_key=address["key"]) as client:
        model = (await client.models.list()).data[0].id
        room = asyncio.Semaphore(at_once)

        async def one(prompt: str) -> dict[str, Any]:
            async with room:
                begun = time.perf_counter()
                if not stream:
                    done = await client.chat.completions.create(model=model, **body(prompt))
                    return {
                        "tokens": done.usage.completion_tokens,
                        "text": done.choices[0].message.content,
                    }
                first, count = 0.0, 0
                chunks = await client.chat.completions.create(
                    model=model, **body(prompt, stream=True)
                )
                async for chunk in chunks:
                    if chunk.choices and chunk.choices[0].delta.content:
                        first = first or time.perf_counter() - begun
                        count += 1
                return {"first": first, "tokens": count}

        await one("Hello.")
        begun = time.perf_counter()
        wanted = PROMPTS if not stream else PROMPTS[: max(at_once, 8)]
        found = list(await asyncio.gather(*map(one, wanted)))
        return [{"wall": time.perf_counter() - begun}, *found]


def through_door(pid: int, address: dict[str, str]) -> dict[str, Any]:
    """The prompts as plain requests; processor time of the engine, the client's left out."""
    asyncio.run(asked(address, 1, stream=True))
    cpu = cpu_seconds(pid)
    wall, *answers = asyncio.run(asked(address, len(PROMPTS), stream=False))
    return {
        "wall": wall["wall"],
        "cpu": cpu_seconds(pid) - cpu,
        "tokens": sum(answer["tokens"] for answer in answers),
        "texts": [answer["text"] for answer in answers],
    }


def streamed(address: dict[str, str], at_once: int) -> dict[str, float]:
    wall, *answers = asyncio.run(asked(address, at_once, stream=True))
    return {
        "first_ms": median(answer["first"] for answer in answers) * 1e3,
        "rate": sum(answer["tokens"] for answer in answers) / wall["wall"],
    }


def no_op_chats(folder: Path, seconds: float) -> float:
    """Chat requests answered a second by a model that computes nothing: each is a durable job."""
    request = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
    with door(folder, "none") as (pid, address):
        host, _, port = address["url"].removeprefix("http://").partition(":")
        load = {
            "address": (host, int(port)),
            "pid": pid,
            "token": address["key"],
            "method": "POST",
            "paths": ["/v1/chat/completions"],
            "body": json.dumps(request),
            "connections": 64,
            "seconds": seconds,
        }
        (figures,) = asyncio.run(figures_of("web.load:drive_all", [load]))
    return figures["rate"]
