"""An engine with jobs of every kind behind its web page, in a thread of its own.

Language models, nodes and containers are fakes behind the real executors; all else is real.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import Request, urlopen

import msgspec
from msgspec.structs import replace
from tests.support.browser.jobs import RULES, app
from tests.support.fake_containers import FakeEngine, Say, Script
from tests.support.fake_llm import FakeRunner

from penstock.app.application import make_executors
from penstock.app.client import Client
from penstock.app.engine import Engine
from penstock.app.portal import Portal
from penstock.config import load
from penstock.core.job import Job, JobRequest
from penstock.core.pointer import encode_data
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import CatchUp, KeyRole, Limit, Schedule
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.executor import ContainerExecutor
from penstock.workloads.container.job import Usage
from penstock.workloads.llm.batches import Batch, FileUpload
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.runner import ProgressListener
from penstock.workloads.llm.values import (
    PIPE_TOPICS,
    Completion,
    Delta,
    GenerationRequest,
    HopTime,
    Timings,
)
from penstock.workloads.pipes.status import (
    FACT,
    HopView,
    NodeView,
    PipesView,
    PipeView,
    SegmentView,
)
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import Work

T = TypeVar("T")
CHAT = "/v1/chat/completions"

IMAGES = {
    "hello:1": Script(says=(Say(b"hello from a container\n"),)),
    "broken:1": Script(says=(Say(b"x" * 9000),), exit_code=3, usage=Usage(3 << 20, 1.5)),
    "endless:1": Script(seconds=1e6),
}


class SplitRunner(FakeRunner):
    """Answers as a model that is split over nodes does, with its hops."""

    async def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        async for one in super().generate(model, ask, choice, watch):
            if isinstance(one, Completion):
                yield replace(one, timings=Timings(180.0, 420.0), hops=HOPS)
            else:
                yield one


HOPS = (
    HopTime(node="attic", layers="ends", compute_ms=12.0, passes=3, tokens=5),
    HopTime(node="attic", layers="0-11", compute_ms=210.0, queue_ms=4.0, passes=3, tokens=5),
    HopTime(node="cellar", layers="12-23", compute_ms=240.0, queue_ms=9.0, network_ms=31.0),
)


def _segment(start: int, end: int, state: str = "ready") -> SegmentView:
    return SegmentView(
        model="duet", layers=f"{start}-{end - 1}", start=start, end=end, state=state, layer_ms=0.9
    )


NODES = PipesView(
    pipes=(
        PipeView(
            model="duet",
            num_layers=24,
            complete=True,
            origins=("attic",),
            hops=(
                HopView(node_id="attic", layers="0-11"),
                HopView(node_id="cellar", layers="12-23"),
            ),
            token_ms=21.5,
        ),
    ),
    nodes=(
        NodeView(
            node_id="attic",
            address="10.0.0.2:7496",
            state="ready",
            end_models=("duet",),
            segments=(_segment(0, 12),),
            weights=310 << 20,
            cache_total=512 << 20,
            cache_used=96 << 20,
            jobs=1,
            tokens_per_s=42.0,
            busy=0.61,
            links={"cellar": 1.4},
        ),
        NodeView(
            node_id="cellar",
            address="10.0.0.3:7496",
            state="ready",
            segments=(_segment(12, 24),),
            weights=290 << 20,
            cache_total=512 << 20,
            cache_used=96 << 20,
            jobs=1,
            tokens_per_s=42.0,
            busy=0.72,
            links={"attic": 1.4},
        ),
        NodeView(
            node_id="spare",
            address="10.0.0.4:7496",
            state="loading",
            segments=(_segment(8, 16, "loading"),),
            cache_total=256 << 20,
        ),
    ),
)


class SplitModels(LlmExecutor):
    """A model whose layers are on nodes, and what its workers tell of them."""

    def facts(self) -> Mapping[str, Any]:
        return {FACT: msgspec.to_builtins(NODES), **super().facts()}


class SteppedClock(SystemClock):
    """The machine's time, `behind` by so many seconds."""

    behind = 0.0

    def now(self) -> float:  # type: ignore[override]
        return time.time() - self.behind


