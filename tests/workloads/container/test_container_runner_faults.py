"""Engines that fail, hang, answer late or die: every job still ends once, and in time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.container.container_runs import Rig, code_of, virtually, with_rig
from tests.support.fake_containers import HANGS, NEVER_ANSWERS, Fault, Say

from penstock.workloads.container.engine import (
    ContainerNotFound,
    EngineError,
    EngineUnavailable,
    ImageNotFound,
)
from penstock.workloads.container.monitor import ENGINE_PATIENCE
from penstock.workloads.container.runner import KILL_WAITS

METHODS = ("image", "create", "attach", "start", "wait", "usage", "signal", "kill")
LONGEST = 10 + 5 + sum(KILL_WAITS) + 4 * 60
"""Run limit, grace, kills, and some calls that are given a minute each."""


@pytest.mark.seed("003", "6.6")
@pytest.mark.parametrize("scripted", ["short", "long", "stubborn"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "fault",
    [
        Fault(error=EngineUnavailable("away")),
        Fault(error=EngineError("odd")),
        Fault(error=ContainerNotFound("gone")),
        Fault(error=RuntimeError("a bug")),
        HANGS,
        NEVER_ANSWERS,
        Fault(before=3),
        Fault(after=3),
    ],
    ids=repr,
)
def test_a_fault_in_any_call_leaves_one_end_and_nothing_else(
    tmp_path: Path, method: str, fault: Fault, scripted: str
) -> None:
    async def body(rig: Rig) -> None:
        if scripted != "short":
            rig.script(seconds=1000, heeds_term=scripted == "long", says=(Say(b"x" * 10**6),))
        rig.engine.fault(method, fault)
        end = await rig.run()
        assert end.state in ("finished", "failed")
        assert (end.error is None) is (end.state == "finished")
        assert rig.clock.monotonic() <= LONGEST
        assert await rig.remove()
        assert rig.engine.leftovers() == []
        assert not rig.sandbox.folder.exists()

    virtually(tmp_path, body)


@pytest.mark.parametrize("method", ["image", "create", "attach", "start"])
def test_an_engine_that_is_away_before_the_job_runs_is_told(tmp_path: Path, method: str) -> None:
    async def body(rig: Rig) -> None:
        rig.script(seconds=5)
        rig.engine.fault(method, Fault(error=EngineUnavailable("no socket")))
        end = await rig.run()
        assert (end.exit_code, code_of(end)) == (None, "ENGINE_UNAVAILABLE")
        assert end.error is not None
        assert "no socket" in end.error.message
        assert rig.engine.running() == []

    virtually(tmp_path, body)


@pytest.mark.parametrize("method", ["image", "create"])
def test_an_engine_that_never_answers_is_as_good_as_away(tmp_path: Path, method: str) -> None:
    async def body(rig: Rig) -> None:
        rig.script(seconds=1000)
        rig.engine.fault(method, NEVER_ANSWERS)
        end = await rig.run()
        assert code_of(end) == "ENGINE_UNAVAILABLE"
        assert rig.clock.monotonic() == pytest.approx(60)
        assert rig.engine.running() == []

    virtually(tmp_path, body)


@with_rig
async def test_a_container_that_was_started_although_the_engine_never_said_so_goes_on(
    rig: Rig,
) -> None:
    rig.script(says=(Say(b"up"),), seconds=62, exit_code=3)
    rig.engine.fault("start", NEVER_ANSWERS)
    end = await rig.run()
    assert (end.exit_code, rig.text()) == (3, "up")


@with_rig
async def test_a_job_that_had_not_all_of_its_input_when_the_engine_went_away_is_ended(
    rig: Rig,
) -> None:
    rig.script(reads=False, seconds=8)
    rig.asks(stdin_bytes=b"x" * 1_000_000)
    running = rig.begin()
    await rig.passes(1)
    rig.engine.cut(rig.container)
    rig.engine.fault("find", Fault(error=EngineUnavailable("away")))
    end = await running
    assert code_of(end) == "ENGINE_UNAVAILABLE"
    assert end.error is not None
    assert "had its input" in end.error.message
    assert rig.engine.running() == []


@with_rig
async def test_a_cancel_counts_although_the_container_was_being_made(rig: Rig) -> None:
    rig.engine.fault("create", Fault(after=3))
    running = rig.begin()
    await rig.passes(1)
    rig.stop.request("enough")
    assert code_of(await running) == "CANCELLED"
    assert "start" not in rig.engine.calls
    assert await rig.remove()
    assert rig.engine.leftovers() == []


# -- stopping -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [HANGS, Fault(error=EngineError("no"))], ids=["hangs", "fails"])
def test_a_term_that_does_not_come_through_does_not_put_off_the_kill(
    tmp_path: Path, fault: Fault
) -> None:
    async def body(rig: Rig) -> None:
        rig.script(seconds=1000)
        rig.engine.fault("signal", fault)
        assert code_of(await rig.run()) == "TIMEOUT"
        assert rig.clock.monotonic() == pytest.approx(15)
        assert rig.engine.running() == []

    virtually(tmp_path, body)


@pytest.mark.parametrize("fault", [HANGS, Fault(error=EngineError("no"))], ids=["hangs", "fails"])
def test_a_kill_that_does_not_come_through_is_given_again(tmp_path: Path, fault: Fault) -> None:
    async def body(rig: Rig) -> None:
        rig.script(seconds=1000, heeds_term=False)
        rig.engine.fault("kill", fault)
        assert code_of(await rig.run()) == "TIMEOUT"
        assert rig.clock.monotonic() == pytest.approx(15 + KILL_WAITS[0])
        assert rig.engine.running() == []

    virtually(tmp_path, body)


@with_rig
async def test_an_engine_that_gives_up_waiting_is_still_made_to_kill(rig: Rig) -> None:
    rig.script(seconds=1000, heeds_term=False)
    rig.engine.fault("wait", Fault(before=12, error=EngineError("odd")))
    assert code_of(await rig.run()) == "TIMEOUT"
    assert rig.engine.running() == []


@with_rig
async def test_a_reader_that_stalled_is_let_go_of_so_that_the_kill_comes_through(
    rig: Rig,
) -> None:
    """The pump itself never stalls; an engine's own streams may."""
    rig.script(says=(Say(b"x" * 1_000_000),), seconds=1000)
    attach = rig.engine.attach

    async def stalled(name: str, *, stdin: bool) -> object:
        streams = await attach(name, stdin=stdin)
        container = rig.engine.containers[name]

        async def output() -> object:
            await rig.engine.until(lambda: container.reader is not streams)
            return
            yield

        streams.output = output  # type: ignore[method-assign,assignment]
        return streams

    rig.engine.attach = stalled  # type: ignore[method-assign,assignment]
    end = await rig.run()
    assert code_of(end) == "TIMEOUT"
    assert rig.clock.monotonic() == pytest.approx(15 + KILL_WAITS[0])
    assert rig.engine.running() == []


