"""What jobs leave behind: logs, live and afterwards, and artifacts."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.container_workers import SLOW, Rig, a_job, ended, with_rig

from penstock.lifecycles.container import ContainerJobState
from penstock.testing.containers import Say, Script
from penstock.workloads.container.job import OUTPUT_FOLDER, ContainerRecord, Stream

OUT, ERR = Stream.STDOUT, Stream.STDERR
TALKER = Script(says=(Say(b"one"), Say(b"oops", ERR), Say(b"two", after=5), Say(b"three", after=5)))


@with_rig
async def test_output_is_read_while_the_job_runs(rig: Rig) -> None:
    rig.engine.scripts["talker:1"] = TALKER
    worker = await rig.start()
    await worker.submit(a_job("a", "talker:1", limits={"max_runtime_seconds": 60}))
    await rig.passes(1)
    page = await worker.logs("a", OUT, 0, limit=100)
    assert page is not None
    assert (page.data, page.next, page.end) == (b"one", 3, False)
    nothing = await worker.logs("a", OUT, 3, limit=100)
    assert nothing is not None
    assert (nothing.data, nothing.next) == (b"", 3)
    record = await rig.record("a")
    assert await worker.text(record) == ("one", "oops")


@with_rig
async def test_who_waits_for_output_gets_it_when_it_comes(rig: Rig) -> None:
    rig.engine.scripts["talker:1"] = TALKER
    worker = await rig.start()
    await worker.submit(a_job("a", "talker:1", limits={"max_runtime_seconds": 60}))
    heard, offset, end = b"", 0, False
    while not end:
        page = await worker.logs("a", OUT, offset, limit=100, wait=60)
        assert page is not None
        assert page.offset == offset
        heard, offset, end = heard + page.data, page.next, page.end
    assert heard == b"onetwothree"
    assert rig.clock.monotonic() < 12, "nobody waited until the time was over"


@with_rig
async def test_who_waits_for_output_in_vain_gets_an_empty_page(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a", SLOW, limits={"max_runtime_seconds": 60}))
    page = await worker.logs("a", OUT, 0, limit=100, wait=3)
    assert page is not None
    assert (page.data, page.end) == (b"", False)
    assert rig.clock.monotonic() == pytest.approx(3, abs=0.1)
    end = await worker.logs("a", OUT, 0, limit=100, wait=60)
    assert end is not None
    assert end.end
    assert rig.clock.monotonic() == pytest.approx(10, abs=0.5)


@with_rig
async def test_who_asks_for_the_output_of_a_queued_job_hears_of_its_start(rig: Rig) -> None:
    rig.engine.scripts["talker:1"] = TALKER
    worker = await rig.start(max_concurrent_jobs=1)
    await worker.submit(a_job("a", SLOW, limits={"max_runtime_seconds": 60}))
    await worker.submit(a_job("b", "talker:1", limits={"max_runtime_seconds": 60}))
    at_once = await worker.logs("b", OUT, 0, limit=100)
    assert at_once is not None
    assert (at_once.data, at_once.end) == (b"", False)
    page = await worker.logs("b", OUT, 0, limit=100, wait=60)
    assert page is not None
    assert page.data == b"one"
    assert await worker.text(await rig.record("b")) == ("one", "oops")
    assert await worker.logs("nobody", OUT, 0, limit=1) is None


@with_rig
async def test_who_waits_for_output_is_not_late_because_the_job_is_slow_to_begin(
    rig: Rig,
) -> None:
    rig.engine.scripts["talker:1"] = TALKER
    getting = rig.store.get

    async def slow(job_id: str, *, body: bool = True) -> ContainerRecord | None:
        if body:
            await rig.passes(1)
        return await getting(job_id, body=body)

    worker = await rig.start()
    rig.store.get = slow  # type: ignore[method-assign]
    await worker.submit(a_job("a", "talker:1", limits={"max_runtime_seconds": 60}))
    page = await worker.logs("a", OUT, 0, limit=100, wait=60)
    assert page is not None
    assert page.data == b"one"
    assert rig.clock.monotonic() < 4


@with_rig
async def test_the_end_of_a_job_that_never_ran_is_the_end_of_its_output(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1)
    await worker.submit(a_job("a", SLOW, limits={"max_runtime_seconds": 60}))
    await worker.submit(a_job("b"))
    reading = asyncio.ensure_future(worker.logs("b", OUT, 0, limit=1, wait=60))
    await rig.passes(1)
    cancelled = await worker.cancel("b")
    assert cancelled is not None
    page = await reading
    assert page is not None
    assert (page.data, page.end) == (b"", True)
    assert await worker.text(cancelled.record) == ("", "")


@with_rig
async def test_output_is_there_after_the_end_and_after_a_restart(rig: Rig) -> None:
    rig.engine.scripts["long:1"] = Script(says=(Say(b"A" * 100 + b"B" * 1000 + b"C" * 100),))
    worker = await rig.start()
    await worker.submit(a_job("a", "long:1", limits={"max_output_bytes": 200}))
    await ended(worker, "a")
    await rig.stop(worker)
    worker = await rig.start()
    record = await rig.record("a")
    assert (record.stdout.bytes, record.stdout.kept) == (1200, 200)
    first = await worker.logs("a", OUT, 0, limit=1000)
    assert first is not None
    assert (first.data, first.end) == (b"A" * 100, False)
    rest = await worker.logs("a", OUT, first.next, limit=1000)
    assert rest is not None
    assert (rest.data, rest.offset, rest.skipped, rest.end) == (b"C" * 100, 1100, 1000, True)
    last = await worker.logs("a", OUT, -10, limit=1000)
    assert last is not None
    assert (last.data, last.offset) == (b"C" * 10, 1190)
    stdout, _ = await worker.text(record)
    assert stdout.startswith("A" * 100)
    assert stdout.rstrip("\n").endswith("C" * 100)


@with_rig
async def test_artifacts_are_served_by_the_names_that_the_record_lists(rig: Rig) -> None:
    rig.engine.scripts["maker:1"] = Script(leaves={"r.txt": b"result"})
    worker = await rig.start()
    await worker.submit(a_job("a", "maker:1", outputs=True))
    record = await ended(worker, "a")
    assert record.state is ContainerJobState.FINISHED
    assert [artifact.path for artifact in record.artifacts] == ["r.txt"]
    found = await worker.artifact("a", "r.txt")
    assert found is not None
    artifact, file = found
    with file:
        assert file.read() == b"result"
    assert artifact.size == 6
    for path in ("../owner", "/etc/passwd", "", "other", OUTPUT_FOLDER):
        assert await worker.artifact("a", path) is None
    assert await worker.artifact("nobody", "r.txt") is None
