"""How a node is set up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
"""`int8` are weights of eight bits, computed with in float32 on a CPU. `auto` takes what is fastest
here of float32 and bfloat16."""
AUTO = "auto"
WireFormat = Literal["exact", "16bit", "8bit"]
"""How hidden states go from node to node."""


class LayerRange(Struct, frozen=True, order=True):
    """Layers `start` to `end`, the last one not included."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.end

    def __str__(self) -> str:
        """As people write it: the last one included."""
        return f"{self.start}-{self.end - 1}"


class LpConfig(Struct, frozen=True, kw_only=True):
    """Everything a node is told at its start."""

    model: str
    """The name under which the network knows it, as in `job.chat.<model>`."""
    source: Path
    """A folder with safetensors and config.json, or a GGUF file."""
    node_id: str = ""
    """Unique in the network; made up from the host's name if empty."""
    layers: tuple[LayerRange, ...] | None = None
    """None lets the network decide ("auto"); () holds none."""
    end_model: bool = False
    """Whether text is handled here: jobs can then begin on this node."""
    local_layers: Annotated[int, Meta(ge=0)] = 1
    """Of the end model: how many of the first layers are computed beside it, so that what leaves
    is never an embedding as such."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT for other nodes."""
    advertise: str = ""
    """HOST:PORT at which others reach it, if that is not where it listens."""
    join: tuple[str, ...] = ()
    """Addresses of nodes that are there already; one that answers is enough."""
    key: str = ""
    """The network's key (`penstock node key`): nodes with the same key form a network."""

    device: str = ""
    """`cpu`, `cuda:0`, `mps`; if empty the fastest one that is there, by a short timing."""
    dtype: Dtype = "auto"
    threads: Annotated[int, Meta(ge=0)] = 0
    """0 is chosen by measurement."""
    memory: Annotated[int, Meta(ge=0)] = 0
    """Bytes that weights and caches may take; 0 means three quarters of the machine's."""
    cache: Annotated[int, Meta(ge=0)] = 0
    """Bytes of it for caches; 0 means a quarter of what is left beside the weights, at most
    4 GiB."""
    context: Annotated[int, Meta(ge=16)] = 4096
    """Tokens that one job may have, prompt and answer together; less if the model has less."""
    max_jobs: Annotated[int, Meta(ge=1)] = 64
    """Jobs that a node has open at once; more wait, with that reason."""
    max_waiting: Annotated[int, Meta(ge=0)] = 256
    """Jobs that may wait for room on a node; more are refused."""

    prefill_chunk_size: Annotated[int, Meta(ge=1)] = 256
    """Tokens of a prompt that go through the pipe at once."""
    pass_tokens: Annotated[int, Meta(ge=1)] = 512
    """Tokens of all jobs that are computed in one pass."""
    keep: Annotated[float, Meta(ge=0)] = 300.0
    """Seconds for which the cache of a finished job is kept for a next turn, unless its room is
    needed; 0 keeps none."""
    wire: WireFormat = "exact"
    """Of jobs that begin here. Fewer bits than they are computed in change answers."""
    speculation: bool = True
    """Whether tokens that came before are proposed and computed along, where that is faster."""
    print_times: bool = False
    """Log the timing statistics of every job."""

    ping: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds between two signs of life."""
    silence: Annotated[float, Meta(gt=0)] = 5.0
    """Seconds without one after which a node is taken for lost."""
    step_timeout: Annotated[float, Meta(gt=0)] = 30.0
    """Seconds that one step may take on its way round the pipe; more if the measured speed of the
    nodes says so."""
    open_timeout: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds that a job may wait in all: for a pipe to be whole, and for room on its nodes."""
    drain: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds that a node which leaves gives the jobs it has."""


# -- layers as people write them ----------------------------------------------------------

NONE = "none"
_RANGE = re.compile(r"(-?\d+)(?:\s*-\s*(-?\d+))?", re.ASCII)
_MOST = 100_000
"""Layers that no model has."""


def parse_layers(text: str) -> tuple[LayerRange, ...] | None:
    """`auto` (None), `none` (()), or `0-14,20-29` with the last one included, in order and each as
    long as it can be. Raises ValueError, saying what is wrong with which part."""
    said = text.strip()
    if said.lower() == AUTO:
        return None
    if said.lower() == NONE:
        return ()
    ranges = sorted(_range(part.strip()) for part in said.split(","))
    joined: list[LayerRange] = []
    for layers in ranges:
        if joined and layers.start < joined[-1].end:
            raise ValueError(f"{joined[-1]} and {layers} overlap")
        if joined and layers.start == joined[-1].end:
            joined[-1] = LayerRange(joined[-1].start, layers.end)
        else:
            joined.append(layers)
    return tuple(joined)


def check_within(ranges: Sequence[LayerRange], num_layers: int) -> None:
    """Raises ValueError for layers that a model does not have."""
    for layers in ranges:
        if layers.end > num_layers:
            raise ValueError(
                f"{layers} goes beyond the model: it has {num_layers} layers, 0 to {num_layers - 1}"
            )


def _range(part: str) -> LayerRange:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise ValueError(f"{part!r} is not a range of layers: write auto, none, or 0-14,20-29")
    first = int(found[1])
    last = first if found[2] is None else int(found[2])
    if first < 0 or last < 0:
        raise ValueError(f"{part!r}: layers are counted from 0")
    if last < first:
        raise ValueError(f"{part!r} is the wrong way round: write {last}-{first}")
    if last >= _MOST:
        raise ValueError(f"{part!r}: no model has so many layers")
    return LayerRange(first, last + 1)
