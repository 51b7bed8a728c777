"""One answer on its way: what stays the same when it has to go another way.

Tokens, sampler and writer belong to the thread that computes; the rest to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.workloads.llm.runner import ProgressListener
from penstock.workloads.llm.values import Delta, LlmCode, LlmFailure
from penstock.workloads.pipes.job import ChunkState, Hop, Job, JobTiming, OriginText
from penstock.workloads.pipes.text.sampler import Logprobs, Sampler
from penstock.workloads.pipes.text.speculation import Speculation
from penstock.workloads.pipes.text.writer import Writer

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class Wrote(Struct, frozen=True):
    piece: Delta | None
    """None while its characters are not whole, or might be the beginning of a stop string."""


class Read(Struct, frozen=True):
    """A part of the prompt is on its way."""

    sent: int
    total: int


class Completed(Struct, frozen=True):
    job_id: bytes


class Broken(Exception):
    """A way that can't be gone on. `node_id` is who is to blame, if anybody is known to be."""

    def __init__(self, job_id: bytes, code: LlmCode, reason: str, node_id: str = "") -> None:
        super().__init__(reason)
        self.job_id, self.code, self.reason, self.node_id = job_id, code, reason, node_id

    def failure(self) -> LlmFailure:
        return LlmFailure(self.code, self.reason)


def code_of(name: str) -> LlmCode:
    """As another node said it, which may be a newer one."""
    try:
        return LlmCode(name)
    except ValueError:
        return LlmCode.ENGINE_ERROR


def blamed(failure: LlmFailure, node_id: str) -> str:
    """Who is left aside for a failure that a node tells of: itself, unless it was given what can't
    be right. Then it names who gave it that."""
    if failure.code is LlmCode.WRONG_COMPUTATION:
        return str(failure.facts.get("node") or node_id)
    return node_id


Event = Wrote | Read | Completed | Broken


@dataclass(eq=False)
class Generation:
    loop: asyncio.AbstractEventLoop
    ids: list[int]
    """Prompt and answer so far."""
    prompt_tokens: int
    max_tokens: int
    reserve: int
    """Tokens of the answer for which the nodes are to have room at first; doubled when they are
    used up."""
    sampler: Sampler
    writer: Writer
    speculation: Speculation | None = None
    on_state: Callable[[torch.Tensor], None] | None = None
    watch: ProgressListener | None = None
    tenant: str = ""
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    avoid: set[str] = field(default_factory=set)
    """Nodes that failed it."""
    apart: set[frozenset[str]] = field(default_factory=set)
    """Pairs of nodes of which one did not reach the other."""
    job: Job | None = None
    hops: tuple[Hop, ...] = ()
    full: set[str] = field(default_factory=set)
    """Nodes that had no room for it since it last set out: others have copies of their layers."""
    opened: dict[str, bool] = field(default_factory=dict)
    """Nodes that were asked for room, and whether they have reserved it."""
    room: int = 0
    """Tokens for which they have, prompt and answer together."""
    left: CachedPrefix | None = None
    """What it or an earlier turn left on the nodes, until all of its nodes have room: it goes on
    from that."""
    grows: bool = False
    """Whether it only gets more room."""
    taken: tuple[int, int] | None = None
    """With how many positions its nodes took over a cache, when it had so many tokens."""
    timing: JobTiming = field(default_factory=JobTiming)
    """Of its route; goes on when it only gets more room."""
    cached: int = 0
    """Tokens of the prompt that were computed before."""
    told: int = 0
    """Tokens that the writer was given."""
    routes: tuple[int, int] = (0, 0)
    """How many it has gone in vain since it had so many tokens."""
    waits: tuple[float, int] = (0.0, -1)
    """Until when it waits for a way, with so many tokens."""
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0
    """When the first token came."""
    sign: float = field(default_factory=time.monotonic)
    """When something last happened to it."""

    @property
    def nodes(self) -> set[str]:
        return {hop.node_id for hop in self.hops}

    def text(self, sent: int, held: int) -> OriginText:
        """For a job that has `sent` tokens in all of its caches already, and `held` in some."""
        return OriginText(
            prompt=None,
            input_ids=self.ids,
            prompt_tokens=self.prompt_tokens,
            max_tokens=min(self.max_tokens, self.room - self.prompt_tokens),
            sampler=self.sampler,
            speculation=self.speculation,
            on_state=self.on_state,
            chunking=ChunkState(total=len(self.ids), sent=sent, acked=sent, held=held),
            timing=self.timing,
            on_token=self._on_token,
            on_progress=self._on_progress,
            is_complete=lambda job, token: self.writer.finished is not None,
        )

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """Tokens that no cache of its nodes has otherwise: all that were computed. But a cache that
        was taken over may have others behind what was the same, until a token was chosen."""
        if self.taken is not None and self.taken[1] == self.told:
            return tuple(self.ids[: self.taken[0]])
        return tuple(self.ids[:-1])

    def tell(self, event: Event) -> bool:
        """From any thread; False when the client disconnected."""
        try:
            self.loop.call_soon_threadsafe(self._take, event)
        except RuntimeError:
            return False
        return True

    def _take(self, event: Event) -> None:
        self.sign = time.monotonic()
        self.events.put_nowait(event)

    def _on_token(self, job: Job, token: int, logprobs: Logprobs | None) -> bool:
        if job is not self.job:
            return False
        piece = self.writer.add(token, logprobs)
        self.told += 1
        return self.tell(Wrote(piece))

    def _on_progress(self, job: Job, sent: int, total: int) -> bool:
        return job is self.job and self.tell(Read(sent, total))

    def forget_untold(self) -> None:
        """What was chosen when its way was left already is chosen again."""
        untold = len(self.ids) - self.prompt_tokens - self.told
        if untold:
            del self.ids[-untold:]
            self.sampler.forget(untold)

    def count_route(self) -> int:
        """One more in vain; how many that makes without a token more."""
        routes, told = self.routes
        self.routes = (routes + 1 if told == self.told else 1, self.told)
        return self.routes[0]

    def step_tokens(self, chunk: int) -> int:
        """Tokens of its largest step under way, where a prompt goes in such chunks."""
        text = self.job.text if self.job is not None else None
        if text is None or text.chunking.acked >= text.chunking.total:
            return 1
        return min(chunk, text.chunking.total)

    def may_land(self, sequence: int) -> bool:
        """Whether this pass is under way and nothing of it is to come back."""
        text = self.job.text if self.job is not None else None
        flight = text.under_way.get(sequence) if text is not None else None
        return flight is not None and flight.returns == 0

    @property
    def pause(self) -> float:
        """Seconds before it sets out again: the first time none, and then longer each time. Two
        nodes that lost each other for a moment have found each other again by then."""
        routes, told = self.routes
        return 0.1 * 2 ** (routes - 1) if routes > 1 and told == self.told else 0.0

    def waits_until(self, now: float, seconds: float) -> float:
        """However often it has to wait before it has a token more."""
        if self.waits[1] != self.told:
            self.waits = (now + seconds, self.told)
        return self.waits[0]

    def forgive(self, node_id: str) -> None:
        """What a node did is forgotten."""
        self.avoid.discard(node_id)
        self.apart = {pair for pair in self.apart if node_id not in pair}

    def note(self, text: str, fraction: float | None = None) -> None:
        if self.watch is not None:
            self._heard(self.watch.progress, fraction, text)

    def log(self, text: str, level: str = "info") -> None:
        if self.watch is not None:
            self._heard(self.watch.log, text, level)

    def _heard(self, tell: Callable[..., None], *what: object) -> None:
        """Who only watches can't stop an answer, nor the connection that brought the news."""
        try:
            tell(*what)
        except Exception:
            _log.exception("a listener of an answer failed")


