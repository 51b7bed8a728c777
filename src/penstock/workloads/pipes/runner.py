"""A split model behind the seam that all engines have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING

from penstock.workloads.llm.health import RunnerHealth
from penstock.workloads.llm.runner import Loading, ProgressListener
from penstock.workloads.llm.values import (
    Completion,
    CompletionRequest,
    Delta,
    EmbeddingRequest,
    EmbeddingResult,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    ModelFacts,
    Sampling,
    TokenizeRequest,
    TokenizeResult,
    Usage,
)
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.node import Node

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 16
"""Texts of one request that are made embeddings of together."""


class PipeRunner:
    """Answers with the model of a node that has the end model. It owns the node."""

    def __init__(self, node: Node) -> None:
        self._node, self._tenant = node, ""
        self.health = RunnerHealth(self)

    def for_tenant(self, tenant: str) -> PipeRunner:
        view = copy(self)
        view._tenant = tenant
        return view

    @property
    def node(self) -> Node:
        return self._node

    @property
    def engine(self) -> str:
        import torch

        from penstock import __version__

        return f"penstock pipes {__version__}, torch {torch.__version__}"

    async def models(self) -> Sequence[ModelFacts]:
        return (self._node.facts(),)

    async def load(self, model: str = "", on_progress: Loading | None = None) -> ModelFacts:
        """Until its own part is loaded; a pipe may still want for other nodes."""
        self._check(model)
        await self._node.start(on_progress)
        return self._node.facts()

    async def unload(self, model: str) -> None:
        """A node gives its layers back when it leaves, not before."""

    def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        self._check(model)
        return self._node.generate(ask, choice, watch, self._tenant)

    async def embed(self, model: str, ask: EmbeddingRequest) -> EmbeddingResult:
        """Of each text what its last token became behind all layers and the norm."""
        self._check(model)
        made: list[tuple[tuple[float, ...], Usage]] = []
        for first in range(0, len(ask.inputs), _AT_ONCE):
            some = ask.inputs[first : first + _AT_ONCE]
            made += await asyncio.gather(*map(self._embedded, some))
        return EmbeddingResult(
            model=self._node.config.model,
            engine=self.engine,
            vectors=tuple(vector for vector, _ in made),
            usage=sum((usage for _, usage in made), Usage()),
        )

    async def _embedded(self, text: str | tuple[int, ...]) -> tuple[tuple[float, ...], Usage]:
        states: list[Tensor] = []
        ask = CompletionRequest(prompts=(text,), max_tokens=1, sampling=Sampling(temperature=0))
        usage = Usage()
        pieces = self._node.generate(ask, tenant=self._tenant, on_state=states.append)
        async for piece in pieces:
            if isinstance(piece, Completion):
                usage = Usage(piece.usage.prompt_tokens, 0, piece.usage.cached_tokens)
        vector = states[-1].float()
        return tuple((vector / vector.norm().clamp_min(1e-12)).tolist()), usage

    async def tokenize(self, model: str, ask: TokenizeRequest) -> TokenizeResult:
        self._check(model)
        await self._node.start()
        if self._node.origin is None:
            raise LlmFailure(LlmCode.NOT_SUPPORTED, "this node has no end model: it sees no text")
        tokens, text = await asyncio.to_thread(self._node.origin.text.tokens_and_text, ask)
        return TokenizeResult(
            model=self._node.config.model, engine=self.engine, tokens=tuple(tokens), text=text
        )

    async def close(self) -> None:
        self.health.close()
        await self._node.stop()

    def _check(self, model: str) -> None:
        name = self._node.config.model
        if model not in ("", name):
            raise LlmFailure(LlmCode.MODEL_NOT_FOUND, f"this node has {name}, not {model}")


# -- the node of an executor --------------------------------------------------------------


class NodeHost:
    """See `penstock.workloads.pipes.executor.Host`."""

    def __init__(self, config: LpConfig) -> None:
        self._node = Node(config)
        self.runner = PipeRunner(self._node)
        self._joined: set[str] = set()

    @property
    def node_id(self) -> str:
        return self._node.node_id

    @property
    def address(self) -> str:
        return self._node.address

    async def start(self, on_progress: Loading) -> None:
        await self._node.start(on_progress)

    def records(self) -> Iterable[NodeRecord]:
        return self._node.mesh.table.live()

    def join(self, addresses: Iterable[str]) -> None:
        known = {record.address for record in self.records()}
        new = set(addresses) - known - self._joined
        self._joined |= new
        self._node.mesh.join(new)

    async def stop(self) -> None:
        await self.runner.close()
