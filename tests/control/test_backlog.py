"""Who is next: order within a tenant, fairness between tenants, and nothing that starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.backlog import Backlog, QueueKey
from penstock.control.limits import Bucket
from penstock.core.job import HEAD_START, Job, Priority, rank
from penstock.testing.samples import T0, a_job

LATER = T0 + 1e6


def backlog_of(*jobs: Job, now: float = LATER) -> Backlog:
    backlog = Backlog()
    for job in jobs:
        backlog.add(job, now)
    backlog.wake(now)
    return backlog


def anywhere(_: QueueKey) -> str:
    return "w"


def room_for(places: int) -> Callable[[QueueKey], str | None]:
    left = iter(range(places))
    return lambda _: None if next(left, None) is None else "w"


def picked(backlog: Backlog, places: int = 1_000_000) -> list[int]:
    return [seq for seq, _ in backlog.pick(room_for(places))]


jobs_of_one_tenant = st.lists(
    st.tuples(st.sampled_from(Priority), st.floats(0, 10_000)), max_size=40
).map(
    lambda kinds: [
        a_job(f"j{seq}", seq=seq, at=T0 + at, priority=priority)
        for seq, (priority, at) in enumerate(kinds, start=1)
    ]
)


@given(jobs_of_one_tenant)
def test_within_a_tenant_the_order_is_rank_then_acceptance(jobs: list[Job]) -> None:
    expected = sorted(jobs, key=lambda job: (rank(job.request, job.accepted_at), job.seq))
    assert picked(backlog_of(*jobs)) == [job.seq for job in expected]


@given(jobs_of_one_tenant, st.integers(1, 5))
def test_it_does_not_matter_in_how_many_picks_the_room_comes(jobs: list[Job], places: int) -> None:
    backlog = backlog_of(*jobs)
    in_pieces: list[int] = []
    while piece := picked(backlog, places):
        in_pieces.extend(piece)
    assert in_pieces == picked(backlog_of(*jobs))


def test_a_batch_job_is_picked_however_many_urgent_ones_keep_coming() -> None:
    backlog = backlog_of(a_job("batch", seq=1, at=T0), now=T0)
    for second in range(10_000):
        seq = second + 2
        urgent = a_job(f"u{seq}", seq=seq, at=T0 + second, priority=Priority.CRITICAL)
        backlog.add(urgent, T0 + second)
        if picked(backlog, 1) == [1]:
            break
    assert 0 < second <= HEAD_START[Priority.CRITICAL] + 1


@given(
    st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from(Priority)), min_size=1, max_size=60)
)
def test_tenants_that_wait_together_are_served_in_turn(kinds: list[tuple[str, Priority]]) -> None:
    jobs = [
        a_job(f"j{seq}", seq=seq, tenant=tenant, priority=priority)
        for seq, (tenant, priority) in enumerate(kinds, start=1)
    ]
    tenant_of = {job.seq: job.request.tenant for job in jobs}
    waiting = Counter(tenant_of.values())
    served: Counter[str] = Counter()
    for seq in picked(backlog_of(*jobs)):
        tenant = tenant_of[seq]
        for other, left in waiting.items():
            if left and other != tenant:
                assert served[tenant] <= served[other]
        served[tenant] += 1
        waiting[tenant] -= 1


def test_a_tenant_with_few_jobs_does_not_wait_behind_one_with_many() -> None:
    many = [a_job(f"m{seq}", seq=seq, tenant="many") for seq in range(1, 1001)]
    few = [a_job(f"f{seq}", seq=seq, tenant="few", at=T0 + 60) for seq in (2001, 2002)]
    first = picked(backlog_of(*many, *few), 4)
    assert set(first) > {2001, 2002}


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    backlog = backlog_of(a_job("a", seq=1, tenant="A"), a_job("b", seq=2, tenant="B"))
    picked(backlog)
    for seq in range(10, 110):
        backlog.add(a_job(f"b{seq}", seq=seq, tenant="B"), LATER)
    assert len(picked(backlog, 100)) == 100
    for seq in range(200, 210):
        backlog.add(a_job(f"a{seq}", seq=seq, tenant="A"), LATER)
        backlog.add(a_job(f"c{seq}", seq=seq + 100, tenant="B"), LATER)
    first = picked(backlog, 10)
    assert 4 <= sum(seq < 300 for seq in first) <= 6


def test_a_tenant_whose_jobs_were_all_dropped_has_saved_nothing_up() -> None:
    backlog = backlog_of(a_job("a", seq=1, tenant="A"))
    backlog.discard(1)
    for seq in range(10, 110):
        backlog.add(a_job(f"b{seq}", seq=seq, tenant="B"), LATER)
    picked(backlog)
    for seq in range(200, 210):
        backlog.add(a_job(f"a{seq}", seq=seq, tenant="A"), LATER)
        backlog.add(a_job(f"c{seq}", seq=seq + 100, tenant="B"), LATER)
    assert 4 <= sum(seq < 300 for seq in picked(backlog, 10)) <= 6


def test_a_tenant_nobody_could_serve_has_saved_nothing_up() -> None:
    """Waiting for a worker that is not there is not waiting for one's turn."""
    backlog = backlog_of(a_job("gpu", seq=1, tenant="A", topic="job.gpu"))

    def no_gpu(key: QueueKey) -> str | None:
        return None if key.topic == "job.gpu" else "w"

    for seq in range(10, 110):
        backlog.add(a_job(f"b{seq}", seq=seq, tenant="B"), LATER)
    assert len(list(backlog.pick(no_gpu))) == 100
    for seq in range(200, 220):
        backlog.add(a_job(f"a{seq}", seq=seq, tenant="A"), LATER)
        backlog.add(a_job(f"c{seq}", seq=seq + 100, tenant="B"), LATER)
    first = [seq for seq, _ in islice(backlog.pick(no_gpu), 20)]
    assert 8 <= sum(seq < 300 for seq in first) <= 12


