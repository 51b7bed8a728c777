"""Which device a node computes on, and in what precision there."""

from __future__ import annotations

import torch

from penstock.core.errors import Misconfigured
from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import AUTO


def device_of(name: str) -> torch.device:
    """The device of this name, or if it is empty an accelerator that is there: of several GPUs the
    one with most memory free. Raises Misconfigured."""
    if not name:
        return _found()
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # torch has no one kind for it
        said = (str(error).splitlines() or [""])[0]
        raise Misconfigured(
            f"node.device {name!r} can't be used here: {said}",
            hint="leave it empty, or say cpu, cuda:0 or mps",
        ) from error
    return device


def _found() -> torch.device:
    if torch.cuda.is_available():
        free = [torch.cuda.mem_get_info(n)[0] for n in range(torch.cuda.device_count())]
        return torch.device("cuda", free.index(max(free)))
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def device_dtype(device: torch.device, dtype: str) -> str:
    """What weights are held in on an accelerator. Raises LlmFailure."""
    if dtype == "int8":
        raise LlmFailure(LlmCode.NOT_SUPPORTED, f"weights of int8 need a CPU, not {device}")
    if dtype != AUTO:
        return dtype
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return "bfloat16"
    return "float16" if device.type in ("cuda", "mps") else "float32"
