"""A job as the nodes of a pipe know it, what it needs at each of them, and how long that takes.

Clocks of two machines are never compared. The network's part of a round is what is left of it,
as the origin measured it, when all that the nodes say they did is taken away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.workloads.llm.values import HopTime
from penstock.workloads.pipes.config import LpConfig, WireFormat

if TYPE_CHECKING:
    import torch

    from penstock.workloads.pipes.end_model import EndModel
    from penstock.workloads.pipes.model.cache import JobCache
    from penstock.workloads.pipes.pipe import Pipe
    from penstock.workloads.pipes.text.sampler import Chosen, Sampler
    from penstock.workloads.pipes.text.speculation import Speculation

ENDS = "ends"
"""Stands where layers stand for what the end model took: embedding and head."""
WINDOW = 10
"""Seconds over which a node's rates are told."""


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
    acked: int = 0
    """Tokens whose pass is over. Several chunks may be under way."""
    held: int = 0
    """Tokens that are in the caches of some nodes and not of others. No chunk goes across: those
    who have all of a chunk do not compute it again."""

    @property
    def has_more(self) -> bool:
        return self.sent < self.total

    def take(self, size: int) -> tuple[int, int]:
        """The next chunk: where it begins, and how many tokens it has."""
        start, end = self.sent, self.held if self.sent < self.held else self.total
        self.sent = min(start + size, end)
        return start, self.sent - start

    def land(self, position: int) -> None:
        """All passes up to there are over."""
        self.acked = max(self.acked, min(position, self.total))


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
    """Jobs that were computed in the same pass; 0 if nothing was."""
    wire_error: float = 0.0
    """By how much hidden states were changed to send them in fewer bits, as a share of their
    size."""


@dataclass(slots=True)
class PassTime:
    """What one pass takes of this node. Seconds."""

    layer: int = 0
    """Where it came in."""
    ready: float = 0.0
    """Since when it waits to be computed."""
    compute: float = 0.0
    queue: float = 0.0
    embed: float = 0.0
    together: int = 1

    def computed(self, began: float, ended: float, together: int) -> None:
        self.queue += max(0.0, began - self.ready)
        self.compute += ended - began
        self.together = max(self.together, together)
        self.ready = ended


@dataclass(slots=True)
class _HopSum:
    compute_us: int = 0
    queue_us: int = 0
    network_us: float = 0.0
    passes: int = 0
    tokens: int = 0
    wire_error: float = 0.0


@dataclass
class JobTiming:
    """Of one job, at its origin."""

    began: float = 0.0
    first: float = 0.0
    """When its first token was chosen."""
    last: float = 0.0
    prefill_tokens: int = 0
    """Of the prompt, those that were computed."""
    tokens: int = 0
    wire: WireFormat = "exact"
    _hops: dict[tuple[str, int, int], _HopSum] = field(default_factory=dict)

    def begin(self) -> None:
        self.began = self.began or time.perf_counter()

    def passed(self, times: Sequence[JobTime], away: float, origin: str, tokens: int) -> None:
        """A pass came back. `away` are the seconds that it was on other nodes and between."""
        legs = elsewhere = 0
        before = origin
        for one in times:
            if one.node_id != before:
                legs += 1
            if one.node_id != origin:
                elsewhere += one.compute_us + one.queue_us
            before = one.node_id
        legs += before != origin
        leg = max(0.0, away * 1e6 - elsewhere) / legs if legs else 0.0
        if before != origin:
            self._sum(origin, -1, -1).network_us += leg
        before = origin
        for one in times:
            if one.embed_us:
                self._sum(origin, -1, -1).compute_us += one.embed_us
            held = (one.start, one.end) if one.start < one.end else (-1, -1)
            sent = self._sum(one.node_id, *held)
            sent.wire_error = max(sent.wire_error, one.wire_error)
            if one.start < one.end:  # an origin may have no layers of its own
                total = self._sum(one.node_id, one.start, one.end)
                total.compute_us += one.compute_us
                total.queue_us += one.queue_us
                total.network_us += leg if one.node_id != before else 0.0
                total.passes += one.together > 0
                total.tokens += tokens if one.together else 0
            before = one.node_id

    def chose(self, origin: str, head: float, tokens: int = 1) -> None:
        """So many tokens were chosen, after a head of this many seconds."""
        now = time.perf_counter()
        self.first = self.first or now
        self.last = now
        self.tokens += tokens
        total = self._sum(origin, -1, -1)
        total.compute_us += int(head * 1e6)
        total.passes += 1
        total.tokens += tokens

    @property
    def prefill_ms(self) -> float:
        return (self.first - self.began) * 1000 if self.first else 0.0

    @property
    def tokens_per_s(self) -> float:
        """While it was decoding: the first token is the prompt's."""
        took = self.last - self.first
        return (self.tokens - 1) / took if took > 0 else 0.0

    def hops(self) -> tuple[HopTime, ...]:
        """In the order of the way, the ends first."""
        return tuple(
            HopTime(
                node=node,
                layers=ENDS if start < 0 else f"{start}-{end - 1}",
                compute_ms=total.compute_us / 1000,
                queue_ms=total.queue_us / 1000,
                network_ms=total.network_us / 1000,
                passes=total.passes,
                tokens=total.tokens,
                wire=self.wire if total.wire_error else "",
                wire_error=total.wire_error,
            )
            for (node, start, end), total in sorted(self._hops.items(), key=lambda one: one[0][1])
        )

    def table(self) -> str:
        """What `print_times` logs."""
        lines = [
            f"prefill {self.prefill_tokens} tokens in {self.prefill_ms:.1f} ms,"
            f" then {self.tokens} tokens at {self.tokens_per_s:.1f}/s",
            f"{'node':<24}{'layers':>9}{'passes':>8}{'compute ms':>12}{'queue ms':>10}"
            f"{'network ms':>12}   (of a pass)",
        ]
        for hop in self.hops():
            passes = max(1, hop.passes)
            lines.append(
                f"{hop.node:<24}{hop.layers:>9}{hop.passes:>8}{hop.compute_ms / passes:>12.2f}"
                f"{hop.queue_ms / passes:>10.2f}{hop.network_ms / passes:>12.2f}"
            )
        return "\n".join(lines)

    def _sum(self, node_id: str, start: int, end: int) -> _HopSum:
        key = (node_id, start, end)
        found = self._hops.get(key)
        if found is None:
            found = self._hops[key] = _HopSum()
        return found


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
    speculation: Speculation | None = None
    proposed: list[int] = field(default_factory=list)
    """Tokens that may follow the newest: computed along in the pass under way."""
    chosen: list[Chosen] = field(default_factory=list)
    """The newest tokens, with their logprobs."""
    passes: int = 0
    """How many were begun: the sequence of the newest."""
    under_way: dict[int, InFlight] = field(default_factory=dict)
    """By sequence: what was handed to other nodes, in this order."""
    timing: JobTiming = field(default_factory=JobTiming)
    on_state: Callable[[torch.Tensor], None] | None = None
    """Given the last position's hidden states behind the norm, for an embedding."""
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
    wire: WireFormat = "exact"
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
    """Of them, how many of the last the origin needs back; 0 tells it only that they arrived."""
    data: torch.Tensor | None = None
    """Hidden states, [count, hidden], contiguous."""
    logits: torch.Tensor | None = None
    """Of the last positions, [returns, vocabulary]; on the origin, between head and sampling."""
    cache: JobCache | None = None
    same: int = 0
    """Positions that its cache may have from an earlier route: see `JobProcessor`."""
    text: OriginText | None = None
    times: list[JobTime] = field(default_factory=list)
    """Of the pass under way."""
    last_update: float = field(default_factory=time.monotonic)
    cancelled: str = ""
    """Why its pass is to be abandoned between two states."""

    def begin_pass(self, chunk_size: int) -> None:
        """Take the next chunk of the prompt, or else the newest token with what may follow it. On
        the origin only."""
        text = self.text
        assert text is not None
        chunking, text.proposed = text.chunking, []
        if chunking.has_more:
            self.start, self.count = chunking.take(chunk_size)
            self.returns = 0 if chunking.sent < chunking.total else 1
        else:
            if text.speculation is not None:
                most = text.max_tokens - text.generated - 1
                text.proposed = text.speculation.propose(text.input_ids, most)
            self.start = len(text.input_ids) - 1
            self.count = self.returns = 1 + len(text.proposed)
        text.passes += 1
        self.sequence = text.passes
        self.current_layer = 0
        self.times = []


