"""From the tensors of a checkpoint to modules of transformers, a layer at a time.

The names and forms that files have and those that modules have differ (experts are stored singly
and held joined): transformers knows how, and is asked for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as told

from penstock.workloads.llm.values import LlmCode, LlmFailure

told.disable_progress_bar()


def fill(
    model: Any,
    tensors: Mapping[str, torch.Tensor],
    where: str,
    device: torch.device,
    within: str = "",
    without: str = "",
) -> set[str]:
    """Put tensors where their names say, and tell which were not there. Of what lies `within` and
    not `without` nothing may be missing. Raises LlmFailure; `where` names this part of the model
    in it."""
    config = LoadStateDictConfig(
        device_map={"": device}, weight_mapping=get_model_conversion_mapping(model)
    )
    try:
        with torch.no_grad():
            found, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    except Exception as error:  # whatever a conversion stumbles over
        raise _invalid(f"{where} can't be read: {error}") from error
    for name, there, expected in sorted(found.mismatched_keys):
        short = name.removeprefix(within)
        raise _invalid(f"{short} of {where} is {list(there)}, not {list(expected)}")
    for name, why in sorted(found.conversion_errors.items()):
        raise _invalid(f"{name.removeprefix(within)} of {where} can't be read: {why}")
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    one_of = {*tied, *tied.values()}
    needed = found.missing_keys
    if one_of - found.missing_keys:  # whichever of them is there
        needed = needed - one_of
    missing = [
        name
        for name in sorted(needed)
        if name.startswith(within) and not (without and name.startswith(without))
    ]
    if missing:
        raise _invalid(f"{where} lacks {missing[0].removeprefix(within)}")
    ignored = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
    unknown = sorted(
        name for name in found.unexpected_keys if not any(one.search(name) for one in ignored)
    )
    if unknown:
        raise LlmFailure(
            LlmCode.NOT_SUPPORTED,
            f"{where} has what {model.config.model_type} models have not:"
            f" {', '.join(name.removeprefix(within) for name in unknown[:8])}",
            architecture=model.config.model_type,
        )
    return set(found.missing_keys)


def hollow(model: Any, layers: nn.ModuleList, device: torch.device) -> None:
    """Let everything but the layers be run, with weights that are nothing and take no memory."""
    inner = {id(part) for part in layers.modules()}
    for part in model.modules():
        for name, one in part.named_parameters(recurse=False):
            if id(part) not in inner:
                zero = torch.zeros((), dtype=one.dtype, device=device).expand(one.shape)
                weight = nn.Parameter(zero, requires_grad=False)
                weight._is_hf_initialized = True
                setattr(part, name, weight)
    settle(model, model, device, without=layers)


def settle(
    model: Any, module: nn.Module, device: torch.device, without: nn.Module | None = None
) -> None:
    """Make what is in no file (tables of rotations and the like), as the model itself does."""
    passed_over = set() if without is None else {id(part) for part in without.modules()}
    with torch.no_grad():
        for part in module.modules():
            if id(part) in passed_over:
                continue
            empty = [name for name, one in part.named_buffers(recurse=False) if one.is_meta]
            for name in empty:
                part._buffers[name] = torch.empty_like(part._buffers[name], device=device)
            if empty:
                model._init_weights(part)
        for one in module.parameters():
            one.requires_grad = False


def _invalid(what: str) -> LlmFailure:
    return LlmFailure(LlmCode.MODEL_INVALID, what)
