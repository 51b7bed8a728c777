"""A run as rows of its job: how it is checkpointed, how it is read back, and its fold.

    run             one row: the definition's fingerprint, errors, and at the end how it ended
    stage           a row a stage, by its index: how far it is
    list/STAGE/G    the items of a stage as they were listed, many a row; `n` is the last one's.
                    One more row, without items, says what was counted while they were listed
    item/STAGE/G    a row an item that has ended

G is the stage's generation: rows can be replaced but not removed, so a stage that is listed
anew gets names of its own. Nothing else remembers a run. What a caller sees of it is folded
from its job and these rows (`fold`), so a run that ended without its runner is as complete as
any other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeGuard
from urllib.parse import unquote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.core.job import Job, JobRequest
from penstock.core.ledger import Step
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.store import StepPage, StepQuery
from penstock.workloads.pipeline.records import (
    STALE_AFTER,
    STALE_MESSAGE,
    Alert,
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    PipelineInfo,
    PipelineRecord,
    RunSummary,
    StageError,
    StageKind,
    StageRecord,
    StageStatus,
    by_name,
    pipeline_of,
    trace_of,
)
from penstock.workloads.pipeline.retrying import CANCELLED
from penstock.workloads.pipeline.summary import closed, evaluate

Read = Callable[[str, StepQuery], Awaitable[StepPage]]
"""Reads checkpointed rows of a job."""
Metric = float | int | str | bool
Outcomes = tuple[ItemOutcome, ...]
"""Which items are meant; none: all."""

RUN, STAGE = "run", "stage"
STALE = "STALE"
WAS_CANCELLED = "Job was cancelled"
_LONGEST_REASON = 500
_LISTED_BYTES = 24 << 10
"""Characters of one row of listed items."""
_LISTED_ITEMS = 500


class ItemReport(Struct, array_like=True):
    """What a stage's function reported beside its output."""

    added: dict[str, int | float] = {}
    """Metrics to add up."""
    fixed: dict[str, Metric] = {}
    """Metrics to set."""
    errors: list[str] = []


class _ItemInfo(Struct, frozen=True, array_like=True, gc=False):
    """The `info` of an item's row."""

    attempts: int
    output_count: int
    error_class: ErrorClass | None
    error_code: str
    duration_ms: float
    reused: bool
    report: ItemReport | None = None


class RunState(Struct, kw_only=True, omit_defaults=True):
    """The row of a run: what neither its job nor its stages know. A RunLog changes it in place."""

    fingerprint: str = ""
    status: PipelineJobStatus | None = None
    """How it ended; None while it runs."""
    errors: tuple[StageError, ...] = ()
    abandoned_items: tuple[str, ...] = ()
    summary: RunSummary | None = None
    alerts: tuple[Alert, ...] = ()
    current_stage: str | None = None
    output: str = ""
    """Pointer to what its last step that ran returned."""
    hooks_called: bool = False


_encode = msgspec.json.Encoder().encode
_info = msgspec.json.Decoder(_ItemInfo).decode
_stage = msgspec.json.Decoder(StageRecord).decode
_run = msgspec.json.Decoder(RunState).decode
_pairs = msgspec.json.Decoder(list[tuple[str, str]]).decode
_report = msgspec.json.Decoder(ItemReport).decode
_OUTCOMES = {str(outcome): outcome for outcome in ItemOutcome}


# -- one row ----------------------------------------------------------------------


def item_rows_name(stage: StageRecord) -> str:
    return f"item/{stage.name}/{stage.generation}"


def list_rows_name(stage: StageRecord) -> str:
    return f"list/{stage.name}/{stage.generation}"


def run_row(state: RunState) -> Step:
    return Step(RUN, 0, outcome=str(state.status or ""), output=_encode(state).decode())


def stage_row(stage: StageRecord) -> Step:
    text = _encode(stage).decode()
    return Step(STAGE, stage.index, key=stage.name, outcome=str(stage.status), output=text)


def item_row(name: str, item: ItemRecord, report: ItemReport | None = None) -> Step:
    info = _ItemInfo(
        item.attempts,
        item.output_count,
        item.error_class,
        item.error_code,
        item.duration_ms,
        item.reused,
        # Errors that it reported are the item's error.
        ItemReport(report.added, report.fixed, []) if has_metrics(report) else None,
    )
    return Step(
        name,
        item.seq,
        item.key,
        item.outcome.value,
        item.input,
        item.output,
        item.error,
        item.finished_at or 0.0,
        0,
        _encode(info).decode(),
    )


