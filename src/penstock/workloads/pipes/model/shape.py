"""What a model's config.json says of its decoder, in one form for all families.

transformers is not asked: a node that only holds layers does not import it. (It has to be installed
all the same, with the rest of the extra `pipes`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.model.families import FAMILIES, has_positions
from penstock.workloads.pipes.model.positions import KINDS, Rope, rope_of

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_NULL = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Here null says that there is none; elsewhere it leaves the family's default."""
_REFUSED = {
    "quantization_config": "weights that are stored quantised",
    "use_bidirectional_attention": "attention in both directions",
}


class Shape(Struct, frozen=True, kw_only=True):
    """A decoder. What is counted by layer has one entry for each."""

    family: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    activation: str
    max_positions: int
    """Tokens that it was made for; a job can't have more."""
    scale: float
    """Of queries times keys."""
    ropes: tuple[Rope | None, ...]
    """By layer; None leaves positions out."""
    windows: tuple[int | None, ...]
    """By layer: how many of the last tokens are looked at, itself included; None is all."""
    tied: bool
    """The head is the embedding."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    embed_scale: float = 1.0
    softcap: float | None = None
    """Of the attention."""
    final_softcap: float | None = None
    """Of the logits."""
    head_norms: bool = False
    """Queries and keys are normed head by head."""
    after_norms: bool = False
    """What attention and feed-forward give is normed too, before it is added."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Raises LlmFailure: NOT_SUPPORTED names the architecture or what of it is unknown,
        MODEL_INVALID what is missing."""
        return _Reading(config).shape()


def cache_bytes(shape: Shape, width: int) -> int:
    """Of one token in one layer, in numbers of this many bytes."""
    return 2 * shape.kv_heads * shape.head_dim * width


class _Reading:
    """One config, read once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._name = str(config.get("model_type") or "")
        if self._name not in FAMILIES:
            raise _unknown(config)
        self._family = FAMILIES[self._name]
        given = {key: config[key] for key in config if config[key] is not None or key in _NULL}
        self._config: dict[str, Any] = {**self._family.defaults, **given}

    def shape(self) -> Shape:
        try:
            shape = self._shape()
        except KeyError as error:
            raise self._invalid(f"lacks {error.args[0]}") from None
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            raise self._invalid(f"can't be read ({error})") from None
        self._check(shape)
        return shape

    def _shape(self) -> Shape:
        config, family = self._config, self._family
        layers = int(config["num_hidden_layers"])
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        kinds = tuple(self._kind(layer) for layer in range(layers))
        ropes = {kind: rope_of(config, kind, head_dim) for kind in kinds}
        scalar = config["query_pre_attn_scalar"] if family.after_norms else head_dim
        return Shape(
            family=self._name,
            num_layers=layers,
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            vocabulary=int(config.get("vocab_size") or 0),
            eps=float(config["rms_norm_eps"]),
            activation=self._activation(),
            max_positions=min(rope.max_positions for rope in ropes.values()),
            scale=float(scalar) ** -0.5,
            ropes=tuple(
                ropes[kind] if has_positions(config, layer) else None
                for layer, kind in enumerate(kinds)
            ),
            windows=tuple(self._window(kind) for kind in kinds),
            tied=bool(config["tie_word_embeddings"]),
            norm_offset=1.0 if family.gemma else 0.0,
            embed_scale=hidden**0.5 if family.gemma else 1.0,
            softcap=config.get("attn_logit_softcapping"),
            final_softcap=config.get("final_logit_softcapping"),
            head_norms=family.head_norms,
            after_norms=family.after_norms,
        )

    def _kind(self, layer: int) -> str:
        listed: Sequence[str] | None = self._config.get("layer_types")
        if listed:
            return listed[layer]
        sliding = self._family.sliding(self._config, layer)
        return "sliding_attention" if sliding else "full_attention"

    def _window(self, kind: str) -> int | None:
        window = self._config["sliding_window"]
        asked = "use_sliding_window" in self._family.defaults
        if kind != "sliding_attention" or (asked and not self._config["use_sliding_window"]):
            return None
        return int(window) if window else None

    def _activation(self) -> str:
        name = self._config["hidden_activation" if self._family.after_norms else "hidden_act"]
        if name not in ACTIVATIONS:
            raise self._unsupported(f"the activation {name}")
        return ACTIVATIONS[name]

    def _check(self, shape: Shape) -> None:
        for key, what in _REFUSED.items():
            if self._config.get(key):
                raise self._unsupported(f"{what} ({key})")
        sizes = (shape.num_layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads)
        if min(*sizes, shape.head_dim, shape.max_positions) < 1 or shape.heads % shape.kv_heads:
            raise self._invalid(f"has sizes that do not fit each other: {shape}")
        for rope in shape.ropes:
            if rope is not None and rope.kind not in KINDS:
                raise self._unsupported(f"positions of the kind {rope.kind}")
            if rope is not None and not (0 < rope.dims <= shape.head_dim and rope.dims % 2 == 0):
                raise self._invalid(f"turns {rope.dims} numbers of {shape.head_dim}")

    def _unsupported(self, what: str) -> LlmFailure:
        return LlmFailure(
            LlmCode.NOT_SUPPORTED,
            f"this {self._name} model has {what}, which is not known here",
            architecture=self._name,
        )

    @staticmethod
    def _invalid(what: str) -> LlmFailure:
        return LlmFailure(LlmCode.MODEL_INVALID, f"the model's config {what}")


def _unknown(config: Mapping[str, Any]) -> LlmFailure:
    name = str(config.get("model_type") or "") or "unnamed"
    classes = config.get("architectures") or []
    told = f"{classes[0]} ({name})" if classes else name
    return LlmFailure(
        LlmCode.NOT_SUPPORTED,
        f"models of architecture {told} can't be split; those of {', '.join(FAMILIES)} can",
        architecture=name,
    )
