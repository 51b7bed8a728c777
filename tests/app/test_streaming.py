"""Parts of a result, told while it is made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.process_jobs import STORY as WORDS
from tests.support.jobs.process_jobs import tell_until_there

import penstock
from penstock.app.application import connect
from penstock.lifecycles.canonical import JobState
from penstock.ports.bus import JobPiece
from penstock.ports.engine_api import JobUpdate, Streamed
from penstock.testing.aio import run_async


def spoken(updates: list[JobUpdate]) -> str:
    return "".join(update.text for update in updates if isinstance(update, Streamed))


def storyteller(mode: str, gate: threading.Event | None = None) -> penstock.App:
    app = penstock.App()

    if mode == "async":

        @app.job("job.story")
        async def tell(ctx: penstock.Context) -> str:
            for word in WORDS:
                ctx.stream(word)
            if gate is not None:
                await asyncio.to_thread(gate.wait, 30)
            return "".join(WORDS)

    else:

        @app.job("job.story", mode="thread")
        def tell_in_a_thread(ctx: penstock.Context) -> str:
            for word in WORDS:
                ctx.stream(word)
            if gate is not None:
                gate.wait(30)
            return "".join(WORDS)

    return app


@pytest.mark.parametrize("mode", ["async", "thread"])
def test_whoever_follows_is_told_every_piece_in_order(tmp_path: Path, mode: str) -> None:
    gate = threading.Event()
    with storyteller(mode, gate).run(tmp_path) as ps:
        handle = ps.submit("job.story")
        updates = []
        for update in handle.follow():
            updates.append(update)
            if isinstance(update, Streamed) and update.n == len(WORDS):
                gate.set()
        assert spoken(updates) == "".join(WORDS)
        numbers = [update.n for update in updates if isinstance(update, Streamed)]
        assert numbers == [1, 2, 3, 4]
        assert handle.result() == "".join(WORDS)


def test_a_job_in_a_process_of_its_own_streams_too(tmp_path: Path) -> None:
    app = penstock.App()
    app.job("job.story", mode="process")(tell_until_there)
    with app.run(tmp_path / "data") as ps:
        gate = tmp_path / "gate"
        handle = ps.submit("job.story", {"gate": str(gate)})
        told = _until_last(handle)
        gate.touch()
        assert "".join(update.text for update in told) == "".join(WORDS)
        assert handle.result() == "".join(WORDS)


def test_whoever_comes_late_is_told_what_came_before(tmp_path: Path) -> None:
    gate = threading.Event()
    with storyteller("async", gate).run(tmp_path) as ps:
        handle = ps.submit("job.story")
        assert [u.n for u in _until_last(handle)] == [1, 2, 3, 4]
        assert [u.n for u in _until_last(handle)] == [1, 2, 3, 4]
        gate.set()
        handle.result()


def _until_last(handle: penstock.JobHandle[Any]) -> list[Streamed]:
    told = []
    for update in handle.follow():
        if isinstance(update, Streamed):
            told.append(update)
            if update.n == len(WORDS):
                break
    return told


def test_nothing_of_it_is_kept_after_the_end(tmp_path: Path) -> None:
    with storyteller("async").run(tmp_path) as ps:
        handle = ps.submit("job.story")
        handle.result()
        assert spoken(list(handle.follow())) == ""


@pytest.mark.parametrize("way", ["link", "http"])
def test_it_is_told_over_every_way_to_an_engine(tmp_path: Path, way: str) -> None:
    gate = threading.Event()
    with storyteller("async", gate).run(tmp_path, http__listen="127.0.0.1:0") as ps:
        address = None if way == "link" else ps.url
        with connect(address, data=tmp_path) as there:
            handle = there.submit("job.story")
            told = _until_last(handle)
            gate.set()
            assert "".join(update.text for update in told) == "".join(WORDS)
            assert handle.result() == "".join(WORDS)


@run_async
async def test_a_new_attempt_begins_again_and_an_old_one_is_not_heard(tmp_path: Path) -> None:
    gate = threading.Event()
    async with storyteller("async", gate).run(tmp_path) as ps:
        handle = await ps.asubmit("job.story")
        feed = ps.api._feed  # type: ignore[attr-defined]
        follow = handle.afollow()
        told = [await _next(follow) for _ in WORDS]
        assert {piece.attempt for piece in told} == {1}
        await feed._take_in([JobPiece(handle.job_id, 2, 1, "again")])
        await feed._take_in([JobPiece(handle.job_id, 1, 5, "late")])
        assert await _next(follow) == Streamed(handle.job_id, 2, 1, "again")
        gate.set()
        job = await handle.await_end()
        assert job.state is JobState.SUCCEEDED
        assert all([not isinstance(update, Streamed) async for update in follow])


async def _next(updates: AsyncIterator[JobUpdate]) -> Streamed:
    async for update in updates:
        if isinstance(update, Streamed):
            return update
    raise AssertionError("it ended")


def test_half_a_character_becomes_a_question_mark(tmp_path: Path) -> None:
    app = penstock.App()
    gate = threading.Event()

    @app.job("job.broken")
    async def broken(ctx: penstock.Context) -> None:
        ctx.stream("\ud800")
        await asyncio.to_thread(gate.wait, 30)

    with app.run(tmp_path) as ps:
        handle = ps.submit("job.broken")
        told = []
        for update in handle.follow():
            if isinstance(update, Streamed):
                told.append(update.text)
                gate.set()
        assert told == ["?"]
