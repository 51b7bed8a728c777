"""A server on a workspace, with a runner that computes nothing: what becomes of each job."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_llm import FakeRunner
from tests.support.spool import original
from tests.support.waiting import soon

from penstock.core.job import Priority
from penstock.lifecycles.spool import Status
from penstock.testing.aio import run_async
from penstock.workloads.llm.runner import ProgressListener
from penstock.workloads.llm.values import (
    ChatRequest,
    Completion,
    CompletionRequest,
    Delta,
    EngineUnavailable,
    GenerationRequest,
    LlmCode,
    Message,
    ModelFacts,
)
from penstock.workloads.spool.client.changes import cancel, clean
from penstock.workloads.spool.client.flow import Flow, JobView
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import JobKind, ServerConfig, SpoolOptions, Sync
from penstock.workloads.spool.disk.files import OpenFolder
from penstock.workloads.spool.disk.job import read_options
from penstock.workloads.spool.disk.peers import write_pid
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server import requests
from penstock.workloads.spool.server.pool import EventKind, JobEvent
from penstock.workloads.spool.server.server import Server

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)


class Hearing(FakeRunner):
    """Remembers all that it was asked."""

    vision = False

    def __init__(self, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.asks: list[GenerationRequest] = []
        self.most = 0

    async def load(self, model: str = "", on_progress: object = None) -> ModelFacts:
        facts = await super().load(model)
        return ModelFacts(name=facts.name, loaded=True, vision=self.vision, context=facts.context)

    async def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        self.asks.append(ask)
        async with aclosing(super().generate(model, ask, choice)) as pieces:
            async for piece in pieces:
                self.most = max(self.most, self.running)
                yield piece


class Place:
    """A workspace with a server, and a client of it."""

    def __init__(self, folder: Path, runner: FakeRunner, **settings: Any) -> None:
        settings = {"sync": Sync.NONE, "scan": 0.1, **settings}
        self.workspace = Workspace(folder, Sync.NONE)
        self.work, self.flow = Work(self.workspace), Flow(self.workspace)
        self.runner = runner
        self.server = Server(ServerConfig(workspace=folder, **settings), runner)
        self.events: list[JobEvent] = []
        self.server.on_event = self.events.append

    def submit(self, prompt: str | bytes = "some words", **more: Any) -> str:
        options = SpoolOptions(**more.pop("options", {}))
        return self.work.submit(prompt, options=options, **more)

    async def ended(self, job_id: str) -> JobView:
        return await self.flow.await_end(job_id, timeout=10)

    async def done(self, job_id: str) -> str:
        found = await self.ended(job_id)
        assert found.status is Status.DONE, found.error
        return found.text

    async def failure(self, job_id: str) -> tuple[str, str]:
        found = await self.ended(job_id)
        assert found.status is Status.FAILED
        assert "\n" not in found.error
        return found.meta.code, found.error

    async def runs(self, job_id: str) -> None:
        await soon(lambda: self.workspace.find(job_id) is Status.RUNNING, f"{job_id} runs")


@asynccontextmanager
async def serving(
    folder: Path, runner: FakeRunner | None = None, **settings: Any
) -> AsyncIterator[Place]:
    place = Place(folder / "workspace", runner or Hearing(), **settings)
    await place.server.start()
    try:
        yield place
    finally:
        await place.server.stop(at_once=True)
        assert os.listdir(place.workspace.private / "servers") == []


# -- the normal way ------------------------------------------------------------------------


@pytest.mark.seed("004", "14.11")
@run_async
async def test_a_job_is_answered_and_everything_about_it_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        job_id = place.submit("say this back", options={"sampling": {"seed": 7}})
        assert await place.done(job_id) == "SAY THIS BACK"
    meta = place.flow.get(job_id).meta
    assert (meta.status, meta.artifacts, meta.finish_reason) == ("done", ("result.txt",), "stop")
    assert (meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens) == (3, 3, 0)
    assert (meta.model, meta.engine, meta.seed, meta.attempts) == ("fake", "fake 1", 7, 1)
    assert meta.completed_at > meta.submitted_at
    assert meta.duration_s is not None
    assert meta.tokens_per_second
    assert [event.what for event in place.events] == [EventKind.CLAIMED, EventKind.DONE]
    assert place.server.counts.tokens == 3
    assert set(os.listdir(place.workspace.of(Status.DONE, job_id))) == {
        "prompt.txt",
        "options.json",
        "meta.json",
        "result.txt",
    }


@pytest.mark.seed("004", "13.2")
@run_async
async def test_a_job_starts_within_milliseconds_of_its_rename(tmp_path: Path) -> None:
    async with serving(tmp_path, scan=60.0) as place:
        took: list[float] = []
        for _ in range(40):
            job_id = await asyncio.to_thread(place.submit)
            submitted = time.time()
            await place.ended(job_id)
            claimed = next(event for event in place.events if event.job_id == job_id)
            took.append(claimed.at - submitted)
        assert sorted(took)[len(took) // 2] < 0.01


@pytest.mark.seed("004", "14.8")
@run_async
async def test_a_job_without_a_seed_is_given_one_and_it_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        job_id = place.submit()
        await place.done(job_id)
        seed = place.flow.get(job_id).meta.seed
        assert seed is not None
        assert isinstance(place.runner, Hearing)
        assert place.runner.asks[0].sampling.seed == seed


@pytest.mark.seed("004", "3.5", "13.2")
@run_async
async def test_a_job_whose_event_was_missed_is_found_by_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workloads.spool.disk.watching._libc", lambda: None)
    async with serving(tmp_path) as place:
        await asyncio.sleep(0.15)  # the first scan is over
        assert await place.done(place.submit("found")) == "FOUND"


@pytest.mark.seed("004", "3.4")
@run_async
async def test_jobs_that_were_queued_before_the_start_run_in_the_order_of_their_ids(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, Hearing(), workers=1)
    ids = ["1736700000_9_2", "1736700000_9_10", "00001736700000500000_1_000000", "1736700001_1_0"]
    for job_id in reversed(ids):
        put(place.workspace, job_id, "x")
    await place.server.start()
    for job_id in ids:
        await place.done(job_id)
    await place.server.stop()
    assert [one.job_id for one in place.events if one.what is EventKind.CLAIMED] == ids


@pytest.mark.seed("004", "14.11")
@run_async
async def test_an_urgent_job_goes_first_and_one_that_waited_long_before_it(tmp_path: Path) -> None:
    place = Place(tmp_path, Hearing(), workers=1)
    now = int(time.time())
    long_ago, lately, urgent = f"{now - 900}_1_0", f"{now - 60}_1_0", f"{now}_1_0"
    for job_id in (long_ago, lately, urgent):
        put(place.workspace, job_id, "x")
    options = {"priority": Priority.INTERACTIVE}
    (place.workspace.of(Status.QUEUED, urgent) / "options.json").write_text(json.dumps(options))
    await place.server.start()
    await place.done(lately)
    await place.server.stop()
    claimed = [one.job_id for one in place.events if one.what is EventKind.CLAIMED]
    assert claimed == [long_ago, urgent, lately]


@pytest.mark.seed("004", "14.12")
@run_async
async def test_work_begins_before_a_long_queue_is_known(tmp_path: Path) -> None:
    place = Place(tmp_path, Hearing(), workers=1)
    for number in range(1500):
        put(place.workspace, f"1736700000_1_{number}", "x")
    known: list[int] = []
    place.server.on_event = lambda event: known.append(place.server.queued)
    await place.server.start()
    await soon(lambda: bool(known), "the first is claimed")
    assert known[0] < 600
    await place.server.stop(at_once=True)


# -- what kind of job ----------------------------------------------------------------------


@run_async
async def test_an_embedding_is_written_as_the_original_writes_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        job_id = place.submit("aei", kind=JobKind.EMBED)
        await place.ended(job_id)
        folder = place.workspace.of(Status.DONE, job_id)
        text = (folder / "embedding.json").read_text()
        assert '"dim": 4,' in text
        found = json.loads(text)
        assert found["vector"] == pytest.approx([2 / 13**0.5] * 3 + [1 / 13**0.5], abs=1e-5)
        assert place.flow.get(job_id).meta.artifacts == ("embedding.json",)


@run_async
async def test_speech_and_pictures_that_the_model_cannot_see_fail_with_that_reason(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(PNG)
    async with serving(tmp_path) as place:
        job_id = place.submit("look", kind=JobKind.VISION, images=[picture])
        code, why = await place.failure(job_id)
        assert code == "NOT_SUPPORTED"
        assert "images" in why
        put(place.workspace, "1736700000_1_0", "speak", **{"type.txt": "tts"})
        code, why = await place.failure("1736700000_1_0")
        assert code == "NOT_SUPPORTED"
        assert "voice" in why


@run_async
async def test_pictures_are_given_to_a_model_that_can_see(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(PNG)
    runner = Hearing()
    runner.vision = True
    async with serving(tmp_path, runner) as place:
        await place.ended(place.submit("look", kind=JobKind.VISION, images=[picture]))
    content: Any = runner.asks[0].messages[-1].content  # type: ignore[union-attr]
    assert content[0].image_url.url.startswith("data:image/png;base64,iVBORw0K")
    assert content[1].text == "look"


@run_async
async def test_a_raw_prompt_is_given_as_it_is_and_the_rest_is_passed_on(tmp_path: Path) -> None:
    runner = Hearing()
    async with serving(tmp_path, runner) as place:
        options = {
            "raw": True,
            "max_tokens": 2,
            "stop": ("x",),
            "schema": {"type": "string"},
            "logprobs": 1,
        }
        job_id = place.submit("one two three", options=options)
        assert await place.done(job_id) == "ONE TWO"
        assert place.flow.get(job_id).meta.finish_reason == "length"
        await place.ended(place.submit("more"))
    ask = runner.asks[0]
    assert isinstance(ask, CompletionRequest)
    assert ask.prompts == ("one two three",)
    assert (ask.max_tokens, ask.stop, ask.logprobs) == (2, ("x",), 1)
    assert ask.schema == {"type": "string"}
    assert runner.asks[1].max_tokens == 2048


@run_async
async def test_a_model_may_be_named_by_a_part_of_its_name(tmp_path: Path) -> None:
    runner = Hearing(models=("Big-Model", "Small-Model"))
    async with serving(tmp_path, runner) as place:
        named = place.submit(options={"model": "small"})
        await place.done(named)
        assert place.flow.get(named).meta.model == "Small-Model"
        default = place.submit()
        await place.done(default)
        assert place.flow.get(default).meta.model == "Big-Model"
        code, why = await place.failure(place.submit(options={"model": "model"}))
        assert code == "MODEL_NOT_FOUND"
        assert "Big-Model or Small-Model" in why
        code, why = await place.failure(place.submit(options={"model": "other"}))
        assert code == "MODEL_NOT_FOUND"


# -- conversations -------------------------------------------------------------------------


@run_async
async def test_a_job_goes_on_from_its_parents(tmp_path: Path) -> None:
    runner = Hearing()
    async with serving(tmp_path, runner) as place:
        first = place.submit("good day", options={"system": "be brief"})
        await place.done(first)
        second = place.submit("and then", parent=first)
        await place.done(second)
        third = place.submit("at last", parent=second, options={"system": "be long"})
        await place.done(third)
    said = [(one.role, one.content) for one in _chat(runner.asks[2]).messages]
    assert said == [
        ("system", "be long"),
        ("user", "good day"),
        ("assistant", "GOOD DAY"),
        ("user", "and then"),
        ("assistant", "AND THEN"),
        ("user", "at last"),
    ]
    assert _chat(runner.asks[1]).messages[0] == Message(role="system", content="be brief")


@run_async
async def test_a_child_waits_for_its_parent_without_running(tmp_path: Path) -> None:
    async with serving(tmp_path, Hearing(delay=0.05)) as place:
        parent = place.submit("a b c d e f")
        child = place.submit("later", parent=parent)
        await place.runs(parent)
        await asyncio.sleep(0.05)
        assert place.workspace.find(child) is Status.QUEUED
        await place.done(child)
        await soon(lambda: place.server.counts.done == 2, "both are done")
        ends = [one.job_id for one in place.events if one.what is EventKind.DONE]
        assert ends == [parent, child]
        claims = [one.job_id for one in place.events if one.what is EventKind.CLAIMED]
        assert claims == [parent, child]


@run_async
async def test_a_child_of_a_failed_or_missing_parent_fails_with_that_reason(
    tmp_path: Path,
) -> None:
    runner = Hearing(fail_with={"bad": LlmCode.ENGINE_ERROR})
    async with serving(tmp_path, runner) as place:
        parent = place.submit("bad")
        code, why = await place.failure(place.submit("go on", parent=parent))
        assert (code, why) == ("PARENT_FAILED", f"PARENT_FAILED: its parent {parent} failed")
        code, why = await place.failure(place.submit("go on", parent="1_2_3"))
        assert why == "PARENT_FAILED: its parent 1_2_3 is missing"


@run_async
async def test_a_job_of_the_original_s_wrk_runs_without_a_parent_that_is_missing(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as place:
        job_id = original.wrk(place.workspace.path, b"go on", parent="1_2_3")
        await place.done(job_id)


@run_async
async def test_the_pid_file_comes_back_after_another_server_took_it_along(tmp_path: Path) -> None:
    async with serving(tmp_path, scan=0.05) as place:
        file = place.workspace.path / ".nrvnad.pid"
        file.unlink()
        await soon(file.exists, "the pid file is back")
        assert file.read_text() == str(os.getpid())


@pytest.mark.parametrize("kind", ["link", "pipe", "folder's draft"])
@run_async
async def test_a_pid_file_that_is_a_link_or_a_pipe_is_neither_followed_nor_waited_for(
    tmp_path: Path, kind: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    async with serving(tmp_path) as place:
        path = place.workspace.path
        name = path / ".nrvnad.pid"
        if kind == "pipe":
            name.unlink()
            os.mkfifo(name)
        elif kind == "link":
            name.unlink()
            name.symlink_to(victim)
        else:
            (path / f".nrvnad.pid.{os.getpid()}.tmp").symlink_to(victim)
        write_pid(path)
        assert name.read_text() == str(os.getpid())
        assert not name.is_symlink()
    assert victim.read_text() == "precious"


@run_async
async def test_the_messages_of_parents_count_to_the_size_of_a_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_PROMPT", 2000)
    long = {"messages": (Message(role="user", content="x" * 1500),)}
    async with serving(tmp_path) as place:
        first = place.submit("one", options=long)
        await place.done(first)
        second = place.submit("two", parent=first, options=long)
        await place.done(second)
        _, why = await place.failure(place.submit("three", parent=second))
        assert "over 2000 characters" in why


@run_async
async def test_a_parent_that_is_cleaned_while_it_is_read_fails_its_child_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as place:
        parent = place.submit("hello")
        await place.done(parent)
        read = read_options

        def after_a_cleaning(folder: Path | OpenFolder) -> SpoolOptions:
            if isinstance(folder, Path) and folder.name == parent:
                clean(place.workspace, keep=0)
            return read(folder)

        monkeypatch.setattr(requests, "read_options", after_a_cleaning)
        code, why = await place.failure(child := place.submit("go on", parent=parent))
        assert (code, why) == ("PARENT_FAILED", f"PARENT_FAILED: its parent {parent} is missing")
    assert place.flow.get(child).meta.attempts == 1
    assert not [one for one in place.events if one.what is EventKind.LET_GO]


@run_async
async def test_parents_in_a_circle_fail(tmp_path: Path) -> None:
    place = Place(tmp_path, Hearing())
    for mine, other in (("1_1", "1_2"), ("1_2", "1_1"), ("1_3", "1_3")):
        put(place.workspace, mine, "x", **{"meta.json": f'{{"parent": "{other}"}}'})
    await place.server.start()
    codes = {job_id: (await place.failure(job_id))[0] for job_id in ("1_1", "1_2", "1_3")}
    await place.server.stop()
    assert set(codes.values()) == {"PARENT_FAILED"}


# -- bad input -----------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, str | bytes], str, str]] = {
    "no prompt": ({}, "INVALID_PROMPT", "prompt.txt: is missing"),
    "an empty prompt": ({"prompt.txt": ""}, "INVALID_PROMPT", "prompt.txt: is empty"),
    "a prompt that is not UTF-8": ({"prompt.txt": b"\xff"}, "INVALID_PROMPT", "not UTF-8"),
    "options that are not JSON": (
        {"prompt.txt": "x", "options.json": "{"},
        "INVALID",
        "options.json",
    ),
    "options that ask for the impossible": (
        {"prompt.txt": "x", "options.json": '{"max_tokens": -1}'},
        "INVALID",
        "options.json",
    ),
    "metadata that is not JSON": ({"prompt.txt": "x", "meta.json": "no"}, "INVALID", "meta.json"),
    "an unknown kind": ({"prompt.txt": "x", "type.txt": "dance"}, "INVALID", "type.txt"),
    "a parent that is no id": (
        {"prompt.txt": "x", "meta.json": '{"parent": "../x"}'},
        "INVALID",
        "not a job id",
    ),
}


@pytest.mark.seed("004", "6.4")
@pytest.mark.parametrize("bad", BAD)
@run_async
async def test_a_folder_with_this_fails_with_a_plain_reason(bad: str, tmp_path: Path) -> None:
    files, code, reason = BAD[bad]
    place = Place(tmp_path, Hearing())
    put(place.workspace, "1736700000_1_0", None, old=True, **files)
    put(place.workspace, "1736700000_1_1", "good")
    await place.server.start()
    found_code, why = await place.failure("1736700000_1_0")
    assert await place.done("1736700000_1_1") == "GOOD"
    await place.server.stop()
    assert found_code == code
    assert reason in why


@run_async
async def test_links_pipes_and_devices_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "prompt.txt").write_text("secret")
    (outside / "result.txt").write_text("mine")
    place = Place(tmp_path / "workspace", Hearing())
    ready = place.workspace.folder(Status.QUEUED)
    (ready / "1_1").symlink_to(outside)
    (ready / "1_2").write_text("a file")
    put(place.workspace, "1_3", None)
    (ready / "1_3" / "prompt.txt").symlink_to(outside / "prompt.txt")
    put(place.workspace, "1_4", None, old=True)
    os.mkfifo(ready / "1_4" / "prompt.txt")
    os.utime(ready / "1_4", (0, 0))
    await place.server.start()
    whys = {job_id: (await place.failure(job_id))[1] for job_id in ("1_1", "1_2", "1_3", "1_4")}
    await place.server.stop()
    assert "1_1: is a symbolic link, not a folder" in whys["1_1"]
    assert "1_2: is a file, not a folder" in whys["1_2"]
    assert "symbolic link" in whys["1_3"]
    assert "pipe" in whys["1_4"]
    assert sorted(os.listdir(outside)) == ["prompt.txt", "result.txt"]
    assert not place.workspace.of(Status.FAILED, "1_1").is_symlink()
    assert place.runner.asked == []


@run_async
async def test_a_name_that_is_no_id_is_left_alone_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as place:
        odd = place.workspace.folder(Status.QUEUED) / "not an id"
        odd.mkdir()
        for _ in range(3):
            await place.done(place.submit())
            await asyncio.sleep(0.12)
        assert odd.is_dir()
    assert sum("not an id" in record.message for record in caplog.records) == 1


@run_async
async def test_a_folder_that_is_filled_where_it_lies_has_time_for_that(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        folder = place.workspace.of(Status.QUEUED, "1736700000_1_0")
        folder.mkdir()
        await asyncio.sleep(0.3)
        (folder / "prompt.txt").write_text("late")
        assert await place.done("1736700000_1_0") == "LATE"


@run_async
async def test_an_overlong_prompt_names_both_counts(tmp_path: Path) -> None:
    async with serving(tmp_path, Hearing(context=10)) as place:
        code, why = await place.failure(place.submit("word " * 25))
        assert code == "CONTEXT_EXCEEDED"
        assert "25" in why
        assert "10" in why


@run_async
async def test_an_id_that_has_ended_before_does_not_overwrite_the_first(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        job_id = place.submit("first")
        assert await place.done(job_id) == "FIRST"
        put(place.workspace, job_id, "second")
        other = f"{job_id}_1"
        await soon(lambda: place.flow.exists(other), "it has another id")
        code, why = await place.failure(other)
        assert code == "SAME_ID"
        assert "output" in why
        assert place.flow.get(job_id).text == "FIRST"
        await soon(lambda: not place.server.running, "it is over")


# -- time, cancelling, and hands in the folders --------------------------------------------


@pytest.mark.seed("004", "14.11")
@run_async
async def test_a_deadline_that_passes_while_queued_fails_the_job_though_all_are_busy(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Hearing(delay=20.0), workers=1) as place:
        busy = place.submit()
        await place.runs(busy)
        late = place.submit(options={"deadline": time.time() + 0.1})
        assert (await place.failure(late))[0] == "DEADLINE_EXCEEDED"
        assert len(place.runner.asked) == 1


@pytest.mark.seed("004", "13.9")
@run_async
async def test_a_deadline_or_timeout_that_passes_while_running_ends_the_generation(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Hearing(delay=20.0)) as place:
        late = place.submit(options={"deadline": time.time() + 0.3})
        long = place.submit(options={"timeout": 0.1})
        assert (await place.failure(late))[0] == "DEADLINE_EXCEEDED"
        code, why = await place.failure(long)
        assert (code, why) == ("TIMEOUT", "TIMEOUT: it ran for longer than 0.1 s")
        assert place.runner.running == 0


@run_async
async def test_cancelling_ends_a_generation_within_a_token(tmp_path: Path) -> None:
    async with serving(tmp_path, Hearing(delay=0.05), scan=60.0) as place:
        job_id = place.submit("word " * 200)
        await soon(lambda: place.runner.running == 1, "it generates")
        began = time.monotonic()
        cancel(place.workspace, job_id, "changed my mind")
        code, why = await place.failure(job_id)
        assert time.monotonic() - began < 1
        assert (code, why) == ("CANCELLED", "CANCELLED: changed my mind")
        assert place.runner.running == 0
        await soon(lambda: os.listdir(place.workspace.private / "cancel") == [], "the note is gone")


@pytest.mark.seed("004", "4.7")
@run_async
async def test_what_was_said_so_far_can_be_read_while_it_runs(tmp_path: Path) -> None:
    async with serving(tmp_path, Hearing(delay=0.02)) as place:
        job_id = place.submit("word " * 60, options={"max_tokens": 50})
        await soon(lambda: bool(place.flow.partial(job_id).text), "there is a part")
        partial = place.flow.partial(job_id)
        assert partial.text.startswith("WORD WORD")
        text = await place.done(job_id)
        assert text.startswith(partial.text)
        assert text == " ".join(["WORD"] * 50)
        names = os.listdir(place.workspace.of(Status.DONE, job_id))
        assert not {"partial.txt", "progress.json"} & set(names)


@pytest.mark.parametrize("how", ["moved", "deleted", "put back into the queue"])
@run_async
async def test_a_job_whose_folder_is_taken_away_is_let_go_and_the_server_goes_on(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(tmp_path, Hearing(delay=0.3), workers=1) as place:
        job_id = place.submit("a b c d")
        await place.runs(job_id)
        folder = place.workspace.of(Status.RUNNING, job_id)
        if how == "moved":
            folder.rename(tmp_path / "elsewhere")
        elif how == "deleted":
            shutil.rmtree(folder)
        else:
            folder.rename(place.workspace.of(Status.QUEUED, job_id))
        await soon(lambda: place.server.counts.let_go == 1, "it is let go")
        assert await place.done(place.submit("next")) == "NEXT"
        if how == "put back into the queue":
            assert await place.done(job_id) == "A B C D"
    assert any("moved or deleted" in record.message for record in caplog.records)


# -- an engine that is unavailable ---------------------------------------------------------


class Ill(Hearing):
    """Has no memory for a model, until it is well."""

    def __init__(self, *ill: str, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.ill = set(ill)

    async def load(self, model: str = "", on_progress: object = None) -> ModelFacts:
        if model in self.ill:
            raise EngineUnavailable(LlmCode.OUT_OF_MEMORY, f"there is no memory for {model}")
        return await super().load(model)


@run_async
async def test_jobs_of_an_engine_without_memory_wait_and_are_not_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workloads.llm.health._FIRST_DELAY", 0.02)
    runner = Ill(models=("one", "two"))
    async with serving(tmp_path, runner, workers=2) as place:
        runner.ill = {"one"}
        jobs = [place.submit(f"say {number}") for number in range(50)]
        late = place.submit("too late", options={"deadline": time.time() + 0.2})
        await soon(lambda: not place.server.health.is_well, "its health tells")
        [(name, why)] = place.server.health.troubles.items()
        assert name == "model one"
        assert "OUT_OF_MEMORY: there is no memory for one" in why
        other = place.submit("go on", options={"model": "two"})
        assert await place.done(other) == "GO ON"
        assert (await place.failure(late))[0] == "DEADLINE_EXCEEDED"
        await soon(lambda: place.flow.counts()[Status.QUEUED] == len(jobs), "all others wait")
        runner.ill = set()
        for number, job_id in enumerate(jobs):
            assert await place.done(job_id) == f"SAY {number}"
            assert place.flow.get(job_id).meta.attempts == 1
        assert place.server.health.is_well


@run_async
async def test_an_engine_that_fails_every_job_fails_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workloads.llm.health._FIRST_DELAY", 0.01)
    runner = Hearing(fail_with={"hello": LlmCode.OUT_OF_MEMORY})
    async with serving(tmp_path, runner) as place:
        for _ in range(30):
            place.submit("hello")
        await soon(lambda: len(runner.asks) > 10, "it was tried again and again")
        assert place.server.counts.failed == 0
        assert "model fake" in place.server.health.troubles


# -- crashes of the engine -----------------------------------------------------------------


@pytest.mark.seed("004", "13.6")
@run_async
async def test_a_job_that_crashes_the_engine_fails_alone_and_the_others_finish(
    tmp_path: Path,
) -> None:
    runner = Hearing(delay=0.005, crash_on=("poison",))
    place = Place(tmp_path, runner, workers=4, attempts=3)
    jobs = {f"1736700000_1_{n}": "poison" if n == 2 else f"good {n}" for n in range(12)}
    for job_id, prompt in jobs.items():
        put(place.workspace, job_id, prompt)
    await place.server.start()
    for job_id, prompt in jobs.items():
        if prompt == "poison":
            code, why = await place.failure(job_id)
        else:
            assert await place.done(job_id) == prompt.upper()
    await place.server.stop()
    assert (code, why) == ("ENGINE_CRASHED", "ENGINE_CRASHED: the job crashed the engine 3 times")
    crashes = [one for one in place.events if one.what is EventKind.REQUEUED]
    assert 2 <= len(crashes) <= 6
    attempts = [place.flow.get(job_id).meta.attempts for job_id in jobs]
    assert max(one for one in attempts if one) == 3


@run_async
async def test_an_innocent_job_in_bad_company_is_not_blamed_even_if_one_attempt_is_all(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, Hearing(delay=0.01, crash_on=("poison",)), workers=4, attempts=1)
    put(place.workspace, "1_1", "good one")
    put(place.workspace, "1_2", "poison one")
    await place.server.start()
    assert await place.done("1_1") == "GOOD ONE"
    assert (await place.failure("1_2"))[0] == "ENGINE_CRASHED"
    await place.server.stop()


@run_async
async def test_jobs_that_crashed_the_engine_run_alone(tmp_path: Path) -> None:
    runner = Hearing(delay=0.01)
    place = Place(tmp_path, runner, workers=4)
    for number in range(6):
        blamed = {"attempts.txt": "crashed the engine\n"} if number != 3 else {}
        put(place.workspace, f"1736700000_1_{number}", "a b c", **blamed)
    await place.server.start()
    for number in range(6):
        await place.done(f"1736700000_1_{number}")
    await place.server.stop()
    assert runner.most == 1
    happened = [event.what for event in place.events]
    assert happened == [EventKind.CLAIMED, EventKind.DONE] * 6


# -- trouble -------------------------------------------------------------------------------


@run_async
async def test_a_server_that_was_taken_for_dead_lets_its_jobs_go_and_goes_on(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Hearing(delay=0.1), workers=1, lease=1.0) as place:
        job_id = place.submit("a b c d e")
        await place.runs(job_id)
        [me] = (place.workspace.private / "servers").iterdir()
        shutil.rmtree(me)  # as a peer on another machine does
        place.workspace.of(Status.RUNNING, job_id).rename(place.workspace.of(Status.QUEUED, job_id))
        assert await place.done(job_id) == "A B C D E"
        assert await place.done(place.submit("next")) == "NEXT"
        assert place.server.counts.let_go == 1


@run_async
async def test_a_queue_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as place:
        shutil.rmtree(place.workspace.folder(Status.QUEUED))
        await soon(lambda: place.workspace.folder(Status.QUEUED).is_dir(), "it is there again")
        assert await place.done(place.submit("again")) == "AGAIN"
        await soon(lambda: place.server.health.is_well, "all is well")


@run_async
async def test_who_watches_may_fail_without_harm(tmp_path: Path) -> None:
    def broken(event: JobEvent) -> None:
        raise RuntimeError("broken")

    async with serving(tmp_path) as place:
        place.server.on_event = broken
        assert await place.done(place.submit("still")) == "STILL"
        await soon(lambda: place.server.counts.done == 1, "it is counted")


# -- stopping ------------------------------------------------------------------------------


@run_async
async def test_a_stop_lets_running_jobs_end_and_claims_nothing_new(tmp_path: Path) -> None:
    place = Place(tmp_path, Hearing(delay=0.05), workers=1, drain=10.0)
    await place.server.start()
    first, second = place.submit("a b c"), place.submit("d")
    await place.runs(first)
    await place.server.stop()
    assert not place.server.is_running
    assert place.workspace.find(first) is Status.DONE
    assert place.workspace.find(second) is Status.QUEUED


@pytest.mark.seed("004", "13.9")
@run_async
async def test_a_stop_whose_patience_is_over_queues_jobs_again_uncounted(tmp_path: Path) -> None:
    place = Place(tmp_path, Hearing(delay=0.3), drain=0.3)
    await place.server.start()
    job_id = place.submit("a b c d e f g h")
    await soon(lambda: bool(place.flow.partial(job_id).text), "it has said something")
    await place.server.stop()
    folder = place.workspace.of(Status.QUEUED, job_id)
    assert set(os.listdir(folder)) == {"prompt.txt", "meta.json"}
    assert place.runner.running == 0


@run_async
async def test_a_second_stop_at_once_does_not_wait(tmp_path: Path) -> None:
    place = Place(tmp_path, Hearing(delay=20.0), drain=60.0)
    await place.server.start()
    job_id = place.submit()
    await place.runs(job_id)
    stopping = asyncio.create_task(place.server.stop())
    await asyncio.sleep(0.05)
    assert not stopping.done()
    began = time.monotonic()
    await place.server.stop(at_once=True)
    await stopping
    assert time.monotonic() - began < 2
    assert place.workspace.find(job_id) is Status.QUEUED


@run_async
async def test_a_server_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    class Missing(FakeRunner):
        async def load(self, model: str = "", on_progress: object = None) -> ModelFacts:
            return await super().load("other")

    place = Place(tmp_path, Missing())
    with pytest.raises(Exception, match="other"):
        await place.server.start()
    assert os.listdir(place.workspace.private / "servers") == []
    assert not (tmp_path / ".nrvnad.pid").exists()


@pytest.mark.seed("004", "12.2", "13.12")
@run_async
async def test_old_jobs_are_taken_away(tmp_path: Path) -> None:
    async with serving(tmp_path, keep_jobs=2) as place:
        jobs = [place.submit(f"job {n}") for n in range(5)]
        for job_id in jobs:
            await place.done(job_id)
        await place.server._clean()
        assert place.workspace.counts()[Status.DONE] == 2


def put(
    workspace: Workspace, job_id: str, prompt: str | None, *, old: bool = False, **files: Any
) -> None:
    """A job as any program may make one: a folder with files, renamed in."""
    folder = workspace.of(Status.STAGING, job_id)
    folder.mkdir()
    for name, content in ({"prompt.txt": prompt} if prompt is not None else {}).items():
        (folder / name).write_text(content)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)
    if old:
        os.utime(folder, (0, 0))
    folder.rename(workspace.of(Status.QUEUED, job_id))


def _chat(ask: GenerationRequest) -> ChatRequest:
    assert isinstance(ask, ChatRequest)
    return ask
