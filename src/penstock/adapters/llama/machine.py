"""The machine: its cores, its memory, and what the kernel's control groups allow of it.

Version 2 has one tree (`memory.max`), version 1 one for memory (`memory.limit_in_bytes`). A limit
of any group above a process holds for it too. Inside a container the path of a group may be the
host's, and name nothing here; then only the root of the tree is looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from penstock.models.facts import GgufFacts
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.values import LlmCode, LlmFailure

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.M)


class Machine(Struct, frozen=True):
    cores: int
    memory: int


def this_machine() -> Machine:
    """As much of it as this process may have."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(cores=cores or 1, memory=min(memory, memory_limit_of() or memory))


def memory_limit_of(process: int | str = "self", *, root: Path = ROOT, proc: Path = PROC) -> int:
    """The lowest limit in bytes of the groups of a process; 0 if there is none."""
    found = (
        _number(group / name)
        for group in _groups(process, root, proc)
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    return min((limit for limit in found if limit), default=0)


def memory_kills(process: int | str = "self", *, root: Path = ROOT, proc: Path = PROC) -> int:
    """How often the kernel has killed a process of the same group for memory; 0 if it is unknown.

    Never a count of the whole machine: most of those have nothing to do with this process.
    """
    for group in _groups(process, root, proc):
        for name in ("memory.events.local", "memory.events", "memory.oom_control"):
            if (found := _KILLS.search(_text(group / name))) is not None:
                return int(found[1])
    return 0


def _groups(process: int | str, root: Path, proc: Path) -> Iterator[Path]:
    """The folders of its groups, from its own up to the root of each tree."""
    for line in _text(proc / str(process) / "cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            tree = root / "unified" if (root / "unified").is_dir() else root
        elif "memory" in controllers.split(","):
            tree = root / "memory"
        else:
            continue
        group = tree / path.lstrip("/")
        yield from (one for one in (group, *group.parents) if one == tree or tree in one.parents)


def _number(file: Path) -> int:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


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
