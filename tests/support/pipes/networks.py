"""Networks of nodes in one process: real connections, a real model, a computing thread each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.workloads.llm.runner import ProgressListener, answer
from penstock.workloads.llm.values import (
    CompletionRequest,
    Delta,
    GenerationRequest,
    LlmResult,
    Sampling,
)
from penstock.workloads.pipes.config import LayerRange, LpConfig
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.routes import Route
from penstock.workloads.pipes.runner import PipeRunner
from penstock.workloads.pipes.wire.identity import new_key

MODEL = "tiny"
LAYERS = 6
GREEDY = Sampling(temperature=0)
PROMPT = tuple(range(40, 80))
VOCABULARY = 430
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["<|eos|>", "<|start|>", "<|done|>", *_LETTERS, "Ġ"]
TOKENS += [a + b for a in _LETTERS for b in _LETTERS][: VOCABULARY - len(TOKENS)]


class SmallModel:
    """On the disk, as people have them, and of transformers."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder, self.model = folder, model
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    @classmethod
    def made(cls, folder: Path, family: str = "llama", **changes: Any) -> SmallModel:
        from tests.support.pipes.random_models import tiny

        size = {
            "vocab_size": VOCABULARY,
            "num_hidden_layers": LAYERS,
            "max_position_embeddings": 1024,
        }
        model, _ = tiny(family, **{**size, **changes})
        # Its first tokens are ends: they are never the likeliest, so that answers go on.
        model.lm_head.weight.data[:3] = 0
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        return cls(folder, model)

    def generated(self, prompt: Sequence[int], count: int) -> list[int]:
        """What transformers makes of it, greedily."""
        from tests.support.pipes.random_models import generated

        key = (tuple(prompt), count)
        if key not in self._known:
            self._known[key] = generated(self.model, list(prompt), count)
        return self._known[key]

    def text(self, prompt: Sequence[int], count: int) -> str:
        return "".join(TOKENS[token] for token in self.generated(prompt, count))


def _tokenizer() -> Any:
    """Each token is a letter or two, so that a text tells its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE({token: number for number, token in enumerate(TOKENS)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}<|start|>{{ m.content }}<|done|>{% endfor %}<|start|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=template,
        eos_token="<|eos|>",
        additional_special_tokens=["<|start|>", "<|done|>"],
    )


def asked(prompt: Sequence[int] = PROMPT, count: int | None = 12, **more: Any) -> CompletionRequest:
    return CompletionRequest(
        prompts=(tuple(prompt),), max_tokens=count, **{"sampling": GREEDY, "logprobs": 0, **more}
    )


def ranges(*cuts: int) -> list[LayerRange]:
    """What lies between cuts: `ranges(0, 3, 6)` are two."""
    return [LayerRange(a, b) for a, b in pairwise(cuts)]


class Network(AsyncExitStack):
    """Ends with all of its nodes."""

    def __init__(self, model: SmallModel, **defaults: Any) -> None:
        super().__init__()
        self.model, self.key = model, new_key()
        self.nodes: dict[str, Node] = {}
        self._defaults: dict[str, Any] = {
            "dtype": "float32",
            "threads": 1,
            "ping": 0.2,
            "silence": 10.0,
            "cache": 64 << 20,
            "context": 512,
            "drain": 5.0,
            **defaults,
        }

    def config(self, node_id: str, *layers: LayerRange | None, **more: Any) -> LpConfig:
        """Of a node that joins the first. `None` for layers is auto."""
        settings = {"model": MODEL, "source": self.model.folder, **self._defaults, **more}
        first = next(iter(self.nodes.values()), None)
        return LpConfig(
            node_id=node_id,
            layers=None if None in layers else tuple(one for one in layers if one is not None),
            key=self.key,
            join=(first.address,) if first is not None else (),
            **settings,
        )

    async def add(self, node_id: str, *layers: LayerRange | None, **more: Any) -> Node:
        node = Node(self.config(node_id, *layers, **more))
        self.push_async_callback(node.stop)
        await node.start()
        self.nodes[node_id] = node
        return node

    async def origin(self, *layers: LayerRange | None, node_id: str = "a", **more: Any) -> Node:
        return await self.add(node_id, *layers, end_model=True, **more)

    async def split(self, *cuts: int, **more: Any) -> Node:
        """An origin `a` with the first range, and a node for each other: `b`, `c` …"""
        first, *others = ranges(*cuts)
        node = await self.origin(first, **more)
        for number, layers in enumerate(others):
            await self.add(chr(ord("b") + number), layers, **more)
        await whole(node)
        return node


async def whole(node: Node) -> Route:
    """Until there is a way over all layers."""
    while not isinstance(route := node.find(frozenset()), Route):
        await asyncio.wait_for(node.changed(10), 11)
    return route


async def until(true: Any, node: Node) -> None:
    """Until something is so, looked at whenever something about the nodes is new."""
    while not true():
        await node.changed(0.05)


async def ask(
    node: Node,
    question: GenerationRequest,
    told: list[Delta] | None = None,
    watch: ProgressListener | None = None,
) -> LlmResult:
    tell = told.append if told is not None else None
    return await answer(PipeRunner(node), MODEL, question, tell, watch)


def tokens(result: LlmResult, choice: int = 0) -> list[str]:
    """As the answer's logprobs have them."""
    found = result.choices[choice].logprobs
    return [one.token for one in found or ()]


class Heard:
    """A Watch that keeps what it hears."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.logs: list[str] = []
        self.news = asyncio.Event()

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        self.notes.append(message)
        self.news.set()

    def log(self, text: str, level: str = "info") -> None:
        self.logs.append(text)
        self.news.set()
