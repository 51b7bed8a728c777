"""What a container worker forgets, and what it clears away."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.container_workers import (
    ENDLESS,
    QUICK,
    Rig,
    a_job,
    ended,
    with_rig,
)
from tests.unit.test_container_worker_restart import a_stray

from penstock.core.errors import StoreFailed
from penstock.lifecycles.container import ContainerJobState
from penstock.testing.containers import HANGS, Fault, Script, image_of
from penstock.workloads.container.config import BuildRules, WorkerConfig
from penstock.workloads.container.engine import EngineError, EngineUnavailable
from penstock.workloads.container.job import Code
from penstock.workloads.container.standing import upkeep
from penstock.workloads.container.standing.images import PulledImages
from penstock.workloads.container.standing.machine import Disk
from penstock.workloads.container.standing.upkeep import low_disk


@with_rig
async def test_an_ended_job_is_forgotten_after_its_time_with_its_folder(rig: Rig) -> None:
    worker = await rig.start(retention=3600)
    await worker.submit(a_job("old"))
    await worker.submit(a_job("runs", ENDLESS, limits={"max_runtime_seconds": 80_000}))
    await ended(worker, "old")
    await rig.passes(3000)
    await worker.submit(a_job("new"))
    await ended(worker, "new")
    assert rig.sandboxes.of("old").folder.is_dir()
    await rig.passes(700)
    assert await worker.get("old") is None
    assert not rig.sandboxes.of("old").folder.exists()
    assert {record.job_id for record in await rig.records()} == {"runs", "new"}
    assert rig.sandboxes.of("runs").folder.is_dir()


@with_rig
async def test_no_more_ended_jobs_are_kept_than_are_to_be(rig: Rig) -> None:
    worker = await rig.start(retention=0, max_records=2)
    for n in range(5):
        await worker.submit(a_job(f"j{n}"))
        await ended(worker, f"j{n}")
        await rig.passes(1)
    await rig.passes(61)
    assert {record.job_id for record in await rig.records()} == {"j3", "j4"}
    assert len(rig.sandboxes.names()) == 2


@with_rig
async def test_without_limits_everything_is_kept(rig: Rig) -> None:
    worker = await rig.start(retention=0, max_records=0)
    await worker.submit(a_job("a"))
    await ended(worker, "a")
    await rig.passes(20_000)
    assert await worker.get("a") is not None


@with_rig
async def test_a_container_that_could_not_be_removed_is_removed_later(rig: Rig) -> None:
    worker = await rig.start()
    rig.engine.fault("remove", *[Fault(error=EngineError("device or resource busy"))] * 2)
    await worker.submit(a_job("a"))
    record = await ended(worker, "a")
    assert record.state is ContainerJobState.FINISHED
    assert rig.engine.leftovers() == [record.container]
    await rig.passes(121)
    assert rig.engine.leftovers() == []


@with_rig
async def test_what_could_not_be_removed_is_tried_again_soon_and_less_and_less_often(
    rig: Rig,
) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a"))
    await ended(worker, "a")
    await rig.passes(1)
    rig.engine.fault("remove", *[Fault(error=EngineError("device or resource busy"))] * 4)
    await worker.submit(a_job("b"))
    record = await ended(worker, "b")
    await rig.passes(1 + 2 + 4 - 0.5)
    assert rig.engine.leftovers() == [record.container]
    await rig.passes(8 + 1)
    assert rig.engine.leftovers() == []


@with_rig
async def test_one_that_can_not_be_removed_keeps_no_other_from_it(rig: Rig) -> None:
    worker = await rig.start()
    first, second = [await a_stray(rig, worker, name) for name in ("one", "two")]
    rig.engine.fault("remove", Fault(error=EngineError("device or resource busy")))
    with pytest.raises(EngineError):
        await worker._sweeper.sweep_containers()
    assert first in rig.engine.containers
    assert second not in rig.engine.containers


@with_rig
async def test_nothing_is_swept_of_a_job_that_a_worker_leaves_to_the_next(rig: Rig) -> None:
    worker = await rig.start()
    rig.engine.fault("remove", Fault(error=EngineError("device or resource busy")))
    await worker.submit(a_job("b"))
    await worker.submit(a_job("a", ENDLESS, limits={"max_runtime_seconds": 3600}))
    await ended(worker, "b")
    # Its end can't be written, so the worker takes some time to stop.
    rig.store.failing["finish"] = 1000
    await worker.submit(a_job("c"))
    await rig.passes(0.1)
    await rig.stop(worker)
    assert rig.engine.running() == [(await rig.record("a")).container]


@with_rig
async def test_only_containers_that_no_job_needs_are_swept(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("runs", ENDLESS, limits={"max_runtime_seconds": 3600}))
    await rig.passes(1)
    stray = await a_stray(rig, worker, "nobody")
    await rig.passes(61)
    assert stray not in rig.engine.containers
    assert len(rig.engine.running()) == 1


@with_rig
async def test_an_image_that_was_built_for_a_job_that_is_gone_is_removed(rig: Rig) -> None:
    rig.engine.recipe = Script()
    worker = await rig.start(build=BuildRules(enabled=True))
    rig.engine.fault("remove_image", Fault(error=EngineError("in use")))
    job = a_job("a", mode="build", build={"dockerfile": "FROM scratch\n"})
    await worker.submit(job)
    assert (await ended(worker, "a")).state is ContainerJobState.FINISHED
    assert rig.engine.built
    await rig.passes(61)
    assert rig.engine.leftovers() == []
    assert QUICK in rig.engine.scripts


@with_rig
async def test_folders_without_a_record_are_cleared_away_at_the_start(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("kept"))
    await ended(worker, "kept")
    await rig.stop(worker)
    orphan = rig.sandboxes.of("orphan").folder
    orphan.mkdir(parents=True)
    (orphan / "stdout.0").write_bytes(b"x")
    await rig.start()
    await rig.passes(1)
    assert not orphan.exists()
    assert rig.sandboxes.of("kept").folder.is_dir()


@with_rig
async def test_a_folder_that_can_not_be_removed_keeps_no_other_from_it(rig: Rig) -> None:
    orphans = [rig.sandboxes.of(name).folder for name in ("a", "b", "c")]
    for orphan in orphans:
        orphan.mkdir(parents=True)
    stubborn, tries = min(orphan.name for orphan in orphans), 0
    discard = rig.sandboxes.discard

    def discard_others(name: str) -> None:
        nonlocal tries
        if name == stubborn:
            tries += 1
            raise PermissionError(13, "Permission denied")
        discard(name)

    rig.sandboxes.discard = discard_others  # type: ignore[method-assign]
    await rig.start()
    await rig.passes(600)
    assert [orphan.name for orphan in orphans if orphan.exists()] == [stubborn]
    assert tries == 1


@with_rig
async def test_an_upkeep_that_fails_is_tried_again(rig: Rig) -> None:
    worker = await rig.start(retention=100)
    await worker.submit(a_job("a"))
    await ended(worker, "a")
    pruning = rig.store.prune

    async def fails(*args: object, **kwargs: object) -> list[str]:
        rig.store.prune = pruning  # type: ignore[method-assign]
        raise StoreFailed("not now")

    rig.store.prune = fails  # type: ignore[method-assign]
    rig.engine.fault("find", Fault(error=EngineUnavailable("not now")))
    await rig.passes(300)
    assert await worker.get("a") is None
    await worker.submit(a_job("after"))
    assert (await ended(worker, "after")).error is None


@with_rig
async def test_an_engine_that_hangs_keeps_no_record_from_being_forgotten(rig: Rig) -> None:
    worker = await rig.start(retention=1000)
    await worker.submit(a_job("a"))
    await ended(worker, "a")
    rig.engine.fault("find", HANGS, HANGS)
    await rig.passes(1400)
    assert await worker.get("a") is None


# -- images -------------------------------------------------------------------------------------


@with_rig
async def test_images_that_were_pulled_are_known_after_a_restart(rig: Rig) -> None:
    path = rig.config.jobs_dir / "images.json"
    images = PulledImages(path, rig.clock)
    rig.engine.scripts["far:1"] = Script()
    images.pulled("far:1", image_of("far:1"))
    await rig.passes(100)
    images = PulledImages(path, rig.clock)
    assert await images.remove_unused(rig.engine, 200, ()) == 0
    assert await images.remove_unused(rig.engine, 50, {"far:1"}) == 0, "a job runs in it"
    rig.engine.fault("remove_image", Fault(error=EngineError("a container uses it")))
    assert await images.remove_unused(rig.engine, 50, ()) == 0
    assert await images.remove_unused(rig.engine, 50, ()) == 1
    assert "far:1" not in rig.engine.scripts
    assert await PulledImages(path, rig.clock).remove_unused(rig.engine, 50, ()) == 0


@with_rig
async def test_a_damaged_list_of_images_removes_nothing(rig: Rig) -> None:
    path = rig.config.jobs_dir / "images.json"
    path.write_bytes(b"{")
    images = PulledImages(path, rig.clock)
    assert await images.remove_unused(rig.engine, 0, ()) == 0
    images.used("sha256:unknown")
    images.save()


# -- the disk -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "low"), [(None, False), (512, False), (511, True), (0, True)]
)
def test_a_disk_is_low_below_its_mark(
    available: int | None, low: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(upkeep, "disk_of", lambda folder: Disk(1000, available))
    config = WorkerConfig(jobs_dir=tmp_path, disk_low_mb=512)
    assert bool(low_disk(config)) is low
    assert Code.DISK_LOW not in low_disk(config)