def test_tenants_that_have_nothing_left_are_forgotten() -> None:
    backlog = backlog_of(a_job("gpu", seq=1, tenant="waits", topic="job.gpu"))
    for seq in range(2, 3000):
        backlog.add(a_job(f"j{seq}", seq=seq, tenant=f"t{seq}"), LATER)
        assert list(backlog.pick(lambda key: None if key.topic == "job.gpu" else "w"))
    assert len(backlog._tenants) < 200


def test_tenants_that_come_again_and_again_with_one_job_leave_the_others_their_turns() -> None:
    """However many they are: that they were forgotten in between gives them no turns."""
    for others in (1, 150):
        backlog = backlog_of(*(a_job(f"z{n}", seq=n, tenant="z") for n in range(1, 51)))
        tenants, seq, served = [f"t{n}" for n in range(others)], 100, 0
        tenant_of: dict[int, str] = {}
        for _ in range(10):
            for tenant in tenants:
                seq += 1
                tenant_of[seq] = tenant
                backlog.add(a_job(f"j{seq}", seq=seq, tenant=tenant), LATER)
            found = picked(backlog, others)
            tenants = [tenant_of[one] for one in found if one in tenant_of]
            served += others - len(tenants)
            assert picked(backlog, 0) == []
        assert 5 <= served <= 11


def test_a_key_without_room_does_not_hold_up_the_others() -> None:
    jobs = [a_job(f"g{seq}", seq=seq, topic="job.gpu") for seq in range(1, 5)]
    jobs += [a_job(f"c{seq}", seq=seq, topic="job.cpu") for seq in range(5, 8)]
    asked: Counter[str] = Counter()

    def place(key: QueueKey) -> str | None:
        asked[key.topic] += 1
        return None if key.topic == "job.gpu" else "w"

    backlog = backlog_of(*jobs)
    assert [seq for seq, _ in backlog.pick(place)] == [5, 6, 7]
    assert asked["job.gpu"] == 1
    assert len(backlog) == 4


