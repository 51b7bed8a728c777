"""A run on paper: its stages, how it ended, and what that means for the exit code."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace
from rich.console import Console

from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.output import Listing
from penstock.cli.pipeline import _won
from penstock.cli.pipeline_display import (
    RunView,
    _live,
    bar,
    breaker_row,
    ending,
    follow,
    headline,
    items_page,
    outcome,
    run_row,
    stage_line,
    stage_table,
    status_page,
    tries_again,
    what,
    when,
)
from penstock.core.errors import Unavailable
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import EngineApi
from penstock.testing.samples import a_job
from penstock.workloads.pipeline.interface import CancelAnswer
from penstock.workloads.pipeline.records import (
    Alert,
    AlertRule,
    Breaker,
    BreakerState,
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineRecord,
    StageError,
    StageInfo,
    StageKind,
    StageRecord,
    StageStatus,
    by_name,
)

S = PipelineJobStatus
NOW = 1000.0
JOB = "01kb9x8n4t5v6w7x8y9z0abcde"


def a_map(name: str = "ingest", **fields: Any) -> StageRecord:
    given = {"status": StageStatus.RUNNING, "listed": True, "started_at": 990.0, **fields}
    return StageRecord(name=name, index=0, kind=StageKind.MAP, **given)


def a_step(name: str = "brief", **fields: Any) -> StageRecord:
    return StageRecord(name=name, index=1, kind=StageKind.STEP, **fields)


def a_run(*stages: StageRecord, **fields: Any) -> PipelineRecord:
    given = {"status": PipelineJobStatus.RUNNING, "started_at": 988.0, **fields}
    return PipelineRecord(
        id=JOB,
        trace_id="t",
        pipeline="news",
        created_at=987.0,
        stage_progress=by_name(stages),
        **given,
    )


def drawn(*parts: Any, width: int = 80) -> list[str]:
    page = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    for part in parts:
        page.print(part)
    text = cast(io.StringIO, page.file).getvalue().replace("\x1b[0m", "")
    return [
        line.rstrip() for line in text.replace("\x1b[1m", "").replace("\x1b[2m", "").split("\n")
    ]


def plain(line: str) -> str:
    return " ".join(line.split())


SIX = (
    a_map(status=StageStatus.PARTIAL, total=4, done=4, ok=3, failed=1, rate=3.2, duration_ms=1234),
    a_map("classify", total=500, done=120, ok=118, failed=2, rate=51.3, eta=7.45),
    a_step("neutralize"),
    a_step("brief"),
    a_step("evaluation", status=StageStatus.SKIPPED, reason="disabled"),
    a_step("optimization", status=StageStatus.SKIPPED, reason="evaluation_disabled"),
)


def test_every_line_of_a_run_of_six_stages_fits_eighty_columns() -> None:
    for live in (False, True):
        lines = drawn(*stage_table(a_run(*SIX), NOW, live=live))
        assert max(map(len, lines)) <= 80
        assert not any("…" in line for line in lines)


def test_a_line_tells_done_failed_rate_and_what_is_left() -> None:
    table = drawn(*stage_table(a_run(*SIX), NOW))
    assert plain(table[0]) == "STAGE STATUS DONE OK FAILED RATE ETA TOOK"
    assert plain(table[1]) == "ingest partial 4/4 3 1 3.2/s 1.2 s"
    assert plain(table[2]) == "classify running 120/500 118 2 51/s 7.5 s 10 s"
    assert plain(table[6]) == "optimization skipped evaluation_disabled"


def test_a_total_that_still_grows_is_marked() -> None:
    (_, line, *_) = drawn(*stage_table(a_run(a_map(listed=False, total=500, done=7)), NOW))
    assert "7/500+" in line


@pytest.mark.parametrize(
    ("done", "failed", "total", "full", "red"),
    [
        (0, 0, 10, 0, 0),
        (5, 0, 10, 6, 0),
        (10, 0, 10, 12, 0),
        (10, 1, 10, 12, 2),
        (1000, 1, 1000, 12, 1),
    ],
)
def test_a_bar_is_as_long_as_what_is_done_and_one_failure_can_be_seen(
    done: int, failed: int, total: int, full: int, red: int
) -> None:
    drawn_bar = bar(a_map(done=done, failed=failed, total=total))
    assert len(drawn_bar.plain) == 12
    assert drawn_bar.plain.count("━") == full
    assert sum(s.end - s.start for s in drawn_bar.spans if s.style == "red") == red


def test_the_board_shows_the_job_the_time_and_the_wish_to_stop() -> None:
    record = a_run(*SIX, cancel_requested=True)
    assert headline(record, NOW).plain == f"news  job {JOB}  RUNNING  12 s  asked to stop"
    board = RunView(record)
    assert any("classify" in line for line in drawn(board))


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (SIX[0], "ingest  partial  4/4  1 failed  1.2 s"),
        (SIX[5], "optimization  skipped  (evaluation_disabled)"),
        (
            a_map(status=StageStatus.COMPLETED, empty=True),
            "ingest  completed  0/0  0.0 ms  (nothing to do)",
        ),
        (
            a_step(status=StageStatus.FAILED, started_at=1.0, errors=("KeyError: x\nTraceback",)),
            "brief  failed  0.0 ms  (KeyError: x)",
        ),
    ],
)
def test_the_end_of_a_stage_in_one_line(stage: StageRecord, line: str) -> None:
    assert stage_line(stage) == line


def test_why_a_run_ended_so() -> None:
    assert outcome(a_run(SIX[0], status=S.PARTIAL)) == "1 of 4 items of ingest failed"
    broken = a_step(status=StageStatus.FAILED, errors=("no",))
    assert outcome(a_run(broken, status=S.FAILED)) == "brief failed: no"
    assert outcome(a_run(status=S.FAILED, errors=(StageError("", "orphaned"),))) == "orphaned"
    assert outcome(a_run(SIX[0], abandoned_items=("a/1",))) == "1 item would not stop"
    stopped = a_run(SIX[0], status=S.CANCELLED, current_stage="ingest")
    assert outcome(stopped) == "in ingest"


def test_where_a_run_is_that_has_not_ended() -> None:
    record = a_run(SIX[0], current_stage="ingest")
    assert outcome(record) == "in ingest"
    assert outcome(replace(record, cancel_requested=True)) == "asked to stop"


@pytest.mark.parametrize(
    ("status", "code", "strict"),
    [
        (S.COMPLETED, Exit.OK, Exit.OK),
        (S.PARTIAL, Exit.OK, Exit.FAILED),
        (S.CANCELLED, Exit.CANCELLED, Exit.CANCELLED),
    ],
)
def test_the_exit_code_of_each_end(status: PipelineJobStatus, code: Exit, strict: Exit) -> None:
    api, record = told(SCRIPT), a_run(status=status)
    assert asyncio.run(ending(api, record, EngineRef())) is code
    assert asyncio.run(ending(api, record, EngineRef(), strict=True)) is strict


def test_a_partial_end_is_warned_of_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    alert = Alert(code="LOW", message="0.5 is below 0.7", value=0.5, threshold=0.7)
    record = a_run(SIX[0], status=S.PARTIAL, finished_at=NOW, alerts=(alert,))
    assert asyncio.run(ending(told(SCRIPT), record, EngineRef(data="d d"))) is Exit.OK
    out, err = capsys.readouterr()
    assert out == ""
    assert "alert LOW: 0.5 is below 0.7" in err
    assert f"job {JOB} ended PARTIAL: 1 of 4 items of ingest failed" in err
    assert "'penstock --data 'd d' pipeline retry 9z0abcde'" in err


def test_a_complete_end_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(ending(told(SCRIPT), a_run(status=S.COMPLETED), EngineRef())) is Exit.OK
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("accepted", "status", "code", "words"),
    [
        (True, S.CANCELLED, Exit.OK, "cancelled"),
        (False, S.CANCELLED, Exit.CONFLICT, "had already ended CANCELLED"),
        (False, S.COMPLETED, Exit.CONFLICT, "had already ended COMPLETED"),
        (True, S.PARTIAL, Exit.CONFLICT, "ended PARTIAL before the cancellation took effect"),
        (True, S.RUNNING, Exit.NOT_YET, "was asked to stop and is still RUNNING"),
    ],
)
def test_a_cancellation_says_which_won(
    accepted: bool, status: PipelineJobStatus, code: Exit, words: str
) -> None:
    assert _won(CancelAnswer(accepted, status), a_run(status=status)) == (code, words)


def test_what_a_stage_takes_in_words() -> None:
    over = {"stage:ingest": "ingest", "config:sources": "config.sources", "source:f": "f()"}
    for given, words in over.items():
        stage = StageInfo(name="x", kind=StageKind.MAP, over=given)
        assert what(stage) == f"map over {words}"
    assert what(StageInfo(name="x", kind=StageKind.STEP, of="y")) == "step of y"
    assert what(StageInfo(name="x", kind=StageKind.STEP)) == "step"


def test_alert_rules_in_words() -> None:
    rate = AlertRule(code="A", metric="ingest.ok", of="ingest.total", below=0.7)
    assert when(rate) == "ingest.ok / ingest.total below 0.7"
    assert when(AlertRule(code="B", metric="status", equals="FAILED")) == "status is FAILED"
    assert when(AlertRule(code="C", metric="x", below=1, above=2)) == "x below 1 or above 2"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (JobState.FAILED, Exit.FAILED),
        (JobState.DENIED, Exit.DENIED),
        (JobState.TIMEOUT, Exit.TIMEOUT),
    ],
)
def test_a_run_whose_job_was_denied_or_timed_out_ends_with_the_code_of_that(
    state: JobState, code: Exit
) -> None:
    class Jobs:
        async def get(self, job_id: str) -> Job:
            return a_job(state=state)

    record = a_run(status=S.FAILED)
    assert asyncio.run(ending(cast(EngineApi, Jobs()), record, EngineRef())) is code


class Scripted:
    """Runs that go as they are told: each event comes with the record of its moment."""

    def __init__(self, script: Sequence[tuple[PipelineEventKind, str, PipelineRecord]]) -> None:
        self.script, self.now = script, script[0][2]
        self.pipelines = self

    async def get(self, job_id: str) -> PipelineRecord:
        return self.now

    async def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        for number, (kind, stage, record) in enumerate(self.script, 1):
            self.now = record
            yield PipelineEvent(number, job_id, 999.0, kind, {"stage": stage} if stage else {})


K = PipelineEventKind
DONE = a_run(SIX[0], status=S.PARTIAL, finished_at=NOW)
SCRIPT = [
    (K.JOB_START, "", a_run()),
    (K.STAGE_START, "ingest", a_run(a_map())),
    (K.STAGE_PROGRESS, "ingest", a_run(a_map(total=4, done=2))),
    (K.STAGE_COMPLETE, "ingest", a_run(SIX[0])),
    (K.JOB_COMPLETE, "", DONE),
]


def told(script: Any) -> EngineApi:
    return cast(EngineApi, Scripted(script))


def test_without_a_terminal_a_stage_is_a_line_at_its_beginning_and_one_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert asyncio.run(follow(told(SCRIPT), RunView(a_run()))) is DONE
    lines = [line.split("  ", 1)[-1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        f"pipeline news, job {JOB}",
        "ingest  started",
        "ingest  partial  4/4  1 failed  1.2 s",
        "news PARTIAL after 12 s",
    ]


def test_events_are_json_lines_where_programs_watch(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(follow(told(SCRIPT), RunView(a_run()), "events"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SCRIPT)
    assert '"kind":"job_complete"' in lines[-1]


def test_a_live_board_ends_with_the_final_record_and_without_remarks() -> None:
    async def seen() -> RunView:
        board = RunView(a_run())
        board.remark = "waits for a worker"
        async with asyncio.timeout(5):
            await _live(told(SCRIPT), board)
        return board

    board = asyncio.run(seen())
    assert (board.record, board.remark) == (DONE, "")


def test_events_that_break_off_are_no_end() -> None:
    with pytest.raises(Unavailable, match="broke off while it was RUNNING"):
        asyncio.run(follow(told(SCRIPT[:3]), RunView(a_run()), "record"))


LONG = "a-rather-long-name-that-somebody-chose-one-day"


def test_a_long_name_does_not_hide_the_status_of_a_run() -> None:
    record = replace(a_run(*SIX), pipeline=LONG)
    page = " ".join(drawn(*status_page(record, "", {}, EngineRef(), NOW)))
    assert "RUNNING" in page
    assert JOB in page


def runs_listed() -> Listing:
    ended = a_run(a_map(LONG, status=StageStatus.FAILED, total=9, failed=9), status=S.CANCELLED)
    record = replace(ended, pipeline=LONG, tenant=LONG)
    return Listing([run_row(record, NOW * 1e6)])


def items_listed() -> Listing:
    item = ItemRecord(
        seq=123_456,
        key=LONG,
        outcome=ItemOutcome.SKIPPED,
        attempts=10,
        error_class=ErrorClass.TRANSIENT,
        error_code="UNREADABLE_POINTER",
        error=LONG * 3,
        duration_ms=1e6,
    )
    return cast(Listing, next(items_page([item], [LONG * 4], wide=False)))


def errors_listed() -> Listing:
    item = ItemRecord(seq=3, key="k", outcome=ItemOutcome.FAILED, error=LONG * 3)
    _, _, listing = items_page([item, replace(item, seq=4, error="")], ["", ""], wide=False)
    assert isinstance(listing, Listing)
    return listing


def breakers_listed() -> Listing:
    half = Breaker(name=LONG, state=BreakerState.HALF_OPEN, failures=1000, opened_at=NOW)
    return Listing([breaker_row(half, NOW + 30)])


@pytest.mark.parametrize("listing", [runs_listed, items_listed, errors_listed, breakers_listed])
def test_lists_fit_eighty_columns_whatever_is_in_them(listing: Callable[[], Listing]) -> None:
    assert max(map(len, drawn(listing()))) <= 80


def test_an_open_breaker_tells_when_it_tries_again() -> None:
    assert tries_again(Breaker(name="x"), NOW) == ""
    half = Breaker(name="x", state=BreakerState.OPEN, opened_at=NOW, cooldown=60.0)
    assert tries_again(half, NOW + 20) == "in 40 s"
    assert tries_again(half, NOW + 60) == "with the next item"
