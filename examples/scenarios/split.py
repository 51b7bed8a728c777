"""One model over two nodes: each a process of its own, and text on one of them only."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import penstock
from scenarios.scenario import Scenario, Stage, Story, expect
from scenarios.spoken import MODEL

TOPIC = "job.chat.SmolLM2"
QUESTION = "What is the capital of France?"
_PATIENCE = 90
_lost: asyncio.Queue[penstock.JobHandle] = asyncio.Queue()
"""From the scenario that has the nodes to the one that tells of the loss of one."""


def lacking() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install 'penstock[pipes]' brings it"
    return "" if MODEL.exists() else "there is no model: 'make model' fetches a small one"


async def over_two_nodes(stage: Stage) -> Story:
    """Asked as a job of the engine, of which the origin is a worker."""
    async with node(stage, "layers", "--layers", "15-29") as (layers, address):
        origin = ("--layers", "0-14", "--end-model", "--join", address)
        engine = ("--connect", f"unix:{stage.data}/penstock.sock")
        async with stage.started(node(stage, "origin", *origin, *engine)) as (_, address):
            await served(stage)
            job = await ask(stage, 12)
            result = await job.aresult(_PATIENCE)
            said = " ".join(result["choices"][0]["text"].split())
            expect("Paris" in said, f"it said {said!r}")
            way = [
                (hop["node"], hop["layers"]) for hop in result["hops"] if hop["layers"] != "ends"
            ]
            expect(way == [("origin", "0-14"), ("layers", "15-29")], f"it went {way}")
            _lost.put_nowait(await lost(stage, layers))
            if stage.stays:  # so that the model answers again
                other = node(stage, "layers-2", "--layers", "15-29", "--join", address)
                await stage.stack.enter_async_context(other)
    shown = " → ".join(f"{name} {numbers}" for name, numbers in way)
    return Story(job, f"{QUESTION} {said} (layers: {shown} → origin)")


async def served(stage: Stage) -> None:
    async with asyncio.timeout(_PATIENCE):
        while TOPIC not in await stage.ps.atopics():  # noqa: ASYNC110 - by another process
            await asyncio.sleep(0.05)


async def lost(stage: Stage, layers: asyncio.subprocess.Process) -> penstock.JobHandle:
    """Another one, whose node is killed in the middle: no copy of its layers is left."""
    job = await ask(stage, 400)
    async for update in job.afollow():
        if layers.returncode is None and isinstance(update, penstock.Streamed):
            layers.kill()
            await layers.wait()
    return job


async def node_lost(stage: Stage) -> Story:
    job = await asyncio.wait_for(_lost.get(), 2 * _PATIENCE)
    end = await job.await_end(_PATIENCE)
    assert end.result is not None
    expect(end.result.error_code == "NODE_LOST", f"it says {end.result.error_code}")
    return Story(job, f"killed by SIGKILL: {(end.result.error_message or '')[:90]}")


async def ask(stage: Stage, tokens: int) -> penstock.JobHandle:
    request = {
        "kind": "chat",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": tokens,
        "sampling": {"temperature": 0},
        "stream": True,
    }
    return await stage.ps.asubmit(TOPIC, request, priority=penstock.Priority.INTERACTIVE)


@asynccontextmanager
async def node(
    stage: Stage, name: str, *more: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """As somebody starts one on a machine; what it says is JSON."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", "node", "start", "--json", "--node-id", name),
        *("--model", "SmolLM2", "--source", str(MODEL), "--dtype", "float32", "--threads", "1"),
        *("--drain-timeout", "0", "--data", str(stage.data), "--with-parent", *more),
        env=os.environ,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_PATIENCE):
            address = ""
            while not address:
                line = await process.stdout.readline()
                expect(bool(line), f"the node {name} did not start")
                address = json.loads(line).get("address", "")
        yield process, address
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


SCENARIOS = [
    Scenario("a model over two nodes", TOPIC, "SUCCEEDED", over_two_nodes, lacking),
    Scenario("a node is lost", TOPIC, "FAILED", node_lost, lacking),
]