def item_of(row: Step) -> ItemRecord:
    info = _info(row.info)
    return ItemRecord(
        seq=row.n,
        key=row.key,
        input=row.input,
        outcome=_OUTCOMES[row.outcome],
        output=row.output,
        output_count=info.output_count,
        attempts=info.attempts,
        error_class=info.error_class,
        error_code=info.error_code,
        error=row.error,
        duration_ms=info.duration_ms,
        finished_at=row.at or None,
        reused=info.reused,
    )


def report_of(row: Step) -> ItemReport | None:
    return _info(row.info).report


def has_metrics(report: ItemReport | None) -> TypeGuard[ItemReport]:
    return report is not None and bool(report.added or report.fixed)


def report_size(report: ItemReport) -> int:
    """Bytes that its metrics take in an item's row."""
    return len(_encode((report.added, report.fixed)))


def list_rows(name: str, items: Sequence[ItemRecord]) -> list[Step]:
    """Rows that list these items, which follow each other. An input that is a blob has a row of
    its own, whose `input` keeps the blob from being collected."""
    rows: list[Step] = []
    some: list[tuple[str, str]] = []
    size = 0

    def pack(last: int) -> None:
        nonlocal size
        if some:
            rows.append(Step(name, last, output=_encode(some).decode()))
            some.clear()
            size = 0

    for item in items:
        if item.input and not item.input.startswith("data:"):
            pack(item.seq - 1)
            rows.append(Step(name, item.seq, item.key, input=item.input))
            continue
        length = len(item.key) + len(item.input) + 8
        if size + length > _LISTED_BYTES or len(some) >= _LISTED_ITEMS:
            pack(item.seq - 1)
        some.append((item.key, item.input))
        size += length
    if items:
        pack(items[-1].seq)
    return rows


def list_end_row(name: str, total: int, report: ItemReport) -> Step:
    """The row after those of the items: what was reported while they were listed."""
    return Step(name, total, output="[]", info=_encode(report).decode())


def listed_items(row: Step) -> list[ItemRecord]:
    """The items of a row, none of them ended."""
    if row.input:
        return [ItemRecord(seq=row.n, key=row.key, input=row.input)]
    pairs = _pairs(row.output)
    first = row.n - len(pairs) + 1
    return [
        ItemRecord(seq=seq, key=key, input=pointer)
        for seq, (key, pointer) in enumerate(pairs, first)
    ]


# -- events of stages -------------------------------------------------------------


def emit_note(stage: str, key: str, data: str) -> str:
    """The entry of the job's history that is an event of a stage's own: JSON."""
    return f"emit {stage}/{key.replace('%', '%25').replace(' ', '%20')} {data}"


def emitted(note: str) -> dict[str, Any] | None:
    """The event of such a note; None if it is none."""
    word, name, data = (*note.split(" ", 2), "", "")[:3]
    stage, _, key = name.partition("/")
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    return {"stage": stage, "key": unquote(key), "data": value} if word == "emit" else None


# -- reading ----------------------------------------------------------------------


