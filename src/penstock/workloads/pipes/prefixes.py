"""What finished jobs left in the nodes' caches, so that a next turn need not compute it again.

Only the origin knows which tokens lie in which cache. A node may give up a kept cache at any time:
what it still has is asked for when a job is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from penstock.workloads.pipes.job import Hop

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
