"""How far a stage is, counted as its items end, between one write and the next."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.ports.clock import Clock
from penstock.workloads.pipeline.context import Metric, Notes
from penstock.workloads.pipeline.meter import Meter
from penstock.workloads.pipeline.records import ItemOutcome, ItemRecord, StageRecord, StageStatus
from penstock.workloads.pipeline.retrying import bounded

_MOST_ERRORS = 5
_LONGEST_ERROR = 300


class Tally:
    """One stage while it runs; `record` makes the value that is written."""

    def __init__(self, stage: StageRecord, clock: Clock) -> None:
        self._base, self._clock = stage, clock
        self.total, self.done, self.ok = stage.total, stage.done, stage.ok
        self.failed, self.skipped, self.reused = stage.failed, stage.skipped, stage.reused
        self.metrics: dict[str, Metric] = stage.metrics
        self.errors: tuple[str, ...] = stage.errors
        self.fan: int | None = 0 if not stage.done else None
        """How many outputs its items gave; None if some ended before this run."""
        self._meter: Meter | None = None
        self._began: float | None = None
        self._still = True
        """Nothing was counted since `_base` was made."""
        self.told_at = -1e9
        """When the last `stage_progress` was sent."""

    @property
    def name(self) -> str:
        return self._base.name

    @property
    def status(self) -> StageStatus:
        return self._base.status

    @property
    def listed(self) -> bool:
        return self._base.listed

    def begin(self) -> None:
        """From here on time counts."""
        self._began = self._clock.monotonic()
        self._meter = Meter(self._clock, self.done)

    def change(self, **changes: object) -> None:
        """Set fields of the record that are not counted here."""
        self._base = replace(self._base, **changes)
        if self._base.eta is not None and self._base.is_final:
            self._base = replace(self._base, eta=None)

    def list(self, items: list[ItemRecord]) -> None:
        self._still = False
        self.total += len(items)
        for item in items:
            if item.outcome is not ItemOutcome.PENDING:
                self._count(item)

    def end(self, item: ItemRecord, notes: Notes | None) -> None:
        self._still = False
        self._count(item)
        if notes is not None and (notes.added or notes.fixed):
            self.metrics = notes.add_to(self.metrics)

    def note(self, notes: Notes | None) -> None:
        """What the stage reported otherwise than by an item."""
        self._still = False
        if notes is not None:
            self.metrics = notes.add_to(self.metrics)
            for error in notes.errors:
                self.complain(error)

    def fix(self, metric: str, value: Metric) -> None:
        self._still = False
        self.metrics = {**self.metrics, metric: value}

    def go_on_from(self, counted: dict[str, Metric]) -> None:
        """Items were taken over from another run, which had counted this."""
        notes = Notes()
        for name, value in self.metrics.items():
            notes.metric(name, value, isinstance(value, bool))
        self._still = False
        self.metrics = notes.add_to(counted)

    def complain(self, error: str) -> None:
        self._still = False
        if len(self.errors) < _MOST_ERRORS:
            self.errors = (*self.errors, bounded(error, _LONGEST_ERROR))

    def _count(self, item: ItemRecord) -> None:
        self.done += 1
        outcome = item.outcome
        if outcome is ItemOutcome.OK:
            self.ok += 1
            if self.fan is not None:
                self.fan += item.fan
            self.reused += item.reused
        elif outcome is ItemOutcome.FAILED:
            self.failed += 1
        else:
            self.skipped += 1
        if item.error and len(self.errors) < _MOST_ERRORS:
            self.complain(f"{item.key}: {item.error}" if item.key else item.error)

    def record(self) -> StageRecord:
        """The stage as it is now; where nothing moves, the same value again."""
        if self._began is None and self._still:
            return self._base
        made = self._made()
        if self._began is None:
            self._base, self._still = made, True
        return made

    def _made(self) -> StageRecord:
        base, meter, now = self._base, self._meter, self._clock.monotonic()
        spent, rate, eta = base.duration_ms, base.rate, base.eta
        if self._began is not None:
            spent += (now - self._began) * 1000
        if meter is not None and base.status is StageStatus.RUNNING:
            meter.mark(self.done)
            rate, eta = meter.rate(), meter.eta(self.total)
        return replace(
            base,
            total=self.total,
            done=self.done,
            ok=self.ok,
            failed=self.failed,
            skipped=self.skipped,
            reused=self.reused,
            metrics=self.metrics,
            errors=self.errors,
            duration_ms=spent,
            rate=rate,
            eta=eta,
        )

    def stand_still(self) -> None:
        """Its time is over: it does not grow any more."""
        self._base, self._began, self._still = self._made(), None, True
