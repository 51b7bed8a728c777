"""The Runner on llama.cpp: one process for each model that is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from copy import copy
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from penstock.adapters.llama.engine import Departed, Engine
from penstock.adapters.llama.machine import (
    Machine,
    embedding_size_of,
    memory_limit,
    size_of,
    this_machine,
)
from penstock.adapters.llama.pool import ModelPool
from penstock.adapters.llama.process import MEAN, EngineSpec, engine_version
from penstock.core.errors import PenstockError
from penstock.models.facts import GgufFacts, name_for, projector_of
from penstock.models.store import ModelStore
from penstock.models.values import resolve_name
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.health import EngineState, RunnerHealth
from penstock.workloads.llm.runner import Loading, ProgressListener, side_by_side
from penstock.workloads.llm.values import (
    Completion,
    Delta,
    EmbeddingRequest,
    EmbeddingResult,
    EngineUnavailable,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    ModelFacts,
    TokenizeRequest,
    TokenizeResult,
    Usage,
)

T = TypeVar("T")


class LlamaRunner:
    """Serves the models that its config names. Nothing is started before it is used."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._machine = this_machine()
        self._catalog = ModelCatalog(config)
        self._pool: ModelPool | None = None
        self._specs: dict[tuple[GgufFacts, bool], EngineSpec] = {}
        self._tenant = ""
        self.health = RunnerHealth(self, self._state)

    @property
    def engine(self) -> str:
        return engine_version()

    def for_tenant(self, tenant: str) -> LlamaRunner:
        self._running()  # made before the copy, so that all copies use the same
        view = copy(self)
        view._tenant = tenant
        return view

    async def models(self) -> Sequence[ModelFacts]:
        return [self._now(facts) for facts in await self._catalog.list()]

    async def load(self, model: str = "", on_progress: Loading | None = None) -> ModelFacts:
        facts = await self._catalog.find(model)
        if on_progress is not None:
            on_progress(0.0, "starting the engine")
        async with self._running().use(self._spec(facts), on_progress):
            return self._now(facts)

    async def unload(self, model: str) -> None:
        await self._running().unload((await self._catalog.find(model)).name)

    async def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        spec = self._spec(await self._catalog.find(model))
        while True:
            async with self._running().use(spec) as engine:
                try:
                    async with aclosing(engine.generate(ask, choice, self._tenant)) as pieces:
                        async for piece in pieces:
                            yield piece
                    return
                except Departed:
                    continue

    async def embed(self, model: str, ask: EmbeddingRequest) -> EmbeddingResult:
        facts = await self._catalog.find(model)
        spec = self._spec(facts, embedding=True)
        done = await side_by_side(
            len(ask.inputs),
            lambda number: self._done(spec, lambda engine: engine.embed(ask.inputs[number])),
            spec.size.slots + spec.waiting,
        )
        return EmbeddingResult(
            model=facts.name,
            engine=self.engine,
            vectors=tuple(vector for vector, _ in done),
            usage=sum((usage for _, usage in done), Usage()),
        )

    async def tokenize(self, model: str, ask: TokenizeRequest) -> TokenizeResult:
        facts = await self._catalog.find(model)
        spec = self._spec(facts, embedding=facts.embeds)
        tokens, text = await self._done(spec, lambda engine: engine.tokenize(ask))
        return TokenizeResult(model=facts.name, engine=self.engine, tokens=tokens, text=text)

    async def close(self) -> None:
        self.health.close()
        if self._pool is not None:
            await self._pool.close()

    async def _done(self, spec: EngineSpec, work: Callable[[Engine], Awaitable[T]]) -> T:
        while True:
            async with self._running().use(spec) as engine:
                try:
                    return await work(engine)
                except Departed:
                    continue

    def _state(self, model: str) -> EngineState:
        return self._pool.state(model) if self._pool is not None else EngineState.GONE

    def _running(self) -> ModelPool:
        if self._pool is None:
            config = self._config

            async def start(spec: EngineSpec, on_progress: Loading) -> Engine:
                return await Engine.start(spec, on_progress, config.load_timeout, config.stall)

            self._pool = ModelPool(memory_limit(config, self._machine), config.idle, start)
        return self._pool

    def _spec(self, facts: GgufFacts, *, embedding: bool = False) -> EngineSpec:
        """Raises LlmFailure if it can't be used for this, or not here."""
        found = self._specs.get((facts, embedding))
        if found is None:
            engine_version()
            found = _spec(facts, self._config, self._machine, embedding=embedding)
            self._specs[facts, embedding] = found
        return found

    def _now(self, facts: GgufFacts) -> ModelFacts:
        """With what is known of it while it is loaded."""
        try:
            spec = self._spec(facts)
        except LlmFailure:
            return facts
        engine = self._pool.engine(spec) if self._pool is not None else None
        if engine is None:
            return replace(facts, memory=spec.size.memory)
        return replace(
            facts,
            context=engine.context,
            slots=spec.size.slots,
            loaded=True,
            tools=engine.tools,
            vision=engine.vision,
            memory=engine.process.memory,
        )


