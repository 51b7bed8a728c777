"""A worker that goes and another that comes: containers are let go of, and taken up again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.container.container_runs import IMAGE, Rig, code_of, virtually, with_rig
from tests.support.fake_containers import Fault, Say, image_of

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.engine import ContainerState, ContainerSummary, EngineUnavailable
from penstock.workloads.container.job import Stream


async def let_go_after(rig: Rig, seconds: float) -> ContainerSummary:
    running = rig.begin()
    await rig.passes(seconds)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return await rig.found()


@with_rig
async def test_a_worker_that_goes_leaves_the_container_running_unread(rig: Rig) -> None:
    rig.script(says=(Say(b"x"), Say(b"y" * 1_000_000, after=5)), seconds=1)
    found = await let_go_after(rig, 2)
    assert found.state is ContainerState.RUNNING
    assert rig.engine.containers[rig.container].reader is None
    assert not {"signal", "kill", "remove"} & set(rig.engine.calls)
    await rig.passes(5)  # nobody reads, and it does not stand still
    assert (await rig.found()).state is ContainerState.EXITED


@with_rig
async def test_a_worker_that_goes_waits_for_the_answer_to_a_start(rig: Rig) -> None:
    """Else nobody could tell a container that was never started from one that is about to be."""
    rig.script(seconds=5)
    rig.engine.fault("start", Fault(before=2))
    found = await let_go_after(rig, 1)
    assert found.state is ContainerState.RUNNING
    assert (await rig.adopt(found, rig.clock.now())).exit_code == 0


@with_rig
async def test_a_container_that_runs_is_taken_up(rig: Rig) -> None:
    rig.script(says=(Say(b"a"), Say(b"b", after=3), Say(b"c", after=3)), exit_code=5)
    began = rig.clock.now()
    found = await let_go_after(rig, 1)
    await rig.passes(4)
    end = await rig.adopt(found, began)
    assert (end.exit_code, code_of(end)) == (5, "NON_ZERO_EXIT")
    assert rig.text() == "ac"
    assert end.stdout_count.gap
    assert end.image_id == image_of(IMAGE).id
    assert await rig.remove()
    assert rig.engine.leftovers() == []


@with_rig
async def test_an_adopted_job_has_what_is_left_of_its_time(rig: Rig) -> None:
    rig.script(seconds=1000)
    began = rig.clock.now()
    found = await let_go_after(rig, 1)
    await rig.passes(4)
    assert code_of(await rig.adopt(found, began)) == "TIMEOUT"
    assert rig.clock.monotonic() == pytest.approx(10)


@with_rig
async def test_an_adopted_job_whose_time_is_over_is_ended_at_once(rig: Rig) -> None:
    rig.script(seconds=1000)
    began = rig.clock.now()
    found = await let_go_after(rig, 1)
    await rig.passes(100)
    assert code_of(await rig.adopt(found, began)) == "TIMEOUT"
    assert rig.clock.monotonic() == pytest.approx(101)
    assert rig.engine.running() == []


@with_rig
async def test_fetching_the_image_took_nothing_from_an_adopted_jobs_time(rig: Rig) -> None:
    rig.engine.registry[IMAGE] = rig.engine.scripts.pop(IMAGE)
    rig.engine.fault("pull", Fault(before=100))
    rig.engine.registry[IMAGE] = rig.engine.registry[IMAGE].__class__(seconds=8)
    began = rig.clock.now()
    found = await let_go_after(rig, 101)
    assert (await rig.adopt(found, began)).exit_code == 0


@with_rig
async def test_a_clock_that_was_set_back_gives_no_job_more_than_its_time(rig: Rig) -> None:
    rig.script(seconds=1000)
    began = rig.clock.now()
    found = await let_go_after(rig, 1)
    rig.clock.jump(-3600)
    assert code_of(await rig.adopt(found, began)) == "TIMEOUT"
    assert rig.clock.monotonic() == pytest.approx(11)


@with_rig
async def test_an_adopted_job_can_be_cancelled(rig: Rig) -> None:
    rig.script(seconds=1000)
    found = await let_go_after(rig, 1)
    rig.stop.request("the worker was restarted")
    end = await rig.adopt(found, rig.clock.now())
    assert code_of(end) == "CANCELLED"
    assert end.error is not None
    assert end.error.message == "the worker was restarted"
    assert rig.engine.running() == []


@with_rig
async def test_a_container_that_ended_meanwhile_has_its_exit_code_and_artifacts(rig: Rig) -> None:
    rig.asks(outputs=True)
    rig.script(says=(Say(b"a"),), seconds=3, leaves={"f": b"12"}, exit_code=6)
    found = await let_go_after(rig, 1)
    await rig.passes(100)
    found = await rig.found()
    assert found.state is ContainerState.EXITED
    end = await rig.adopt(found, rig.clock.now() - 101)
    assert (end.exit_code, code_of(end), rig.text()) == (6, "NON_ZERO_EXIT", "a")
    assert rig.left() == [("f", 2)]
    assert end.stdout_count.gap


@pytest.mark.parametrize(
    ("exit_code", "code"),
    [(143, "CANCELLED"), (137, "CANCELLED"), (3, "NON_ZERO_EXIT"), (0, None)],
)
def test_a_container_that_the_cancel_of_an_earlier_worker_ended_is_cancelled(
    tmp_path: Path, exit_code: int, code: str | None
) -> None:
    async def body(rig: Rig) -> None:
        rig.script(seconds=3, exit_code=exit_code)
        await let_go_after(rig, 1)
        await rig.passes(10)
        rig.stop.request("deleted by its owner")
        end = await rig.adopt(await rig.found(), rig.clock.now() - 1)
        assert code_of(end) == code
        if code == "CANCELLED":
            assert (end.exit_code, end.error_message) == (None, "deleted by its owner")

    virtually(tmp_path, body)


@pytest.mark.parametrize(
    ("exit_code", "seconds", "code"),
    [
        (143, 101, "TIMEOUT"),
        (137, 101, "TIMEOUT"),
        (137, 5, "NON_ZERO_EXIT"),
        (1, 101, "NON_ZERO_EXIT"),
    ],
)
def test_what_the_last_worker_ended_for_want_of_time_is_told_so(
    tmp_path: Path, exit_code: int, seconds: float, code: str
) -> None:
    async def story(rig: Rig) -> None:
        rig.asks(limits={"max_runtime_seconds": 100})
        rig.script(seconds=2, exit_code=exit_code)
        began = rig.clock.now()
        await let_go_after(rig, 1)
        await rig.passes(seconds)
        end = await rig.adopt(await rig.found(), began)
        assert code_of(end) == code

    virtually(tmp_path, story)


@with_rig
async def test_an_exit_counts_although_a_cancel_waits(rig: Rig) -> None:
    rig.script(seconds=3)
    await let_go_after(rig, 1)
    await rig.passes(5)
    rig.stop.request("too late")
    end = await rig.adopt(await rig.found(), rig.clock.now())
    assert end.state is ContainerJobState.FINISHED


@with_rig
async def test_an_engine_that_is_away_when_a_job_is_adopted_is_waited_for(rig: Rig) -> None:
    rig.script(says=(Say(b"a"), Say(b"b", after=5)), seconds=1)
    began = rig.clock.now()
    found = await let_go_after(rig, 1)
    rig.engine.die()
    adopting = asyncio.ensure_future(rig.adopt(found, began))
    await rig.passes(2)
    rig.engine.revive()
    end = await adopting
    assert (end.exit_code, rig.text()) == (0, "ab")


@with_rig
async def test_a_job_whose_end_nobody_can_tell_is_told_so(rig: Rig) -> None:
    rig.script(seconds=1)
    await let_go_after(rig, 0.5)
    await rig.passes(5)
    found = await rig.found()
    rig.engine.fault("wait", *[Fault(error=EngineUnavailable("no"))] * 50)
    assert code_of(await rig.adopt(found, rig.clock.now())) == "ENGINE_UNAVAILABLE"


@with_rig
async def test_a_worker_that_dies_before_the_end_is_recorded_can_tell_it_again(rig: Rig) -> None:
    rig.asks(outputs=True)
    rig.script(says=(Say(b"said"),), leaves={"f": b"12"}, exit_code=9)
    first = await rig.run()
    again = await rig.adopt(await rig.found(), rig.clock.now())
    assert (again.state, again.exit_code, again.error) == (first.state, 9, first.error)
    assert rig.left() == [("f", 2)]
    assert again.stdout_count.bytes == first.stdout_count.bytes


@with_rig
async def test_a_fetch_that_is_let_go_of_is_over(rig: Rig) -> None:
    del rig.engine.scripts[IMAGE]
    rig.engine.fault("pull", Fault(before=100))
    running = rig.begin()
    await rig.passes(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert rig.engine.leftovers() == []
    assert rig.output.count(Stream.STDOUT).bytes == 0
