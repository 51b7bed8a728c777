"""A job's way through an engine, and each way in which it can end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.container.container_runs import IMAGE, Rig, code_of, virtually, with_rig
from tests.support.fake_containers import Fault, Say, Script, image_of

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.config import BuildRules, ImageRules, Pull
from penstock.workloads.container.engine import (
    JOB_LABEL,
    OWNER_LABEL,
    BuildFailed,
    CommandNotFound,
    CommandNotRunnable,
    EngineError,
    PullFailed,
    Unsupported,
)
from penstock.workloads.container.job import BuildSpec, InputFile, Mode, Stream, Usage

# -- running --------------------------------------------------------------------------------


@with_rig
async def test_a_job_that_exits_with_0_is_finished(rig: Rig) -> None:
    rig.script(says=(Say(b"hello\n"), Say(b"oh\n", Stream.STDERR)), seconds=3)
    end = await rig.run()
    assert (end.state, end.exit_code, end.error) == (ContainerJobState.FINISHED, 0, None)
    assert (rig.text(), rig.text(Stream.STDERR)) == ("hello\n", "oh\n")
    assert (end.stdout_count.bytes, end.stderr_count.bytes) == (6, 3)
    assert end.image_id == image_of(IMAGE).id
    assert rig.clock.monotonic() == pytest.approx(3)


@with_rig
async def test_the_container_is_there_until_it_is_removed(rig: Rig) -> None:
    await rig.run()
    assert rig.engine.leftovers() == [rig.container]
    assert rig.engine.running() == []
    assert await rig.remove()
    assert rig.engine.leftovers() == []
    assert await rig.remove()  # again, and nothing happens


@pytest.mark.seed("003", "4.4")
@with_rig
async def test_the_plan_says_everything_that_the_job_asks_for(rig: Rig) -> None:
    rig.asks(
        cmd=("a", "b"),
        env={"K": "v"},
        user=(7, 8),
        workdir="/w",
        outputs=True,
        inputs=(InputFile(path="in.txt", text="x"),),
        limits={"memory_mb": 64, "tmp_mb": 0.5, "cpus": 0.5, "pids": 9, "max_artifact_bytes": 99},
    )
    await rig.run()
    plan = rig.engine.containers[rig.container].plan
    assert plan.name == rig.container
    assert plan.image == image_of(IMAGE).id
    assert (plan.cmd, plan.env, plan.user, plan.workdir) == (("a", "b"), {"K": "v"}, (7, 8), "/w")
    assert (plan.memory, plan.tmp, plan.cpus, plan.pids) == (64 << 20, 512 << 10, 0.5, 9)
    assert plan.file_size == 100
    assert {(mount.target, mount.read_only) for mount in plan.mounts} == {
        ("/input", True),
        ("/output", False),
    }
    assert (plan.labels[OWNER_LABEL], plan.labels[JOB_LABEL]) == ("owner", "job-1")
    assert plan.network == "none"


@with_rig
async def test_without_an_output_folder_files_may_be_as_large_as_there_is_room(rig: Rig) -> None:
    await rig.run()
    assert rig.engine.containers[rig.container].plan.file_size == 0


@with_rig
async def test_a_containers_name_tells_owners_and_jobs_apart_and_is_safe(rig: Rig) -> None:
    names = {rig.runner.name_of(job) for job in ("a", "b", "../c", "x" * 5000)}
    assert len(names) == 4
    assert all(name.startswith("penstock-") and name[9:].isalnum() for name in names)
    assert {len(name) for name in names} == {33}


@with_rig
async def test_a_job_reads_its_input_to_the_end(rig: Rig) -> None:
    rig.script(echoes=True)
    rig.asks(stdin_bytes=b'{"job_id":"job-1"}' * 10_000)
    end = await rig.run()
    assert end.exit_code == 0
    assert end.stdout_count.bytes == 180_000


@with_rig
async def test_input_that_is_empty_is_at_its_end_at_once(rig: Rig) -> None:
    rig.script(echoes=True)
    end = await rig.run()
    assert (end.exit_code, end.stdout_count.bytes) == (0, 0)


@with_rig
async def test_a_container_that_does_not_read_its_input_holds_up_nothing(rig: Rig) -> None:
    rig.script(reads=False, says=(Say(b"busy"),), seconds=2)
    rig.asks(stdin_bytes=b"x" * 1_000_000)
    end = await rig.run()
    assert (end.exit_code, rig.text()) == (0, "busy")
    assert rig.clock.monotonic() == pytest.approx(2)


@with_rig
async def test_more_output_than_is_kept_flows_all_the_same(rig: Rig) -> None:
    rig.script(says=tuple(Say(b"x" * 100_000) for _ in range(100)))
    end = await rig.run()
    assert (end.exit_code, end.stdout_count.bytes) == (0, 10_000_000)
    assert end.stdout_count.truncated


@with_rig
async def test_output_that_can_t_be_kept_is_drained_and_told_as_missed(rig: Rig) -> None:
    rig.script(says=tuple(Say(b"x" * 60_000) for _ in range(20)))

    def full(stream: Stream, data: bytes) -> None:
        raise OSError("no space left")

    rig.output.write = full  # type: ignore[method-assign]
    end = await rig.run()
    assert (end.exit_code, end.stdout_count.gap) == (0, True)


# -- ends -----------------------------------------------------------------------------------


@with_rig
async def test_a_code_that_is_not_0_is_kept(rig: Rig) -> None:
    rig.script(exit_code=3)
    end = await rig.run()
    assert (end.state, end.exit_code, code_of(end)) == ("failed", 3, "NON_ZERO_EXIT")


@with_rig
async def test_a_memory_kill_is_told_as_one(rig: Rig) -> None:
    rig.script(exit_code=137, oom=True)
    end = await rig.run()
    assert (end.exit_code, code_of(end)) == (137, "OOM_KILLED")


@with_rig
async def test_a_program_that_coped_with_a_memory_kill_is_finished(rig: Rig) -> None:
    rig.script(exit_code=0, oom=True)
    assert (await rig.run()).state is ContainerJobState.FINISHED


@with_rig
async def test_an_exit_code_that_the_engine_does_not_know_is_no_success(rig: Rig) -> None:
    rig.script(exit_code=None, error="status unknown")
    end = await rig.run()
    assert (end.exit_code, code_of(end)) == (None, "ENGINE_ERROR")
    assert end.error is not None
    assert "status unknown" in end.error.message


@with_rig
async def test_a_container_that_heeds_term_is_ended_at_its_limit_at_once(rig: Rig) -> None:
    rig.script(seconds=1000, last_words=b"bye")
    end = await rig.run()
    assert (end.exit_code, code_of(end), rig.text()) == (None, "TIMEOUT", "bye")
    assert rig.clock.monotonic() == pytest.approx(10)
    assert "kill" not in rig.engine.calls


@pytest.mark.seed("003", "10.2")
@with_rig
async def test_a_container_that_ignores_term_is_killed_after_the_grace(rig: Rig) -> None:
    rig.script(seconds=1000, heeds_term=False)
    end = await rig.run()
    assert (end.exit_code, code_of(end)) == (None, "TIMEOUT")
    assert rig.clock.monotonic() == pytest.approx(15)
    assert rig.engine.running() == []


@with_rig
async def test_without_a_grace_a_container_is_killed_at_its_limit(rig: Rig) -> None:
    rig.config = replace(rig.config, stop_grace=0)
    rig.script(seconds=1000)
    assert code_of(await rig.run()) == "TIMEOUT"
    assert "signal" not in rig.engine.calls
    assert rig.clock.monotonic() == pytest.approx(10)


@pytest.mark.seed("003", "6.3")
@with_rig
async def test_exit_0_after_a_timeout_is_still_a_timeout(rig: Rig) -> None:
    rig.script(seconds=1000, term_code=0)
    end = await rig.run()
    assert (end.state, end.exit_code, code_of(end)) == ("failed", None, "TIMEOUT")


@with_rig
async def test_a_cancel_ends_the_container_and_gives_its_reason(rig: Rig) -> None:
    rig.script(seconds=1000)
    running = rig.begin()
    await rig.passes(2)
    rig.stop.request("deleted by its owner")
    end = await running
    assert (end.exit_code, code_of(end)) == (None, "CANCELLED")
    assert end.error is not None
    assert end.error.message == "deleted by its owner"
    assert rig.engine.running() == []
    assert rig.clock.monotonic() == pytest.approx(2)


@with_rig
async def test_a_cancel_that_comes_after_the_exit_changes_nothing(rig: Rig) -> None:
    rig.script(seconds=1, exit_code=4)
    rig.engine.fault("usage", Fault(), Fault(after=1))  # the job is being closed meanwhile
    running = rig.begin()
    await rig.passes(1.5)
    rig.stop.request("too late")
    end = await running
    assert (end.exit_code, code_of(end)) == (4, "NON_ZERO_EXIT")


@with_rig
async def test_a_job_that_is_cancelled_before_it_began_makes_nothing(rig: Rig) -> None:
    rig.stop.request("never mind")
    end = await rig.run()
    assert (end.state, end.exit_code, code_of(end)) == ("failed", None, "CANCELLED")
    assert rig.engine.calls == []


@with_rig
async def test_a_command_that_is_missing_or_no_program_is_told(rig: Rig) -> None:
    for refusal, code, exit_code in (
        (CommandNotFound, "COMMAND_NOT_FOUND", 127),
        (CommandNotRunnable, "COMMAND_NOT_RUNNABLE", 126),
        (EngineError, "ENGINE_ERROR", 125),
    ):
        rig.script(refuses=refusal)
        end = await rig.run()
        assert (end.exit_code, code_of(end)) == (exit_code, code)
        assert await rig.remove()


# -- images ---------------------------------------------------------------------------------


@with_rig
async def test_an_image_that_is_not_here_is_fetched(rig: Rig) -> None:
    rig.engine.registry[IMAGE] = rig.engine.scripts.pop(IMAGE)
    rig.engine.fault("pull", Fault(before=200))
    end = await rig.run()
    assert (end.exit_code, rig.clock.monotonic()) == (0, pytest.approx(200))


@with_rig
async def test_an_image_is_not_fetched_where_the_worker_fetches_none(rig: Rig) -> None:
    rig.engine.registry[IMAGE] = rig.engine.scripts.pop(IMAGE)
    rig.config = replace(rig.config, images=ImageRules(pull=Pull.NEVER))
    end = await rig.run()
    assert (end.exit_code, code_of(end)) == (125, "IMAGE_NOT_FOUND")
    assert "pull" not in rig.engine.calls


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (Fault(), "IMAGE_NOT_FOUND", "check its name"),
        (Fault(error=PullFailed("no route")), "IMAGE_PULL_FAILED", "no route"),
        (Fault(error=Unsupported("no")), "IMAGE_NOT_FOUND", "fetches none"),
        (Fault(before=301), "IMAGE_PULL_FAILED", "longer than 300 s"),
    ],
)
def test_a_fetch_that_fails_says_why(tmp_path: Path, fault: Fault, code: str, words: str) -> None:
    async def body(rig: Rig) -> None:
        del rig.engine.scripts[IMAGE]
        rig.engine.fault("pull", fault)
        end = await rig.run()
        assert (end.exit_code, code_of(end)) == (125, code)
        assert end.error is not None
        assert words in end.error.message
        assert rig.engine.leftovers() == []

    virtually(tmp_path, body)


@with_rig
async def test_a_cancel_ends_a_fetch(rig: Rig) -> None:
    del rig.engine.scripts[IMAGE]
    rig.engine.fault("pull", Fault(before=100))
    running = rig.begin()
    await rig.passes(1)
    rig.stop.request("enough")
    assert code_of(await running) == "CANCELLED"
    assert rig.clock.monotonic() == pytest.approx(1)


@with_rig
async def test_an_image_that_is_not_what_the_list_pins_does_not_run(rig: Rig) -> None:
    pinned = f"tool@sha256:{'0' * 64}"
    rig.config = replace(rig.config, images=ImageRules(allowed=(pinned,)))
    end = await rig.run()
    assert (end.exit_code, code_of(end)) == (125, "IMAGE_NOT_ALLOWED")
    assert "create" not in rig.engine.calls


@with_rig
async def test_an_image_that_goes_between_check_and_start_is_not_found(rig: Rig) -> None:
    def heard(method: str) -> None:
        if method == "create":
            rig.engine.scripts.clear()

    rig.engine.heard = heard
    end = await rig.run()
    assert (end.exit_code, code_of(end)) == (125, "IMAGE_NOT_FOUND")


# -- builds ---------------------------------------------------------------------------------


def builds(rig: Rig) -> None:
    build = BuildSpec(dockerfile="FROM scratch\n")
    rig.asks(mode=Mode.BUILD, image="", build=build)
    rig.config = replace(rig.config, build=BuildRules(enabled=True, max_seconds=60))


@with_rig
async def test_a_job_can_run_what_it_builds_and_nothing_of_it_stays(rig: Rig) -> None:
    builds(rig)
    rig.engine.recipe = Script(says=(Say(b"made"),))
    end = await rig.run()
    assert (end.exit_code, rig.text()) == (0, "made")
    assert len(rig.engine.leftovers()) == 2
    assert await rig.remove()
    assert rig.engine.leftovers() == []


@with_rig
async def test_the_log_of_a_build_is_kept_in_the_folder_of_its_job(rig: Rig) -> None:
    builds(rig)
    rig.engine.recipe = Script()
    await rig.run()
    assert rig.sandbox.build_log.read_bytes() == rig.engine.build_log


@with_rig
async def test_a_build_that_fails_says_how_its_log_ended(rig: Rig) -> None:
    builds(rig)
    rig.engine.build_log = b"first\n" + b"x" * 1_000_000 + b"\nRUN false\n"
    rig.engine.recipe = BuildFailed("step 2 returned 1")
    end = await rig.run()
    assert (end.exit_code, code_of(end)) == (None, "BUILD_FAILED")
    assert end.error is not None
    assert "step 2 returned 1" in end.error.message
    assert end.error.message.endswith("RUN false")
    assert len(end.error.message) < 2200
    assert rig.sandbox.build_log.stat().st_size == 256 << 10


@with_rig
async def test_a_build_that_takes_too_long_says_so(rig: Rig) -> None:
    builds(rig)
    rig.engine.recipe = Script()
    rig.engine.fault("build", Fault(before=61))
    end = await rig.run()
    assert code_of(end) == "BUILD_FAILED"
    assert end.error is not None
    assert "longer than 60 s" in end.error.message
    assert rig.clock.monotonic() == pytest.approx(60)


@with_rig
async def test_a_cancel_ends_a_build(rig: Rig) -> None:
    builds(rig)
    rig.engine.fault("build", Fault(before=30))
    running = rig.begin()
    await rig.passes(1)
    rig.stop.request("enough")
    assert code_of(await running) == "CANCELLED"
    assert rig.engine.leftovers() == []


# -- files ----------------------------------------------------------------------------------


@with_rig
async def test_what_a_job_leaves_is_there_until_all_of_it_is_removed(rig: Rig) -> None:
    rig.asks(outputs=True, inputs=(InputFile(path="in.txt", text="x"),))
    rig.script(leaves={"out.txt": b"result"})
    await rig.run()
    assert rig.left() == [("out.txt", 6)]
    assert await rig.remove()
    assert not rig.sandbox.folder.exists()


@with_rig
async def test_what_a_job_left_is_there_also_when_it_failed(rig: Rig) -> None:
    rig.asks(outputs=True)
    rig.script(leaves={"out.txt": b"result"}, exit_code=1)
    end = await rig.run()
    assert (code_of(end), len(rig.left())) == ("NON_ZERO_EXIT", 1)


@with_rig
async def test_a_job_that_writes_too_much_is_ended(rig: Rig) -> None:
    rig.asks(outputs=True, limits={"max_artifact_bytes": 1000})
    rig.script(leaves={"big": b"x" * 1001}, seconds=1000)
    end = await rig.run()
    assert (code_of(end), end.exit_code) == ("OUTPUT_LIMIT", 143)
    assert rig.clock.monotonic() < 0.5
    assert rig.engine.running() == []


@with_rig
async def test_a_job_that_wrote_too_much_and_was_gone_is_told_too(rig: Rig) -> None:
    rig.asks(outputs=True, limits={"max_artifact_bytes": 1000})
    rig.script(says=(Say(b"x", after=0.05),), leaves={"big": b"x" * 1001})
    end = await rig.run()
    assert (end.state, code_of(end), end.exit_code) == ("failed", "OUTPUT_LIMIT", 0)


@with_rig
async def test_as_much_as_it_may_leave_is_no_reason_to_end_a_job(rig: Rig) -> None:
    rig.asks(outputs=True, limits={"max_artifact_bytes": 1000})
    rig.script(leaves={"big": b"x" * 1000}, seconds=5)
    end = await rig.run()
    assert (end.exit_code, rig.left()) == (0, [("big", 1000)])


@with_rig
async def test_input_that_can_t_be_had_is_told_and_nothing_runs(rig: Rig) -> None:
    rig.asks(inputs=(InputFile(path="x", pointer="blob://nowhere/x"),))
    end = await rig.run()
    assert code_of(end) == "INPUT_UNAVAILABLE"
    assert "create" not in rig.engine.calls


# -- usage ----------------------------------------------------------------------------------


@with_rig
async def test_what_a_container_used_is_told_by_an_engine_that_knows_it_afterwards(
    rig: Rig,
) -> None:
    rig.script(usage=Usage(5_000_000, 1.5))
    assert (await rig.run()).usage == Usage(5_000_000, 1.5)


@with_rig
async def test_nothing_is_made_up_about_a_container_that_was_too_quick(rig: Rig) -> None:
    rig.script(usage=Usage(5_000_000, 1.5), usage_after_end=False)
    assert (await rig.run()).usage == Usage()


@with_rig
async def test_who_waits_for_output_is_woken_when_the_job_has_ended(rig: Rig) -> None:
    rig.script(seconds=5)
    running = rig.begin()
    waiting = asyncio.ensure_future(rig.output.more(Stream.STDOUT, 0, 1000))
    await running
    await waiting
    assert rig.clock.monotonic() == pytest.approx(5)
