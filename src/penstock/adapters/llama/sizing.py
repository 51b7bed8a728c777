"""How much of a machine a model gets: slots, context, threads, and the memory that takes.

Plain values in, plain values out.
"""

from __future__ import annotations

from msgspec import Struct

from penstock.adapters.llama.machine import Machine
from penstock.models.facts import GgufFacts
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.values import LlmCode, LlmFailure

USUAL_CONTEXT = 8192
LEAST_CONTEXT = 512
"""Below this nobody is served: rather fewer slots."""
EMBEDDING_CONTEXT = 2048
_STEP = 256
EMBEDDING_SLOTS = 4
_BATCH = 128
"""Tokens of prompts that are computed in one go: as fast as more of them, and nobody waits longer
for the next token, or to be rid of a cancelled job."""
_PROCESS = 64 << 20
"""What a process with the engine and no model takes."""
_COMPUTE = 128 << 20
"""Buffers of a computation of up to 512 tokens, of a model of a usual width."""


class Size(Struct, frozen=True, kw_only=True):
    """What one process is started with."""

    slots: int
    context: int
    """Tokens of one slot."""
    threads: int
    batch: int = _BATCH
    memory: int
    """Bytes that it will take, estimated."""


def memory_limit(config: ModelConfig, machine: Machine) -> int:
    """Bytes that all models may take together."""
    return config.memory or machine.memory * 3 // 4


def size_of(facts: GgufFacts, config: ModelConfig, machine: Machine) -> Size:
    """As much as was asked for, or as fits: first a shorter context, then fewer slots.

    What was asked for by name is not made smaller. Raises OUT_OF_MEMORY with both numbers.
    """
    limit = memory_limit(config, machine)
    train = facts.train_context or USUAL_CONTEXT
    context = _rounded(min(config.context or USUAL_CONTEXT, train))
    slots = config.slots
    while (size := _size(facts, config, machine, slots, context)).memory > limit:
        if not config.context and context > LEAST_CONTEXT:
            context = max(LEAST_CONTEXT, context // 2)
        elif slots > 1:
            slots //= 2
        else:
            raise too_large(facts.name, size.memory, limit)
    return size


def embedding_size_of(facts: GgufFacts, config: ModelConfig, machine: Machine) -> Size:
    """For vectors: a text must fit into one batch, so it is as long as the context."""
    train = facts.train_context or EMBEDDING_CONTEXT
    context = _rounded(min(config.context or EMBEDDING_CONTEXT, train))
    slots = min(EMBEDDING_SLOTS, config.slots)
    size = _size(facts, config, machine, slots, context, batch=context)
    limit = memory_limit(config, machine)
    if size.memory > limit:
        raise too_large(facts.name, size.memory, limit)
    return size


def too_large(name: str, memory: int, limit: int) -> LlmFailure:
    return LlmFailure(
        LlmCode.OUT_OF_MEMORY,
        f"the model {name} would take about {shown(memory)}, and models may take {shown(limit)}:"
        " raise the limit, or take a smaller model or a shorter context",
        memory=memory,
        limit=limit,
    )


def shown(size: int) -> str:
    if size < 1 << 30:
        return f"{size / (1 << 20):.0f} MiB"
    return f"{size / (1 << 30):.1f} GiB"


def _rounded(context: int) -> int:
    """As llama.cpp would: up to the next multiple."""
    return -(-context // _STEP) * _STEP


def _size(
    facts: GgufFacts,
    config: ModelConfig,
    machine: Machine,
    slots: int,
    context: int,
    batch: int = _BATCH,
) -> Size:
    threads = min(config.threads or machine.cores, machine.cores)
    cache = slots * context * facts.kv_bytes_per_token
    return Size(
        slots=slots,
        context=context,
        threads=threads,
        batch=batch,
        memory=facts.size + cache + _COMPUTE * -(-batch // 512) + _PROCESS,
    )
