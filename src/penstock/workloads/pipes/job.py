"""A job as the nodes of a pipe know it, and what it needs at each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.workloads.pipes.config import LpConfig

if TYPE_CHECKING:
    import torch

    from penstock.workloads.pipes.end_model import EndModel
    from penstock.workloads.pipes.model.cache import JobCache
    from penstock.workloads.pipes.pipe import Pipe
    from penstock.workloads.pipes.text.sampler import Sampler


class ComputeStep(IntEnum):
    """What a job needs next. The first two and the last two are for the end model alone."""

    TOKENIZE = 0
    EMBED = 1
    LAYER = 2
    NORM = 3
    HEAD = 4


class Hop(Struct, frozen=True, array_like=True):
    """A part of a pipe: layers `start` to `end` (not included) on one node."""

    node_id: str
    start: int
    end: int


@dataclass
class ChunkState:
    """How far the prompt was sent through the pipe."""

    total: int = 0
    """Tokens to compute before the first new one: a prompt, or all that is replayed."""
    sent: int = 0
    landed: int = 0
    """Tokens whose pass is over. Several chunks may be under way."""

    @property
    def has_more(self) -> bool:
        return self.sent < self.total


@dataclass
class OriginText:
    """What only the origin knows of a job. Nothing of it is ever sent."""

    prompt: str | None
    """Text that is not tokenized yet."""
    input_ids: list[int] = field(default_factory=list)
    """Prompt and answer so far."""
    prompt_tokens: int = 0
    max_tokens: int = 0
    """How many may be generated."""
    sampler: Sampler | None = None
    chunking: ChunkState = field(default_factory=ChunkState)
    on_token: Callable[[Job, int, Any], bool] = lambda *_: True
    """Told of each new token with its logprobs (or None); False when nobody listens any more.
    Returning is quick: it is called by the thread that computes."""
    on_progress: Callable[[Job, int, int], bool] = lambda *_: True
    """Told of each chunk of a prompt: tokens sent so far, and of how many."""
    is_complete: Callable[[Job, int], bool] = lambda *_: False
    """Whether a token was the last: one of the model's ends, or a stop string."""

    @property
    def generated(self) -> int:
        return len(self.input_ids) - self.prompt_tokens


@dataclass
class Job:
    """One pass after the other, a job on its way. A layer node has what its packets told."""

    job_id: bytes
    """Sixteen random bytes, fresh for each way that is tried: it links nothing to an earlier job,
    nor to the canonical one."""
    pipe_id: str
    model_id: str
    origin_node_id: str
    hops: tuple[Hop, ...] = ()
    """The whole way."""
    compute_step: ComputeStep = ComputeStep.TOKENIZE
    current_layer: int = 0
    sequence: int = 0
    """Of the pass that is under way here; the first has 1."""
    seen: int = 0
    """The highest sequence that was taken: what is not above it is passed over."""
    start: int = 0
    """The position of the pass's first token."""
    count: int = 0
    """Tokens of the pass."""
    returns: int = 1
    """Of them, how many of the last the origin needs back; 0 tells it only that they landed."""
    data: torch.Tensor | None = None
    """Hidden states, [count, hidden], contiguous."""
    logits: torch.Tensor | None = None
    """Of the last position, [vocabulary]; on the origin, between head and sampling."""
    cache: JobCache | None = None
    text: OriginText | None = None
    times: list[JobTime] = field(default_factory=list)
    """Of the pass under way."""
    last_update: float = field(default_factory=time.monotonic)
    cancelled: str = ""
    """Why its pass is to be abandoned between two states."""


class JobTime(Struct, frozen=True, array_like=True):
    """What one node did in one pass. Durations only: clocks of two machines are never compared."""

    node_id: str
    start: int
    end: int
    compute_us: int
    queue_us: int
    """From its arrival to the beginning of its computation."""
    embed_us: int = 0
    head_us: int = 0
    together: int = 1
    """Jobs that were computed in the same pass."""


@dataclass
class JobContext:
    """All that a JobProcessor works with (the seed's five)."""

    config: LpConfig
    logger: Any
    job: Job | None
    pipe: Pipe | None
    end_model: EndModel | None