@with_rig
async def test_a_container_that_can_t_be_ended_is_given_up_in_time_and_told(rig: Rig) -> None:
    rig.script(seconds=1000, heeds_term=False)
    rig.engine.fault("kill", *[HANGS] * 20)
    end = await rig.run()
    assert code_of(end) == "TIMEOUT"
    assert end.error is not None
    assert "keeps trying" in end.error.message
    assert rig.clock.monotonic() <= 15 + sum(KILL_WAITS) + 10
    assert await rig.remove()


@with_rig
async def test_streams_that_do_not_end_with_the_container_are_not_waited_for(rig: Rig) -> None:
    rig.script(says=(Say(b"done"),))
    attach = rig.engine.attach

    async def endless(name: str, *, stdin: bool) -> object:
        streams = await attach(name, stdin=stdin)
        own = streams.output

        async def output() -> object:
            async for chunk in own():
                yield chunk
            await rig.engine.until(lambda: False)

        streams.output = output  # type: ignore[method-assign,assignment]
        return streams

    rig.engine.attach = endless  # type: ignore[method-assign,assignment]
    end = await rig.run()
    assert (end.exit_code, rig.text()) == (0, "done")
    assert rig.clock.monotonic() == pytest.approx(2)


# -- an engine that dies --------------------------------------------------------------------

SPEAKS = (Say(b"before\n"), Say(b"lost\n", after=3), Say(b"after\n", after=3))


@pytest.mark.parametrize("tells", [True, False])
def test_a_job_goes_on_when_its_engine_comes_back(tmp_path: Path, tells: bool) -> None:
    async def body(rig: Rig) -> None:
        rig.engine.tells_of_death = tells
        rig.script(says=SPEAKS, exit_code=7)
        running = rig.begin()
        await rig.passes(2)
        rig.engine.die()
        await rig.passes(2)
        rig.engine.revive()
        end = await running
        assert (end.exit_code, code_of(end)) == (7, "NON_ZERO_EXIT")
        assert rig.text() == "before\nafter\n"
        assert end.stdout_count.gap
        assert rig.clock.monotonic() == pytest.approx(6)

    virtually(tmp_path, body)


@with_rig
async def test_a_job_that_ended_while_its_engine_was_away_has_its_exit_code(rig: Rig) -> None:
    rig.script(says=SPEAKS, exit_code=7)
    running = rig.begin()
    await rig.passes(2)
    rig.engine.die()
    await rig.passes(20)  # longer than its limit, which nobody could enforce
    rig.engine.revive()
    end = await running
    assert (end.exit_code, code_of(end)) == (7, "NON_ZERO_EXIT")


