"""Tiny random models of the decoders of transformers, and what splitting makes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.pipes.walking import Split
from transformers.core_model_loading import revert_weight_conversion

from penstock.workloads.pipes.job import Job

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_d_head", "mamba_head_dim", "state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 16),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "qk_head_dim": 24,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_num_experts": 4,
    "conv_dim": 64,
    "block_ff_dim": 96,
    "mamba_d_ssm": 64,
}
"""What configs call the same things."""
_MIXED = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
OWN: Mapping[str, Mapping[str, Any]] = {
    "lfm2": _MIXED,
    "lfm2_moe": {**_MIXED, "num_dense_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
}
"""What only one of them needs."""
PROMPTS = ([5, 9, 3, 77, 21], [*range(10, 29)], [33, 7, 12, 90, 4, 60, 61, 62, 63, 64, 65])
_NEW = 5
_NUMBERED = re.compile(r"(?:[^.]+\.)*?(\d+)\.(.+)")


class Checkpoint:
    """A Source: the weights of a model in memory, as transformers would save them."""

    def __init__(self, model: Any) -> None:
        self.path, self.config = Path("a checkpoint"), model.config.to_dict()
        self._layers: dict[int, dict[str, torch.Tensor]] = {}
        self._ends: dict[str, torch.Tensor] = {}
        for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
            if found := _NUMBERED.fullmatch(name):
                self._layers.setdefault(int(found[1]), {})[found[2]] = tensor.clone()
            else:
                self._ends[name] = tensor.clone()

    def layer(self, n: int) -> Mapping[str, torch.Tensor]:
        return self._layers[n]

    def ends(self) -> Mapping[str, torch.Tensor]:
        return self._ends


def tiny_config(name: str) -> Any:
    kind = transformers.CONFIG_MAPPING[name]
    known = {*dir(kind()), *kind().to_dict()}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:  # all heads share one latent
        sizes["num_key_value_heads"] = 4
    if "qk_rope_head_dim" in known:
        sizes["head_dim"] = 8
    if isinstance(getattr(kind, "head_dim", None), property) or "head_dim" not in known:
        sizes.pop("head_dim", None)
    return kind(**{**sizes, **OWN.get(name, {})})


def tiny_model(name: str) -> Any:
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            tiny_config(name), dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for parameter, one in model.named_parameters():
                if one.dim() > 1:  # as they come, every token looks alike
                    one.normal_(0, 0.15)
                elif "norm" in parameter:
                    one.add_(torch.randn_like(one) * 0.1)
    return model


def generated(model: Any, prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """What `generate` says: tokens, and the logits that each was taken from."""
    with torch.inference_mode():
        told = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=_NEW,
            min_new_tokens=_NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=None,
        )
    return told.sequences[0, len(prompt) :].tolist(), torch.cat(told.logits)


def farthest(name: str) -> tuple[bool, float]:
    """Whether jobs are packed, and how far any logit of any step lies from `generate`'s: in 1, 2
    and 3 segments, prompts whole and in chunks, jobs alone and together."""
    model = tiny_model(name)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    source, worst, packed = Checkpoint(model), 0.0, True
    for cuts in ((), (2,), (1, 3)):
        split = Split(source, cuts)
        packed = packed and all(segment.segment.packed for segment in split.segments)
        for chunk in (4, 100) if cuts else (4,):
            for found, (_, logits) in zip(_together(split, expected, chunk), expected, strict=True):
                worst = max(worst, float((found - logits).abs().max()))
        if not cuts:
            alone = _together(split, expected[1:2], 100, PROMPTS[1:2])
            worst = max(worst, float((alone[0] - expected[1][1]).abs().max()))
    return packed, worst


def _together(
    split: Split,
    expected: Sequence[tuple[list[int], torch.Tensor]],
    chunk: int,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[torch.Tensor]:
    """The logits of each step, all jobs side by side: some at their prompt, others at an answer."""
    jobs: list[Job] = [split.job(64) for _ in prompts]
    ids = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    sent, found = [0] * len(jobs), [list[torch.Tensor]() for _ in jobs]
    while going := [n for n in range(len(jobs)) if len(found[n]) < _NEW]:
        ready = {n: max(len(prompts[n]), sent[n] + 1) for n in going}
        pieces = [(n, ids[n][sent[n] : ready[n]][:chunk]) for n in going]
        made = split.step(*((jobs[n], piece, sent[n]) for n, piece in pieces))
        for (n, piece), logits in zip(pieces, made, strict=True):
            sent[n] += len(piece)
            if sent[n] >= len(prompts[n]):
                found[n].append(logits[-1])
    return [torch.stack(each) for each in found]
