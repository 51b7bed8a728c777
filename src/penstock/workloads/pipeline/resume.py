"""A run that goes on where another process left it, or begins.

Stages are declared, not replayed, so what was done can be kept as long as it is still a part
of the pipeline: the stages that have begun must be its first ones, unchanged.
"""

from __future__ import annotations

from penstock.workloads.pipeline import records
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import OnChange, PipelineRecord, StageRecord, StageStatus
from penstock.workloads.pipeline.reuse import form_of

DEFINITION_CHANGED = "DEFINITION_CHANGED"


class DefinitionChanged(Exception):
    """What was begun can't be gone on with."""

    def __init__(self, message: str, stage: str = "orchestrator") -> None:
        super().__init__(message)
        self.stage = stage


def first_stages(pipeline: Definition) -> tuple[StageRecord, ...]:
    """The stages of a run of which nothing has begun."""
    return records.first_stages(stage.info for stage in pipeline.stages.values())


def is_changed(record: PipelineRecord, pipeline: Definition) -> bool:
    """Whether something was begun under another definition than this."""
    begun = any(stage.status is not StageStatus.PENDING for stage in record.stages)
    return begun and record.fingerprint not in ("", pipeline.fingerprint)


def stages_to_go_on(record: PipelineRecord, pipeline: Definition) -> tuple[StageRecord, ...]:
    """The stages with what was done of them. Raises DefinitionChanged, naming the stage.

    Not for a pipeline that restarts upon a change: that forgets what was done.
    """
    if is_changed(record, pipeline):
        if pipeline.on_change is OnChange.REFUSE:
            raise DefinitionChanged(
                f"pipeline {pipeline.name} was changed while this job ran, and its jobs are not"
                " resumed then (on_change='refuse')"
            )
        _check(record, pipeline)
    begun = {s.name: s for s in record.stages if s.status is not StageStatus.PENDING}
    known = (begun.get(stage.name, stage) for stage in first_stages(pipeline))
    return (*known, *removed_stages(record, pipeline))


def removed_stages(record: PipelineRecord, pipeline: Definition) -> list[StageRecord]:
    """Those that the pipeline had when the job began. They are kept, last, and do not count."""
    first = len(pipeline.stages)
    gone = [stage for stage in record.stages if stage.name not in pipeline.stages]
    return [
        StageRecord(
            name=stage.name,
            index=first + place,
            kind=stage.kind,
            form=stage.form,
            status=StageStatus.SKIPPED,
            reason="removed",
            counted=False,
        )
        for place, stage in enumerate(gone)
    ]


def _check(record: PipelineRecord, pipeline: Definition) -> None:
    begun = [stage for stage in record.stages if stage.status is not StageStatus.PENDING]
    now = list(pipeline.stages.values())
    for index, stage in enumerate(begun):
        if stage.name not in pipeline.stages:
            raise DefinitionChanged(f"stage {stage.name} is not there any more", stage.name)
        if index >= len(now) or now[index].name != stage.name:
            raise DefinitionChanged(f"stage {stage.name} is not in its place any more", stage.name)
        if stage.form and stage.form != form_of(now[index]):
            raise DefinitionChanged(
                f"stage {stage.name} was {stage.form!r} and is {form_of(now[index])!r}", stage.name
            )
