"""Which worker gets a job, and what is said when none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.backlog import Lane
from penstock.control.placement import Places, serves, why_waiting
from penstock.control.roster import DEFAULT_POOL, Pool, WorkerRecord

TEXT = Lane("job.text.shout", frozenset())
GPU = Lane("job.text.shout", frozenset({("gpu", "yes")}))


def worker(worker_id: str, *, held: int = 0, **fields: Any) -> WorkerRecord:
    defaults: dict[str, Any] = {"topics": ("job.*",), "slots": 2, "limit": 2}
    record = WorkerRecord(worker_id, **{**defaults, **fields})
    record.held = {f"{worker_id}-{n}": 1 for n in range(held)}
    return record


def placer(workers: list[WorkerRecord], named: dict[str, Pool]) -> Callable[[Lane], str | None]:
    return Places(workers, named, ()).find


def pools(*named: Pool) -> dict[str, Pool]:
    return {pool.name: pool for pool in (Pool(DEFAULT_POOL), *named)}


@pytest.mark.parametrize(
    ("pool", "fields", "lane", "expected"),
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
    pool: Pool, fields: dict[str, Any], lane: Lane, expected: bool
) -> None:
    assert serves(pool, worker("w", **fields), lane) is expected


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
    lanes=st.lists(st.sampled_from([TEXT, GPU]), max_size=40),
)
def test_each_job_goes_to_the_least_busy_worker_of_those_that_could_run_it(
    workers: list[tuple[int, int, str, bool]], capacity: int, lanes: list[Lane]
) -> None:
    named = pools(Pool("p", capacity=capacity), Pool("q"))
    here = [
        worker(f"w{n}", limit=limit, held=held, pool=pool, labels={"gpu": "yes"} if gpu else {})
        for n, (limit, held, pool, gpu) in enumerate(workers)
    ]
    place = placer(here, named)
    held = {w.worker_id: len(w.held) for w in here}
    for lane in lanes:
        in_p = sum(held[w.worker_id] for w in here if w.pool == "p")
        free = {
            w.worker_id: (w.limit - held[w.worker_id]) / w.limit
            for w in here
            if serves(named[w.pool], w, lane)
            and held[w.worker_id] < w.limit
            and (w.pool == "q" or in_p < capacity)
        }
        expected = max(free, key=lambda name: free[name], default=None)
        assert place(lane) == expected
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
    ("workers", "named", "lane", "said"),
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
    workers: list[WorkerRecord], named: list[Pool], lane: Lane, said: str
) -> None:
    assert said in why_waiting(lane, workers, pools(*named))


def test_a_paused_pool_is_given_nothing() -> None:
    workers = [worker("a", pool="p"), worker("b", pool="q")]
    places = Places(workers, pools(Pool("p"), Pool("q")), {"p"})
    assert [places.find(TEXT) for _ in range(3)] == ["b", "b", None]


def test_there_is_room_until_every_worker_that_is_open_is_full() -> None:
    places = Places(
        [worker("a"), worker("b", held=2), worker("c", pool="p")], pools(Pool("p")), {"p"}
    )
    assert places.has_room()
    assert [places.find(TEXT), places.find(TEXT)] == ["a", "a"]
    assert not places.has_room()


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
