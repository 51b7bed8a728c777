"""Stages of a run: in order, with what the ones before them gave, and to an honest end."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Struct
from tests.support.pipeline.pipeline_jobs import on_virtual_time
from tests.support.pipeline.pipeline_runs import Place, reasons, stage_of, statuses

from penstock.core.errors import NotFound
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.payloads import Results
from penstock.workloads.pipeline.records import ErrorClass, ItemOutcome, StageStatus

_S = PipelineJobStatus


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3)
    enable_second: bool = True
    enable_third: bool = True


class Article(Struct):
    title: str
    words: int = 0


def _chain(order: list[str] | None = None) -> Definition:
    """Numbers, twice each; one more; their sum."""
    seen: list[str] = [] if order is None else order
    one = Definition("chain", config=Config)

    @one.map(over="numbers")
    async def twice(number: int, ctx: Any) -> list[int]:
        seen.append(f"twice {number}")
        return [number, number]

    @one.map(over=twice, concurrency=1)
    async def more(number: int) -> int:
        seen.append(f"more {number}")
        return number + 1

    @one.step()
    async def total(results: Any, ctx: Any) -> int:
        seen.append("total")
        return sum([number async for number in results])

    return one


# -- order and results ------------------------------------------------------------


@on_virtual_time
async def test_stages_run_in_order_and_hand_on_what_they_gave() -> None:
    place = Place()
    order: list[Any] = []
    ended = await place.run(_chain(order))
    assert ended.status is _S.COMPLETED
    assert order == [
        *("twice 1", "twice 2", "twice 3"),
        *("more 1", "more 1", "more 2", "more 2", "more 3", "more 3"),
        "total",
    ]
    assert await place.outputs("more") == [2, 2, 3, 3, 4, 4]
    assert await place.outputs("total") == [18]


@on_virtual_time
async def test_items_are_known_by_their_place_and_by_the_item_they_came_from() -> None:
    place = Place()
    await place.run(_chain())
    assert [item.key for item in await place.items("twice")] == ["0", "1", "2"]
    assert [item.key for item in await place.items("more")] == [
        *("0/0", "0/1", "1/0", "1/1", "2/0", "2/1")
    ]
    assert [item.key for item in await place.items("total")] == [""]


@on_virtual_time
async def test_a_single_output_keeps_the_key_of_its_item() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers", key=lambda number: f"n{number}")
    async def first(number: int) -> int:
        return number

    @one.map(over=first)
    async def second(number: int) -> int:
        return number

    place = Place()
    await place.run(one)
    assert [item.key for item in await place.items("second")] == ["n1", "n2", "n3"]


@on_virtual_time
async def test_a_repeated_key_is_left_out_and_counted() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers", key=lambda number: str(number % 2))
    async def odd_or_even(number: int) -> int:
        return number

    place = Place(page=1)
    ended = await place.run(one, {"numbers": [1, 2, 3, 4, 5]})
    assert await place.outputs("odd_or_even") == [1, 2]
    stage = stage_of(ended, "odd_or_even")
    assert (stage.total, stage.metrics["duplicates"]) == (2, 3)


@run_async
async def test_plain_functions_run_in_threads_and_read_results_plainly() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    def double(number: int, ctx: Any) -> int:
        ctx.check()
        return number * 2

    @one.step()
    def total(results: Any, ctx: Any) -> dict[str, Any]:
        again = ctx.results("double").list()
        keys = [item.key for item in results.items()]
        return {"sum": sum(results), "again": again, "keys": keys, "count": results.count}

    place = Place()
    ended = await place.run(one)
    assert ended.status is _S.COMPLETED
    assert await place.outputs("total") == [
        {"sum": 12, "again": [2, 4, 6], "keys": ["0", "1", "2"], "count": 3}
    ]


@on_virtual_time
async def test_a_step_reads_any_stage_before_it_and_no_other() -> None:
    one = _chain()
    caught: list[BaseException] = []

    @one.step()
    async def last(results: Any, ctx: Any) -> list[Any]:
        with pytest.raises(NotFound) as refused:
            ctx.results("last")
        caught.append(refused.value)
        return [await ctx.results("more").list(), [x async for x in results]]

    place = Place()
    await place.run(one)
    assert await place.outputs("last") == [[[2, 2, 3, 3, 4, 4], [18]]]
    assert "these have: twice, more, total" in str(caught[0].hint)  # type: ignore[attr-defined]


@on_virtual_time
async def test_an_async_function_that_reads_results_with_for_is_told_how() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def same(number: int) -> int:
        return number

    @one.step()
    async def wrong(results: Any) -> list[int]:
        return [number for number in results]  # noqa: C416 - this is what goes wrong

    ended = await Place().run(one)
    assert "async for" in stage_of(ended, "wrong").errors[0]


@on_virtual_time
async def test_results_are_read_page_by_page_in_order() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def same(number: int) -> int:
        return number

    @one.step()
    async def all_of(results: Any) -> list[int]:
        assert results.count == len(results) == 250
        return [number async for number in results]

    place = Place(page=7)
    await place.run(one, {"numbers": list(range(250))})
    assert await place.outputs("all_of") == [list(range(250))]


# -- types ------------------------------------------------------------------------


@on_virtual_time
async def test_annotated_parameters_get_values_of_their_type() -> None:
    one = Definition("one", config=Config)
    kinds: list[type] = []

    @one.map(over="numbers")
    async def write(number: int) -> Article:
        return Article(f"no {number}", number)

    @one.map(over=write)
    async def read(article: Article) -> int:
        kinds.append(type(article))
        return article.words

    @one.step(of=write)
    async def titles(results: Results[Article]) -> list[str]:
        return [article.title async for article in results]

    @one.step(of=write)
    async def at_once(articles: list[Article]) -> int:
        return len([article.title for article in articles])

    place = Place()
    ended = await place.run(one)
    assert ended.status is _S.COMPLETED
    assert kinds == [Article] * 3
    assert await place.outputs("titles") == [["no 1", "no 2", "no 3"]]
    assert await place.outputs("at_once") == [3]


@on_virtual_time
async def test_an_item_of_the_wrong_type_fails_for_good_and_alone() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def mixed(number: int) -> Any:
        return "two" if number == 2 else number

    @one.map(over=mixed, retry=3)
    async def half(number: int) -> float:
        return number / 2

    place = Place()
    ended = await place.run(one)
    bad = (await place.items("half"))[1]
    assert (bad.outcome, bad.error_class, bad.error_code, bad.attempts) == (
        *(ItemOutcome.FAILED, ErrorClass.PERMANENT, "WRONG_TYPE"),
        1,
    )
    assert "Expected `int`, got `str`" in bad.error
    assert await place.outputs("half") == [0.5, 1.5]
    assert statuses(ended) == {"mixed": "completed", "half": "partial"}


@on_virtual_time
async def test_a_function_that_returns_something_else_than_it_says_fails_its_item() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def liar(number: int) -> list[str]:
        return ["fine"] if number == 1 else [number]  # type: ignore[list-item]

    @one.map(over="numbers")
    async def yielding(number: int) -> Any:
        yield number

    place = Place()
    await place.run(one)
    assert [item.error_code for item in await place.items("liar")] == [
        *("", "WRONG_TYPE", "WRONG_TYPE")
    ]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "RESULT_NOT_STORABLE"),
        (float("nan"), "RESULT_NOT_STORABLE"),
        ({"x": [float("inf")]}, "RESULT_NOT_STORABLE"),
        ({1, 2}, ""),
        (None, ""),
    ],
)
@on_virtual_time
async def test_an_output_that_cant_be_stored_fails_its_item_and_nothing_else(
    value: Any, why: str
) -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def give(number: int) -> Any:
        return value if number == 2 else number

    place = Place()
    await place.run(one)
    items = await place.items("give")
    assert [item.error_code for item in items] == ["", why, ""]
    assert items[0].outcome is items[2].outcome is ItemOutcome.OK


@on_virtual_time
async def test_large_inputs_and_outputs_are_kept_in_blobs() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def grow(number: int) -> str:
        return "x" * 100 * number

    @one.map(over=grow)
    async def length(text: str) -> int:
        return len(text)

    place = Place(inline_limit=250)
    place.blobs.inline_limit = 0
    await place.run(one)
    assert [item.output.partition(":")[0] for item in await place.items("grow")] == [
        *("data", "data", "blob")
    ]
    assert [item.input.partition(":")[0] for item in await place.items("length")] == [
        *("data", "data", "blob")
    ]
    assert await place.outputs("length") == [100, 200, 300]
    rows = place.engine.rows["job"].values()
    kept = {row.output for row in rows} | {row.input for row in rows}
    assert len({pointer for pointer in kept if pointer.startswith("blob:")}) == 1


# -- what goes wrong --------------------------------------------------------------


@pytest.mark.seed("002", "8.9")
@on_virtual_time
async def test_a_failed_item_does_not_fail_its_siblings() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def picky(number: int) -> int:
        if number == 2:
            raise KeyError("two")
        return number

    @one.step()
    async def total(results: Any) -> int:
        return sum([number async for number in results])

    place = Place()
    ended = await place.run(one)
    stage = stage_of(ended, "picky")
    assert (stage.status, stage.ok, stage.failed) == (StageStatus.PARTIAL, 2, 1)
    assert stage.errors == ("1: 'two'",)
    assert ended.status is _S.PARTIAL
    assert [(error.stage, error.message) for error in ended.errors] == [("picky", "1: 'two'")]
    assert await place.outputs("total") == [4]


@pytest.mark.seed("002", "7.16", "8.9")
@on_virtual_time
async def test_a_stage_of_which_nothing_succeeds_has_failed_and_the_next_runs() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def broken(number: int) -> int:
        raise RuntimeError("no")

    @one.step()
    async def after(results: Any) -> int:
        return results.count  # type: ignore[no-any-return]

    place = Place()
    ended = await place.run(one)
    assert statuses(ended) == {"broken": "failed", "after": "completed"}
    assert ended.status is _S.PARTIAL
    assert await place.outputs("after") == [0]


@pytest.mark.seed("002", "8.11")
@on_virtual_time
async def test_a_stage_with_nothing_to_do_completes_and_says_it_was_empty() -> None:
    place = Place()
    ended = await place.run(_chain(), {"numbers": []})
    assert statuses(ended) == {"twice": "completed", "more": "completed", "total": "completed"}
    assert [stage.empty for stage in ended.stages] == [True, True, False]
    assert ended.status is _S.COMPLETED


@on_virtual_time
async def test_a_generator_that_yields_nothing_gives_no_items() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def nothing(number: int) -> Any:
        for _ in ():
            yield number

    @one.map(over=nothing)
    async def more(number: int) -> int:
        return number

    ended = await Place().run(one)
    assert statuses(ended) == {"nothing": "completed", "more": "completed"}
    assert stage_of(ended, "more").empty


@on_virtual_time
async def test_a_generator_that_never_ends_fails_its_item() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers", retry=2)
    async def endless(number: int) -> Any:
        while number == 2:
            yield number
        yield number

    place = Place(max_outputs=1000)
    await place.run(one)
    items = await place.items("endless")
    assert [item.error_code for item in items] == ["", "TOO_MANY_OUTPUTS", ""]
    assert items[1].attempts == 1


@on_virtual_time
async def test_a_step_that_complains_is_partial_and_its_result_is_kept() -> None:
    one = Definition("one")

    @one.step()
    async def careful(results: Any, ctx: Any) -> str:
        ctx.error("one page was torn")
        return "done"

    place = Place()
    ended = await place.run(one)
    stage = stage_of(ended, "careful")
    assert (stage.status, stage.errors) == (StageStatus.PARTIAL, ("one page was torn",))
    assert ended.status is _S.PARTIAL
    assert ended.errors[0].message == "one page was torn"
    assert await place.outputs("careful") == ["done"]


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ({}, StageStatus.PARTIAL),
        ({"min_ok": 2}, StageStatus.PARTIAL),
        ({"min_ok": 3}, StageStatus.FAILED),
        ({"max_failed": 0.34}, StageStatus.PARTIAL),
        ({"max_failed": 0.3}, StageStatus.FAILED),
    ],
)
@on_virtual_time
async def test_a_stage_may_ask_for_more_than_one_success(
    limits: dict[str, Any], status: StageStatus
) -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers", **limits)
    async def picky(number: int) -> int:
        return 1 // (number - 1)

    ended = await Place().run(one)
    stage = stage_of(ended, "picky")
    assert stage.status is status
    assert bool(stage.reason) is (status is StageStatus.FAILED)


@on_virtual_time
async def test_a_policy_that_raises_fails_the_job_and_keeps_what_was_done() -> None:
    def policy(stages: Any) -> Any:
        raise ZeroDivisionError("no opinion")

    one = Definition("one", config=Config, policy=policy)

    @one.map(over="numbers")
    async def same(number: int) -> int:
        return number

    ended = await Place().run(one)
    assert ended.status is _S.FAILED
    assert [(e.stage, e.code) for e in ended.errors] == [("orchestrator", "ZeroDivisionError")]
    assert statuses(ended) == {"same": "completed"}
    assert ended.summary is not None


# -- what runs, and what is skipped -----------------------------------------------


def _three(**second: Any) -> Definition:
    one = Definition("three", config=Config)

    @one.map(over="numbers")
    async def first(number: int) -> int:
        return number

    @one.step(enabled="enable_second", **second)
    async def second_(results: Any) -> int:
        raise ValueError("it never works")

    @one.step(enabled="enable_third", needs=["second_"])
    async def third(results: Any) -> int:
        return 3

    return one


@pytest.mark.seed("002", "7.4")
@pytest.mark.parametrize(
    ("config", "expected", "status"),
    [
        ({}, ("failed", "second__failed", True), _S.PARTIAL),
        ({"enable_second": False}, ("skipped", "second__disabled", False), _S.COMPLETED),
        ({"enable_third": False}, ("failed", "disabled", False), _S.PARTIAL),
    ],
)
@on_virtual_time
async def test_a_stage_is_skipped_for_a_reason_that_says_whether_it_counts(
    config: dict[str, Any], expected: tuple[str, str, bool], status: PipelineJobStatus
) -> None:
    ended = await Place().run(_three(), config)
    third = stage_of(ended, "third")
    assert (statuses(ended)["second_"], third.reason, third.counted) == expected
    assert third.status is StageStatus.SKIPPED
    assert ended.status is status


@on_virtual_time
async def test_what_needs_a_stage_that_was_skipped_is_skipped_too() -> None:
    one = _three()

    @one.step(needs=["third"])
    async def fourth(results: Any) -> int:
        return 4

    @one.step()
    async def fifth(results: Any) -> int:
        return 5

    ended = await Place().run(one)
    assert reasons(ended)["fourth"] == "third_skipped"
    assert statuses(ended)["fifth"] == "completed"
    ended = await Place().run(one, {"enable_second": False})
    assert reasons(ended)["fourth"] == "third_disabled"
    assert not stage_of(ended, "fourth").counted


@on_virtual_time
async def test_a_stage_that_is_named_is_needed_and_the_one_before_is_not() -> None:
    one = _three()

    @one.step(of="second_")
    async def of_it(results: Any) -> int:
        return 1

    ended = await Place().run(one)
    assert reasons(ended)["of_it"] == "second__failed"


@on_virtual_time
async def test_a_map_over_a_failed_stage_is_skipped() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def broken(number: int) -> int:
        raise RuntimeError("no")

    @one.map(over=broken)
    async def more(number: int) -> int:
        return number

    ended = await Place().run(one)
    assert (statuses(ended)["more"], reasons(ended)["more"]) == ("skipped", "broken_failed")
    assert ended.status is _S.FAILED


@pytest.mark.seed("002", "7.1")
@on_virtual_time
async def test_after_a_critical_stage_failed_nothing_runs_and_the_job_failed() -> None:
    ended = await Place().run(_three(critical=True))
    assert statuses(ended) == {"first": "completed", "second_": "failed", "third": "skipped"}
    assert reasons(ended)["third"] == "critical_stage_failed"
    assert ended.status is _S.FAILED


@pytest.mark.seed("002", "7.13")
@on_virtual_time
async def test_a_stage_that_does_not_count_changes_nothing_by_failing() -> None:
    ended = await Place().run(_three(counts=False), {"enable_third": False})
    assert statuses(ended)["second_"] == "failed"
    assert ended.status is _S.COMPLETED


@on_virtual_time
async def test_a_flag_may_be_a_function_and_one_that_raises_fails_its_stage() -> None:
    one = Definition("one", config=Config)

    @one.step(enabled=lambda config: config.enable_second)
    async def first(results: Any) -> int:
        return 1

    @one.step(enabled=lambda config: config.nothing)
    async def second(results: Any) -> int:
        return 2

    ended = await Place().run(one, {"enable_second": False})
    assert statuses(ended) == {"first": "skipped", "second": "failed"}
    assert "nothing" in reasons(ended)["second"]
