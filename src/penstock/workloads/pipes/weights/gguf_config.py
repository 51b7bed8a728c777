"""A GGUF's facts in the words of transformers' config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.models.gguf import Value
from penstock.workloads.pipes.weights.source import invalid, not_supported

MOST_LAYERS = 10_000
"""Far from what any model has: a number beyond is damage, and would take all memory."""

FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""By the GGUF's name of the architecture. Mistral's models call themselves `llama` there, and
compute the same."""


class GgufConfig:
    """Reads one file's facts. `values` gives a small tensor's numbers, if there is one."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Value],
        shapes: Mapping[str, tuple[int, ...]],
        values: Callable[[str], list[float]],
    ) -> None:
        self._path, self._metadata, self._shapes, self._values = path, metadata, shapes, values
        self._arch = str(metadata.get("general.architecture", ""))
        if not self._arch:
            raise invalid(path, "does not say what architecture the model has")
        if self._arch not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise not_supported(path, f"has the architecture {self._arch!r}; known are {known}")
        if self._get("expert_count", 0):
            raise not_supported(path, "is a mixture of experts, which is not split yet")

    def config(self) -> dict[str, Any]:
        model_type, name = FAMILIES[self._arch]
        config = {
            "architectures": [name],
            "model_type": model_type,
            **self._sizes(),
            **self._tokens(),
            "hidden_act": "silu",
            "rms_norm_eps": self._need("attention.layer_norm_rms_epsilon"),
            "rope_theta": float(self._get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in self._shapes,
            "attention_bias": "blk.0.attn_q.bias" in self._shapes,
        }
        scaling = self._rope_scaling(config)
        if scaling:
            config["rope_scaling"] = scaling
        more: Callable[[dict[str, Any]], dict[str, Any]] | None = getattr(
            self, f"_{self._arch}", None
        )
        return config | (more(config) if more else {})

    # -- what all have ------------------------------------------------------------------

    def _sizes(self) -> dict[str, Any]:
        hidden, heads = self._count("embedding_length"), self._count("attention.head_count")
        embed = self._shapes.get("token_embd.weight")
        rotary = self._get("rope.dimension_count", 0) if self._arch in ("llama", "smollm3") else 0
        size = self._get("attention.key_length", 0) or rotary or hidden // heads
        if self._get("attention.value_length", size) != size:
            raise not_supported(self._path, "has values of another length than keys")
        return {
            "num_hidden_layers": self._count("block_count", most=MOST_LAYERS),
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": size,
            "max_position_embeddings": self._count("context_length"),
            "vocab_size": embed[0] if embed else self._count("vocab_size"),
        }

    def _tokens(self) -> dict[str, Any]:
        names = {"bos": "bos", "eos": "eos", "padding": "pad"}
        found = {
            f"{hf}_token_id": self._metadata.get(f"tokenizer.ggml.{ours}_token_id")
            for ours, hf in names.items()
        }
        return {name: token for name, token in found.items() if token is not None}

    def _rope_scaling(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._shapes:
            return self._llama3(config, self._values("rope_freqs.weight"))
        if "rope_factors_long.weight" in self._shapes:
            return {
                "rope_type": "longrope",
                "long_factor": self._values("rope_factors_long.weight"),
                "short_factor": self._values("rope_factors_short.weight"),
            }
        kind = self._get("rope.scaling.type", "none")
        factor = self._get("rope.scaling.factor", 1.0)
        if kind == "linear" and factor != 1.0:
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            original = self._get("rope.scaling.original_context_length", 0)
            more = {"original_max_position_embeddings": original} if original else {}
            return {"rope_type": "yarn", "factor": factor, **more}
        return None

    def _llama3(self, config: Mapping[str, Any], factors: list[float]) -> dict[str, Any] | None:
        """The file has what Llama 3's rule gave, the config its four numbers. The last factor
        tells one of them; the other three are what all of its models have, and it is checked
        that the rule gives these factors again."""
        if max(factors, default=1.0) == 1.0:
            return None
        rule = {
            "rope_type": "llama3",
            "factor": factors[-1],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        size, theta = config["head_dim"], config["rope_theta"]
        again = [
            _llama3_factor(2 * math.pi * theta ** (2 * pair / size), factors[-1])
            for pair in range(size // 2)
        ]
        near = (math.isclose(a, b, rel_tol=1e-3) for a, b in zip(again, factors, strict=False))
        if len(factors) != len(again) or not all(near):
            raise not_supported(self._path, "scales its positions by a rule that is not known")
        return rule

    # -- what some have -----------------------------------------------------------------

    def _smollm3(self, config: Mapping[str, Any]) -> dict[str, Any]:
        layers = range(config["num_hidden_layers"])
        return {"no_rope_layers": [int((n + 1) % 4 != 0) for n in layers]}

    def _phi3(self, config: Mapping[str, Any]) -> dict[str, Any]:
        turned = self._get("rope.dimension_count", config["head_dim"])
        original = self._get("rope.scaling.original_context_length", 0)
        return {
            "partial_rotary_factor": turned / config["head_dim"],
            "sliding_window": self._get("attention.sliding_window", 0) or None,
            "original_max_position_embeddings": original or config["max_position_embeddings"],
        }

    def _gemma(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

    def _gemma2(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **self._gemma(config),
            **self._windows(config, 4096, every=2),
            "query_pre_attn_scalar": self._scalar(config, largest=46),
            "attn_logit_softcapping": self._get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self._get("final_logit_softcapping", 30.0),
        }

    def _gemma3(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **self._gemma(config),
            **self._windows(config, 1024, every=6),
            "query_pre_attn_scalar": self._scalar(config, largest=62),
            "rope_theta": float(self._get("rope.freq_base", 1_000_000.0)),
            "rope_local_base_freq": float(self._get("rope.freq_base_swa", 10_000.0)),
            "final_logit_softcapping": self._get("final_logit_softcapping", None),
        }

    def _windows(self, config: Mapping[str, Any], width: int, every: int) -> dict[str, Any]:
        layers = range(1, config["num_hidden_layers"] + 1)
        return {
            "sliding_window": self._get("attention.sliding_window", width),
            "layer_types": ["sliding_attention" if n % every else "full_attention" for n in layers],
        }

    def _scalar(self, config: Mapping[str, Any], largest: int) -> int:
        """The file has no word for it: the largest model of the family is known by its layers,
        as llama.cpp does it."""
        if config["num_hidden_layers"] == largest:
            return int(config["hidden_size"] // config["num_attention_heads"])
        return int(config["head_dim"])

    # -- reading ------------------------------------------------------------------------

    def _get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"{self._arch}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._get(key, None)
        if value is None:
            raise invalid(self._path, f"is not whole: it lacks {self._arch}.{key}")
        return value

    def _count(self, key: str, default: int | None = None, most: int = 1 << 31) -> int:
        value = self._need(key) if default is None else self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise not_supported(
                self._path, f"has {str(value)[:80]} as {self._arch}.{key}, no usable number"
            )
        return value


def _llama3_factor(wavelength: float, factor: float) -> float:
    low, high, original = 1.0, 4.0, 8192
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