class RunRows:
    """The rows of one run."""

    def __init__(self, read: Read, job_id: str) -> None:
        self._read, self.job_id = read, job_id

    def of_run(self, job_id: str) -> RunRows:
        """Those of another run."""
        return RunRows(self._read, job_id)

    async def head(self) -> tuple[RunState | None, tuple[StageRecord, ...], float | None]:
        """The run's own row, its stages, and when one of them was last written."""
        state, stages, at = None, [], None
        for row in await self._rows(StepQuery(after=(RUN, -1))):
            if row.name == RUN:
                state = _run(row.output)
            elif row.name == STAGE:
                stages.append(_stage(row.output))
            else:
                break
            at = max(at or 0.0, row.at)
        return state, tuple(stages), at

    async def ended(
        self, stage: StageRecord, after: int = -1, limit: int = 1000, outcomes: Outcomes = ()
    ) -> list[Step]:
        """Rows of items that have ended, in order; fewer than asked for only at the end."""
        name, wanted = item_rows_name(stage), tuple(map(str, outcomes))
        return await self._rows(
            StepQuery(name=name, after=(name, after), outcomes=wanted, limit=limit)
        )

    async def items(
        self, stage: StageRecord, after: int = -1, limit: int = 1000, outcomes: Outcomes = ()
    ) -> list[ItemRecord]:
        """Items after a position, in order; fewer than asked for only at the end."""
        if ItemOutcome.PENDING not in outcomes and outcomes:
            rows = await self.ended(stage, after=after, limit=limit, outcomes=outcomes)
            return [item_of(row) for row in rows]
        if stage.kind is StageKind.STEP:  # its one item is not listed
            rows = await self.ended(stage, limit=1) if stage.total and after < 0 else []
            step = item_of(rows[0]) if rows else ItemRecord(seq=0, key="")
            is_asked = stage.total and after < 0 and (not outcomes or step.outcome in outcomes)
            return [step] if is_asked else []
        found: list[ItemRecord] = []
        name = list_rows_name(stage)
        some = 1  # a row may list one item or hundreds
        while len(found) < limit:
            query = StepQuery(name=name, after=(name, after), limit=some)
            page = await self._read(self.job_id, query)
            some = min(some * 4, limit)
            if not page.steps:
                break
            last = page.steps[-1].n
            ended = await self.ended(stage, after, last - after) if stage.done else []
            ends = {row.n: item_of(row) for row in ended if row.n <= last}
            for row in page.steps:
                for listed in listed_items(row):
                    item = ends.get(listed.seq, listed)
                    is_meant = not outcomes or item.outcome in outcomes
                    if is_meant and after < item.seq < stage.total:
                        found.append(item)
            after = last
            if not page.more:
                break
        return found[:limit]

    async def list_report(self, stage: StageRecord) -> ItemReport | None:
        """What was reported while a stage was listed to its end."""
        name = list_rows_name(stage)
        rows = await self._rows(StepQuery(name=name, after=(name, stage.total - 1), limit=1))
        return _report(rows[0].info) if rows else None

    async def _rows(self, query: StepQuery) -> list[Step]:
        rows: list[Step] = []
        limit, more = query.limit, True
        while more and len(rows) < limit:
            page = await self._read(self.job_id, replace(query, limit=limit - len(rows)))
            rows.extend(page.steps)
            more = page.more
            if rows:
                query = replace(query, after=(rows[-1].name, rows[-1].n))
        return rows


# -- the fold ---------------------------------------------------------------------

JOB_STATES = {
    PipelineJobStatus.PENDING: (JobState.PENDING, JobState.SCHEDULED, JobState.DISPATCHED),
    PipelineJobStatus.RUNNING: (JobState.RUNNING,),
    PipelineJobStatus.COMPLETED: (JobState.SUCCEEDED,),
    PipelineJobStatus.FAILED: (JobState.FAILED, JobState.TIMEOUT, JobState.DENIED),
    PipelineJobStatus.CANCELLED: (JobState.CANCELLED,),
}
"""Which states of its job are which status of a run; `status_of` knows the exceptions."""
_STATUS = {state: status for status, states in JOB_STATES.items() for state in states}


def status_of(job: Job) -> PipelineJobStatus:
    """What the state of a run's job is in the words of seed 002."""
    if job.state is JobState.SUCCEEDED and job.result is not None and job.result.error_code:
        return PipelineJobStatus.PARTIAL
    return PipelineJobStatus.FAILED if was_stale(job) else _STATUS[job.state]


def was_stale(job: Job) -> bool:
    """Whether its job was cancelled because it made no progress (`cleanup_stale_jobs`)."""
    if job.state is not JobState.CANCELLED or job.result is None:
        return False
    return job.result.error_message == STALE_MESSAGE


def stale_since(record: PipelineRecord, job: Job, info: PipelineInfo | None) -> float | None:
    """When an unfinished run has gone without progress for too long; None: never.

    A run that was dispatched again has all of its time from then on, and a call may take as long
    as its stage allows.
    """
    limit = STALE_AFTER if info is None else info.stale_after
    if limit is None or record.is_final:
        return None
    for stage in () if info is None else info.stages:
        if record.current_stage in (None, stage.name):
            limit = max(limit, stage.timeout or 0.0)
    return limit + max(record.progress_at or 0.0, job.updated_at, job.request.run_at or 0.0)


