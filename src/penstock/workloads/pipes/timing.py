"""How long things take: of one job over its way, and of a node over the last seconds.

Clocks of two machines are never compared. The network's part of a round is what is left of it,
as the origin measured it, when all that the nodes say they did is taken away.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.workloads.llm.values import HopTime

if TYPE_CHECKING:
    from penstock.workloads.pipes.job import JobTime

ENDS = "ends"
"""Stands where layers stand for what the end model took: embedding and head."""
WINDOW = 10
"""Seconds over which a node's rates are told."""


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
            if one.start < one.end:  # an origin may have no layers of its own
                total = self._sum(one.node_id, one.start, one.end)
                total.compute_us += one.compute_us
                total.queue_us += one.queue_us
                total.network_us += leg if one.node_id != before else 0.0
                total.passes += 1
                total.tokens += tokens
            before = one.node_id

    def chose(self, origin: str, head: float) -> None:
        """A token was chosen, after a head of this many seconds."""
        now = time.perf_counter()
        self.first = self.first or now
        self.last = now
        self.tokens += 1
        total = self._sum(origin, -1, -1)
        total.compute_us += int(head * 1e6)
        total.passes += 1
        total.tokens += 1

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
