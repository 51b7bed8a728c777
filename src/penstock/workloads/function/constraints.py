"""What safety rules demand of a job, and what a function can be held to.

Time, retries, concurrency and the size of the result are seen to by others. What is left is
what the code itself may do; where that can't be enforced, the function is not called.
"""

from __future__ import annotations

import sys

from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Outcome
from penstock.workloads.function.options import Mode

CONSTRAINT_NOT_ENFORCED = "CONSTRAINT_NOT_ENFORCED"


def refusal(constraints: Constraints, mode: Mode, platform: str = sys.platform) -> Outcome | None:
    """Why a function of this mode may not run within these constraints; None if it may."""
    if constraints.read_only:
        return not_enforced(
            "read_only", mode, "have the rule deny it, or require an approval, instead"
        )
    if constraints.network:
        return not_enforced(
            f"network = {list(constraints.network)}",
            mode,
            "have the rule allow no network at all (an empty list), or require an approval",
        )
    for demand, made in (
        ("max_memory", constraints.max_memory is not None),
        ("network = []", is_offline(constraints)),
    ):
        if made and mode is not Mode.PROCESS:
            return not_enforced(demand, mode, "run it in process mode (mode='process')")
        if made and platform != "linux":
            return not_enforced(demand, mode, "run it on a worker on Linux")
    return None


def is_offline(constraints: Constraints | None) -> bool:
    """Whether it may use no network at all."""
    return constraints is not None and constraints.network is not None and not constraints.network


def memory_within(limit: int | None, constraints: Constraints | None) -> int | None:
    """A function's own limit, or the rules' if that is less."""
    most = None if constraints is None else constraints.max_memory
    given = [size for size in (limit, most) if size is not None]
    return min(given, default=None)


def not_enforced(demand: str, mode: Mode, help: str, why: str = "") -> Outcome:
    return Outcome(
        JobState.FAILED,
        error_code=CONSTRAINT_NOT_ENFORCED,
        error_message=f"the safety rules demand {demand}, to which a function in {mode} mode"
        f" can't be held{f' here ({why})' if why else ''}, so it was not run: {help}",
    )
