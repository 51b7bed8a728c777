"""An engine in a process of its own, to be killed: `python mortal_engine.py DATA MARKS [SPEED]`.

Its model writes down each prompt that it begins, in MARKS.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from tests.support.fake_llm import FakeRunner

from penstock.app.engine import Engine
from penstock.config import load
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.runner import ProgressListener
from penstock.workloads.llm.values import ChatRequest, Completion, Delta, GenerationRequest

SLOTS = 8


class Marking(FakeRunner):
    def __init__(self, marks: Path, delay: float) -> None:
        super().__init__(delay=delay)
        self._file = os.open(marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        assert isinstance(ask, ChatRequest)
        os.write(self._file, f"{ask.messages[-1].content}\n".encode())
        async for piece in super().generate(model, ask, choice):
            yield piece


async def main(data: Path, marks: Path, delay: float) -> None:
    flags = {"data_dir": str(data), "http__listen": "127.0.0.1:0", "concurrency": SLOTS}
    settings = load(flags=flags)
    runner = Marking(marks, delay)
    async with Engine(settings, [LlmExecutor(runner, ["fake"])], listen=False) as engine:
        draft = data / "url.draft"
        draft.write_text(engine.url)
        draft.rename(data / "url")
        await engine.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])))