# -- caches that finished jobs left on the nodes, for a next turn -------------------------
# Only the origin knows which tokens lie in which cache. A node may give up a kept cache at any
# time: what it still has is asked for when a job is opened.

LEAST = 16
"""Tokens for which it is worth the trouble."""
MOST = 64
"""Caches that are remembered."""


class CachedPrefix(Struct, frozen=True):
    keys: Mapping[str, bytes]
    """The job under whose id each node has its part of it."""
    tenant: str
    """Whose job that was. No other tenant may use it: the number of cached tokens, and the time
    that they save, would tell what its prompt was."""
    ids: tuple[int, ...]
    """The tokens whose keys and values it has, in all of its nodes."""
    hops: tuple[Hop, ...]
    until: float


class Prefixes:
    """Each is taken once: the job that continues it extends it and puts it back."""

    def __init__(self) -> None:
        self._kept: list[CachedPrefix] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, kept: CachedPrefix) -> None:
        self._kept.append(kept)
        del self._kept[:-MOST]

    def take(
        self,
        tenant: str,
        ids: Sequence[int],
        now: float,
        usable: Callable[[tuple[Hop, ...]], bool],
    ) -> tuple[CachedPrefix, int] | None:
        """The tenant's own cache that has most of these tokens, and how many; at least one token
        is left to compute."""
        self._kept = [kept for kept in self._kept if kept.until > now]
        best, most = None, min(LEAST, len(ids)) - 1
        for kept in reversed(self._kept):
            common = shared(kept.ids, ids) if kept.tenant == tenant else 0
            if common > most and usable(kept.hops):
                best, most = kept, common
        if best is None:
            return None
        self._kept.remove(best)
        return best, min(most, len(ids) - 1)

    def forget(self, node_id: str) -> None:
        """A node was lost, and its caches with it."""
        self._kept = [
            kept for kept in self._kept if all(hop.node_id != node_id for hop in kept.hops)
        ]


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))
