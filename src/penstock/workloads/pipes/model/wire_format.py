"""Hidden states in fewer bits for slow links, on request: what they become, and the error of it.

- `16bit`: float16, or bfloat16 where a number does not fit that.
- `8bit`: integers of eight bits with a scale for each block of 64 numbers, so that a few that are
  large do not cost the others their precision. A row is its integers, then its scales (float32).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from penstock.workloads.pipes.config import WireFormat

BLOCK = 64
_SCALE = 4
_MOST_HALF = 65504.0


def encoded(states: torch.Tensor, wire: WireFormat) -> tuple[torch.Tensor, float]:
    """[rows, hidden] as they are sent, and how far they are from what they were, as a share of
    their size. Integers of eight bits are bytes of another width."""
    if wire == "exact" or (wire == "16bit" and states.itemsize <= 2):
        return states, 0.0
    if wire == "16bit":
        fits = float(states.abs().max()) <= _MOST_HALF
        sent = decoded = states.to(torch.float16 if fits else torch.bfloat16)
    else:
        sent = _to_bytes(states)
        decoded = from_bytes(sent, states.shape[1])
    size = float(states.float().norm())
    return sent, float((decoded.float() - states.float()).norm()) / size if size else 0.0


def row_bytes(width: int) -> int:
    """Of a row of so many numbers in eight bits."""
    return width + _SCALE * -(-width // BLOCK)


def width_of(row: int) -> int:
    """The numbers in a row of so many bytes."""
    return row - _SCALE * -(-row // (BLOCK + _SCALE))


def from_bytes(rows: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, width] in float32."""
    scales = rows[:, width:].contiguous().view(torch.float32)
    numbers = rows[:, :width].view(torch.int8).float()
    return numbers * scales.repeat_interleave(BLOCK, 1)[:, :width]


def _to_bytes(states: torch.Tensor) -> torch.Tensor:
    count, width = states.shape
    blocks = F.pad(states.float(), (0, -width % BLOCK)).view(count, -1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(127)
    small = (blocks / scales).round_().to(torch.int8).view(count, -1)[:, :width]
    parts = (small.contiguous().view(torch.uint8), scales.view(count, -1).view(torch.uint8))
    return torch.cat(parts, 1)
