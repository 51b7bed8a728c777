"""The tables of the command line fit a terminal of eighty columns, whatever is in them."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from rich.console import Console

from penstock.cli import data, job_list, key, limit, schedule
from penstock.cli.output import Listing
from penstock.core.verdict import ApprovalTerms, Hold, Rate, Vote
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import (
    KeyRole,
    KeyView,
    Limit,
    LimitUse,
    LimitView,
    Schedule,
    ScheduleView,
)
from penstock.ports.store import AuditEntry
from penstock.testing.samples import T0, a_job, a_request

LONG = "a-rather-long-name-that-somebody-chose-one-day"
NOW = T0 + 1e6


def drawn(listing: Listing) -> list[str]:
    page = io.StringIO()
    Console(file=page, width=80, highlight=False).print(listing)
    return [line.rstrip() for line in page.getvalue().splitlines()]


def a_hold() -> Hold:
    terms = ApprovalTerms(needed=3, approvers=("team-*", LONG))
    return Hold(LONG, "0123456789ab", "hash", T0, NOW + 1e5, terms, (Vote("ada", T0),))


def parked_jobs() -> Listing:
    job = a_job(state=JobState.SCHEDULED, topic=f"job.{LONG}", principal=LONG)
    return Listing([job_list.approval_row(replace(job, hold=a_hold()), NOW)])


def schedule_list() -> Listing:
    known = Schedule(
        name=LONG,
        cron="0,15,30,45 7-19 1-15 jan-jun mon-fri",
        request=a_request("", topic=f"job.{LONG}"),
        timezone="America/Argentina/ComodRivadavia",
        tenant=LONG,
    )
    view = ScheduleView(
        schedule=known, next_at=NOW + 86_000, last_at=T0, fired=12_345, problem=LONG * 3
    )
    return Listing([schedule.schedule_row(view, NOW)])


def key_list() -> Listing:
    made = KeyView(
        key_id="0123456789ab",
        name=LONG,
        roles=tuple(KeyRole),
        tenant=LONG,
        created_at=T0,
        expires_at=NOW + 1e7,
    )
    return Listing([key.key_row(made, NOW)])


def limit_list() -> Listing:
    known = Limit(
        name=LONG,
        key=("tenant", "label:customer"),
        topics=("job.text.*", "job.video.*"),
        concurrency=1000,
        rate=Rate(100, 60.0),
        max_waiting=1_000_000,
    )
    uses = (LimitUse((LONG, LONG), 1000, 100_000, NOW + 30), LimitUse(("a", "b"), 1, 1))
    views = [LimitView(known, uses), LimitView(known, ())]
    return Listing([row for view in views for row in limit.limit_rows(view, NOW)])


def audit_log() -> Listing:
    entry = AuditEntry(T0, LONG, "schedule.resume", LONG, detail=LONG * 3, outcome="refused")
    return Listing([data.audit_row(entry, NOW)])


@pytest.mark.parametrize("table", [parked_jobs, schedule_list, key_list, limit_list, audit_log])
def test_a_table_fits_eighty_columns(table: Callable[[], Listing]) -> None:
    lines = drawn(table())
    assert len(lines) >= 2
    assert max(map(len, lines)) <= 80


def test_what_may_not_be_cut_is_not_cut() -> None:
    assert "0123456789ab" in drawn(key_list())[1]
    assert "1/3" in drawn(parked_jobs())[1]
    assert "12,345" in drawn(schedule_list())[1]
    assert "schedule.resume" in drawn(audit_log())[1]
