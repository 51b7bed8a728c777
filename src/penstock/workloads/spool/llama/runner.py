"""The Runner on llama.cpp: one process for each model that is loaded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec

from penstock.core.llm import (
    Embedding,
    EmbeddingResult,
    Generation,
    LlmCode,
    LlmFailure,
    ModelFacts,
    Piece,
    Said,
    Usage,
)
from penstock.workloads.spool.config import ModelConfig
from penstock.workloads.spool.llama.engine import Departed, Engine
from penstock.workloads.spool.llama.fleet import Fleet
from penstock.workloads.spool.llama.process import Purpose
from penstock.workloads.spool.llama.sizing import (
    Machine,
    embedding_size_of,
    memory_limit,
    size_of,
)
from penstock.workloads.spool.llama.trial import engine_version
from penstock.workloads.spool.runner import Loading


class LlamaRunner:
    """Serves the models that its config names. Nothing is started before it is used."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._machine = this_machine()
        self._known: dict[str, ModelFacts] | None = None
        self._fleet: Fleet | None = None

    @property
    def engine(self) -> str:
        return engine_version()

    async def models(self) -> Sequence[ModelFacts]:
        return [self._now(facts) for facts in self._catalogue().values()]

    async def load(self, model: str = "", told: Loading | None = None) -> ModelFacts:
        facts = self._find(model)
        purpose = self._purpose(facts)
        if told is not None:
            told(0.0, "starting the engine")
        async with self._running().use(purpose, told):
            return self._now(facts)

    async def unload(self, model: str) -> None:
        await self._running().unload(self._find(model).name)

    async def generate(
        self, model: str, ask: Generation, choice: int = 0
    ) -> AsyncGenerator[Piece | Said, None]:
        purpose = self._purpose(self._find(model))
        while True:
            async with self._running().use(purpose) as engine:
                try:
                    async with aclosing(engine.generate(ask, choice)) as pieces:
                        async for piece in pieces:
                            yield piece
                    return
                except Departed:
                    continue

    async def embed(self, model: str, ask: Embedding) -> EmbeddingResult:
        facts = self._find(model)
        purpose = self._purpose(facts, embedding=True)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._embed(purpose, text)) for text in ask.inputs]
        done = [task.result() for task in tasks]
        return EmbeddingResult(
            model=facts.name,
            engine=self.engine,
            vectors=tuple(vector for vector, _ in done),
            usage=sum((usage for _, usage in done), Usage()),
        )

    async def close(self) -> None:
        if self._fleet is not None:
            await self._fleet.close()

    async def _embed(
        self, purpose: Purpose, text: str | tuple[int, ...]
    ) -> tuple[tuple[float, ...], Usage]:
        while True:
            async with self._running().use(purpose) as engine:
                try:
                    return await engine.embed(text)
                except Departed:
                    continue

    def _running(self) -> Fleet:
        if self._fleet is None:
            config = self._config

            async def start(purpose: Purpose, told: Loading) -> Engine:
                return await Engine.start(purpose, told, config.load_timeout, config.stall)

            self._fleet = Fleet(memory_limit(config, self._machine), config.idle, start)
        return self._fleet

    def _purpose(self, facts: ModelFacts, *, embedding: bool = False) -> Purpose:
        engine_version()
        sized = embedding_size_of if embedding else size_of
        size = sized(facts, self._config, self._machine)
        return Purpose(
            model=facts.name,
            path=facts.path,
            size=size,
            projector="" if embedding else projector_of(Path(facts.path)),
            embedding=embedding,
            spin=self._config.spin,
            waiting=max(1, size.slots // 4),
        )

    def _now(self, facts: ModelFacts) -> ModelFacts:
        """With what is known of it while it is loaded."""
        try:
            purpose = self._purpose(facts)
        except LlmFailure:
            return facts
        engine = self._fleet.engine(purpose) if self._fleet is not None else None
        if engine is None:
            return msgspec.structs.replace(facts, memory=purpose.size.memory)
        return msgspec.structs.replace(
            facts,
            context=purpose.size.context,
            slots=purpose.size.slots,
            loaded=True,
            tools=engine.tools,
            vision=engine.vision,
            memory=engine.process.memory,
        )

    def _find(self, model: str) -> ModelFacts:
        known = self._catalogue()
        if not model and known:
            return next(iter(known.values()))
        if model in known:
            return known[model]
        raise LlmFailure(
            LlmCode.MODEL_NOT_FOUND,
            f"there is no model {model!r} here; there is {', '.join(known) or 'none'}",
        )

    def _catalogue(self) -> dict[str, ModelFacts]:
        if self._known is None:
            self._known = {
                Path(one).stem: ModelFacts(
                    name=Path(one).stem, path=one, size=os.path.getsize(one), train_context=8192
                )
                for one in self._config.models
            }
        return self._known


def projector_of(model: Path) -> str:
    """The file that lets the model see: beside it, with its name and `mmproj` in its own."""
    for file in sorted(model.parent.glob("*.gguf")):
        name = file.stem.lower()
        if file != model and "mmproj" in name and model.stem.lower() in name:
            return str(file)
    return ""


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(cores=cores or 1, memory=memory)
