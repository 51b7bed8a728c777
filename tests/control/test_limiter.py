"""Which limits a job counts against, and who may go, come or must wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.control.backlog import QueueKey
from penstock.control.limits import Bucket, Gate, Limiter, matches
from penstock.core.errors import TooMany
from penstock.core.job import Job
from penstock.core.verdict import Constraints, Decision, Rate, SafetyVerdict
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import Limit, LimitUse
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, a_job, a_request


class LimiterBench:
    """A limiter, and the jobs that OpenJobs would tell it of."""

    def __init__(self, *limits: Limit) -> None:
        self.clock = VirtualClock(T0)
        self.held: dict[str, Job] = {}
        self.waiting: dict[str, Job] = {}
        self.limiter = Limiter(self.clock.now, held=self.held.values, waiting=self.waiting.values)
        self.limiter.monotonic = self.clock.monotonic
        self.limiter.use(limits)

    def wait(self, *jobs: Job) -> None:
        for job in jobs:
            self.waiting[job.job_id] = job
            self.limiter.wait(job)

    def leave(self, *jobs: Job) -> None:
        for job in jobs:
            self.waiting.pop(job.job_id)
            self.limiter.wait_no_more(job.seq)

    def hold(self, *jobs: Job) -> None:
        for job in jobs:
            self.held[job.job_id] = job
            self.limiter.hold(replace(job, dispatched_at=self.clock.now()))

    def end(self, *jobs: Job) -> None:
        for job in jobs:
            self.held.pop(job.job_id, None)
            self.limiter.let_go(job.job_id)

    def gate(self) -> Gate:
        return Gate(self.limiter, lambda key: "w")

    def key(self, job: Job) -> QueueKey:
        return QueueKey.of(job, self.limiter.buckets(job, job.verdict))

    def may_go(self, job: Job) -> bool:
        return self.gate().place(self.key(job)) == "w"


def job(name: str = "a", **fields: Any) -> Job:
    verdict = fields.pop("verdict", None)
    made = a_job(name, seq=int.from_bytes(name.encode()), **fields)
    return replace(made, verdict=verdict)


def limit(name: str = "l", **fields: Any) -> Limit:
    return Limit(name=name, **fields)


# -- buckets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"topics": ("job.text.*",)}, True),
        ({"topics": ("job.image.*", "job.text.*")}, True),
        ({"topics": ("job.image.*",)}, False),
        ({"tenants": ("ac*",)}, True),
        ({"tenants": ("other",)}, False),
        ({"labels": {"customer": "c*"}}, True),
        ({"labels": {"customer": "x"}}, False),
        ({"labels": {"region": "*"}}, False),
        ({"labels": {"customer": "c1"}, "tenants": ("other",)}, False),
    ],
)
def test_a_limit_holds_for_what_all_its_conditions_match(
    fields: dict[str, Any], expected: bool
) -> None:
    request = a_request(topic="job.text.shout", tenant="acme", labels={"customer": "c1"})
    assert matches(limit(concurrency=1, **fields), request) is expected


def test_jobs_with_the_same_values_of_a_key_share_a_bucket() -> None:
    site = LimiterBench(
        limit(key=("tenant", "label:customer"), concurrency=1), limit("all", concurrency=9)
    )
    one = site.limiter.buckets(job("a", tenant="t", labels={"customer": "c1", "x": "1"}))
    same = site.limiter.buckets(job("b", tenant="t", labels={"customer": "c1", "x": "2"}))
    other = site.limiter.buckets(job("c", tenant="t", labels={"customer": "c2"}))
    assert one == same == (Bucket("l", ("t", "c1")), Bucket("all", ()))
    assert other == (Bucket("l", ("t", "c2")), Bucket("all", ()))


def test_leaving_a_label_out_is_no_way_around_a_limit() -> None:
    site = LimiterBench(limit(key=("label:customer",), concurrency=1))
    site.hold(job("a"))
    assert not site.may_go(job("b"))


def test_a_job_that_no_limit_matches_counts_against_nothing() -> None:
    site = LimiterBench(limit(topics=("job.other",), concurrency=1))
    assert site.limiter.buckets(job()) == ()


def test_a_rule_that_slows_jobs_down_is_a_limit_of_each_tenant() -> None:
    verdict = SafetyVerdict(Decision.THROTTLE, "slow", "s1", rate=Rate(1, 60.0))
    site = LimiterBench()
    assert site.limiter.buckets(job(tenant="t"), verdict) == (Bucket("rule:slow", ("t",)),)
    allowed = SafetyVerdict(Decision.ALLOW, "fine", "s1")
    assert site.limiter.buckets(job(), allowed) == ()


# -- going ------------------------------------------------------------------------


def test_no_more_run_than_the_concurrency_and_one_that_ends_makes_room() -> None:
    site = LimiterBench(limit(key=("tenant",), concurrency=2))
    one, two, three = (job(name, tenant="t") for name in "abc")
    site.hold(one)
    assert site.may_go(two)
    site.hold(two)
    assert not site.may_go(three)
    assert site.may_go(job("d", tenant="other"))
    site.end(one)
    assert site.may_go(three)
    assert site.limiter.freed() == [Bucket("l", ("t",))]


def test_what_is_given_out_in_one_turn_counts_at_once() -> None:
    site = LimiterBench(limit(concurrency=2))
    gate, key = site.gate(), site.key(job())
    assert [gate.place(key) for _ in range(3)] == ["w", "w", Bucket("l", ())]
    assert gate.taken == Counter({Bucket("l", ()): 2})


def test_a_job_takes_all_its_buckets_or_none() -> None:
    site = LimiterBench(limit("a", concurrency=1), limit("b", topics=("job.b",), concurrency=5))
    site.hold(job("x"))
    gate = site.gate()
    assert gate.place(site.key(job("y", topic="job.b"))) == Bucket("a", ())
    assert not gate.taken
    nobody = Gate(site.limiter, lambda key: None)
    site.end(*site.held.values())
    assert nobody.place(site.key(job("y", topic="job.b"))) is None
    assert not nobody.taken


def test_a_job_that_goes_to_another_worker_is_counted_once() -> None:
    site = LimiterBench(limit(concurrency=2, rate=Rate(2, 60.0)))
    for _ in range(5):
        site.hold(job("a"))
    assert site.may_go(job("b"))
    site.end(job("a"))
    site.end(job("a"))
    assert site.limiter._running == Counter()


def test_no_more_go_than_the_rate_and_the_bucket_says_when_it_opens() -> None:
    site = LimiterBench(limit(rate=Rate(2, 10.0)))
    site.hold(job("a"))
    site.clock.advance(4)
    site.hold(job("b"))
    site.end(job("a"), job("b"))
    site.limiter.freed()
    assert not site.may_go(job("c"))
    assert site.limiter.opens_in() == 6
    site.clock.advance(6)
    assert site.limiter.freed() == [Bucket("l", ())]
    assert site.may_go(job("c"))
    site.hold(job("c"))
    assert not site.may_go(job("d"))
    assert site.limiter.opens_in() == 4


def test_setting_the_wall_clock_changes_no_rate() -> None:
    site = LimiterBench(limit(rate=Rate(1, 10.0)))
    site.hold(job("a"))
    for hours in (5, -9, 4):
        site.clock.jump(hours * 3600.0)
        assert not site.may_go(job("b"))
        assert site.limiter.opens_in() == 10
    site.clock.advance(10)
    assert site.may_go(job("b"))


def test_a_bucket_that_is_only_full_with_what_a_turn_took_is_asked_again() -> None:
    site = LimiterBench(limit(rate=Rate(1, 10.0)))
    gate, key = site.gate(), site.key(job())
    assert [gate.place(key), gate.place(key)] == ["w", Bucket("l", ())]
    assert site.limiter.freed() == [Bucket("l", ())]


def test_a_bucket_that_is_full_of_running_jobs_wakes_nobody_by_its_rate() -> None:
    site = LimiterBench(limit(concurrency=1, rate=Rate(5, 10.0)))
    site.hold(job("a"))
    assert not site.may_go(job("b"))
    assert site.limiter.opens_in() is None
    assert site.limiter.freed() == []


def test_what_was_held_before_a_restart_counts_against_the_rate() -> None:
    site = LimiterBench(limit(rate=Rate(1, 10.0)))
    site.limiter.hold(replace(job("a"), dispatched_at=T0 - 4))
    assert not site.may_go(job("b"))
    assert site.limiter.opens_in() == 6


def test_a_rules_number_of_running_jobs_is_kept_for_each_tenant() -> None:
    verdict = SafetyVerdict(
        Decision.ALLOW_WITH_CONSTRAINTS, "few", "s1", constraints=Constraints(max_concurrent=1)
    )
    site = LimiterBench()
    site.hold(job("a", tenant="t", verdict=verdict))
    assert not site.may_go(job("b", tenant="t", verdict=verdict))
    assert site.may_go(job("c", tenant="u", verdict=verdict))


def test_what_a_rule_says_last_holds() -> None:
    slow = SafetyVerdict(Decision.THROTTLE, "r", "s1", rate=Rate(1, 86_400.0))
    quick = SafetyVerdict(Decision.THROTTLE, "r", "s2", rate=Rate(1, 2.0))
    site = LimiterBench()
    site.hold(job("a", verdict=slow))
    assert not site.may_go(job("b", verdict=slow))
    assert not site.may_go(job("b", verdict=quick))
    opens_in = site.limiter.opens_in()
    assert opens_in is not None
    assert opens_in <= 86_400
    site.clock.advance(2)
    assert Bucket("rule:r", ("default",)) in site.limiter.freed()
    assert site.may_go(job("b", verdict=quick))


# -- changes ----------------------------------------------------------------------


def test_changed_limits_count_what_is_held_anew() -> None:
    asked = []
    site = LimiterBench(limit(concurrency=5))
    site.limiter.on_change = lambda: asked.append(True)
    site.hold(job("a"), job("b"))
    site.limiter.use([limit(concurrency=2), limit("t", key=("tenant",), concurrency=9)])
    assert asked == [True]
    assert not site.may_go(job("c"))
    assert site.limiter._running[Bucket("t", ("default",))] == 2
    site.end(job("a"))
    assert site.may_go(job("c"))
    site.limiter.use([])
    assert site.limiter.buckets(job("c")) == ()
    site.end(job("b"))
    assert site.limiter._running == Counter()


def test_a_changed_limit_does_not_forget_what_went() -> None:
    site = LimiterBench(limit(rate=Rate(5, 60.0)))
    done = [job(name) for name in "abc"]
    site.hold(*done)
    site.end(*done)
    site.limiter.use([limit(rate=Rate(3, 60.0))])
    assert not site.may_go(job("d"))
    site.limiter.use([limit(rate=Rate(4, 60.0))])
    assert site.may_go(job("d"))


def test_keys_that_come_no_more_are_forgotten() -> None:
    site = LimiterBench(limit(key=("label:n",), rate=Rate(1, 1.0), max_waiting=5))
    for n in range(5000):
        one = job(f"j{n}", labels={"n": str(n)})
        site.wait(one)
        site.leave(one)
        site.hold(one)
        site.end(one)
        site.clock.advance(0.1)
    assert len(site.limiter._windows) + len(site.limiter._departures) < 1100
    assert not site.limiter._running


# -- coming -----------------------------------------------------------------------


def test_more_than_may_wait_are_refused_with_the_limit_the_key_and_a_time() -> None:
    site = LimiterBench(limit("depth", key=("tenant",), max_waiting=3))
    site.wait(job("a", tenant="t"), job("b", tenant="t"))
    site.limiter.check_waiting([a_request("c", tenant="t")])
    with pytest.raises(
        TooMany, match=r"limit depth for t: queue is full \(max_waiting=3, 2 waiting, 2 more\)"
    ) as refused:
        site.limiter.check_waiting([a_request("c", tenant="t"), a_request("d", tenant="t")])
    assert refused.value.retry_after == 60.0
    site.limiter.check_waiting([a_request("c", tenant="u")] * 3)


def test_the_time_to_try_again_is_how_fast_the_queue_got_shorter() -> None:
    site = LimiterBench(limit(max_waiting=2))
    gone = [job(f"g{n}") for n in range(4)]
    site.wait(*gone)
    for one in gone:
        site.clock.advance(2)
        site.leave(one)
    site.clock.advance(2)
    site.wait(job("a"), job("b"))
    with pytest.raises(TooMany) as refused:
        site.limiter.check_waiting([a_request("c")] * 2)
    assert refused.value.retry_after == pytest.approx(4.0)


def test_the_time_to_try_again_is_never_less_than_a_second() -> None:
    site = LimiterBench(limit(max_waiting=1))
    for n in range(40):
        one = job(f"g{n}")
        site.wait(one)
        site.leave(one)
    site.wait(job("a"))
    with pytest.raises(TooMany) as refused:
        site.limiter.check_waiting([a_request("c")])
    assert refused.value.retry_after == 1.0


def test_a_batch_that_could_never_wait_is_told_so() -> None:
    site = LimiterBench(limit(max_waiting=3))
    with pytest.raises(TooMany, match="at most 3 at once"):
        site.limiter.check_waiting([a_request("c")] * 4)


def test_a_job_that_waits_is_counted_once() -> None:
    site = LimiterBench(limit(max_waiting=2))
    for _ in range(3):
        site.wait(job("a"))
    site.limiter.check_waiting([a_request("b")])
    site.leave(job("a"))
    site.limiter.check_waiting([a_request("b")] * 2)


# -- saying -----------------------------------------------------------------------


def test_a_job_is_told_which_limit_holds_it_back() -> None:
    site = LimiterBench(
        limit("two", key=("tenant",), concurrency=2), limit("r", rate=Rate(3, 60.0))
    )
    site.hold(job("a", tenant="t"))
    assert site.limiter.why(job("c", tenant="t")) is None
    site.hold(job("b", tenant="t"))
    assert site.limiter.why(job("c", tenant="t")) == ("limit two for t is reached: 2 of 2 running")
    site.hold(job("d", tenant="u"))
    site.clock.advance(20)
    assert site.limiter.why(job("e", tenant="u")) == ("limit r is reached: 3/m, next in 40.0 s")


def test_a_view_shows_the_busiest_keys_first_and_the_limits_of_rules() -> None:
    verdict = SafetyVerdict(Decision.THROTTLE, "slow", "s1", rate=Rate(1, 60.0))
    site = LimiterBench(limit("l", key=("tenant",), concurrency=2, max_waiting=9))
    site.hold(job("a", tenant="t"), job("b", tenant="u"), job("c", tenant="u", verdict=verdict))
    site.wait(job("d", tenant="v"))
    mine, rules = site.limiter.views(T0)
    assert mine.uses == (
        LimitUse(("u",), 2, 0),
        LimitUse(("t",), 1, 0),
        LimitUse(("v",), 0, 1),
    )
    assert (rules.limit.name, rules.limit.rate) == ("rule:slow", Rate(1, 60.0))
    assert rules.uses == (LimitUse(("u",), 1, 0, T0 + 60),)


def test_a_view_shows_a_hundred_keys_at_most() -> None:
    site = LimiterBench(limit(key=("label:n",), concurrency=2))
    site.hold(*(job(f"j{n}", labels={"n": str(n)}) for n in range(300)))
    (view,) = site.limiter.views(T0)
    assert len(view.uses) == 100


def test_without_limits_nothing_is_counted() -> None:
    site = LimiterBench()
    assert not site.limiter.in_use
    site.wait(job("a"))
    site.hold(job("b", state=JobState.RUNNING))
    site.limiter.check_waiting([a_request("c")])
    assert not site.limiter._waiting
    assert not site.limiter._held