def test_nobody_in_a_queue_that_had_no_room_is_forgotten() -> None:
    jobs = [
        a_job(f"j{seq}", seq=seq, at=T0, priority=priority)
        for seq, priority in enumerate(reversed(Priority), start=1)
    ]
    backlog = backlog_of(*jobs[:2])  # each was the first when it came
    assert picked(backlog, 0) == []
    backlog.add(jobs[2], LATER)
    ranked = sorted(jobs, key=lambda job: rank(job.request, job.accepted_at))
    assert [picked(backlog, 1) for _ in jobs] == [[job.seq] for job in ranked]


@given(jobs_of_one_tenant, st.data())
def test_however_often_there_is_no_room_every_job_is_picked_once(
    jobs: list[Job], data: st.DataObject
) -> None:
    backlog, found = Backlog(), list[int]()
    for job in jobs:
        backlog.add(job, LATER)
        found += picked(backlog, data.draw(st.integers(0, 1)))
    assert sorted(found + picked(backlog)) == [job.seq for job in jobs]


def test_delayed_jobs_wait_for_their_time() -> None:
    backlog = Backlog()
    backlog.add(a_job("late", seq=1, run_at=T0 + 20), T0)
    backlog.add(a_job("soon", seq=2, run_at=T0 + 10), T0)
    backlog.add(a_job("now", seq=3), T0)
    assert len(backlog) == 3
    assert backlog.wake(T0) == T0 + 10
    assert picked(backlog) == [3]
    assert backlog.wake(T0 + 10) == T0 + 20
    assert picked(backlog) == [2]
    assert backlog.wake(T0 + 25) is None
    assert picked(backlog) == [1]


def test_a_dropped_job_is_never_picked_nor_waited_for() -> None:
    backlog = Backlog()
    backlog.add(a_job("a", seq=1), T0)
    backlog.add(a_job("b", seq=2, run_at=T0 + 5), T0)
    backlog.discard(1)
    backlog.discard(2)
    assert len(backlog) == 0
    assert 1 not in backlog
    assert backlog.wake(T0) is None
    assert picked(backlog) == []


def test_a_job_that_comes_back_is_picked_once() -> None:
    backlog = Backlog()
    job = a_job("a", seq=1)
    for _ in range(3):
        backlog.add(job, LATER)
        backlog.discard(1)
        backlog.add(job, LATER)
        backlog.add(job, LATER)
    assert picked(backlog) == [1]
    backlog.add(job, LATER)
    assert picked(backlog) == [1]
    assert picked(backlog) == []


def test_what_was_yielded_has_left_even_if_the_pick_is_cut_short() -> None:
    backlog = backlog_of(*(a_job(f"j{seq}", seq=seq) for seq in range(1, 6)))
    assert [seq for seq, _ in islice(backlog.pick(anywhere), 2)] == [1, 2]
    assert 2 not in backlog
    assert picked(backlog) == [3, 4, 5]


@pytest.mark.seed("001", "6.6")
def test_a_key_is_made_of_the_topic_and_the_placement_labels() -> None:
    labels = {"place.gpu": "yes", "colour": "red"}
    key = QueueKey.of(a_job(labels=labels))
    assert key == QueueKey("job.test", frozenset({("gpu", "yes")}))
    assert QueueKey.of(a_job(labels={"colour": "blue"})) == QueueKey("job.test", frozenset())


@given(jobs_of_one_tenant, st.data())
def test_every_job_is_picked_exactly_once_or_dropped(jobs: list[Job], data: st.DataObject) -> None:
    backlog = backlog_of(*jobs)
    dropped = {job.seq for job in jobs if data.draw(st.booleans())}
    for seq in dropped:
        backlog.discard(seq)
    assert sorted(picked(backlog)) == sorted({job.seq for job in jobs} - dropped)


