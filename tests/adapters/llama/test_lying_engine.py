"""An engine whose process lives and talks nonsense: a failure with a reason, and no other error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.adapters.llama.engine import Engine
from penstock.adapters.llama.machine import Size
from penstock.adapters.llama.process import EngineSpec
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import CompletionRequest, LlmCode, LlmFailure

ASK = CompletionRequest(prompts=("hello",))


class LivingProcess:
    """What an Engine needs of its process."""

    def __init__(self, socket: Path) -> None:
        self.socket, self.key, self.is_alive = socket, "key", True
        size = Size(slots=1, context=512, threads=1, memory=1)
        self.spec = EngineSpec(model="liar", path="liar.gguf", size=size)

    def begin_answer(self) -> None: ...

    def kill(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def talking(folder: Path, status: int, body: bytes) -> AsyncIterator[Engine]:
    """An engine that answers everything with this."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    server = web.Application()
    server.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(server)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "sock")).start()
    process: Any = LivingProcess(folder / "sock")
    engine = Engine(process, 0)
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


STREAMS = {
    "no JSON": b"data: {nope\n\n",
    "no object": b"data: [1]\n\n",
    "an error that is text": b'data: {"error": "x"}\n\n',
    "a choice that is text": b'data: {"choices": ["x"]}\n\n',
    "no UTF-8": b'data: {"choices": [{"text": "\xff"}]}\n\n',
    "other counts": b'data: {"usage": {"tokens": 1}}\n\n',
    "other times": b'data: {"timings": {"ms": 1}}\n\n',
    "a text that is a number": (
        b'data: {"choices": [{"text": 5}],'
        b' "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n'
    ),
    "deep": b"data: " + b"[" * 5000 + b"\n\n",
}


@pytest.mark.parametrize("kind", STREAMS)
@run_async
async def test_an_answer_that_is_none_is_an_error_of_the_engine(tmp_path: Path, kind: str) -> None:
    async with talking(tmp_path, 200, STREAMS[kind]) as engine:
        with pytest.raises(LlmFailure, match="can't be understood") as failed:
            async for _ in engine.generate(ASK, 0):
                pass
        assert failed.value.code is LlmCode.ENGINE_ERROR
        await asyncio.sleep(0)


@pytest.mark.parametrize("body", [b"", b"[1]", b"5", b'{"data": []}', b'{"data": [{}]}'])
@run_async
async def test_a_vector_that_is_none_is_an_error_of_the_engine(tmp_path: Path, body: bytes) -> None:
    async with talking(tmp_path, 200, body) as engine:
        with pytest.raises(LlmFailure, match="can't be understood"):
            await engine.embed("hello")
        with pytest.raises(LlmFailure, match="can't be understood"):
            await engine._look()


@run_async
async def test_a_refusal_without_a_reason_is_an_error_of_the_engine(tmp_path: Path) -> None:
    async with talking(tmp_path, 500, b'{"error": "x"}') as engine:
        for asked in (engine.embed("hello"), anext(engine.generate(ASK, 0))):
            with pytest.raises(LlmFailure):
                await asked
