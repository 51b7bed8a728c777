"""What a model's config.json says of its decoder, in one form for all families.

A family is here if its layer is the common one (norm, grouped attention with rotary positions,
norm, gated feed-forward) with the variations that `Shape` can say. transformers is not asked:
a node that holds layers needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from penstock.core.llm import LlmCode, LlmFailure

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


class Rope(Struct, frozen=True):
    """How positions are turned into angles."""

    theta: float
    dims: int
    """Of each head, how many of the first are turned; even."""
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()
    """What the kind needs, by name."""
    max_positions: int = 0


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
    """Of one token in one layer, in numbers of so many bytes."""
    return 2 * shape.kv_heads * shape.head_dim * width


class Family(Struct, frozen=True, kw_only=True):
    """Where a family differs from Llama."""

    defaults: Mapping[str, Any]
    """What its config may leave out."""
    gemma: bool = False
    """Norm weights are offsets from one, and embeddings are scaled."""
    head_norms: bool = False
    after_norms: bool = False
    sliding: Callable[[Mapping[str, Any], int], bool] = lambda config, layer: False
    """Whether a layer looks at a window only, where `layer_types` does not say so."""


def _always(config: Mapping[str, Any], layer: int) -> bool:
    return True


def _qwen(config: Mapping[str, Any], layer: int) -> bool:
    return bool(config["use_sliding_window"]) and layer >= config["max_window_layers"]


def _every_other(config: Mapping[str, Any], layer: int) -> bool:
    return layer % 2 == 0


def _gemma3(config: Mapping[str, Any], layer: int) -> bool:
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    return (layer + 1) % int(pattern) != 0


def _smollm3(config: Mapping[str, Any], layer: int) -> bool:
    return bool(config["use_sliding_window"]) and not _has_rope(config, layer)


def _has_rope(config: Mapping[str, Any], layer: int) -> bool:
    listed = config.get("no_rope_layers")
    if listed is not None:
        return bool(listed[layer])
    interval = config.get("no_rope_layer_interval")
    return interval is None or (layer + 1) % int(interval) != 0


_COMMON: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "sliding_window": None,
    "hidden_act": "silu",
}
_GEMMA: Mapping[str, Any] = {
    **_COMMON,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
}
_GEMMA2: Mapping[str, Any] = {
    **_GEMMA,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults={**_COMMON, "max_position_embeddings": 2048}),
    "mistral": Family(
        defaults={**_COMMON, "sliding_window": 4096, "num_key_value_heads": 8}, sliding=_always
    ),
    "qwen2": Family(defaults={**_COMMON, "sliding_window": 4096}, sliding=_qwen),
    "qwen3": Family(
        defaults={**_COMMON, "sliding_window": 4096, "head_dim": 128},
        sliding=_qwen,
        head_norms=True,
    ),
    "gemma": Family(defaults={**_GEMMA, "max_position_embeddings": 8192}, gemma=True),
    "gemma2": Family(
        defaults={**_GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        gemma=True,
        after_norms=True,
        sliding=_every_other,
    ),
    "gemma3_text": Family(
        defaults={
            **_GEMMA2,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        gemma=True,
        head_norms=True,
        after_norms=True,
        sliding=_gemma3,
    ),
    "phi3": Family(defaults={**_COMMON, "rms_norm_eps": 1e-5}, sliding=_always),
    "smollm3": Family(
        defaults={
            **_COMMON,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
        },
        sliding=_smollm3,
    ),
}

_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
_REFUSED = {
    "quantization_config": "weights that are stored quantised",
    "use_bidirectional_attention": "attention in both directions",
    "num_local_experts": "a mixture of experts",
}


class _Reading:
    """One config, read once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._name = str(config.get("model_type") or "")
        family = FAMILIES.get(self._name)
        if family is None:
            raise self._unsupported(config)
        given = {key: value for key, value in config.items() if value is not None}
        # A window that is given as null means none; other nulls mean the family's default.
        if "sliding_window" in config:
            given["sliding_window"] = config["sliding_window"]
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if key in config:
                given[key] = config[key]
        self._family = family
        self._config: dict[str, Any] = {**family.defaults, **given}
        self._check()

    @staticmethod
    def _unsupported(config: Mapping[str, Any]) -> LlmFailure:
        names = config.get("architectures") or []
        name = str(config.get("model_type") or "") or "unnamed"
        told = f"{names[0]} ({name})" if names else name
        return LlmFailure(
            LlmCode.NOT_SUPPORTED,
            f"models of architecture {told} can't be split; those of {', '.join(FAMILIES)} can",
            architecture=name,
        )

    def _check(self) -> None:
        missing = [key for key in _NEEDED if key not in self._config]
        if missing:
            raise LlmFailure(LlmCode.MODEL_INVALID, f"the config lacks {', '.join(missing)}")
        for key, what in _REFUSED.items():
            if self._config.get(key):
                raise LlmFailure(
                    LlmCode.NOT_SUPPORTED, f"{what} ({key}) can't be split", architecture=self._name
                )
        if self._activation not in ACTIVATIONS:
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                f"the activation {self._activation} is not known",
                architecture=self._name,
            )

    @property
    def _activation(self) -> str:
        config = self._config
        if self._family.gemma:
            # Gemma's first configs say "gelu" and mean its approximation, as transformers does.
            return str(config.get("hidden_activation") or "gelu_pytorch_tanh")
        return str(config["hidden_act"])

    def shape(self) -> Shape:
        config, family = self._config, self._family
        layers = int(config["num_hidden_layers"])
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        kinds = tuple(self._kind(layer) for layer in range(layers))
        window = config.get("sliding_window")
        ropes = {kind: self._rope(kind, head_dim) for kind in set(kinds)}
        scalar = config.get("query_pre_attn_scalar", head_dim) if family.after_norms else head_dim
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
            activation=ACTIVATIONS[self._activation],
            max_positions=min(self._positions, *(rope.max_positions for rope in ropes.values())),
            scale=float(scalar) ** -0.5,
            ropes=tuple(
                ropes[kind] if self._turns(layer) else None for layer, kind in enumerate(kinds)
            ),
            windows=tuple(
                int(window) if window and kind == "sliding_attention" else None for kind in kinds
            ),
            tied=bool(config["tie_word_embeddings"]),
            norm_offset=1.0 if family.gemma else 0.0,
            embed_scale=hidden**0.5 if family.gemma else 1.0,
            softcap=config.get("attn_logit_softcapping"),
            final_softcap=config.get("final_logit_softcapping"),
            head_norms=family.head_norms,
            after_norms=family.after_norms,
        )

    @property
    def _positions(self) -> int:
        return int(self._config.get("max_position_embeddings") or 4096)

    def _kind(self, layer: int) -> str:
        listed: Sequence[str] | None = self._config.get("layer_types")
        if listed:
            return listed[layer]
        sliding = self._family.sliding(self._config, layer)
        return "sliding_attention" if sliding else "full_attention"

    def _turns(self, layer: int) -> bool:
        return self._name != "smollm3" or _has_rope(self._config, layer)

    def _rope(self, kind: str, head_dim: int) -> Rope:
        config = self._config
        told: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
        nested = kind in told or "full_attention" in told
        if nested:
            told = told.get(kind) or {}
        theta = told.get("rope_theta")
        if theta is None:
            theta = config["rope_theta"]
            if kind == "sliding_attention" and "rope_local_base_freq" in config:
                # An older config scales the layers that look far, and only those.
                theta, told = config["rope_local_base_freq"], {}
        name = str(told.get("rope_type") or told.get("type") or "default")
        part = told.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
        positions = self._positions
        original = told.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        scaling = {**told, "original_max_position_embeddings": original or positions}
        if name in ("su", "longrope"):
            # The factors for long texts change what was computed before: not with a cache.
            name, scaling["ratio"] = "longrope", positions / (original or positions)
            positions = original or positions
        if name not in ("default", "linear", "dynamic", "yarn", "longrope", "llama3"):
            raise LlmFailure(
                LlmCode.NOT_SUPPORTED,
                f"positions of the kind {name} are not known",
                architecture=self._name,
            )
        return Rope(
            theta=float(theta),
            dims=int(head_dim * float(part)),
            kind=name,
            scaling=tuple(
                sorted((key, _plain(value)) for key, value in scaling.items() if value is not None)
            ),
            max_positions=positions,
        )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
