"""Layers of a decoder and, on an origin, its two ends: transformers' own modules on one device.

The model's own forward runs, with a stand-in for each layer that is elsewhere: what arrives is
put in before the first layer that is computed here, and the forward ends after the last. So
positions, masks, scales and norms are always those of the model's own code.

**Packed**: tokens of many jobs lie side by side in one row. A registered attention computes each
job over its own cache, and a registered mask function keeps the rule (causal, sliding, chunked) as
it is, to be asked for each job's positions. **Unpacked**, where layers compute beside the attention
interface or keep a state: one job after the other, each with a cache of transformers.

`Trial` decides which of both gives what the model's own code gives, with the weights that are here.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from penstock.workloads.pipes.model.architecture import Architecture, Stop, hidden_of
from penstock.workloads.pipes.model.cache import CPU, JobCache, Layout
from penstock.workloads.pipes.model.linear import COMPUTE, swap_ends, swapped
from penstock.workloads.pipes.model.loading import fill, hollow, settle

PACKED = "penstock_packed"
"""The name of the attention that is registered here."""
_HARMLESS = frozenset(
    {
        *("position_ids", "cache_position", "use_cache", "sliding_window", "is_causal"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    }
)
"""Arguments of attention that change nothing here: the rule of the mask knows windows."""


class NotPacked(Exception):
    """This model's layers can't compute several jobs in one row; why."""


class NeedsWhole(Exception):
    """Keys are derived from what the cache returns: it has to return all of it."""


class Part:
    """One job's tokens in a pass: `count` of them, at positions from `start` on."""

    def __init__(self, cache: JobCache, start: int, count: int) -> None:
        self.cache, self.start, self.count, self.end = cache, start, count, start + count
        self._views: dict[tuple[int, int], Mapping[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def seen(self, layer: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer from position `first` on, each [heads, positions, size].
        Views of all layers are made at once: one by one they would take as long as attention."""
        return self._between(first, self.end)[layer]

    def places(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._between(self.start, self.end)[layer]

    def _between(self, first: int, end: int) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
        found = self._views.get((first, end))
        if found is None:
            found = self._views[first, end] = self.cache.views(first, end)
        return found


class _Rule:
    """A mask as transformers describes it: who may look at whom, by positions."""

    def __init__(self, batch: _Pass, allowed: Callable[..., Any]) -> None:
        self.batch, self._allowed = batch, allowed
        self._known: dict[int, tuple[int, torch.Tensor | None, bool]] = {}

    def of(self, part: Part) -> tuple[int, torch.Tensor | None, bool]:
        """The first position that is looked at, and from there on what may be seen; None if that
        is all, or, if the last is set, the plain causal mask."""
        found = self._known.get(id(part))
        if found is None:
            found = self._known[id(part)] = self._made(part)
        return found

    def _made(self, part: Part) -> tuple[int, torch.Tensor | None, bool]:
        # On the CPU: asked of an accelerator, each answer would be waited for.
        queries = torch.arange(part.start, part.end, device=CPU)[:, None]
        keys = torch.arange(part.end, device=CPU)
        zero = torch.zeros(1, 1, dtype=torch.long, device=CPU)
        seen = self._allowed(zero, zero, queries, keys).expand(part.count, part.end)
        first = int(seen.any(0).int().argmax())
        seen = seen[:, first:]
        if bool(seen.all()):
            return first, None, False
        if part.start == 0 and bool((seen == (keys <= queries)).all()):
            return 0, None, True
        return first, seen.to(self.batch.device), False


class _Pass:
    """What goes through layers in one row."""

    def __init__(self, parts: Sequence[Part], device: torch.device, whole: bool) -> None:
        self.parts, self.device, self.whole = parts, device, whole
        self.layer = -1
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None
        positions = [torch.arange(part.start, part.end, device=device) for part in parts]
        self.positions = torch.cat(positions)[None]


_running = threading.local()


def _mask(mask_function: Callable[..., Any], **_: Any) -> _Rule:
    return _Rule(_running.batch, mask_function)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, tokens, size] each, to [1, tokens, heads, size]."""
    if not isinstance(attention_mask, _Rule):
        raise NotPacked("its attention gets no mask by a rule")
    for name, given in more.items():
        if given is not None and name not in _HARMLESS:
            raise NotPacked(f"its attention takes {name}")
    batch = attention_mask.batch
    if not batch.whole:
        fresh = batch.fresh
        if fresh is None or key is not fresh[0] or value is not fresh[1]:
            raise NeedsWhole
    made, at, past = [], 0, 0
    for part in batch.parts:
        first, mask, causal = attention_mask.of(part)
        if batch.whole:
            keys = key[0, :, past + first : past + part.end]
            values = value[0, :, past + first : past + part.end]
            past += part.end
        else:
            keys, values = part.seen(batch.layer, first)
        queries = query[:, :, at : at + part.count]
        made.append(_one(queries, keys[None], values[None], mask, causal, scaling, softcap, s_aux))
        at += part.count
    return made[0] if len(made) == 1 else torch.cat(made, 1), None


def _one(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One job's attention: [1, tokens, heads, size]."""
    _, heads, count, _ = queries.shape
    groups = keys.shape[1]
    if softcap is None and sinks is None:
        if count == 1 and mask is None:
            # Those that share a key are taken for as many tokens: nothing is repeated.
            shared = queries.reshape(1, groups, heads // groups, -1)
            mixed = F.scaled_dot_product_attention(shared, keys, values, scale=scaling)
            return mixed.reshape(1, 1, heads, -1)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=causal, scale=scaling, enable_gqa=heads != groups
        )
        return mixed.transpose(1, 2)
    if heads != groups:
        keys, values = (one.repeat_interleave(heads // groups, 1) for one in (keys, values))
    scores = (
        queries @ keys.transpose(2, 3) * (queries.shape[-1] ** -0.5 if scaling is None else scaling)
    )
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if causal:
        mask = torch.ones(count, count, dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        beside = sinks.reshape(1, -1, 1, 1).expand(1, heads, count, 1).to(scores.dtype)
        scores = torch.cat((scores, beside), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    weights = weights if sinks is None else weights[..., :-1]
    return (weights @ values).transpose(1, 2)


AttentionInterface.register(PACKED, _attention)
AttentionMaskInterface.register(PACKED, _mask)


class Lengths(Cache):
    """Answers what stock code asks the first layer, which may be elsewhere."""

    def __init__(self, past: int) -> None:
        super().__init__(layers=[])
        self.past = past

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.past + query_length, 0


class _PackedCache(Lengths):
    """Deals a row's keys and values out to the jobs that it is made of."""

    def __init__(self, batch: _Pass) -> None:
        super().__init__(max(part.start for part in batch.parts))
        self._batch = batch

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, at = self._batch, 0
        for part in batch.parts:
            keys, values = part.places(layer_idx)
            if len(batch.parts) == 1:
                keys.copy_(key_states[0])
                values.copy_(value_states[0])
            else:
                keys.copy_(key_states[0, :, at : at + part.count])
                values.copy_(value_states[0, :, at : at + part.count])
                at += part.count
        if batch.whole:
            found = [part.seen(layer_idx, 0) for part in batch.parts]
            return torch.cat([k for k, _ in found], 1)[None], torch.cat([v for _, v in found], 1)[
                None
            ]
        batch.layer, batch.fresh = layer_idx, (key_states, value_states)
        return batch.fresh


class SequenceCache(DynamicCache):
    """One job's cache as transformers has it. Windows are left to the mask, so that what was
    written can be cut back."""

    get_seq_length = Lengths.get_seq_length
    get_query_offset = Lengths.get_query_offset
    get_mask_sizes = Lengths.get_mask_sizes

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        stock: list[Any] = self.layers
        self.layers: list[Any] = [
            DynamicLayer() if type(one) is DynamicSlidingWindowLayer else one for one in stock
        ]
        self.past = 0

    @property
    def can_be_cut(self) -> bool:
        return all(type(one) in (DynamicLayer, DummyLayer) for one in self.layers)

    def cut(self, layer: int, position: int) -> None:
        one = self.layers[layer]
        if isinstance(one, DynamicLayer) and one.is_initialized:
            one.keys, one.values = one.keys[:, :, :position], one.values[:, :, :position]

    def layout(self, layer: int) -> Layout:
        one = self.layers[layer]
        if not isinstance(one, DynamicLayer) or not one.is_initialized:
            return Layout()
        (_, heads, _, size), (_, others, _, width) = one.keys.shape, one.values.shape
        return Layout(heads, size, others, width)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        if layer_idx is None:
            return self.past > 0
        return bool(super().has_previous_state(layer_idx, state_idx))


class _Layers(nn.ModuleList):
    """Stock code takes a slice of all layers in each forward: made anew, they take half a
    millisecond."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return list(self._modules.values())[key]
        return super().__getitem__(key)


class Segment:
    """The model's skeleton, with real layers in some places. One thread at a time computes."""

    def __init__(self, architecture: Architecture, dtype: str, device: torch.device) -> None:
        self.architecture, self.dtype, self.device = architecture, dtype, device
        self.compute = COMPUTE[dtype]
        self.model = architecture.build(self.compute)
        self._config: Any = self.model.config
        self._own = self._config._attn_implementation
        """What transformers would take."""
        self.whole = False
        self.why_unpacked = ""
        self._turn = threading.Lock()
        self._layers: Mapping[int, nn.Module] = {}
        self._first, self._end = 0, 0
        self._states: torch.Tensor | None = None
        self._list: Any = self.model.get_submodule(architecture.path)
        self._list.__class__ = _Layers
        for number, layer in enumerate(self._list):
            layer.forward = partial(self._layer, number)

    def joined(self, other: Segment) -> Segment:
        """Whichever of two skeletons fits the layers of both."""
        if self.packed != other.packed:
            why = self.why_unpacked or other.why_unpacked
            raise self.architecture.refused(f"some of its layers can't be packed: {why}")
        return self if self.whole or not other.whole else other

    @property
    def packed(self) -> bool:
        return bool(self._config._attn_implementation == PACKED)

    @packed.setter
    def packed(self, packed: bool) -> None:
        self._config._attn_implementation = PACKED if packed else self._own

    @property
    def can_be_cut(self) -> bool:
        """Whether what its layers keep of a job can be taken back to an earlier position."""
        return SequenceCache(self._config).can_be_cut

    # -- weights --------------------------------------------------------------------

    def load_layer(self, number: int, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        """A layer of its own, beside the stand-in for it. Names are those of a checkpoint, without
        what stands before them in all of a layer's."""
        own = self._list[number]
        forward = own.__dict__.pop("forward")
        try:
            layer = copy.deepcopy(own, {id(self._config): self._config})
        finally:
            own.forward = forward
        self._list[number] = layer
        prefix = f"{self.architecture.path}.{number}."
        try:
            named = {prefix + name: one for name, one in tensors.items()}
            fill(self.model, named, f"layer {number}", self.device, within=prefix)
            settle(self.model, layer, self.device)
        finally:
            self._list[number] = own
        return swapped(layer, self.dtype) if self.device.type == "cpu" else layer

    def load_ends(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Everything that is not in a layer."""
        path = f"{self.architecture.path}."
        model: Any = self.model
        missing = fill(model, tensors, "the end model", self.device, without=path)
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
        settle(model, model, self.device, without=self._list)
        if self.device.type == "cpu":
            swap_ends(model, self.dtype)

    def without_ends(self) -> None:
        """Only layers are computed here: what stands before and after them is run, and what it
        makes is dropped, so that its weights may be anything."""
        hollow(self.model, self._list, self.device)

    # -- layers ---------------------------------------------------------------------

    def run(
        self,
        layers: Mapping[int, nn.Module],
        parts: Sequence[Part],
        states: torch.Tensor,
        first: int,
        end: int,
    ) -> torch.Tensor:
        """[tokens, hidden] through layers `first` to `end`, the last one not included."""
        with self._turn:
            self._layers, self._first, self._end = layers, first, end
            try:
                if self.packed:
                    return self._run_packed(parts, states)
                counts = [part.count for part in parts]
                pieces = zip(parts, states.split(counts), strict=True)
                return torch.cat([self._run_alone(part, piece) for part, piece in pieces])
            finally:
                self._layers = {}

    def _run_packed(self, parts: Sequence[Part], states: torch.Tensor) -> torch.Tensor:
        batch = _Pass(parts, self.device, self.whole)
        _running.batch = batch
        try:
            return self._forward(_PackedCache(batch), batch.positions, states)
        finally:
            _running.batch = None

    def _run_alone(self, part: Part, states: torch.Tensor) -> torch.Tensor:
        cache = part.cache.sequence(lambda: SequenceCache(self.model.config))
        cache.past = part.start
        positions = torch.arange(part.start, part.end, device=self.device)[None]
        return self._forward(cache, positions, states)

    def _forward(self, cache: Cache, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        self._states = states.to(self.device, self.compute)[None]
        embeds = torch.zeros_like(self._states)
        try:
            self.architecture.call(self.model, cache, positions, inputs_embeds=embeds)
        except Stop as stop:
            return stop.states[0]
        finally:
            self._states = None
        raise RuntimeError(f"the model's forward ended without layer {self._end}")

    def _layer(self, number: int, *args: Any, **named: Any) -> Any:
        """Called by the model's forward in place of each layer."""
        if number < self._first:
            assert self._states is not None
            return self.architecture.form(self._states)
        states, rest, named = hidden_of(args, named)
        if number >= self._end:
            raise Stop(states)
        if number == self._first:
            states = self._states
        made = self._layers[number](states, *rest, **named)
        if number < self._end - 1:
            return made
        raise Stop(made[0] if isinstance(made, tuple) else made)

    # -- the two ends ---------------------------------------------------------------

    def embed(self, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """[tokens, hidden]: what the first layer is given."""
        with self._turn:
            self._first = self._end = 0
            if "position_ids" in self.architecture.arguments:
                return self._embed(ids, positions)
            # It counts from what is in the cache: one job's tokens at a time.
            cuts = [0, *(n for n in range(1, len(ids)) if positions[n] != positions[n - 1] + 1)]
            ends = [*cuts[1:], len(ids)]
            pieces = zip(cuts, ends, strict=True)
            return torch.cat([self._embed(ids[a:b], positions[a:b]) for a, b in pieces])

    def _embed(self, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        try:
            self._call(self.model, positions, input_ids=torch.tensor([ids], device=self.device))
        except Stop as stop:
            return stop.states[0]
        raise RuntimeError("the model's forward did not come to its first layer")

    def norm(self, states: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """What the decoder without its head returns."""
        return self._behind(self._base, states, positions)[0][0]

    def logits(self, states: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """What the whole model makes of its last layer's hidden states, in one go."""
        return self._behind(self.model, states, positions).logits[0].float()

    def _behind(self, module: nn.Module, states: torch.Tensor, positions: Sequence[int]) -> Any:
        """A forward in which all layers are passed over."""
        with self._turn:
            self._first = self._end = self.architecture.num_layers
            self._states = states.to(self.device, self.compute)[None]
            try:
                return self._call(module, positions, inputs_embeds=torch.zeros_like(self._states))
            finally:
                self._states = None

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits, [tokens, vocabulary], in float32, with all that the model's own forward does to
        them."""
        model: Any = self.model
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with self._turn:
            self._base.forward = lambda *_, **__: _Output(states[None])
            try:
                logits: torch.Tensor = model(input_ids=ids).logits[0]
            finally:
                del self._base.forward
        return logits.float()

    @property
    def _base(self) -> Any:
        return self.model.get_submodule(self.architecture.base)

    def _call(self, module: nn.Module, positions: Sequence[int], **inputs: torch.Tensor) -> Any:
        _running.batch = None
        at = torch.tensor([list(positions)], device=self.device)
        return self.architecture.call(module, Lengths(positions[0]), at, **inputs)


class _Output:
    """What a decoder returns to the model around it: hidden states, and nothing else."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, key: Any) -> Any:
        return self.last_hidden_state if key == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None
