"""A store that is filled tenfold at a time, and what a job costs at each size."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from harness import Figures, medians
from plan import RATE, Plan
from run import measure, scratch
from side import PENSTOCK


def measure_growth(
    plan: Plan, root: Path | None, tell: Callable[[str], None], *, growth: bool, memory: bool
) -> tuple[list[Figures], Figures]:
    """The costs at each size, and the memory at the largest."""
    costs: list[Figures] = []
    with scratch(root) as base:
        for stored in plan.stored if growth else plan.stored[-1:]:
            tell(f"store with {stored:,} finished jobs")
            measure(PENSTOCK, "fill", base, {"jobs": stored})
            if growth:
                runs = [_cost(plan, base, root) for _ in range(plan.repeats)]
                costs.append({"stored": stored, **medians(runs)})
        if not memory:
            return costs, {}
        tell(f"memory with {plan.waiting:,} waiting jobs besides")
        figures = measure(PENSTOCK, "memory", base, {"waiting": plan.waiting})
        figures |= measure(PENSTOCK, "memory_again", base, {})
        return costs, {"stored": plan.stored[-1], "waiting": plan.waiting, **figures}


def _cost(plan: Plan, base: Path, root: Path | None) -> Figures:
    """Measured on a copy, so that the store keeps its size."""
    with scratch(root) as folder:
        shutil.copytree(base / "data", folder / "data")
        os.sync()  # the copy's own writing should not weigh on what is measured
        options = {"jobs": plan.growth_jobs, "seconds": plan.seconds / 2, "rate": RATE}
        return measure(PENSTOCK, "cost", folder, options)
