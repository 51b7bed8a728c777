"""Traces of jobs, received by an OTLP collector of the test's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec import Struct
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from tests.support.nats import NatsServer, working

import penstock
from penstock.adapters.link.address import Address
from penstock.app.engine import Engine
from penstock.app.worker_process import WorkerProcess
from penstock.config import Settings, load
from penstock.core.errors import InvalidRequest, JobFailed
from penstock.core.job import RetryPolicy
from penstock.core.trace import TraceParent
from penstock.testing.aio import run_async

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Words(Struct):
    words: tuple[str, ...]


class Collector:
    """What was received, by the name of the span."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        received = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                received.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            about = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.services.add(about["service.name"])
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def one(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_a_job_is_a_span_within_the_callers_trace(tmp_path: Path, collector: Collector) -> None:
    app = penstock.App()
    seen = []

    @app.job("job.add", ctx=True)
    def add(ctx: penstock.Context, a: int, b: int) -> int:
        seen.append(ctx.traceparent)
        return a + b

    with app.run(tmp_path, telemetry__otlp_endpoint=collector.url):
        assert add.options(traceparent=CALLER).submit(a=1, b=2).result() == 3
    whole, run, wait = (collector.one(name) for name in ("job job.add", "attempt 1", "wait"))
    caller = TraceParent.parse(CALLER)
    assert caller is not None
    assert {span.trace_id.hex() for span in (whole, run, wait)} == {caller.trace_id}
    assert whole.parent_span_id.hex() == caller.span_id
    assert run.parent_span_id == wait.parent_span_id == whole.span_id
    assert seen == [f"00-{caller.trace_id}-{run.span_id.hex()}-01"]
    assert whole.start_time_unix_nano == wait.start_time_unix_nano <= run.start_time_unix_nano
    assert whole.end_time_unix_nano == run.end_time_unix_nano
    about = {one.key: one.value.string_value for one in whole.attributes}
    assert about["penstock.job.state"] == "SUCCEEDED"
    assert collector.services == {"penstock"}


@asynccontextmanager
async def linked(app: penstock.App, settings: Settings) -> AsyncIterator[None]:
    """A worker over the link, as one in another process."""
    site = WorkerProcess(app, Address(path=settings.socket), settings, worker_id="w-1")
    running = asyncio.create_task(site.run())
    await site.welcomed()
    yield
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("way", ["link", "bus"])
@run_async
async def test_the_header_of_an_http_call_reaches_workers_and_children_over(
    way: str, tmp_path: Path, collector: Collector
) -> None:
    app, seen = penstock.App(), {}

    @app.job("job.child", ctx=True)
    async def child(ctx: penstock.Context) -> None:
        seen["child"] = ctx.traceparent

    @app.job("job.parent", ctx=True)
    async def parent(ctx: penstock.Context) -> None:
        seen["parent"] = ctx.traceparent
        await (await child.asubmit()).aresult()

    flags: dict[str, Any] = {
        "data_dir": str(tmp_path / "data"),
        "http.listen": "127.0.0.1:0",
        "telemetry.otlp_endpoint": collector.url,
    }
    nats = NatsServer(tmp_path) if way == "bus" else None
    if nats is not None:
        flags["bus.url"] = nats.url
    settings = load(environ={}, flags=flags)
    worker = working if nats is not None else linked
    try:
        async with Engine(settings) as engine, worker(app, settings):
            token = settings.token_file.read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "traceparent": CALLER}
            async with httpx2.AsyncClient(headers=headers) as http:
                body = {"topic": "job.parent"}
                job = (await http.post(f"{engine.url}/v1/jobs", json=body)).json()
            await engine.api.wait(job["job_id"], 20)
    finally:
        if nats is not None:
            nats.kill()
    caller = TraceParent.parse(CALLER)
    assert caller is not None
    outer, inner = collector.one("job job.parent"), collector.one("job job.child")
    assert {outer.trace_id.hex(), inner.trace_id.hex()} == {caller.trace_id}
    assert outer.parent_span_id.hex() == caller.span_id
    runs = {span.parent_span_id: span for span in collector.spans if span.name == "attempt 1"}
    assert inner.parent_span_id == runs[outer.span_id].span_id
    for name, whole in (("parent", outer), ("child", inner)):
        run = runs[whole.span_id]
        assert seen[name] == f"00-{caller.trace_id}-{run.span_id.hex()}-01"


