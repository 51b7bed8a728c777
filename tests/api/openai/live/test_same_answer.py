"""The model's name, its answer and its usage are the same by every way to ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from tests.support.fake_llm import FakeRunner
from tests.support.openai.door import door

from penstock.testing.aio import run_async
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import ServerConfig
from penstock.workloads.spool.server.server import Server

TURNS = {"model": "fake", "messages": [{"role": "user", "content": "one two three"}]}
Answered = tuple[str, str, int, int]
"""Model, text, tokens of the prompt and of the answer."""
WAYS: dict[str, tuple[dict[str, Any], Callable[[Any], Answered]]] = {
    "/v1/chat/completions": (
        TURNS,
        lambda told: (
            told["model"],
            told["choices"][0]["message"]["content"],
            told["usage"]["prompt_tokens"],
            told["usage"]["completion_tokens"],
        ),
    ),
    "/v1/completions": (
        {"model": "fake", "prompt": "one two three"},
        lambda told: (
            told["model"],
            told["choices"][0]["text"],
            told["usage"]["prompt_tokens"],
            told["usage"]["completion_tokens"],
        ),
    ),
    "/v1/responses": (
        {"model": "fake", "input": "one two three"},
        lambda told: (
            told["model"],
            told["output"][0]["content"][0]["text"],
            told["usage"]["input_tokens"],
            told["usage"]["output_tokens"],
        ),
    ),
    "/v1/messages": (
        {**TURNS, "max_tokens": 16},
        lambda told: (
            told["model"],
            told["content"][0]["text"],
            told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"],
            told["usage"]["output_tokens"],
        ),
    ),
    "/api/chat": (
        {**TURNS, "stream": False},
        lambda told: (
            told["model"],
            told["message"]["content"],
            told["prompt_eval_count"],
            told["eval_count"],
        ),
    ),
    "/api/generate": (
        {"model": "fake", "prompt": "one two three", "stream": False},
        lambda told: (
            told["model"],
            told["response"],
            told["prompt_eval_count"],
            told["eval_count"],
        ),
    ),
}


async def spooled(folder: Path) -> Answered:
    server = Server(ServerConfig(workspace=folder), FakeRunner())
    await server.start()
    try:
        job_id = Work(folder).submit("one two three")
        found = await Flow(folder).await_end(job_id, timeout=30)
    finally:
        await server.stop()
    meta = found.meta
    return meta.model, found.text, meta.prompt_tokens or 0, meta.completion_tokens or 0


@run_async
async def test_model_answer_and_usage_are_the_same_by_every_way(tmp_path: Path) -> None:
    answers = {"the spool": await spooled(tmp_path / "spool")}
    async with door(tmp_path) as house:
        headers = {"Authorization": f"Bearer {house.token}"}
        async with httpx.AsyncClient(base_url=house.url, headers=headers) as client:
            for path, (body, read) in WAYS.items():
                answers[path] = read((await client.post(path, json=body)).json())
    assert answers == dict.fromkeys(answers, ("fake", "ONE TWO THREE", 3, 3))
