"""A job as the nodes of a pipe know it, and what it needs at each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.timing import JobTiming

if TYPE_CHECKING:
    import torch

    from penstock.workloads.pipes.end_model import EndModel
    from penstock.workloads.pipes.model.cache import JobCache
    from penstock.workloads.pipes.pipe import Pipe
    from penstock.workloads.pipes.text.sampler import Chosen, Sampler


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
    """Begins above 0 when the first tokens are in every cache of the way already."""
    landed: int = 0
    """Tokens whose pass is over. Several chunks may be under way."""

    @property
    def has_more(self) -> bool:
        return self.sent < self.total

    def land(self, position: int) -> None:
        """All passes up to there are over."""
        self.landed = max(self.landed, min(position, self.total))


@dataclass(slots=True)
class InFlight:
    """A pass that has left the origin and is not back."""

    end: int
    """The position after its last token."""
    count: int
    returns: int
    left: float
    """When it left; the origin's own clock."""
    away: float = 0.0
    """Seconds that it was elsewhere before it came by and left again."""


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
    chosen: Chosen | None = None
    """The newest token, with its logprobs."""
    passes: int = 0
    """How many were begun: the sequence of the newest."""
    under_way: dict[int, InFlight] = field(default_factory=dict)
    """By sequence: what was handed to other nodes, in this order."""
    timing: JobTiming = field(default_factory=JobTiming)
    on_token: Callable[[Job, int, Any], bool] = lambda *_: True
    """Told of each new token with its logprobs (or None); False when the client disconnected.
    Returning is quick: it is called by the thread that computes."""
    on_progress: Callable[[Job, int, int], bool] = lambda *_: True
    """Told of each chunk of a prompt: tokens sent so far, and of how many."""
    is_complete: Callable[[Job, int], bool] = lambda *_: False
    """Whether a token was the last: one of the model's ends, or a stop string."""

    @property
    def generated(self) -> int:
        return len(self.input_ids) - self.prompt_tokens

    def land(self, sequence: int) -> InFlight | None:
        """This pass is over, and so are all before it: they go in order. None if it was not
        under way."""
        flight = self.under_way.get(sequence)
        if flight is not None:
            for earlier in [number for number in self.under_way if number <= sequence]:
                del self.under_way[earlier]
            self.chunking.land(flight.end)
        return flight


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
    seen: dict[int, int] = field(default_factory=dict)
    """By the layer at which a pass comes in (a way may lead over a node twice), the highest
    sequence that was taken: what is not above it is passed over."""
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
    on_return: Callable[[torch.Tensor], None] | None = None
    """On the origin: takes what comes back instead of a pass. A spot check's."""
    cancelled: str = ""
    """Why its pass is to be abandoned between two states."""

    def begin_pass(self, chunk_size: int) -> None:
        """Take the next chunk of the prompt, or else the newest token. On the origin only."""
        text = self.text
        assert text is not None
        chunking = text.chunking
        if chunking.has_more:
            self.start = chunking.sent
            self.count = min(chunk_size, chunking.total - chunking.sent)
            chunking.sent += self.count
            self.returns = 0 if chunking.sent < chunking.total else 1
        else:
            self.start = len(text.input_ids) - 1
            self.count = self.returns = 1
        text.passes += 1
        self.sequence = text.passes
        self.current_layer = 0
        self.times = []


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
