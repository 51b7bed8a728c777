"""Which worker gets a job, and what is said when none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.backlog import QueueKey
from penstock.control.workers import (
    DEFAULT_POOL,
    Placement,
    Pool,
    Roster,
    WorkerRecord,
    serves,
    why_waiting,
)
from penstock.ports.bus import Handshake
from penstock.ports.executor import PAUSED

TEXT = QueueKey("job.text.shout", frozenset())
GPU = QueueKey("job.text.shout", frozenset({("gpu", "yes")}))


def worker(worker_id: str, *, held: int = 0, **fields: Any) -> WorkerRecord:
    defaults: dict[str, Any] = {"topics": ("job.*",), "slots": 2, "limit": 2}
    holds = {f"{worker_id}-{n}": 1 for n in range(held)}
    return WorkerRecord(worker_id, held=holds, **{**defaults, **fields})


def placer(workers: list[WorkerRecord], named: dict[str, Pool]) -> Callable[[QueueKey], str | None]:
    return placement_of(roster_of(workers, named)).find


def roster_of(workers: list[WorkerRecord], named: dict[str, Pool]) -> Roster:
    roster = Roster(named)
    for w in workers:
        held = tuple(w.held.items())
        roster.greet(Handshake(w.worker_id, w.pool, w.topics, w.slots, w.labels, held), 0.0)
        roster.set_limit(w.worker_id, w.limit)
        if w.missing_since is not None:
            roster.set_missing(roster.workers[w.worker_id], w.missing_since)
        if w.draining:
            roster.drain(roster.workers[w.worker_id])
    return roster


def placement_of(roster: Roster) -> Placement:
    placement = Placement(roster)
    placement.refresh()
    return placement


def pools(*named: Pool) -> dict[str, Pool]:
    return {pool.name: pool for pool in (Pool(DEFAULT_POOL), *named)}


@pytest.mark.parametrize(
    ("pool", "fields", "key", "expected"),
    [
        (Pool("p"), {}, TEXT, True),
        (Pool("p"), {"topics": ("job.image.*",)}, TEXT, False),
        (Pool("p"), {"topics": ("job.image.*", "job.text.*")}, TEXT, True),
        (Pool("p", topics=("job.image.*",)), {}, TEXT, False),
        (Pool("p", topics=("job.text.*",)), {}, TEXT, True),
        (Pool("p"), {}, GPU, False),
        (Pool("p"), {"labels": {"gpu": "yes"}}, GPU, True),
        (Pool("p"), {"labels": {"gpu": "no"}}, GPU, False),
        (Pool("p", labels={"gpu": "yes"}), {}, GPU, True),
        (Pool("p", labels={"gpu": "yes"}), {"labels": {"gpu": "no"}}, GPU, False),
    ],
)
def test_a_worker_serves_what_its_pool_its_topics_and_its_labels_allow(
    pool: Pool, fields: dict[str, Any], key: QueueKey, expected: bool
) -> None:
    assert serves(pool, worker("w", **fields), key) is expected


def test_the_least_busy_worker_is_chosen_and_counted() -> None:
    place = placer([worker("a", held=1), worker("b")], pools())
    assert [place(TEXT) for _ in range(4)] == ["b", "a", "b", None]


@given(
    workers=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 5), st.sampled_from("pq"), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    capacity=st.integers(0, 12),
    keys=st.lists(st.sampled_from([TEXT, GPU]), max_size=40),
)
def test_each_job_goes_to_the_least_busy_worker_of_those_that_could_run_it(
    workers: list[tuple[int, int, str, bool]], capacity: int, keys: list[QueueKey]
) -> None:
    named = pools(Pool("p", capacity=capacity), Pool("q"))
    here = [
        worker(f"w{n}", limit=limit, held=held, pool=pool, labels={"gpu": "yes"} if gpu else {})
        for n, (limit, held, pool, gpu) in enumerate(workers)
    ]
    place = placer(here, named)
    held = {w.worker_id: len(w.held) for w in here}
    for key in keys:
        in_p = sum(held[w.worker_id] for w in here if w.pool == "p")
        free = {
            w.worker_id: (w.limit - held[w.worker_id]) / w.limit
            for w in here
            if serves(named[w.pool], w, key)
            and held[w.worker_id] < w.limit
            and (w.pool == "q" or in_p < capacity)
        }
        expected = max(free, key=lambda name: free[name], default=None)
        assert place(key) == expected
        if expected is not None:
            held[expected] += 1


def test_a_larger_worker_takes_its_share() -> None:
    place = placer([worker("small", limit=2), worker("large", limit=6)], pools())
    given = [place(TEXT) for _ in range(8)]
    assert (given.count("small"), given.count("large")) == (2, 6)
    assert place(TEXT) is None


@pytest.mark.parametrize("gone", [{"missing_since": 1.0}, {"draining": True}])
def test_who_is_missing_or_draining_is_given_nothing(gone: dict[str, Any]) -> None:
    assert placer([worker("a", **gone)], pools())(TEXT) is None


def test_a_worker_over_its_limit_is_given_nothing() -> None:
    assert placer([worker("a", held=3), worker("b", limit=0)], pools())(TEXT) is None


def test_a_pool_holds_no_more_than_its_capacity() -> None:
    place = placer(
        [worker("a", pool="p", held=1), worker("b", pool="p")], pools(Pool("p", capacity=2))
    )
    assert [place(TEXT), place(TEXT)] == ["b", None]


@pytest.mark.parametrize("gone", [{"missing_since": 1.0}, {"draining": True}])
def test_what_missing_and_draining_workers_hold_counts_against_the_capacity(
    gone: dict[str, Any],
) -> None:
    leaving = worker("a", pool="p", held=2, **gone)
    place = placer([leaving, worker("b", pool="p")], pools(Pool("p", capacity=2)))
    assert place(TEXT) is None


def test_a_full_pool_does_not_stand_in_the_way_of_another() -> None:
    workers = [worker("a", pool="p", held=1), worker("b", pool="q")]
    place = placer(workers, pools(Pool("p", capacity=1), Pool("q")))
    assert place(TEXT) == "b"


@pytest.mark.parametrize(
    ("workers", "named", "key", "said"),
    [
        ([], [Pool(DEFAULT_POOL, topics=("job.image.*",))], TEXT, "no pool serves the topic"),
        ([], [], TEXT, "no worker is here that serves the topic job.text.shout"),
        ([worker("a", topics=("job.b",))], [], TEXT, "no worker is here that serves"),
        ([worker("a")], [], GPU, "has the labels gpu=yes"),
        ([worker("a", draining=True)], [], TEXT, "missing or draining"),
        ([worker("a", missing_since=1.0)], [], TEXT, "missing or draining"),
        ([worker("a", held=2)], [], TEXT, "busy (2 jobs on 1)"),
        ([worker("a", pool="p", held=1)], [Pool("p", capacity=1)], TEXT, "the pool p is at its"),
        ([worker("a")], [], TEXT, "about to be dispatched"),
    ],
)
def test_what_waits_has_a_reason(
    workers: list[WorkerRecord], named: list[Pool], key: QueueKey, said: str
) -> None:
    assert said in why_waiting(key, workers, pools(*named))


def test_a_paused_pool_is_given_nothing() -> None:
    workers = [worker("a", pool="p"), worker("b", pool="q")]
    roster = roster_of(workers, pools(Pool("p"), Pool("q")))
    roster.pause("p")
    placement = placement_of(roster)
    assert [placement.find(TEXT) for _ in range(3)] == ["b", "b", None]
    assert placement.freed() == []
    roster.resume("p")
    placement.refresh()
    assert placement.freed() == [TEXT]
    assert placement.find(TEXT) in ("a", "b")


def test_there_is_room_until_every_worker_that_is_open_is_full() -> None:
    workers = [worker("a"), worker("b", held=2), worker("c", pool="p")]
    roster = roster_of(workers, pools(Pool("p")))
    roster.pause("p")
    placement = placement_of(roster)
    assert placement.has_room()
    assert [placement.find(TEXT), placement.find(TEXT)] == ["a", "a"]
    assert not placement.has_room()


def test_what_was_given_out_and_not_committed_is_free_again_in_the_next_turn() -> None:
    roster = roster_of([worker("a", limit=3)], pools())
    placement = placement_of(roster)
    assert [placement.find(TEXT) for _ in range(4)] == ["a", "a", "a", None]
    roster.hold("a", "j1", 1)
    placement.refresh()
    assert placement.freed() == [TEXT]
    assert [placement.find(TEXT) for _ in range(3)] == ["a", "a", None]


def test_a_worker_that_pauses_a_topic_is_given_others() -> None:
    roster = roster_of([worker("a")], pools())
    placement = placement_of(roster)
    roster.set_facts("a", "", {PAUSED: {TEXT.topic: "no model"}})
    placement.refresh()
    other = QueueKey("job.other", frozenset())
    assert [placement.find(TEXT), placement.find(other)] == [None, "a"]
    roster.set_facts("a", "", {})
    placement.refresh()
    assert placement.freed() == [TEXT]
    assert placement.find(TEXT) == "a"


def test_a_worker_that_was_forgotten_is_given_nothing() -> None:
    roster = roster_of([worker("a"), worker("b")], pools())
    placement = placement_of(roster)
    assert placement.find(TEXT) == "a"
    roster.forget(roster.workers["a"])
    placement.refresh()
    assert [placement.find(TEXT) for _ in range(3)] == ["b", "b", None]


def test_a_job_that_ends_on_a_missing_worker_makes_room_in_its_pool() -> None:
    workers = [worker("a", pool="p", held=1, missing_since=1.0), worker("b", pool="p")]
    roster = roster_of(workers, pools(Pool("p", capacity=1)))
    placement = placement_of(roster)
    assert placement.find(TEXT) is None
    assert not placement.has_room()
    roster.release("a", "a-0", 1)
    placement.refresh()
    assert placement.freed() == [TEXT]
    assert placement.find(TEXT) == "b"


def test_a_turn_looks_only_at_workers_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    roster = roster_of([worker(f"w{n}") for n in range(1000)], pools())
    placement = placement_of(roster)
    looked_at: list[str] = []
    update = placement._update

    def counted(worker_id: str) -> None:
        looked_at.append(worker_id)
        update(worker_id)

    monkeypatch.setattr(placement, "_update", counted)
    assert placement.find(TEXT) == "w0"
    roster.hold("w0", "j", 1)
    roster.set_limit("w7", 1)
    placement.refresh()
    placement.refresh()
    assert looked_at == ["w0", "w7"]
    assert placement.find(TEXT) == "w1"


def test_a_worker_that_comes_is_asked_for_what_nobody_could_run() -> None:
    roster = roster_of([worker("a")], pools())
    placement = placement_of(roster)
    assert placement.find(GPU) is None
    roster.release("a", "nothing", 1)
    placement.refresh()
    assert placement.freed() == []
    roster.greet(Handshake("b", DEFAULT_POOL, ("job.*",), 1, {"gpu": "yes"}), 0.0)
    placement.refresh()
    assert placement.freed() == [GPU]
    assert placement.find(GPU) == "b"


@pytest.mark.parametrize(
    ("paused", "said"),
    [
        ({"p"}, "about to be dispatched"),
        ({"p", "q"}, "the pools p, q are paused"),
        ({"q", "r"}, "busy (2 jobs on 1)"),
    ],
)
def test_what_waits_for_a_paused_pool_is_told_so(paused: set[str], said: str) -> None:
    workers = [worker("a", pool="p", held=2), worker("b", pool="q")]
    assert said in why_waiting(TEXT, workers, pools(Pool("p"), Pool("q")), paused)
