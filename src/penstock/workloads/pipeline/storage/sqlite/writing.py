"""What each write does to the file. Every method runs within a transaction of its caller.

Heads are read in that transaction, never kept: another process may have written since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import apsw
from msgspec import UNSET
from msgspec.structs import replace

from penstock.core.errors import Conflict, NotFound, PipelineBusy
from penstock.workloads.pipeline import store_rules
from penstock.workloads.pipeline.records import (
    Breaker,
    PipelineEventKind,
    PipelineInfo,
    PipelineRecord,
    StageRecord,
)
from penstock.workloads.pipeline.storage.sqlite import rows
from penstock.workloads.pipeline.store import (
    CancelAnswer,
    Claim,
    Happening,
    Save,
    Saved,
    StageItems,
)
from penstock.workloads.pipeline.store_rules import Head
from penstock.workloads.pipeline.summary import ending_of

_PARTS: dict[str, Callable[[Any], str]] = {
    "errors": rows.text,
    "summary": rows.summary_text,
    "alerts": rows.alerts_text,
    "abandoned_items": rows.text,
    "fingerprint": str,
}
"""What a save sets as it is, if it is set, and how that is written."""


class Writing:
    """The writes of `PipelineStore`, each with the list of jobs to add to if it changes one."""

    def __init__(self, writer: apsw.Connection, sql: Mapping[str, str]) -> None:
        self._writer = writer
        self._cursor = writer.cursor()
        self._sql = sql
        self._read_head, self._write_head = sql["head"], sql["update_head"]
        self._write_progress = sql["update_progress"]
        self._put_stage, self._append = sql["put_stage"], sql["append_event"]

    # -- the life of a run --------------------------------------------------------

    def create(
        self, record: PipelineRecord, single_flight: bool, changed: list[str]
    ) -> PipelineRecord:
        held = self._row("run_by_id", record.id)
        if held is not None:
            return rows.read_run(held)
        if single_flight:
            self._refuse_second(record)
        config = rows.text(record.config)
        self._cursor.execute(self._sql["insert_run"], rows.run_row(record, config))
        run = self._writer.last_insert_rowid()
        if len(config) > rows.LONG:
            self._cursor.execute(self._sql["insert_config"], (run, config))
        self._put_stages(run, record.stages)
        changed.append(record.id)
        ordered = sorted(record.stages, key=lambda stage: (stage.index, stage.name))
        return replace(record, stages=tuple(ordered))

    def _refuse_second(self, record: PipelineRecord) -> None:
        running = self._row("open_run", record.pipeline, record.tenant)
        if running is not None:
            raise PipelineBusy(
                f"pipeline {record.pipeline} is running already, as job {running[0]}",
                running=running[0],
                hint="wait for that job, or cancel it",
            )

    def claim(self, claim: Claim, changed: list[str]) -> PipelineRecord | None:
        run, head = self._find(claim.job_id)
        taken = store_rules.take(head, claim)
        if taken is None:
            return None
        self._keep(claim.job_id, run, taken, changed)
        return rows.read_run(self._row("run_by_id", claim.job_id) or ())

    def save(self, save: Save, changed: list[str]) -> Saved:
        run, before = self._find(save.job_id)
        head = store_rules.advance(save.job_id, before, save)
        if head is None:
            return Saved(before.status, before.cancel_requested)
        listed = self._list(run, save.listed) if save.listed else 0
        if save.ended:
            self._end(run, save.ended)
        if save.stages:
            self._put_stages(run, save.stages)
        if save.happened:
            self._note(run, save.at, save.happened)
        self._set_parts(run, save)
        if head.status is before.status and head.started_at is before.started_at:
            self._cursor.execute(self._write_progress, rows.progress_row(run, head))
            changed.append(save.job_id)
        else:
            self._keep(save.job_id, run, head, changed)
        return Saved(head.status, head.cancel_requested, listed)

    def _set_parts(self, run: int, save: Save) -> None:
        for name, write in _PARTS.items():
            value = getattr(save, name)
            if value is not UNSET:
                self._cursor.execute(self._sql[f"set_{name}"], (write(value), run))

    def _list(self, run: int, groups: Iterable[StageItems]) -> int:
        count = 0
        for group in groups:
            lot = self._lot(run, group.stage)
            if lot is None:
                self._cursor.execute(self._sql["insert_lot"], (run, group.stage))
                lot = self._writer.last_insert_rowid()
            before = self._writer.total_changes()
            items = [rows.listed_row(lot, item) for item in group.items]
            try:
                self._cursor.executemany(self._sql["list_item"], items)
            except apsw.ConstraintError as error:
                if "UNIQUE" not in str(error):
                    raise
                raise Conflict(f"an item of stage {group.stage} has another's number") from error
            count += self._writer.total_changes() - before
        return count

    def _end(self, run: int, groups: Iterable[StageItems]) -> None:
        for group in groups:
            lot, before = self._lot(run, group.stage), self._writer.total_changes()
            if lot is not None:
                items = [rows.ended_row(lot, item) for item in group.items]
                self._cursor.executemany(self._sql["end_item"], items)
            if self._writer.total_changes() - before != len(group.items):
                raise NotFound(f"an item of stage {group.stage} ended that was never listed")

    def _lot(self, run: int, stage: str) -> int | None:
        row = self._row("lot", run, stage)
        return None if row is None else row[0]

    def request_cancel(self, job_id: str, now: float, changed: list[str]) -> CancelAnswer:
        run, before = self._find(job_id)
        head, answer = store_rules.ask_to_stop(before, now)
        if head is not before:
            if head.finished_at is not None:
                self._end_alone(job_id, run, head, store_rules.WAS_CANCELLED, store_rules.CANCELLED)
            self._keep(job_id, run, head, changed)
        return answer

    def fail_stale(
        self, job_id: str, now: float, message: str, version: int, changed: list[str]
    ) -> bool:
        row = self._row("head", job_id)
        if row is None:
            return False
        run, before = row[0], rows.read_head(row)
        head = store_rules.give_up(before, now, version)
        if head is None:
            return False
        self._end_alone(job_id, run, head, message, store_rules.STALE)
        self._keep(job_id, run, head, changed)
        return True

    def _end_alone(self, job_id: str, run: int, head: Head, reason: str, code: str) -> None:
        """Nobody else will say that it has ended."""
        held = head.onto(rows.read_run(self._row("run_by_id", job_id) or ()))
        declared = self._row("declaration", held.pipeline)
        info = None if declared is None else rows.read_info(declared[0])
        ended = store_rules.ended_alone(held, info, reason, code)
        self._put_stages(run, ended.stages)
        for name in ("errors", "summary", "alerts"):
            written = _PARTS[name](getattr(ended, name))
            self._cursor.execute(self._sql[f"set_{name}"], (written, run))
        at = ended.finished_at or ended.created_at
        self._note(run, at, (Happening(PipelineEventKind.JOB_COMPLETE, ending_of(ended)),))

    def forget_stages(
        self, job_id: str, fence: int, stages: Sequence[str], changed: list[str]
    ) -> None:
        run, head = self._find(job_id)
        store_rules.check_fence(job_id, head.fence, fence)
        for stage in stages:
            lot = self._lot(run, stage)
            if lot is not None:
                self._cursor.execute(self._sql["forget_stage"], rows.span(lot))
        self._keep(job_id, run, replace(head, version=head.version + 1), changed)

    def _find(self, job_id: str) -> tuple[int, Head]:
        found: list[rows.Row] = self._cursor.execute(self._read_head, (job_id,)).fetchall()
        if not found:
            raise NotFound(f"no pipeline job {job_id}")
        return found[0][0], rows.read_head(found[0])

    def _keep(self, job_id: str, run: int, head: Head, changed: list[str]) -> None:
        self._cursor.execute(self._write_head, (*rows.head_row(head), run))
        changed.append(job_id)

    def _put_stages(self, run: int, stages: Iterable[StageRecord]) -> None:
        for stage in stages:
            self._cursor.execute(self._put_stage, rows.stage_row(run, stage))

    def _note(self, run: int, at: float, happened: Iterable[Happening]) -> None:
        for one in happened:
            self._cursor.execute(self._append, (run, at, one.kind, rows.text(one.data)))

    def _row(self, query: str, *values: object) -> rows.Row | None:
        # To its end, or the file would stay as it is now for what is read next.
        found: list[rows.Row] = self._cursor.execute(self._sql[query], values).fetchall()
        return found[0] if found else None

    # -- beside the runs ----------------------------------------------------------

    def put_breaker(self, breaker: Breaker) -> bool:
        record, before = rows.text(breaker), self._writer.total_changes()
        if breaker.version == 0:
            self._cursor.execute(self._sql["first_breaker"], (breaker.name, record))
        else:
            values = (record, breaker.name, breaker.version - 1)
            self._cursor.execute(self._sql["next_breaker"], values)
        return self._writer.total_changes() > before

    def declare(self, infos: Sequence[PipelineInfo]) -> None:
        self._cursor.executemany(
            self._sql["declare"], [(info.name, rows.text(info)) for info in infos]
        )

    def remember(self, name: str, value: bytes) -> None:
        self._cursor.execute(self._sql["remember"], (name, value))

    # -- upkeep -------------------------------------------------------------------

    def doom(self, finished_before: float, limit: int) -> int:
        """Forget old runs; their items and events are left for `bury`."""
        before = self._writer.total_changes()
        self._cursor.execute(self._sql["doom"], (finished_before, limit))
        count = self._writer.total_changes() - before
        if count:
            for name in ("forget_stages", "forget_configs", "forget_runs"):
                self._cursor.execute(self._sql[name])
        return count

    def bury(self, limit: int) -> bool:
        """Remove up to so many items, or events, of a forgotten run; whether any may be left."""
        doomed = self._row("any_doomed")
        if doomed is None:
            return False
        run, lot = doomed
        if lot is not None:
            if self._remove("forget_items", *rows.span(lot), limit) < limit:
                self._cursor.execute(self._sql["forget_lot"], (lot,))
        elif self._remove("forget_events", run, limit) < limit:
            self._cursor.execute(self._sql["undoom"], (run,))
        return True

    def _remove(self, query: str, *values: object) -> int:
        before = self._writer.total_changes()
        self._cursor.execute(self._sql[query], values)
        return self._writer.total_changes() - before
