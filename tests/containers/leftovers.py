"""What a container job could leave behind on a machine, looked for everywhere."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.testing.container_engine import processes_with


def leftovers(mark: str, jobs_dir: Path) -> list[str]:
    """Processes with a mark, mounts and cgroups of ours below a folder, bundles, open folders."""
    found = [f"process {pid}" for pid in processes_with(mark)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line.split()[4]}" for line in mounts if str(jobs_dir) in line]
    run = jobs_dir / "oci" / "run"
    if run.is_dir():
        names = os.listdir(run)
        found += [f"bundle {name}" for name in names]
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
