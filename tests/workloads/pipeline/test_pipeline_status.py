"""How stages and jobs end, in every combination."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every

from penstock.core.errors import Misconfigured
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import StageKind, StageRecord, StageStatus
from penstock.workloads.pipeline.status import (
    POLICIES,
    document,
    overall,
    policy_of,
    reference,
    stage_status,
)

COMPLETED, PARTIAL, FAILED = (
    PipelineJobStatus.COMPLETED,
    PipelineJobStatus.PARTIAL,
    PipelineJobStatus.FAILED,
)
OK, SOME, NONE, SKIP = (
    StageStatus.COMPLETED,
    StageStatus.PARTIAL,
    StageStatus.FAILED,
    StageStatus.SKIPPED,
)
ENDS = (OK, SOME, NONE, SKIP)
MULTISETS = [
    combination
    for size in range(7)
    for combination in itertools.combinations_with_replacement(ENDS, size)
]


def a_stage(
    status: StageStatus, index: int = 0, *, kind: StageKind = StageKind.MAP, **fields: Any
) -> StageRecord:
    return StageRecord(name=f"s{index}", index=index, kind=kind, status=status, **fields)


def stages_of(statuses: Iterable[StageStatus]) -> list[StageRecord]:
    return [a_stage(status, index) for index, status in enumerate(statuses)]


# -- a second formulation: worst case first, by counting ----------------------------------


def expected_by_document(statuses: Sequence[StageStatus]) -> PipelineJobStatus:
    count = Counter(statuses)
    succeeded_somewhat = count[OK] + count[SOME]
    if len(statuses) > 0 and succeeded_somewhat == 0:
        return FAILED
    if count[SOME] or count[NONE] or count[SKIP]:
        return PARTIAL
    return COMPLETED


def expected_by_reference(statuses: Sequence[StageStatus]) -> PipelineJobStatus:
    """The rows of the table of facts, in their order."""
    have = {status: status in statuses for status in ENDS}
    if not any(have.values()):
        return COMPLETED
    if have[OK] and not (have[SOME] or have[NONE] or have[SKIP]):
        return COMPLETED
    if have[NONE]:
        return PARTIAL if have[OK] else FAILED
    return PARTIAL


@pytest.mark.seed("002", "7.1", "8.7")
@every("statuses", MULTISETS)
def test_every_multiset_of_stage_statuses_up_to_six(statuses: tuple[StageStatus, ...]) -> None:
    stages = stages_of(statuses)
    assert document(stages) is overall("document", stages) is expected_by_document(statuses)
    assert reference(stages) is overall("reference", stages) is expected_by_reference(statuses)


@pytest.mark.seed("002", "7.3")
@every(
    "statuses, by_document, by_reference",
    [
        ((), COMPLETED, COMPLETED),
        ((OK, OK), COMPLETED, COMPLETED),
        ((NONE, NONE), FAILED, FAILED),
        ((NONE,), FAILED, FAILED),
        ((OK, NONE), PARTIAL, PARTIAL),
        ((OK, NONE, SKIP, SOME), PARTIAL, PARTIAL),
        ((SOME,), PARTIAL, PARTIAL),
        ((OK, SOME), PARTIAL, PARTIAL),
        ((SOME, NONE), PARTIAL, FAILED),
        ((SKIP, NONE), FAILED, FAILED),
        ((OK, SKIP), PARTIAL, PARTIAL),
        ((SKIP,), FAILED, PARTIAL),
        ((SOME, SKIP), PARTIAL, PARTIAL),
    ],
)
def test_the_settled_rows_by_hand(
    statuses: tuple[StageStatus, ...],
    by_document: PipelineJobStatus,
    by_reference: PipelineJobStatus,
) -> None:
    assert document(stages_of(statuses)) is by_document
    assert reference(stages_of(statuses)) is by_reference


@given(st.permutations(range(6)), st.lists(st.sampled_from(ENDS), min_size=6, max_size=6))
def test_the_order_of_stages_does_not_matter(order: list[int], statuses: list[StageStatus]) -> None:
    stages = stages_of(statuses)
    shuffled = [stages[index] for index in order]
    for policy in POLICIES.values():
        assert policy(stages) is policy(shuffled)


# -- counted, critical, reason ------------------------------------------------------------

KINDS = [
    (status, counted, critical, reason)
    for status, counted, critical in itertools.product(ENDS, (True, False), (True, False))
    for reason in ("", "disabled", "breaker_open", "evaluation_failed")
]


@pytest.mark.seed("002", "7.4")
@pytest.mark.parametrize("policy", ["document", "reference"])
@pytest.mark.parametrize("size", [1, 2])
def test_every_combination_of_counted_critical_and_reason(policy: str, size: int) -> None:
    by_table = {"document": expected_by_document, "reference": expected_by_reference}[policy]
    for combination in itertools.product(KINDS, repeat=size):
        stages = [
            a_stage(status, counted=counted, critical=critical, reason=reason)
            for status, counted, critical, reason in combination
        ]
        stops = any(critical and status is NONE for status, _, critical, _ in combination)
        counted = [status for status, counts, _, _ in combination if counts]
        expected = FAILED if stops else by_table(counted)
        assert overall(policy, stages) is expected, combination


def test_a_job_with_every_stage_disabled_is_completed() -> None:
    stages = [a_stage(SKIP, i, counted=False, reason="disabled") for i in range(6)]
    assert overall("document", stages) is COMPLETED


def test_a_critical_stage_that_failed_fails_the_job_also_if_it_is_not_counted() -> None:
    stages = [a_stage(OK, 0), a_stage(NONE, 1, critical=True, counted=False)]
    assert document(stages) is FAILED
    assert overall("reference", stages) is FAILED
    assert overall(lambda stages: COMPLETED, stages) is FAILED


@pytest.mark.parametrize("status", [OK, SOME, SKIP])
def test_a_critical_stage_that_did_not_fail_is_like_any_other(status: StageStatus) -> None:
    stages = [a_stage(OK, 0), a_stage(status, 1, critical=True)]
    assert overall("document", stages) is (COMPLETED if status is OK else PARTIAL)


@pytest.mark.seed("002", "7.12")
def test_an_empty_stage_is_completed_and_only_the_reference_minds_an_empty_step() -> None:
    step = [a_stage(OK, 0), a_stage(OK, 1, kind=StageKind.STEP, empty=True)]
    mapped = [a_stage(OK, 0), a_stage(OK, 1, empty=True)]
    assert (document(step), reference(step)) == (COMPLETED, PARTIAL)
    assert (document(mapped), reference(mapped)) == (COMPLETED, COMPLETED)


@pytest.mark.parametrize("unfinished", [StageStatus.PENDING, StageStatus.RUNNING])
def test_a_stage_that_never_ended_is_no_success(unfinished: StageStatus) -> None:
    assert document(stages_of([OK, unfinished])) is PARTIAL
    assert document(stages_of([unfinished])) is FAILED


# -- policies -----------------------------------------------------------------------------


def test_a_policy_of_ones_own_is_given_the_records_and_decides() -> None:
    seen: list[Any] = []

    def mine(stages: Any) -> str:
        seen.append(stages)
        return "PARTIAL"

    stages = stages_of([OK])
    assert overall(mine, stages) is PARTIAL
    assert seen == [tuple(stages)]


@pytest.mark.parametrize("answer", ["RUNNING", "CANCELLED", "PENDING", "completed", None, 3, []])
def test_a_policy_that_gives_no_end_is_misconfigured(answer: Any) -> None:
    with pytest.raises(Misconfigured, match="COMPLETED, PARTIAL, FAILED"):
        overall(lambda stages: answer, stages_of([OK]))


def test_an_async_policy_is_misconfigured_and_not_left_unawaited() -> None:
    async def mine(stages: Any) -> PipelineJobStatus:
        return COMPLETED

    with pytest.raises(Misconfigured, match="plain function"):
        overall(mine, stages_of([OK]))


def test_what_a_policy_raises_is_passed_on() -> None:
    def mine(stages: Any) -> PipelineJobStatus:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        overall(mine, stages_of([OK]))


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(Misconfigured, match="document, reference"):
        policy_of("documents")


# -- a stage by its items -----------------------------------------------------------------


def ended(ok: int, failed: int = 0, skipped: int = 0, **settings: Any) -> StageStatus:
    return stage_status(
        ok=ok,
        failed=failed,
        skipped=skipped,
        **{"total": ok + failed + skipped, **settings},
    )


@pytest.mark.seed("002", "3.2", "7.16", "8.9")
@pytest.mark.parametrize(
    ("ok", "failed", "skipped", "status"),
    [
        (0, 0, 0, OK),
        (3, 0, 0, OK),
        (2, 1, 0, SOME),
        (1, 2, 0, SOME),
        (0, 3, 0, NONE),
        (0, 1, 0, NONE),
        (2, 0, 1, SOME),
        (1, 1, 1, SOME),
        (0, 1, 2, NONE),
        (0, 0, 3, SKIP),
    ],
)
def test_a_stage_ends_by_its_items(ok: int, failed: int, skipped: int, status: StageStatus) -> None:
    assert ended(ok, failed, skipped) is status


def test_errors_that_a_stage_reports_make_it_partial() -> None:
    assert ended(1, errors=1) is SOME
    assert ended(0, errors=1) is SOME
    assert ended(0, 1, errors=1) is NONE


def test_items_that_never_ended_are_not_passed_over() -> None:
    assert ended(2, total=3) is SOME
    assert ended(0, total=3) is NONE


@pytest.mark.parametrize(("ok", "status"), [(4, NONE), (5, SOME), (6, SOME)])
def test_fewer_good_items_than_wanted_fail_a_stage(ok: int, status: StageStatus) -> None:
    assert ended(ok, 10 - ok, min_ok=5) is status


def test_too_few_items_to_reach_the_minimum_fail_a_stage() -> None:
    assert ended(0, min_ok=1) is NONE
    assert ended(4, min_ok=5) is NONE
    assert ended(5, min_ok=5) is OK


@pytest.mark.parametrize(("failed", "status"), [(0, OK), (28, SOME), (29, SOME), (30, NONE)])
def test_a_larger_share_of_failed_items_than_allowed_fails_a_stage(
    failed: int, status: StageStatus
) -> None:
    assert ended(100 - failed, failed, max_failed=0.29) is status


def test_a_tolerance_never_makes_a_failed_stage_succeed() -> None:
    assert ended(0, 3, max_failed=1.0) is NONE
    assert ended(0, max_failed=0.0) is OK


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_more_good_items_never_make_a_stage_worse(ok: int, failed: int, skipped: int) -> None:
    order = [NONE, SKIP, SOME, OK]
    settings: dict[str, Any] = {"min_ok": 3, "max_failed": 0.5}
    worse, better = (
        ended(ok, failed, skipped, **settings),
        ended(ok + 1, failed, skipped, **settings),
    )
    assert order.index(better) >= order.index(worse)