def _spec(
    facts: GgufFacts, config: ModelConfig, machine: Machine, *, embedding: bool
) -> EngineSpec:
    if facts.embeds and not embedding:
        raise LlmFailure(
            LlmCode.NOT_SUPPORTED, f"{facts.name} is an embedding model; chat is not supported"
        )
    path = Path(facts.path)
    size = (embedding_size_of if embedding else size_of)(facts, config, machine)
    return EngineSpec(
        model=facts.name,
        path=facts.path,
        size=size,
        projector="" if embedding else str(projector_of(path) or ""),
        embedding=embedding,
        # One that was made for it says itself how.
        pooling="" if facts.embeds else MEAN,
        spin=config.spin,
        gpu_layers=config.gpu_layers,
        tensor_split=config.tensor_split,
        projector_gpu=config.projector_gpu,
        waiting=size.slots,
    )


Entry = GgufFacts | LlmFailure
"""A model, or why it is none."""


class ModelCatalog:
    """Looks at files only when it is asked for all, or for one that it does not know."""

    def __init__(self, config: ModelConfig) -> None:
        self._store = ModelStore(config.models_dir or Path("models"))
        self._wanted = config.models
        self._entries: dict[str, Entry] = {}
        """In their order: the first is the default one."""
        self._known: dict[str, GgufFacts] = {}
        """All that were ever usable: jobs may name them, and wait until their files are back."""

    async def list(self) -> Sequence[GgufFacts]:
        """All that can be used."""
        await asyncio.to_thread(self._look)
        return [one for one in self._entries.values() if isinstance(one, GgufFacts)]

    async def find(self, name: str) -> GgufFacts:
        """By its name, or a part of it that no other has; the default one by none. Raises
        MODEL_NOT_FOUND, or EngineUnavailable for a known one whose file is gone or no good."""
        entry = self._entries.get(name or next(iter(self._entries), ""))
        if not isinstance(entry, GgufFacts):
            await asyncio.to_thread(self._look)
            entry = self._entries[self._named(name)]
        if isinstance(entry, LlmFailure):
            raise EngineUnavailable(entry.code, entry.message, **entry.facts)
        return entry

    def _named(self, name: str) -> str:
        if not name and self._entries:
            return next(iter(self._entries))
        there = f"there is {', '.join(self._entries) or 'none'}"
        if not name:
            raise LlmFailure(LlmCode.MODEL_NOT_FOUND, f"there are no models; {there}")
        try:
            return resolve_name(name, self._entries)
        except PenstockError as error:
            problem = f"{error.message}; {there}"
            raise LlmFailure(LlmCode.MODEL_NOT_FOUND, problem) from error

    def _look(self) -> None:
        found: list[tuple[str, Entry]]
        if self._wanted:
            found = [self._wanted_one(one) for one in self._wanted]
        else:
            found = [(one.name, one) for one in self._store.list()]
        entries: dict[str, Entry] = {}
        for name, entry in found:
            entries.setdefault(name, entry)
        for name, known in self._known.items():
            entries.setdefault(name, _gone(known))
        self._known |= {name: one for name, one in found if isinstance(one, GgufFacts)}
        self._entries = entries

    def _wanted_one(self, wanted: str) -> tuple[str, Entry]:
        try:
            facts = self._store.find(wanted)
        except LlmFailure as failure:
            return name_for(Path(wanted)), failure
        except PenstockError as error:
            missing = LlmFailure(LlmCode.MODEL_NOT_FOUND, str(error))
            return name_for(Path(wanted)), missing
        return facts.name, facts


def _gone(known: GgufFacts) -> LlmFailure:
    return LlmFailure(
        LlmCode.MODEL_NOT_FOUND, f"the file of the model {known.name} is gone: {known.path}"
    )