@with_rig
async def test_a_job_over_its_limit_is_ended_as_soon_as_its_engine_is_back(rig: Rig) -> None:
    rig.script(seconds=1000)
    running = rig.begin()
    await rig.passes(2)
    rig.engine.die()
    await rig.passes(20)
    rig.engine.revive()
    end = await running
    assert code_of(end) == "TIMEOUT"
    assert 22 <= rig.clock.monotonic() <= 25
    assert rig.engine.running() == []


@with_rig
async def test_an_engine_that_comes_back_without_the_container_is_told(rig: Rig) -> None:
    rig.script(seconds=8)
    running = rig.begin()
    await rig.passes(2)
    rig.engine.die(spare=False)
    await rig.passes(1)
    rig.engine.revive()
    end = await running
    assert (end.exit_code, code_of(end)) == (None, "ENGINE_UNAVAILABLE")
    assert end.error is not None
    assert "without the container" in end.error.message


@with_rig
async def test_an_engine_that_stays_away_is_given_up_after_a_while(rig: Rig) -> None:
    rig.script(seconds=8)
    running = rig.begin()
    await rig.passes(2)
    rig.engine.die()
    end = await running
    assert (end.exit_code, code_of(end)) == (None, "ENGINE_UNAVAILABLE")
    assert end.error is not None
    assert "for 30 s" in end.error.message
    assert rig.clock.monotonic() == pytest.approx(2 + ENGINE_PATIENCE, abs=4)
    assert not await rig.remove()
    rig.engine.revive()
    assert await rig.remove()
    assert rig.engine.leftovers() == []


@with_rig
async def test_a_cancel_while_the_engine_is_away_is_a_cancel(rig: Rig) -> None:
    for comes_back in (True, False):
        rig.script(seconds=1000)
        rig.engine.revive()
        rig.stop = type(rig.stop)()
        running = rig.begin()
        await rig.passes(2)
        rig.engine.die()
        await rig.passes(1)
        rig.stop.request("enough")
        await rig.passes(1)
        if comes_back:
            rig.engine.revive()
        assert code_of(await running) == "CANCELLED"
        assert bool(rig.engine.running()) is not comes_back
        rig.engine.revive()
        assert await rig.remove()


@with_rig
async def test_an_engine_that_dies_while_a_container_is_being_ended_changes_nothing(
    rig: Rig,
) -> None:
    rig.script(seconds=1000, heeds_term=False)
    running = rig.begin()
    await rig.passes(12)  # asked to end at 10, killed at 15
    rig.engine.die()
    await rig.passes(9)
    rig.engine.revive()
    assert code_of(await running) == "TIMEOUT"
    assert rig.engine.running() == []


@with_rig
async def test_an_engine_that_breaks_off_again_and_again_is_given_up(rig: Rig) -> None:
    rig.script(seconds=8)
    rig.engine.fault("wait", *[Fault(error=EngineUnavailable("reset"))] * 100)
    rig.asks(limits={"max_runtime_seconds": 1000})
    end = await rig.run()
    assert code_of(end) == "ENGINE_UNAVAILABLE"
    assert rig.clock.monotonic() < 30
    assert rig.engine.running() == []


@with_rig
async def test_streams_that_break_off_alone_are_taken_up_again(rig: Rig) -> None:
    rig.script(says=SPEAKS)
    running = rig.begin()
    await rig.passes(1)
    rig.engine.cut(rig.container)
    end = await running
    assert end.exit_code == 0
    assert end.stdout_count.gap
    assert rig.text() == "before\nlost\nafter\n"  # they were back before it spoke again


@with_rig
async def test_a_removal_that_fails_says_so_and_can_be_made_again(rig: Rig) -> None:
    await rig.run()
    for fault in (Fault(error=EngineUnavailable("away")), HANGS, Fault(error=EngineError("busy"))):
        rig.engine.fault("remove", fault)
        assert not await rig.remove()
    assert await rig.remove()
    assert rig.engine.leftovers() == []


@with_rig
async def test_an_image_that_vanishes_and_an_engine_that_lies_are_told_apart(rig: Rig) -> None:
    rig.engine.fault("create", Fault(error=ImageNotFound("gone")))
    end = await rig.run()
    assert code_of(end) == "IMAGE_NOT_FOUND"
    assert end.error is not None
    assert "just before" in end.error.message


@with_rig
async def test_an_engine_that_comes_back_and_never_says_how_a_container_ended_is_given_up(
    rig: Rig,
) -> None:
    rig.script(seconds=5)
    running = rig.begin()
    await rig.passes(1)
    rig.engine.die()
    await rig.passes(8)
    rig.engine.fault("wait", *[HANGS] * 50)
    rig.engine.revive()
    end = await running
    assert code_of(end) == "ENGINE_UNAVAILABLE"
    assert rig.clock.monotonic() < 300
