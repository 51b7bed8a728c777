"""The Runner on llama.cpp: one process for each model that is loaded."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import copy
from pathlib import Path

from msgspec.structs import replace

from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.models.gguf import GgufFacts, projector_of
from penstock.workloads.llm.runner import Loading, Watch, side_by_side
from penstock.workloads.llm.values import (
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
from penstock.workloads.spool.llama.catalogue import Catalogue
from penstock.workloads.spool.llama.cgroups import memory_limit_of
from penstock.workloads.spool.llama.engine import Departed, Engine
from penstock.workloads.spool.llama.fleet import Fleet
from penstock.workloads.spool.llama.process import MEAN, Purpose
from penstock.workloads.spool.llama.sizing import (
    Machine,
    embedding_size_of,
    memory_limit,
    size_of,
)
from penstock.workloads.spool.llama.trial import engine_version


class LlamaRunner:
    """Serves the models that its config names. Nothing is started before it is used."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._machine = this_machine()
        self._catalogue = Catalogue(config)
        self._fleet: Fleet | None = None
        self._purposes: dict[tuple[GgufFacts, bool], Purpose] = {}
        self._tenant = ""

    @property
    def engine(self) -> str:
        return engine_version()

    def for_tenant(self, tenant: str) -> LlamaRunner:
        self._running()  # made before the copy, so that all copies use the same
        view = copy(self)
        view._tenant = tenant
        return view

    async def models(self) -> Sequence[ModelFacts]:
        return [self._now(facts) for facts in await self._catalogue.list()]

    async def load(self, model: str = "", told: Loading | None = None) -> ModelFacts:
        facts = await self._catalogue.find(model)
        if told is not None:
            told(0.0, "starting the engine")
        async with self._running().use(self._purpose(facts), told):
            return self._now(facts)

    async def unload(self, model: str) -> None:
        await self._running().unload((await self._catalogue.find(model)).name)

    async def generate(
        self, model: str, ask: Generation, choice: int = 0, watch: Watch | None = None
    ) -> AsyncGenerator[Piece | Said, None]:
        purpose = self._purpose(await self._catalogue.find(model))
        while True:
            async with self._running().use(purpose) as engine:
                try:
                    async with aclosing(engine.generate(ask, choice, self._tenant)) as pieces:
                        async for piece in pieces:
                            yield piece
                    return
                except Departed:
                    continue

    async def embed(self, model: str, ask: Embedding) -> EmbeddingResult:
        facts = await self._catalogue.find(model)
        purpose = self._purpose(facts, embedding=True)
        done = await side_by_side(
            len(ask.inputs),
            lambda number: self._embed(purpose, ask.inputs[number]),
            purpose.size.slots + purpose.waiting,
        )
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

    def _purpose(self, facts: GgufFacts, *, embedding: bool = False) -> Purpose:
        """Raises LlmFailure if it can't be used for this, or not here."""
        found = self._purposes.get((facts, embedding))
        if found is None:
            engine_version()
            found = _purpose(facts, self._config, self._machine, embedding=embedding)
            self._purposes[facts, embedding] = found
        return found

    def _now(self, facts: GgufFacts) -> ModelFacts:
        """With what is known of it while it is loaded."""
        try:
            purpose = self._purpose(facts)
        except LlmFailure:
            return facts
        engine = self._fleet.engine(purpose) if self._fleet is not None else None
        if engine is None:
            return replace(facts, memory=purpose.size.memory)
        return replace(
            facts,
            context=engine.context,
            slots=purpose.size.slots,
            loaded=True,
            tools=engine.tools,
            vision=engine.vision,
            memory=engine.process.memory,
        )


def _purpose(
    facts: GgufFacts, config: ModelConfig, machine: Machine, *, embedding: bool
) -> Purpose:
    if facts.embeds and not embedding:
        raise LlmFailure(
            LlmCode.NOT_SUPPORTED, f"{facts.name} was made for embeddings, and can't answer"
        )
    path = Path(facts.path)
    size = (embedding_size_of if embedding else size_of)(facts, config, machine)
    return Purpose(
        model=facts.name,
        path=facts.path,
        size=size,
        projector="" if embedding else str(projector_of(path) or ""),
        embedding=embedding,
        # One that was made for it says itself how.
        pooling="" if facts.embeds else MEAN,
        spin=config.spin,
        waiting=max(1, size.slots // 4),
    )


def this_machine() -> Machine:
    """As much of it as this process may have."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(cores=cores or 1, memory=min(memory, memory_limit_of() or memory))
