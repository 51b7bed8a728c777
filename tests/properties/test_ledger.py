"""What the ledger promises, whatever is asked of it in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.memory.store import MemoryBackend
from penstock.control import ledger as control
from penstock.control.ledger import Ledger
from penstock.core.job import Job, JobResult, Unique
from penstock.core.journal import Folded, fold
from penstock.core.ledger import Accept, BulkMove, Change, Checkpoint, Decider, Known, Move, Step
from penstock.lifecycles.canonical import HELD, TERMINAL, JobEvent, JobState
from penstock.ports.query import matches, order
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.testing.samples import T0, accept, move

IDS = ("a", "b", "c", "d")
_E = JobEvent
_WORKER = "worker:w1"

times = st.floats(T0 - 10, T0 + 10)
_EVENTS: tuple[tuple[tuple[JobEvent, ...], str], ...] = (
    ((_E.SCHEDULE,), "scheduler"),
    ((_E.SCHEDULE, _E.DISPATCH), "scheduler"),
    ((_E.DISPATCH,), "scheduler"),
    ((_E.REDISPATCH,), "scheduler"),
    ((_E.START,), _WORKER),
    ((_E.SUCCEED,), _WORKER),
    ((_E.FAIL,), _WORKER),
    ((_E.EXPIRE,), "reconciler"),
    ((_E.REQUEST_CANCEL,), "gateway"),
    ((_E.CANCEL,), "reconciler"),
    ((_E.NOTE,), "gateway"),
)


@st.composite
def bulk_moves(draw: st.DrawFn) -> BulkMove:
    events, actor = draw(st.sampled_from(_EVENTS))
    job_ids = draw(st.lists(st.sampled_from(IDS), min_size=1, max_size=5))
    guarded = draw(st.booleans())
    numbers = st.lists(st.integers(1, 4), min_size=len(job_ids), max_size=len(job_ids))
    return BulkMove(
        job_ids=job_ids,
        events=events,
        actor=actor,
        at=draw(times),
        versions=draw(numbers) if guarded and actor == "scheduler" else None,
        attempts=draw(numbers) if guarded and actor == _WORKER else None,
        worker_id="w1",
        pool="default",
        results=[JobResult(job_id=one, status=JobState.SUCCEEDED) for one in job_ids],
    )


@st.composite
def changes(draw: st.DrawFn) -> Change:
    job_id = draw(st.sampled_from(IDS))
    kind = draw(st.integers(0, 9))
    if kind < 3:
        fields: dict[str, Any] = {}
        if draw(st.booleans()):
            fields["idempotency_key"] = draw(st.sampled_from(["k1", "k2"]))
        if draw(st.booleans()):
            fields["unique"] = Unique(key="u")
        return accept(job_id, draw(times), **fields)
    if kind == 3:
        rows = (Step("stage", draw(st.integers(0, 3)), output=str(draw(st.integers()))),)
        notes = tuple(draw(st.lists(st.sampled_from(["begun", "half way"]), max_size=2)))
        return Checkpoint(job_id, draw(st.integers(0, 3)), rows, notes, _WORKER, draw(times))
    events, actor = draw(st.sampled_from(_EVENTS))
    attempt = draw(st.one_of(st.none(), st.integers(0, 3)))
    result = JobResult(job_id=job_id, status=JobState.FAILED)
    return Move(job_id, events, actor, draw(times), attempt=attempt, worker_id="w1", result=result)


commits = st.tuples(st.lists(changes(), max_size=5), st.lists(bulk_moves(), max_size=2))


def open_jobs_after(setup: list[Change]) -> dict[str, Job]:
    decider = Decider({}, Known(), 1, 1)
    decider.decide(setup)
    return decider.heads


@given(st.lists(changes(), max_size=12), bulk_moves())
def test_a_bulk_move_does_what_its_moves_do_one_by_one(
    setup: list[Change], asked: BulkMove
) -> None:
    jobs = open_jobs_after(setup)
    at_once = Decider(jobs, Known(), 100, 100)
    told = at_once.bulk(asked)
    apart = Decider(jobs, Known(), 100, 100)
    answers = [apart.decide([asked.one(n)])[0] for n in range(len(asked.job_ids))]
    assert told.moved == [answer.job for answer in answers if answer.moved]
    others = [(n, a.verdict, a.job, a.why) for n, a in enumerate(answers) if not a.moved]
    assert [(n, a.verdict, a.job, a.why) for n, a in told.others] == others
    assert at_once.heads == apart.heads
    one, other = at_once.commit(), apart.commit()
    assert one.counts == other.counts
    assert {job.job_id for job in one.changed} == {job.job_id for job in other.changed}


@given(st.lists(commits, max_size=12))
def test_a_commit_writes_in_order_what_it_did_to_each_job(
    asked: list[tuple[list[Change], list[BulkMove]]],
) -> None:
    jobs: dict[str, Job] = {}
    logs: dict[str, list[Any]] = {}
    seq = page = 1
    for singles, bulk in asked:
        decider = Decider(jobs, Known(), seq, page)
        decider.decide(singles)
        for one in bulk:
            decider.bulk(one)
        commit = decider.commit()
        seq, page = decider.next_seq, decider.next_page
        jobs.update(decider.heads)
        for stride in commit.strides:
            for job in stride.jobs:
                logs.setdefault(job.job_id, []).extend(stride.transitions(job))
        for job_id, log in logs.items():
            assert fold(log) == Folded.of(jobs[job_id])
        written = {job.job_id: job for job in (*commit.accepted, *commit.changed)}
        behind = {one for one, job in decider.heads.items() if written.get(one) is not job}
        assert {job.job_id for job in commit.lagging} == behind
        assert all(job.state in HELD for job in commit.lagging)


@given(st.lists(st.tuples(commits, st.booleans()), max_size=12), st.integers(1, 3))
def test_a_ledger_that_is_opened_again_knows_all_that_was_committed(
    asked: list[tuple[tuple[list[Change], list[BulkMove]], bool]], replay_pages: int
) -> None:
    run_async(_crash_often)(asked, replay_pages)


async def _crash_often(
    asked: list[tuple[tuple[list[Change], list[BulkMove]], bool]], replay_pages: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "_REPLAY_PAGES", replay_pages)
        backend = MemoryBackend()
        ledger = Ledger(backend, max_records=2)
        for (singles, bulk), crashes in asked:
            await ledger.commit(singles, bulk)
            if not crashes:
                continue
            after = Ledger(backend, max_records=2)
            assert await after.unfinished() == await ledger.unfinished()
            assert await after.tally() == await ledger.tally()
            for job_id in IDS:
                assert await after.get(job_id) == await ledger.get(job_id)
            ledger = after
        everything = [job for job_id in IDS if (job := await ledger.get(job_id)) is not None]
        for job in everything:
            assert fold(await ledger.history(job.job_id)) == Folded.of(job)
        verified = await ledger.verify()
        assert (verified.jobs, verified.mismatches) == (len(everything), ())
        for states in ((), (JobState.RUNNING, JobState.DISPATCHED), tuple(TERMINAL)):
            query = JobQuery(states=states, limit=3)
            wanted = sorted((j for j in everything if matches(query, j)), key=order(query))[:3]
            assert await ledger.find(query) == wanted
        with_key = [job for job in everything if job.request.idempotency_key == "k1"]
        if with_key:
            (answer,) = await ledger.apply([accept("z", idempotency_key="k1")])
            assert (answer.moved, answer.job) == (False, with_key[0])


@run_async
async def test_changes_of_many_callers_share_a_commit() -> None:
    import asyncio

    backend = MemoryBackend()
    ledger = Ledger(backend)
    await asyncio.gather(*(ledger.apply([accept(f"j{n}")]) for n in range(200)))
    assert len(backend._pages) < 10
    assert len(await ledger.unfinished()) == 200


@run_async
async def test_a_very_large_commit_is_journalled_in_several_pages() -> None:
    ledger = Ledger(MemoryBackend())
    await ledger.apply([Accept(accept(f"j{n}").request, T0) for n in range(9000)])
    assert {len(job.pages) for job in await ledger.unfinished()} == {1}
    assert len({job.pages for job in await ledger.unfinished()}) == 3
    events = await ledger.events(0, limit=10_000)
    assert len({event.cursor for event in events}) == 9000
    assert [event.cursor for event in events] == sorted(event.cursor for event in events)
    await ledger.apply([move("j8999", _E.NOTE)])
    assert len(await ledger.history("j8999")) == 2


@given(st.lists(changes(), max_size=12), changes(), st.sampled_from(IDS), st.integers(0, 3))
def test_a_checkpoint_is_kept_with_its_notes_or_refused_without_a_trace(
    setup: list[Change], between: Change, job_id: str, attempt: int
) -> None:
    decider = Decider(open_jobs_after([*setup, between]), Known(), 100, 100)
    before = decider.find(job_id)
    rows, notes = (Step("stage", 1), Step("stage", 2)), ("one", "two")
    (answer,) = decider.decide([Checkpoint(job_id, attempt, rows, notes, _WORKER, T0 + 50)])
    commit = decider.commit()
    written = [
        (entry.event, entry.reason)
        for stride in commit.strides
        for job in stride.jobs
        for entry in stride.transitions(job)
    ]
    if before is None or before.attempt != attempt or before.state not in HELD:
        assert not answer.moved
        assert (commit.steps, written) == ([], [])
        return
    started = [(JobEvent.START, "")] if before.state is JobState.DISPATCHED else []
    assert answer.moved
    assert written == [*started, (JobEvent.NOTE, "one"), (JobEvent.NOTE, "two")]
    assert [(seq, row.n, row.attempt) for seq, row in commit.steps] == [
        (before.seq, 1, attempt),
        (before.seq, 2, attempt),
    ]
