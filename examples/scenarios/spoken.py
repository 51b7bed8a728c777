"""Language models: a question is a job, and a folder can be the queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import penstock
from penstock.adapters.llama.process import check_engine
from penstock.lifecycles.spool import FOLDERS, Status
from penstock.workloads.llm.answers import TextStream
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.values import LlmFailure
from penstock.workloads.spool.config import ServerConfig, SpoolOptions
from scenarios.scenario import Scenario, Stage, Story, expect

MODEL = Path(__file__).resolve().parents[2] / ".models" / "SmolLM2-135M-Instruct.gguf"
TOPIC = f"job.llm.{MODEL.stem}"
QUESTION = "Name three colours."
WORKSPACE = "workspace"
"""The folder of the spool, beside the engine's data."""


@cache
def lacking() -> str:
    try:
        check_engine()
    except LlmFailure as failure:
        return failure.message
    return "" if MODEL.exists() else "there is no model: 'make model' fetches a small one"


def served() -> tuple[str, ...]:
    return () if lacking() else (str(MODEL),)


async def question(stage: Stage) -> Story:
    request = {
        "kind": "chat",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 12,
        "sampling": {"temperature": 0},
        "stream": True,
    }
    job = await stage.ps.asubmit(TOPIC, request, priority=penstock.Priority.INTERACTIVE)
    told: list[str] = []
    stream = TextStream(told.append)
    async for update in job.afollow():
        stream.add(update)
    said = (await job.aresult(60))["choices"][0]["text"]
    expect("".join(told) == said, f"it streamed {told}, and said {said!r}")
    return Story(job, f"{QUESTION} {_line(said)} ({len(told)} pieces)")


async def shaped(stage: Stage) -> Story:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = await penstock.aask(
        "Which colour is grass?", client=stage.ps, schema=schema, max_tokens=20, temperature=0
    )
    expect(json.loads(answer.text)["colour"] in ("red", "green", "blue"), f"{answer.text!r}")
    job = await stage.ps.aget(answer.job_id)
    return Story(job, f"constrained by a JSON schema: {_line(answer.text)}")


async def too_long(stage: Stage) -> Story:
    message = {"role": "user", "content": "word " * 3000}
    job = await stage.ps.asubmit(TOPIC, {"kind": "chat", "messages": [message]})
    end = await job.await_end(60)
    assert end.result is not None
    expect(end.result.error_code == "CONTEXT_EXCEEDED", f"it says {end.result.error_code}")
    return Story(job, _line(end.result.error_message or "", 150))


async def openai(stage: Stage) -> Story:
    """As OpenAI's clients ask, with a key of the engine."""
    import aiohttp

    key = (stage.data / "token").read_text().strip()
    body = {
        "model": MODEL.stem,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 12,
        "temperature": 0,
    }
    address = f"{stage.ps.url}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(address, json=body, headers=headers) as answer,
    ):
        told = await answer.json()
        expect(answer.status == 200, f"it answered {told}")
        job = await stage.ps.aget(answer.headers["x-penstock-job"])
    said = _line(told["choices"][0]["message"]["content"])
    return Story(job, f"POST /v1/chat/completions: {said}")


async def folders(stage: Stage) -> Story:
    """A directory's path is its state: watch it move."""
    from penstock.workloads.spool.client.flow import Flow
    from penstock.workloads.spool.client.work import Work
    from penstock.workloads.spool.disk.workspace import Workspace

    place = stage.data.parent / WORKSPACE
    workspace = Workspace(place)
    options = SpoolOptions(max_tokens=8)
    job_id = await asyncio.to_thread(Work(workspace).submit, QUESTION, options=options)
    flow, seen = Flow(workspace), [Status.QUEUED]
    expect(flow.status(job_id) is Status.QUEUED, "it is not in input/ready")
    async with stage.started(spool_server(place)), asyncio.timeout(60):
        while seen[-1] not in (Status.DONE, Status.FAILED):
            if (now := flow.status(job_id)) is not seen[-1]:
                seen.append(now)
            await asyncio.sleep(0.002)
    said = _line((place / FOLDERS[Status.DONE] / job_id / "result.txt").read_text())
    way = " → ".join(f"{FOLDERS[state]}/" for state in seen)
    return Story(None, f"{job_id}: {said}", way=way, end=str(seen[-1]))


@asynccontextmanager
async def spool_server(place: Path) -> AsyncIterator[None]:
    from penstock.adapters.llama.runner import LlamaRunner
    from penstock.workloads.spool.server.server import Server

    config = ModelConfig(models=served(), slots=1, context=512)
    server = Server(ServerConfig(workspace=place, workers=1), LlamaRunner(config))
    await server.start()
    try:
        yield
    finally:
        await server.stop()


def _line(text: str, most: int = 60) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else words[:most] + "…"


SCENARIOS = [
    Scenario("a question", TOPIC, "SUCCEEDED", question, lacking),
    Scenario("an answer in a shape", TOPIC, "SUCCEEDED", shaped, lacking),
    Scenario("through the OpenAI API", TOPIC, "SUCCEEDED", openai, lacking),
    Scenario("a prompt that is too long", TOPIC, "FAILED", too_long, lacking),
    Scenario("a folder is the queue", "a spooled job", "DONE", folders, lacking),
]
