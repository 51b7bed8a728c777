"""Whether a segment computes what the model's own code does, found by trying when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from penstock.workloads.pipes.model.cache import JobCache, KvPool, Layout
from penstock.workloads.pipes.model.linear import COMPUTE
from penstock.workloads.pipes.model.segment import NeedsWhole, Part, Segment, SequenceCache

_LENGTHS = (5, 11, 7)
_PASSES: Sequence[Sequence[tuple[int, int, int]]] = (
    ((0, 0, 3), (1, 0, 9)),
    ((0, 3, 4), (1, 9, 10), (2, 0, 4)),
    ((0, 4, 5), (1, 10, 11), (2, 4, 7)),
)
"""(sequence, start, end): prompts whole and in pieces, beside tokens that follow."""
_EXACT, _ROUNDED = 1e-3, 5e-2
"""How far a token's hidden states may lie from what they should be, as a share of their size: the
worst of all in float32; with fewer bits the middle one, as one expert may be taken for another."""


def tried(segment: Segment, layers: Mapping[int, nn.Module]) -> dict[int, Layout]:
    """Decides whether these layers are computed packed or one job at a time, and tells what each
    keeps of a token. Raises LlmFailure if neither gives what the model's own code gives for whole
    sequences."""
    return _Trial(segment, layers).decide()


def try_ends(segment: Segment) -> None:
    """Whether embedding and head, apart from each other and for several jobs at once, give what the
    model's own code gives for one. Raises LlmFailure."""
    architecture, lengths = segment.architecture, (5, 3)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(architecture.vocabulary, (sum(lengths),), generator=chance).tolist()
    states = torch.randn(sum(lengths), architecture.hidden, generator=chance)
    count = lengths[0]
    try:
        whole = segment.embed(ids, range(len(ids)))
        parted = segment.embed(
            [*ids[count:], *ids[:count]], [*range(count, len(ids)), *range(count)]
        )
        logits = segment.logits(states, range(len(ids)))
        apart = segment.head(segment.norm(states, range(len(ids))))
    except Exception as error:
        raise architecture.refused(f"its ends do not run ({_said(error)})") from error
    together = torch.cat((parted[lengths[1] :], parted[: lengths[1]]))
    for what, found, expected in (("embedding", together, whole), ("head", apart, logits)):
        if float((found.float() - expected.float()).norm()) > _EXACT * float(
            expected.float().norm()
        ):
            raise architecture.refused(f"its {what} can't be computed apart")


class _Trial:
    def __init__(self, segment: Segment, layers: Mapping[int, nn.Module]) -> None:
        self._segment, self._layers = segment, layers
        self._first, self._end = min(layers), max(layers) + 1
        chance = torch.Generator().manual_seed(self._first)
        width = segment.architecture.hidden
        self._states = [torch.randn(count, width, generator=chance) for count in _LENGTHS]

    def decide(self) -> dict[int, Layout]:
        segment, refused = self._segment, self._segment.architecture.refused
        segment.packed = False
        try:
            expected, layouts, keeps_state = self._whole()
        except Exception as error:
            raise refused(f"its layers do not run ({_said(error)})") from error
        why = "its layers keep a state" if keeps_state else self._wrong(True, expected, layouts)
        if why:
            segment.packed, segment.whole = False, False
            segment.why_unpacked = why
            wrong = self._wrong(False, expected, layouts)
            if wrong:
                raise refused(f"{why}; one job at a time, {wrong}")
        return layouts

    def _whole(self) -> tuple[list[torch.Tensor], dict[int, Layout], bool]:
        """Each sequence in one go, by the model's own attention."""
        found, caches = [], []
        for states in self._states:
            cache = self._caches({})[0]
            part = Part(cache, 0, len(states))
            found.append(self._segment.run(self._layers, [part], states, self._first, self._end))
            caches.append(cache.sequence(lambda: SequenceCache(self._segment.model.config)))
        layouts = {layer: caches[0].layout(layer) for layer in self._layers}
        return found, layouts, not caches[0].can_be_cut

    def _wrong(
        self, packed: bool, expected: Sequence[torch.Tensor], layouts: Mapping[int, Layout]
    ) -> str:
        """How the sequences in pieces, mixed and over two segments, differ from them whole."""
        self._segment.packed = packed
        try:
            try:
                made = self._pieces(layouts)
            except NeedsWhole:
                self._segment.whole = True
                made = self._pieces(layouts)
        except Exception as error:  # whatever code of a model does that was not made for this
            return f"its layers do not run so ({_said(error)})"
        away = torch.cat(
            [
                (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)
                for a, b in zip(made, expected, strict=True)
            ]
        )
        exact = self._segment.dtype == "float32"
        worst = float(away.max() if exact else away.median())
        if worst <= (_EXACT if exact else _ROUNDED):
            return ""
        return f"its results differ by {worst:.1g} of their size"

    def _pieces(self, layouts: Mapping[int, Layout]) -> list[torch.Tensor]:
        caches = self._caches(layouts, len(_LENGTHS))
        made: list[list[torch.Tensor]] = [[] for _ in _LENGTHS]
        for one in _PASSES:
            parts = [Part(caches[n], start, end - start) for n, start, end in one]
            states = torch.cat([self._states[n][start:end] for n, start, end in one])
            rows = self._in_two(parts, states).split([part.count for part in parts])
            for (n, _, _), row in zip(one, rows, strict=True):
                made[n].append(row)
        return [torch.cat(rows) for rows in made]

    def _in_two(self, parts: Sequence[Part], states: torch.Tensor) -> torch.Tensor:
        """As over two segments."""
        between = (self._first + self._end) // 2
        for first, end in ((self._first, between), (between, self._end)):
            if first < end:
                states = self._segment.run(self._layers, parts, states, first, end)
        return states

    def _caches(self, layouts: Mapping[int, Layout], count: int = 1) -> list[JobCache]:
        segment = self._segment
        pool = KvPool(layouts, 64, 1 << 50, COMPUTE[segment.dtype], segment.device)
        layers = sorted(layouts)
        return [pool.reserve(layers, 64) for _ in range(count)]


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
