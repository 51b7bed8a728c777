"""How a stage ended, by its items, and how a job ended, by its stages: pure, and pluggable.

The seed says in four places when a job is FAILED, and not the same. `document` is the reading
of its transition table and flowchart; `reference` is what the code it describes does. A
pipeline may have a function of its own.

Both look only at stages that are `counted`: one switched off by a flag is not.

    counted stages                  document    reference
    none                            COMPLETED   COMPLETED
    all completed                   COMPLETED   COMPLETED
    all failed                      FAILED      FAILED
    all skipped                     FAILED      PARTIAL
    failed and skipped              FAILED      FAILED
    partial and failed              PARTIAL     FAILED
    any other mixture               PARTIAL     PARTIAL
    a step completed, but empty     as completed  PARTIAL

Whatever the policy, a job whose orchestrator raised, or one of whose critical stages failed,
is FAILED.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.core.errors import Misconfigured
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import StageKind, StageRecord, StageStatus

if TYPE_CHECKING:
    from penstock.workloads.pipeline.definition import Stage

StagePolicy = Callable[[Sequence[StageRecord]], PipelineJobStatus]

_SUCCESS = frozenset({StageStatus.COMPLETED, StageStatus.PARTIAL})
_ANSWERS = (PipelineJobStatus.COMPLETED, PipelineJobStatus.PARTIAL, PipelineJobStatus.FAILED)


def document(stages: Sequence[StageRecord]) -> PipelineJobStatus:
    """FAILED if nothing that counts succeeded at all; COMPLETED if all of it did."""
    if _stopped(stages):
        return PipelineJobStatus.FAILED
    statuses = {stage.status for stage in stages if stage.counted}
    if statuses <= {StageStatus.COMPLETED}:
        return PipelineJobStatus.COMPLETED
    return PipelineJobStatus.PARTIAL if statuses & _SUCCESS else PipelineJobStatus.FAILED


def reference(stages: Sequence[StageRecord]) -> PipelineJobStatus:
    """FAILED if a stage failed and none completed; a partial stage is no success here."""
    counted = [stage for stage in stages if stage.counted]
    if any(stage.empty and stage.kind is StageKind.STEP for stage in counted):
        return PipelineJobStatus.PARTIAL
    statuses = {stage.status for stage in counted}
    if statuses <= {StageStatus.COMPLETED}:
        return PipelineJobStatus.COMPLETED
    if StageStatus.FAILED in statuses and StageStatus.COMPLETED not in statuses:
        return PipelineJobStatus.FAILED
    return PipelineJobStatus.PARTIAL


POLICIES: Mapping[str, StagePolicy] = {"document": document, "reference": reference}


def overall(policy: str | Callable[..., Any], stages: Sequence[StageRecord]) -> PipelineJobStatus:
    """The status that a job ends with. Raises Misconfigured where a policy of the pipeline's
    own gives no such status, and whatever that policy raises."""
    if _stopped(stages):
        return PipelineJobStatus.FAILED
    return _checked(policy_of(policy)(tuple(stages)))


def policy_of(policy: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function of that name, or the function itself."""
    if callable(policy):
        return policy
    if policy not in POLICIES:
        raise Misconfigured(
            f"there is no status policy {policy!r}",
            hint=f"there are {', '.join(POLICIES)}, or give a function of the stages' records",
        )
    return POLICIES[policy]


def stage_status(
    *,
    ok: int,
    failed: int,
    skipped: int,
    total: int,
    min_ok: int = 0,
    max_failed: float | None = None,
    errors: int = 0,
) -> StageStatus:
    """How a stage that did not raise ended.

    `skipped` items are those that an open breaker kept from running; `errors` is how often the
    stage itself reported one. Items that never ended count against it like failed ones.
    """
    if ok < min_ok or (max_failed is not None and total and failed / total > max_failed):
        return StageStatus.FAILED
    if ok == total and not errors:
        return StageStatus.COMPLETED
    if ok or not total:
        return StageStatus.PARTIAL
    return StageStatus.SKIPPED if skipped == total else StageStatus.FAILED


def _stopped(stages: Iterable[StageRecord]) -> bool:
    return StageStatus.FAILED in {stage.status for stage in stages if stage.critical}


def _checked(answer: Any) -> PipelineJobStatus:
    if inspect.iscoroutine(answer):
        answer.close()
    if answer not in _ANSWERS:
        raise Misconfigured(
            f"the pipeline's status policy gave {answer!r:.100}",
            hint=f"a plain function that returns one of {', '.join(_ANSWERS)}",
        )
    return PipelineJobStatus(answer)


DISABLED = "disabled"
CRITICAL_STAGE_FAILED = "critical_stage_failed"


class Skip(Struct, frozen=True):
    reason: str
    counted: bool


def skip_of(stage: Stage, config: Any, stages: Mapping[str, StageRecord]) -> Skip | None:
    """None if it is to run. Raises what a flag that is a function raises."""
    if _stopped(stages.values()):
        return Skip(CRITICAL_STAGE_FAILED, True)
    if not is_enabled(stage, config):
        return Skip(DISABLED, False)
    over, _, upstream = stage.info.over.partition(":")
    needs = (upstream, *stage.info.needs) if over == "stage" else stage.info.needs
    for name in needs:
        if (skip := _missed(name, stages.get(name))) is not None:
            return skip
    return None


def is_enabled(stage: Stage, config: Any) -> bool:
    if stage.enabled is not None:
        return bool(stage.enabled(config))
    flag = stage.info.enabled
    if not flag:
        return True
    return bool(config.get(flag) if isinstance(config, Mapping) else getattr(config, flag))


def _missed(name: str, needed: StageRecord | None) -> Skip | None:
    if needed is None or needed.status in (StageStatus.COMPLETED, StageStatus.PARTIAL):
        return None
    if needed.status is StageStatus.FAILED:
        return Skip(f"{name}_failed", True)
    if needed.reason == DISABLED or needed.reason.endswith("_disabled"):
        return Skip(f"{name}_disabled", False)
    return Skip(f"{name}_skipped", True)
