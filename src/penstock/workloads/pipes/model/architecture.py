"""What a model's config says of its decoder: transformers' own model, built without weights.

Nothing here knows a family. Where the layers are, what they return, and whether they can be on
different machines is found by running the model with a stand-in for each layer.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, Cache
from transformers.cache_utils import DynamicCache

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.model.loading import hollow

MOST_LAYERS = 10_000
"""Far from what any model has: a number beyond is damage, and would take all memory."""
_LONGEST = 1 << 17
"""Positions of a model that does not say how many it has."""
_TOKENS = 3
"""Of a run that only shows what is called."""

Form = Callable[[torch.Tensor], Any]
"""A layer's hidden states in the form in which the model's layers return them."""


class Stop(Exception):
    """Ends a model's forward where nothing more of it is needed."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


class Architecture:
    """Raises LlmFailure: NOT_SUPPORTED names the architecture and why its layers can't be split,
    MODEL_INVALID what is wrong with the config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.name = str(config.get("model_type") or "unnamed")
        self.classes = config.get("architectures") or []
        self.config = self._read(dict(config))
        self.num_layers = self._count("num_hidden_layers", MOST_LAYERS)
        self.hidden = self._count("hidden_size")
        self.vocabulary = self._count("vocab_size")
        self.max_positions = _positions(self.config)
        model = self._built()
        self.path = self._layers_path(model)
        """Where the layers are in the model."""
        self.base = self.path.rpartition(".")[0]
        """Where the decoder without its head is."""
        base = model.get_submodule(self.base)
        self.arguments = frozenset(inspect.signature(base.forward).parameters)
        for needed in ("past_key_values", "inputs_embeds"):
            if needed not in self.arguments:
                raise self.refused(f"its forward takes no {needed}")
        layers = model.get_submodule(self.path)
        assert isinstance(layers, nn.ModuleList)
        self.layer_values = [_values(layer) for layer in layers]
        """Weights of each layer."""
        self.end_values = _values(model) - sum(self.layer_values)
        self.linears = tuple(
            (one.shape[-2], one.shape[-1]) for one in layers[0].parameters() if one.dim() > 1
        )
        """(out, in) of a layer's linear maps."""
        hollow(model, layers, torch.device("cpu"))
        self.form = self._form(model, layers)
        self._check_inputs(model, layers)

    def build(self, dtype: torch.dtype) -> nn.Module:
        """The whole model on `meta`, with a config of its own."""
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(self.config), dtype=dtype)
        _without_padding(model.config)  # or each embedding would look for it, to warn
        return cast(nn.Module, model.eval())

    def refused(self, why: str) -> LlmFailure:
        named = f"{self.classes[0]} ({self.name})" if self.classes else self.name
        return LlmFailure(
            LlmCode.NOT_SUPPORTED,
            f"models of architecture {named} can't be split: {why}",
            architecture=self.name,
        )

    @cached_property
    def cache_values(self) -> int:
        """Numbers that a token takes in the cache of one layer, as far as the config says so: what
        a layer really keeps is known when it was loaded and tried."""
        config = self.config
        heads = getattr(config, "num_attention_heads", None) or 1
        groups = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or self.hidden // heads
        return 2 * max(_numbers(groups)) * max(_numbers(size))

    # -- reading --------------------------------------------------------------------

    def _read(self, config: dict[str, Any]) -> Any:
        if self.name not in CONFIG_MAPPING:
            raise self.refused("transformers does not know it")
        if config.get("quantization_config"):
            raise self.refused("its weights are quantised: take plain ones, or a GGUF")
        layers = config.get("num_hidden_layers")
        if isinstance(layers, int) and not 1 <= layers <= MOST_LAYERS:
            raise _invalid(f"has {layers} layers")
        try:
            read = CONFIG_MAPPING[self.name].from_dict(config)
        except Exception as error:  # whatever its class finds wrong
            raise _invalid(f"can't be read: {_first_line(error)}") from error
        if type(read) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise self.refused("it is not a decoder that generates text")
        if getattr(read, "is_encoder_decoder", False):
            raise self.refused("it has an encoder")
        if getattr(read, "use_bidirectional_attention", None) or not getattr(
            read, "is_causal", True
        ):
            raise self.refused("it looks at tokens that come later")
        if (getattr(read, "pad_token_id", None) or 0) >= getattr(read, "vocab_size", 0):
            _without_padding(read)  # its class's own, for another vocabulary
        return read

    def _count(self, name: str, most: int = 1 << 31) -> int:
        value = getattr(self.config, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise _invalid(f"has {str(value)[:80]} as {name}")
        return value

    def _built(self) -> nn.Module:
        try:
            return self.build(torch.float32)
        except Exception as error:  # sizes that do not fit each other
            raise _invalid(f"has sizes that do not fit each other: {_first_line(error)}") from error

    def _layers_path(self, model: nn.Module) -> str:
        """The longest list of modules that is as long as the model is deep."""
        outer: dict[str, int] = {
            name: _values(part)
            for name, part in model.named_modules()
            if isinstance(part, nn.ModuleList) and len(part) == self.num_layers
            if not re.search(r"\.\d+\.", name)
        }
        if not outer:
            raise self.refused(f"it has no list of its {self.num_layers} layers")
        return max((values, name) for name, values in outer.items())[1]

    # -- how layers are called ------------------------------------------------------

    def _form(self, model: nn.Module, layers: nn.ModuleList) -> Form:
        """What the model takes from a layer: tried with stand-ins alone."""
        extra = torch.empty(1)
        forms: tuple[Form, ...] = (
            lambda x: x,
            lambda x: (x,),
            lambda x: (x, extra),
            lambda x: (x, None),
            lambda x: (x, extra, extra),
            lambda x: (x, None, None),
        )
        problem = ""
        for form in forms:
            calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
            passed = torch.empty(1, _TOKENS, self.hidden)
            with _stand_ins(layers, calls, form(passed)):
                try:
                    self._run(model, inputs_embeds=torch.empty(1, _TOKENS, self.hidden))
                except Exception as error:
                    problem = _first_line(error)
                    continue
            if len(calls) != self.num_layers:
                problem = f"{len(calls)} of {self.num_layers} layers were called"
                continue
            if all(states is passed for states, _, _ in calls[1:]):
                if any(one is extra for _, a, k in calls for one in (*a, *k.values())):
                    raise self.refused("a layer hands on more than hidden states to the next")
                return form
            problem = "a layer does not get what the one before it returned"
        raise self.refused(problem)

    def _check_inputs(self, model: nn.Module, layers: nn.ModuleList) -> None:
        """A layer may depend on hidden states and positions: what else is made of the tokens does
        not reach other nodes. Gradients show what is made of embeddings or weights."""
        ids = torch.zeros(1, _TOKENS, dtype=torch.long)
        own = {id(one) for layer in layers for one in layer.parameters()}
        model.requires_grad_(False)
        for one in model.parameters():
            if id(one) not in own and one.is_floating_point():
                one.requires_grad_(True)
        calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        passed = torch.empty(1, _TOKENS, self.hidden)
        with torch.enable_grad(), _stand_ins(layers, calls, self.form(passed)):
            try:
                self._run(model, input_ids=ids)
                embeds = torch.empty(1, _TOKENS, self.hidden, requires_grad=True)
                self._run(model, inputs_embeds=embeds)
            except Exception as error:
                raise self.refused(_first_line(error)) from error
        for _, args, named in calls:
            for one in _tensors((*args, *named.values())):
                if one is ids:
                    raise self.refused("its layers look at the tokens")
                if one.requires_grad:
                    raise self.refused("its layers also take what is made of the embeddings")

    def call(self, model: nn.Module, cache: Cache, positions: torch.Tensor, **inputs: Any) -> Any:
        """The causal forward; positions are left out where it knows none."""
        if "position_ids" in self.arguments:
            inputs["position_ids"] = positions
        return model(past_key_values=cache, use_cache=True, return_dict=True, **inputs)

    def _run(self, model: nn.Module, **inputs: Any) -> None:
        self.call(model, DynamicCache(), torch.arange(_TOKENS)[None], **inputs)


@contextmanager
def _stand_ins(
    layers: nn.ModuleList,
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]],
    answer: Any,
) -> Iterator[None]:
    """Each layer notes how it was called, and answers without computing."""

    def forward(*args: Any, **named: Any) -> Any:
        states, rest, named = hidden_of(args, named)
        calls.append((states, rest, named))
        return answer

    try:
        for layer in layers:
            layer.forward = forward
        yield
    finally:
        for layer in layers:
            del layer.forward


def hidden_of(
    args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A layer's hidden states, and its other arguments."""
    if args:
        return args[0], args[1:], named
    return named.pop("hidden_states"), args, named


def _without_padding(config: Any) -> None:
    config.__dict__["pad_token_id"] = None  # where its class wants a number


def _positions(config: Any) -> int:
    """Tokens that it was made for; a job can't have more."""
    named = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    found = [getattr(config, name, None) for name in named]
    most = next((one for one in found if isinstance(one, int) and one > 0), _LONGEST)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if one.get("rope_type") == "longrope":
            # What it has for longer texts would change what was computed before: not with a cache.
            original = one.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            most = min(most, int(original or most))
    return most


def _values(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)
        elif isinstance(one, Mapping):
            yield from _tensors(one.values())


def _numbers(value: Any) -> list[int]:
    return [int(one) for one in value] if isinstance(value, list | tuple) else [int(value)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _invalid(what: str) -> LlmFailure:
    return LlmFailure(LlmCode.MODEL_INVALID, f"the model's config {what}")