def test_tenants_that_wait_for_a_worker_that_is_not_there_cost_nothing() -> None:
    tenants = range(1, 2001)
    backlog = backlog_of(*(a_job(f"j{n}", seq=n, tenant=f"t{n}", topic="job.gpu") for n in tenants))
    asked: list[QueueKey] = []
    free: list[str] = []

    def place(key: QueueKey) -> str | None:
        asked.append(key)
        return free.pop() if free else None

    assert list(backlog.pick(place, lambda: True, list)) == []
    assert len(asked) == 1
    asked.clear()
    assert list(backlog.pick(place, lambda: True, list)) == []
    assert asked == []
    assert backlog._turns == []
    gpu = QueueKey("job.gpu", frozenset())
    for turn in range(1, 4):
        free.append("w")
        assert len(list(backlog.pick(place, lambda: True, lambda: [gpu]))) == 1
        assert len(asked) == 2 * turn
        assert len(backlog._turns) <= 1  # only those whose turn it was came back


# -- limits -----------------------------------------------------------------------


def test_a_key_whose_limit_is_full_is_asked_about_again_when_it_is_opened() -> None:
    """However many keys have a full limit, one that opens costs no look at the others."""
    backlog, full = Backlog(), {Bucket("l", (str(n),)) for n in range(10_000)}
    for seq, bucket in enumerate(sorted(full) * 2, start=1):
        backlog.add(a_job(f"j{seq}", seq=seq), LATER, (bucket,))
    asked: list[Bucket] = []

    def place(key: QueueKey) -> str | Bucket:
        (bucket,) = key.buckets
        asked.append(bucket)
        return bucket if bucket in full else "w"

    assert list(backlog.pick(place)) == []
    assert len(asked) == 10_000
    asked.clear()
    assert list(backlog.pick(place)) == []
    assert asked == []
    opened = Bucket("l", ("77",))
    full.discard(opened)
    backlog.open(opened)
    assert len(list(backlog.pick(place))) == 2
    assert asked == [opened, opened]


def test_a_job_that_is_added_under_other_limits_leaves_its_old_queue() -> None:
    backlog, old, new = Backlog(), Bucket("old", ()), Bucket("new", ())
    backlog.add(a_job("a", seq=1), LATER, (old,))
    backlog.discard(1)
    backlog.add(a_job("a", seq=1), LATER, (new,))
    keys: list[QueueKey] = []

    def place(key: QueueKey) -> str:
        keys.append(key)
        return "w"

    assert [seq for seq, _ in backlog.pick(place)] == [1]
    assert [key.buckets for key in keys] == [(new,)]


def test_nobody_is_asked_when_there_is_no_room_for_anything() -> None:
    jobs = [a_job(f"j{seq}", seq=seq, topic=f"job.t{seq}") for seq in range(1, 101)]
    backlog, asked = backlog_of(*jobs), []

    def place(key: QueueKey) -> None:
        asked.append(key)

    assert list(backlog.pick(place, lambda: False)) == []
    assert len(asked) == 1
    assert len(picked(backlog)) == 100


def test_urgent_jobs_that_keep_coming_leave_nothing_behind() -> None:
    backlog = backlog_of(a_job("batch", seq=1, at=T0), now=T0)
    for seq in range(2, 3000):
        backlog.add(a_job(f"u{seq}", seq=seq, priority=Priority.CRITICAL), LATER)
        assert picked(backlog, 1) == [seq]
    assert sum(len(tenant.heads) for tenant in backlog._tenants.values()) <= 2


def test_a_backlog_that_was_emptied_keeps_whose_turn_it_is() -> None:
    jobs = [a_job(f"{t}{n}", seq=2 * n + (t == "B"), tenant=t) for n in range(1, 9) for t in "AB"]
    whole, emptied = backlog_of(*jobs), backlog_of(*jobs)
    first = picked(whole, 3)
    assert picked(emptied, 3) == first
    left = set(emptied.empty())
    assert len(emptied) == 0
    for job in jobs:
        if job.seq in left:
            emptied.add(job, LATER)
    assert picked(emptied) == picked(whole)
