"""What a container job could leave behind on a machine, looked for everywhere."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from tests.support.container_engines import ask

from penstock.testing.container_engine import processes_with
from penstock.workloads.container.engine import OWNER_LABEL

T = TypeVar("T")


def leftovers(mark: str, jobs_dir: Path) -> list[str]:
    """Processes with a mark, mounts and cgroups of ours below a folder, bundles, open folders."""
    found = [f"process {pid}" for pid in processes_with(mark)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line.split()[4]}" for line in mounts if str(jobs_dir) in line]
    for place in ("live/run", "live/gone", "layers"):
        found += [f"bundle {path}" for path in (jobs_dir / "oci" / place).glob("*")]
    for kind in ("input", "output", "build"):
        found += [f"folder {path}" for path in (jobs_dir / "jobs").glob(f"*/{kind}")]
    return found


def cgroups_of(names: set[str]) -> list[str]:
    """Cgroups named after any of these containers."""
    return [
        folder
        for folder, _, _ in os.walk("/sys/fs/cgroup")
        if any(name in os.path.basename(folder) for name in names)
    ]


def containers_of(socket: Path, jobs_dir: Path) -> list[str]:
    """Containers that an engine still has of the worker in this folder."""
    owner = (jobs_dir / "owner").read_text().strip()
    wanted = quote(json.dumps({"label": [OWNER_LABEL]}))
    status, answer = ask(socket, "GET", f"/containers/json?all=1&filters={wanted}")
    assert status == 200, answer
    return [
        f"container {found['Names'][0]}"
        for found in json.loads(answer)
        if found["Labels"][OWNER_LABEL].startswith(owner)
    ]


def settled(look: Callable[[], T], patience: float = 60) -> T:
    """What is still so after a while: a job that has ended is cleared away soon after."""
    until = time.monotonic() + patience
    while (found := look()) and time.monotonic() < until:
        time.sleep(0.02)
    return found
