"""Which device a node computes on, and in what precision there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.nn import functional as F

from penstock.core.errors import Misconfigured
from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import AUTO
from penstock.workloads.pipes.measure import ANSWER, CHUNK, PROMPT
from penstock.workloads.pipes.model.linear import COMPUTE

Linears = tuple[tuple[int, int], ...]
_TIMES = 4
"""The best counts: the first one warms up."""


def device_of(name: str, linears: Linears = (), dtype: str = AUTO) -> torch.device:
    """The device of this name, or if it is empty the one on which a layer of such linear maps (out,
    in) is fastest. Raises Misconfigured."""
    if not name:
        return fastest(there(), linears, dtype)
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


def there() -> list[torch.device]:
    """All that torch can use; of several GPUs those with most memory free first."""
    found = [torch.device("mps")] if torch.backends.mps.is_available() else []
    if torch.cuda.is_available():
        gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
        found += sorted(gpus, key=lambda gpu: -torch.cuda.mem_get_info(gpu)[0])
    return [*found, torch.device("cpu")]


def fastest(
    devices: Sequence[torch.device],
    linears: Linears,
    dtype: str = AUTO,
    timed: Callable[[torch.device, str, Linears], float] | None = None,
) -> torch.device:
    """For a usual job; the first of those that are as fast. Weights of int8 need a CPU."""
    if dtype == "int8":
        devices = [device for device in devices if device.type == "cpu"]
    if len(devices) == 1:
        return devices[0]
    timed = timed or layer_seconds
    # Precisions of a CPU are tried elsewhere, in a process of their own.
    return min(
        devices,
        key=lambda one: timed(
            one, "float32" if one.type == "cpu" else device_dtype(one, dtype), linears
        ),
    )


@cache
def layer_seconds(device: torch.device, dtype: str, linears: Linears) -> float:
    """What a job takes of one layer, prompt and answer; infinite where it can't be computed."""
    total = 0.0
    try:
        for rows, columns in linears:
            weight = torch.ones(rows, columns, device=device, dtype=COMPUTE[dtype])
            for tokens, times in ((1, ANSWER), (CHUNK, PROMPT // CHUNK)):
                x = torch.ones(tokens, columns, device=device, dtype=weight.dtype)
                total += times * min(_seconds(x, weight) for _ in range(_TIMES))
    except Exception:  # no memory, no such operation: torch has no one kind for it
        return math.inf
    return total


def _seconds(x: torch.Tensor, weight: torch.Tensor) -> float:
    began = time.perf_counter()
    F.linear(x, weight)
    if x.device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(x.device)
    return time.perf_counter() - began


def device_dtype(device: torch.device, dtype: str) -> str:
    """What weights are held in on an accelerator. Raises LlmFailure."""
    if dtype == "int8":
        raise LlmFailure(LlmCode.NOT_SUPPORTED, f"weights of int8 need a CPU, not {device}")
    if dtype != AUTO:
        return dtype
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return "bfloat16"
    return "float16" if device.type in ("cuda", "mps") else "float32"
