"""What a process can have of the machine, or of what a container has of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.workloads.pipes.weights.memory import machine_memory

GIB = 1 << 30


def machine(root: Path, membership: str, limits: dict[str, str]) -> int:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 5 kB\n")
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in limits.items():
        file = root / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return machine_memory(root / "proc", root / "cgroup")


@pytest.mark.parametrize(
    ("membership", "limits", "gib"),
    [
        ("0::/\n", {}, 16),
        ("0::/\n", {"memory.max": "max\n"}, 16),
        ("0::/\n", {"memory.max": f"{2 * GIB}\n"}, 2),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{3 * GIB}\n"}, 3),
        ("0::/a\n", {"a/memory.max": f"{5 * GIB}\n", "memory.max": f"{4 * GIB}\n"}, 4),
        ("0::/a\n", {"a/memory.max": f"{99 * GIB}\n"}, 16),
        ("4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": f"{GIB}\n"}, 1),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, 16),
        ("4:cpu,memory:/gone\n", {"memory/memory.limit_in_bytes": f"{GIB}\n"}, 1),
    ],
)
def test_a_containers_limit_counts_in_both_versions_and_at_every_height(
    membership: str, limits: dict[str, str], gib: int, tmp_path: Path
) -> None:
    assert machine(tmp_path, membership, limits) == gib * GIB


def test_this_machine_has_some() -> None:
    assert machine_memory() > 1 << 26
