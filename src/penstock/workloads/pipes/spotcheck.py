"""Whether a node computes what its weights say: the origin recomputes one of its layers.

The node can't tell a check from a job: it is a way on which the origin says that it holds all other
layers itself, and hidden states like any. One layer is enough to find a node that lies often; one
that lies rarely is found after a while.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import Hop, Job
from penstock.workloads.pipes.llm_model import LlmModel
from penstock.workloads.pipes.model.cache import KvPool

if TYPE_CHECKING:
    from penstock.workloads.pipes.model.architecture import Architecture
    from penstock.workloads.pipes.weights.source import Source

TOKENS = 8
_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2, "int8": 1e-1}
"""How far a result may lie from ours, as a share of its own size: by the less exact of both."""


def chosen(hops: Sequence[Hop], origin: str, chance: random.Random) -> Hop | None:
    """One layer of another node, any with the same likelihood."""
    layers = [
        Hop(hop.node_id, layer, layer + 1)
        for hop in hops
        if hop.node_id != origin
        for layer in range(hop.start, hop.end)
    ]
    return chance.choice(layers) if layers else None


def route_of(check: Hop, origin: str, num_layers: int) -> tuple[Hop, ...]:
    """All other layers are said to be the origin's."""
    around = (Hop(origin, 0, check.start), check, Hop(origin, check.end, num_layers))
    return tuple(hop for hop in around if hop.start < hop.end)


def recomputed(
    architecture: Architecture, source: Source, check: Hop, states: torch.Tensor
) -> torch.Tensor:
    """What should come back. Reads the layer from the origin's own files."""
    model = LlmModel.load(architecture, source, LayerRange(check.start, check.end), "float32")
    pool = KvPool(model.layouts, architecture.max_positions, 1 << 30, torch.float32)
    count = len(states)
    job = Job(b"", "", "", "", hops=(check,), current_layer=check.start, count=count)
    job.cache, job.data = pool.reserve([check.start], count), states.float()
    model.process_jobs([job], check.end)
    assert job.data is not None
    return job.data


def differ(theirs: torch.Tensor, ours: torch.Tensor, dtype: str) -> str:
    """How a result is wrong, or nothing."""
    if theirs.shape != ours.shape:
        return f"it has the shape {tuple(theirs.shape)}, not {tuple(ours.shape)}"
    away = (theirs.float() - ours).norm() / ours.norm()
    if not bool(away <= _TOLERANCE.get(dtype, 1e-1)):
        return f"it differs by {float(away):.2g} of its size"
    return ""