class World:
    """The engine, and what tests ask of it from outside its thread."""

    def __init__(self, folder: Path, behind: float = 0.0, **settings: Any) -> None:
        self.clock = SteppedClock()
        self.clock.behind = behind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rules.toml").write_text(RULES)
        flags = {
            "data_dir": str(folder / "data"),
            "rules": str(folder / "rules.toml"),
            "durability": "memory",
            "http__listen": "127.0.0.1:0",
            "spools": [str(folder / "spool")],
            **settings,
        }
        self.settings = load(flags=flags)
        self.spool = Flow(folder / "spool")
        Work(self.spool.workspace).submit("Say something.")
        containers = ContainerExecutor(
            WorkerConfig(jobs_dir=folder / "containers", disk_low_mb=0),
            FakeEngine(SystemClock(), IMAGES),
        )
        self.parrot = FakeRunner(("parrot",), delay=0.05)
        models = LlmExecutor(self.parrot, ["parrot"])
        split = SplitModels(SplitRunner(("duet",)), ["duet"], prefix=PIPE_TOPICS)
        executors = [*make_executors(app, self.settings), containers, models, split]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = self.run(self._started(executors))
        self.api = self.engine.api
        self.url, self.token = self.engine.url, self.settings.token_file.read_text().strip()

    async def _started(self, executors: list[Any]) -> Engine:
        portal, engine = (
            Portal(asyncio.get_running_loop()),
            Engine(self.settings, executors, clock=self.clock),
        )
        engine.on_open = lambda: app.bind(Client(engine.api, portal, app.functions))
        await engine.start()
        return engine

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 30.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def close(self) -> None:
        self.run(self.engine.stop(0.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # -- what tests do ------------------------------------------------------------

    def submit(self, topic: str, given: Any = None, **fields: Any) -> Job:
        pointer = encode_data(json.dumps({} if given is None else given).encode())
        request = JobRequest(job_id=fields.pop("job_id", ""), topic=topic, context_ptr=pointer)
        (job,) = self.run(self.api.submit([_changed(request, fields)]))
        return job

    def wait(self, job: Job, timeout: float = 20.0) -> Job:
        return self.run(self.api.wait(job.job_id, timeout))

    def job(self, job_id: str) -> Job:
        return self.run(self.api.get(job_id))

    def key(self, name: str, *roles: KeyRole, tenant: str | None = None) -> str:
        return self.run(self.api.keys.create(name, roles, tenant=tenant)).token

    def batch(self, *prompts: str) -> Batch:
        """Submit these as a batch of OpenAI's API."""
        lines = [
            {"custom_id": str(n), "method": "POST", "url": CHAT, "body": _chat(prompt)}
            for n, prompt in enumerate(prompts)
        ]

        async def submit() -> Batch:
            upload = FileUpload(self.api.batches)
            await upload.write(b"\n".join(json.dumps(line).encode() for line in lines))
            file = await upload.keep("questions.jsonl")
            return await self.api.batches.create(file.id, CHAT)

        return self.run(submit())

    def link(self) -> str:
        """A one-time sign-in link of the owner, as `penstock dashboard` prints it."""
        return self.run(self.api.keys.create_link()).url

    def get(self, path: str) -> Any:
        request = Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        with urlopen(request, timeout=20) as answer:
            return json.load(answer)


def _chat(prompt: str) -> dict[str, Any]:
    return {"model": "parrot", "messages": [{"role": "user", "content": prompt}]}


def _changed(request: JobRequest, fields: dict[str, Any]) -> JobRequest:
    return replace(request, **fields)


@contextmanager
def world(folder: Path, behind: float = 0.0, **settings: Any) -> Iterator[World]:
    one = World(folder, behind, **settings)
    try:
        yield one
    finally:
        one.close()


def fill(one: World) -> dict[str, Job]:
    """A job of every kind and in every state; by name."""
    jobs = {
        "shout": one.submit("job.text.shout", {"text": "hello"}, labels={"team": "red"}),
        "failed": one.submit("job.math.divide", {"a": 1, "b": 0}),
        "denied": one.submit("job.shell.run", {"line": "rm -r /"}),
        "mail": one.submit("job.mail.send", {"to": "ada@example.org"}),
        "running": one.submit("job.slow.count", {"to": 5000, "pause": 0.2}),
        "cancelled": one.submit("job.slow.count", {"to": 5000}),
        "late": one.submit("job.slow.count", {"to": 5000}, timeout=0.3),
        "delayed": one.submit("job.text.shout", {"text": "later"}, run_at=time.time() + 3600),
        "picture": one.submit("job.picture.draw"),
        "crawl": one.submit("job.site.crawl", {"pages": 6}),
        "pipeline": one.submit("job.pipeline.shop"),
        "container": one.submit("job.container.run", {"runtime": {"image": "hello:1"}}),
        "broken": one.submit("job.container.run", {"runtime": {"image": "broken:1"}}),
        "endless": one.submit("job.container.run", {"runtime": {"image": "endless:1"}}),
        "answer": one.submit(
            "job.llm.parrot",
            {"kind": "chat", "messages": [{"role": "user", "content": "say something"}]},
        ),
        "split": one.submit(
            "job.chat.duet",
            {"kind": "chat", "messages": [{"role": "user", "content": "over several machines"}]},
        ),
        "acme": one.submit("job.text.shout", {"text": "for acme"}, tenant="acme"),
    }
    one.run(one.api.cancel(jobs["cancelled"].job_id, reason="not needed any more"))
    ended = ("shout", "failed", "denied", "late", "picture", "crawl", "pipeline", "container")
    for name in (*ended, "broken", "split"):
        jobs[name] = one.wait(jobs[name])
    request = JobRequest(
        job_id="", topic="job.text.shout", context_ptr=encode_data(b'{"text":"x"}')
    )
    one.run(
        one.api.schedules.put(
            Schedule(name="nightly", cron="0 3 * * *", request=request, catch_up=CatchUp.LAST)
        )
    )
    one.run(one.api.limits.put(Limit(name="calm", topics=("job.slow.*",), concurrency=8)))
    one.key("ada", KeyRole.SUBMIT, KeyRole.APPROVE)
    return jobs
