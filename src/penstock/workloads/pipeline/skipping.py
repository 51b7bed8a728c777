"""Whether a stage's turn is passed over, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from penstock.workloads.pipeline.records import StageRecord, StageStatus
from penstock.workloads.pipeline.stage import Stage

DISABLED = "disabled"
CRITICAL_STAGE_FAILED = "critical_stage_failed"


class Skip(Struct, frozen=True):
    reason: str
    counted: bool


def skip_of(stage: Stage, config: Any, stages: Mapping[str, StageRecord]) -> Skip | None:
    """None if it is to run. Raises what a flag that is a function raises."""
    if any(one.critical and one.status is StageStatus.FAILED for one in stages.values()):
        return Skip(CRITICAL_STAGE_FAILED, True)
    if not is_enabled(stage, config):
        return Skip(DISABLED, False)
    for name in _needed(stage):
        skip = _missed(name, stages.get(name))
        if skip is not None:
            return skip
    return None


def is_enabled(stage: Stage, config: Any) -> bool:
    if stage.enabled is not None:
        return bool(stage.enabled(config))
    flag = stage.info.enabled
    if not flag:
        return True
    return bool(config.get(flag) if isinstance(config, Mapping) else getattr(config, flag))


def _needed(stage: Stage) -> tuple[str, ...]:
    kind, _, name = stage.info.over.partition(":")
    return (name, *stage.info.needs) if kind == "stage" else stage.info.needs


def _missed(name: str, needed: StageRecord | None) -> Skip | None:
    if needed is None or needed.status in (StageStatus.COMPLETED, StageStatus.PARTIAL):
        return None
    if needed.status is StageStatus.FAILED:
        return Skip(f"{name}_failed", True)
    if needed.reason == DISABLED or needed.reason.endswith("_disabled"):
        return Skip(f"{name}_disabled", False)
    return Skip(f"{name}_skipped", True)