@dataclass
class JobContext:
    """All that a JobProcessor works with (the seed's five)."""

    config: LpConfig
    logger: Any
    job: Job | None
    pipe: Pipe | None
    end_model: EndModel | None


class JobTable:
    """The event loop lets in and out, the thread that computes looks up."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[Job, Pipe]] = {}
        self._lock = threading.Lock()

    def add(self, job: Job, pipe: Pipe) -> None:
        """Raises KeyError if its id is taken."""
        with self._lock:
            if job.job_id in self._open:
                raise KeyError(f"job {job.job_id.hex()} is open already")
            self._open[job.job_id] = (job, pipe)

    def get(self, job_id: bytes) -> Job | None:
        found = self._open.get(job_id)
        return found[0] if found is not None else None

    def find(self, job_id: bytes) -> tuple[Job | None, Pipe | None]:
        """The job and its pipe, or neither."""
        return self._open.get(job_id) or (None, None)

    def remove(self, job_id: bytes) -> Job | None:
        """The job, if it was there: who gets it has to see to its end."""
        with self._lock:
            found = self._open.pop(job_id, None)
        return found[0] if found is not None else None

    def of_origin(self, node_id: str) -> list[Job]:
        return [job for job in self.all() if job.origin_node_id == node_id]

    def all(self) -> list[Job]:
        with self._lock:
            return [job for job, _ in self._open.values()]

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._open

    def __len__(self) -> int:
        return len(self._open)


class NodeTiming:
    """Rates of one node over the last seconds. Written by one thread, read by any."""

    def __init__(self, now: float | None = None) -> None:
        self.tokens = 0
        """Since its start: tokens that went through layers here."""
        self.passes = 0
        self.busy = 0.0
        """Seconds since its start."""
        self._began = time.monotonic() if now is None else now
        self._seconds: list[tuple[int, int, float]] = [(-1, 0, 0.0)] * (WINDOW + 1)

    def add(self, tokens: int, busy: float, now: float) -> None:
        self.tokens += tokens
        self.passes += 1
        self.busy += busy
        second = int(now)
        at = second % (WINDOW + 1)
        of, before, spent = self._seconds[at]
        self._seconds[at] = (
            (second, before + tokens, spent + busy) if of == second else (second, tokens, busy)
        )

    def rates(self, now: float) -> tuple[float, float]:
        """Tokens per second, and the share of time in which it computed."""
        second = int(now)
        recent = [one for one in self._seconds if second - WINDOW <= one[0] <= second]
        took = min(WINDOW + now - second, max(now - self._began, 1e-3))
        tokens = sum(one[1] for one in recent)
        return tokens / took, min(1.0, sum(one[2] for one in recent) / took)