async def retried(request: JobRequest, get: Callable[[str], Awaitable[Job | None]]) -> str | None:
    """The run whose finished items this one takes over: its parent, if that is a run of the same
    pipeline and tenant. A submitter may name any parent."""
    parent = None if request.parent_job_id is None else await get(request.parent_job_id)
    if parent is None or parent.request.topic != request.topic:
        return None
    return parent.job_id if parent.request.tenant == request.tenant else None


def fold(
    job: Job,
    config: dict[str, Any],
    info: PipelineInfo | None,
    state: RunState | None = None,
    stages: Sequence[StageRecord] = (),
    progress_at: float | None = None,
    *,
    retry_of: str | None = None,
) -> PipelineRecord:
    """The record of a run. `info` is its pipeline as declared, if anybody knows it; `retry_of`
    is the run that it retries (`retried`)."""
    state, request = state or RunState(), job.request
    stages = stages or (() if info is None else info.first_stages)
    status = status_of(job)
    begun = [stage.name for stage in stages if stage.started_at is not None]
    trigger = "retry" if retry_of else "child" if request.parent_job_id else "manual"
    record = PipelineRecord(
        id=job.job_id,
        trace_id=trace_of(job.job_id),
        pipeline=pipeline_of(request.topic) or "",
        fingerprint=state.fingerprint,
        config=config,
        status=status,
        current_stage=begun[-1] if begun else state.current_stage,
        created_at=job.accepted_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        progress_at=max(progress_at or 0.0, job.started_at or job.accepted_at),
        stage_progress=by_name(stages),
        errors=state.errors,
        cancel_requested=not was_stale(job)
        and (job.cancel_requested or status is PipelineJobStatus.CANCELLED),
        cancel_effective=_cancel_effective(job),
        abandoned_items=state.abandoned_items,
        summary=state.summary,
        alerts=state.alerts,
        retry_of=retry_of,
        tenant=request.tenant,
        trigger=trigger if request.schedule is None else "schedule",
        worker_id=job.worker_id or "",
        attempt=job.attempt,
    )
    if job.is_final and state.status is not status:
        return _without_runner(record, job, info)
    if record.summary is not None and record.is_final:
        times = {"started_at": record.started_at, "finished_at": record.finished_at}
        record = replace(record, summary=replace(record.summary, **times))
    return record


def _cancel_effective(job: Job) -> bool | None:
    if job.state is JobState.CANCELLED:
        return None if was_stale(job) else True
    return False if job.cancel_requested and job.is_final else None


def _without_runner(record: PipelineRecord, job: Job, info: PipelineInfo | None) -> PipelineRecord:
    """A run that did not write its own end: cancelled while it waited, stale, denied, lost.
    Every stage gets an end, and the error, the alerts and the summary are there."""
    cancelled = record.status is PipelineJobStatus.CANCELLED
    reason, code = _end_of(job, cancelled=cancelled)
    at = record.finished_at or record.created_at
    why = "cancelled" if cancelled else reason[:_LONGEST_REASON]
    error = StageError(record.current_stage or "", reason, code)
    record = replace(
        record,
        stage_progress=by_name(cut_short(stage, at, why) for stage in record.stages),
        errors=record.errors if error in record.errors else (*record.errors, error),
        summary=None,
    )
    try:
        alerts = evaluate(() if info is None else info.alerts, record)
    except Exception:  # a metric that no rule expects: the run has ended all the same
        alerts = ()
    return replace(record, alerts=alerts, summary=closed(record, alerts))


def _end_of(job: Job, *, cancelled: bool) -> tuple[str, str]:
    """Why, and the code of that."""
    result = job.result
    message = None if result is None else result.error_message
    if cancelled:
        return message or WAS_CANCELLED, CANCELLED
    if job.state is JobState.TIMEOUT or result is None or was_stale(job):
        return STALE_MESSAGE, STALE
    return message or f"its job ended {job.state}", result.error_code or str(job.state)


def cut_short(stage: StageRecord, at: float, reason: str) -> StageRecord:
    """A stage as it is when its run was stopped."""
    if stage.status is StageStatus.RUNNING:
        status = StageStatus.PARTIAL if stage.ok else StageStatus.FAILED
        return replace(stage, status=status, reason=reason, finished_at=at, rate=None, eta=None)
    if stage.status is StageStatus.PENDING:
        return replace(stage, status=StageStatus.SKIPPED, reason=reason)
    return stage