def test_a_child_and_its_retry_belong_to_the_trace_of_the_parent(
    tmp_path: Path, collector: Collector
) -> None:
    app = penstock.App()

    @app.job("job.child", retries=RetryPolicy(retries=1, delay=0.01))
    def child() -> None:
        raise ValueError("secret text")

    @app.job("job.parent")
    def parent() -> None:
        child.submit().result()

    with app.run(tmp_path, telemetry__otlp_endpoint=collector.url), pytest.raises(JobFailed):
        parent.submit().result()
    outer = collector.one("job job.parent")
    tries = [span for span in collector.spans if span.name == "job job.child"]
    (run,) = [
        span
        for span in collector.spans
        if span.name == "attempt 1" and span.parent_span_id == outer.span_id
    ]
    assert len(tries) == 2
    assert {span.trace_id for span in tries} == {outer.trace_id}
    assert {span.parent_span_id for span in tries} == {run.span_id}
    assert len({span.span_id for span in tries}) == 2
    assert all(span.status.code == 2 for span in tries)  # an error
    assert b"secret text" not in b"".join(span.SerializeToString() for span in collector.spans)


def test_an_unsampled_trace_is_not_exported(tmp_path: Path, collector: Collector) -> None:
    app = penstock.App()

    @app.job("job.quiet")
    def quiet() -> None: ...

    with app.run(tmp_path, telemetry__otlp_endpoint=collector.url):
        quiet.options(traceparent=CALLER[:-2] + "00").submit().result()
        quiet.submit().result()
    assert len([span for span in collector.spans if span.name == "job job.quiet"]) == 1


def test_stages_of_a_pipeline_are_spans_of_its_attempt(
    tmp_path: Path, collector: Collector
) -> None:
    app = penstock.App()
    pipeline = penstock.Pipeline("words", config=Words)

    @pipeline.map(over="words")
    def shout(word: str) -> str:
        return word.upper()

    @pipeline.step(of=shout)
    def count(words: list[str]) -> int:
        return len(words)

    app.add(pipeline)
    with app.run(tmp_path, telemetry__otlp_endpoint=collector.url):
        pipeline.run(Words(words=("a", "b")))
    attempt = collector.one("attempt 1")
    stages = [collector.one(f"stage {name}") for name in ("shout", "count")]
    assert {span.parent_span_id for span in stages} == {attempt.span_id}
    assert stages[0].end_time_unix_nano <= stages[1].end_time_unix_nano


def test_spans_of_the_program_surround_and_continue_a_job(
    tmp_path: Path, collector: Collector
) -> None:
    app = penstock.App()
    tracer = TracerProvider().get_tracer("test")
    inner: list[Any] = []

    @app.job("job.traced")
    def traced() -> None:
        with tracer.start_as_current_span("inside") as span:
            inner.append(span)
        assert trace.get_current_span().get_span_context().is_valid

    with app.run(tmp_path, telemetry__otlp_endpoint=collector.url):
        with tracer.start_as_current_span("outside") as outside:
            handle = traced.submit()
        handle.result()
    whole, run = collector.one("job job.traced"), collector.one("attempt 1")
    context = outside.get_span_context()
    assert int.from_bytes(whole.parent_span_id) == context.span_id
    assert int.from_bytes(whole.trace_id) == context.trace_id
    (span,) = inner
    assert span.parent.span_id == int.from_bytes(run.span_id)


def test_a_collector_that_is_away_hurts_no_job(tmp_path: Path) -> None:
    app = penstock.App()

    @app.job("job.add")
    def add(a: int) -> int:
        return a + 1

    with app.run(tmp_path, telemetry__otlp_endpoint="http://127.0.0.1:9"):
        assert add.submit(a=1).result() == 2


def test_a_bad_traceparent_is_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    app = penstock.App()

    @app.job("job.add")
    def add(a: int) -> int:
        return a

    with app.run(tmp_path) as client:
        with pytest.raises(InvalidRequest, match="traceparent"):
            add.options(traceparent="00-zz").submit(a=1)
        assert client.jobs() == []
