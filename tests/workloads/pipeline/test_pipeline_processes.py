"""Stages in processes of their own."""

from __future__ import annotations

import os

import pytest
from tests.support.pipeline import pipeline_processes as stages
from tests.support.pipeline.pipeline_runs import Place, stage_of, turns, within
from tests.support.waiting import soon

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.records import ErrorClass, ItemOutcome

_S = PipelineJobStatus


@run_async
async def test_items_run_in_other_processes_and_their_results_come_back() -> None:
    place = Place(processes=2)
    ended = await place.run(stages.apart)
    items = await place.items("elsewhere")
    found = await place.outputs("elsewhere")
    assert [one["number"] for one in found] == [10, 30]
    assert os.getpid() not in {one["pid"] for one in found}
    assert found[0]["known"] == ["job", "elsewhere", "0", 1, False]
    assert (items[1].error_class, items[1].error_code) == (ErrorClass.PERMANENT, "ValueError")
    assert items[1].error == "two is not liked"
    assert await place.outputs("collect") == [[10, 30]]
    assert ended.status is _S.PARTIAL
    assert place.attempt.heard("at 0")


@run_async
async def test_values_are_converted_and_checked_there_too() -> None:
    place = Place(processes=2)
    await place.run(stages.typed)
    assert await place.outputs("length") == [1, 2, 3]
    assert {item.error_code for item in await place.items("liar")} == {"WRONG_TYPE"}


@run_async
async def test_what_is_not_there_in_a_process_says_so() -> None:
    place = Place(processes=1)
    ended = await place.run(stages.wrong)
    assert "ctx.metric is not there" in stage_of(ended, "lacking").errors[0]
    (unfound,) = await place.items("unfound")
    assert unfound.error_code == "NOT_IMPORTABLE"
    assert "decorator at the top of a module" in unfound.error


@run_async
async def test_a_failure_there_is_judged_by_its_kind_and_tried_again() -> None:
    place = Place(processes=1)
    ended = await place.run(stages.flaky)
    assert ended.status is _S.COMPLETED
    assert await place.outputs("third_time") == [3]


@run_async
async def test_a_process_that_ran_out_of_time_is_killed() -> None:
    place = Place(processes=1)
    ended = await within(20, place.run(stages.late))
    (item,) = await place.items("too_long")
    assert item.error_class is ErrorClass.TIMEOUT
    assert ended.abandoned_items == ()


@run_async
async def test_a_cancel_kills_processes_that_do_not_listen_and_leaves_none() -> None:
    place = Place(processes=2)
    attempt = await place.begin(stages.sleepy)
    await soon(lambda: sum("pid" in line for _, line in attempt.lines) == 2)
    attempt.cancel_run()
    ended = await within(20, attempt.task)
    assert ended.status is _S.CANCELLED
    assert ended.abandoned_items == ()
    items = await place.items("asleep")
    assert [item.outcome for item in items] == [
        *(ItemOutcome.FAILED, ItemOutcome.FAILED, ItemOutcome.PENDING)
    ]
    await turns()
    for _, line in attempt.lines:
        if line.startswith("pid "):
            with pytest.raises(ProcessLookupError):
                os.kill(int(line.split()[1]), 0)
