"""Runs of pipelines by callers who are not to be trusted: odd configs, and other tenants' ids."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.core.errors import InvalidRequest, NotFound, Unavailable
from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import KeyRole
from penstock.workloads.pipeline.interface import RunQuery

SECRET = "launch code 42"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    words: tuple[str, ...] = ("default",)
    more: Any = None


def pipeline_of(**options: Any) -> penstock.Pipeline:
    pipeline = penstock.Pipeline("words", config=Config, single_flight=False, **options)

    @pipeline.map(over="words")
    async def upper(word: str) -> str:
        return word.upper()

    @pipeline.map(over=upper, distributed=True)
    async def add(word: str, ctx: Any) -> str:
        return ",".join(one[:50] for one in (word, *ctx.config.words))

    @pipeline.step(of=upper)
    async def together(results: Any) -> list[str]:
        return [word async for word in results]

    return pipeline


def app_of(*pipelines: penstock.Pipeline) -> penstock.App:
    app = penstock.App()
    app.add(*pipelines)
    return app


@contextmanager
def tenants(folder: Path, pipeline: penstock.Pipeline, *names: str) -> Iterator[list[Any]]:
    """An engine with its HTTP API, and a client of each tenant with a key to submit."""
    with app_of(pipeline).run(data=folder, http__listen="127.0.0.1:0") as inside:
        made = [inside.keys.create(n, (KeyRole.SUBMIT,), tenant=n).token for n in names]
        sessions = [penstock.connect(inside.url, token=token) for token in made]
        clients = [session.__enter__() for session in sessions]
        try:
            yield clients
        finally:
            for session in sessions:
                session.__exit__(None, None, None)


# -- configs ----------------------------------------------------------------------

ODD = {
    "nested lists": b"[" * 3000 + b"]" * 3000,
    "nested objects": b'{"more":' * 1200 + b"1" + b"}" * 1200,
    "nested, but readable": b'{"more":' + b"[" * 500 + b"]" * 500 + b"}",
    "no object": b"[1]",
    "no JSON": b"{",
    "no UTF-8": b'{"words": ["\xff"]}',
}


def test_a_config_that_cannot_be_read_is_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    with app_of(pipeline_of()).run(tmp_path) as ps:
        for name, payload in ODD.items():
            pointer = encode_data(payload)
            request = JobRequest(job_id="", topic="job.pipeline.words", context_ptr=pointer)
            with pytest.raises(InvalidRequest) as refused:
                ps._engine.portal.run(ps.api.submit([request]))
            assert refused.value.field == "config", name
        assert ps.jobs() == []
        assert ps.pipelines.runs(RunQuery()) == []


def test_a_blob_that_is_no_config_ends_its_run_failed_and_nothing_else(tmp_path: Path) -> None:
    with tenants(tmp_path, pipeline_of(), "acme") as (acme,):
        for payload in ODD.values():
            padded = payload + b" " * 20_000  # what is too large for a data: pointer is a blob
            uri = acme._engine.portal.run(acme.api.put_blob(padded))
            request = JobRequest(job_id="", topic="job.pipeline.words", context_ptr=uri)
            (job,) = acme._engine.portal.run(acme.api.submit([request]))
            ended = acme.get(job.job_id).wait(timeout=20)
            assert (ended.state, ended.result.error_code) == (penstock.JobState.FAILED, "BAD_INPUT")
            record = acme.pipelines.get(job.job_id)
            assert record.status is PipelineJobStatus.FAILED
            assert ["config" in error.message for error in record.errors] == [True]
            with pytest.raises(InvalidRequest, match="config"):
                acme.pipelines.retry_failed(job.job_id)
        good = acme.pipelines.start("words", {"words": ["still", "there"]})
        assert acme.get(good.id).result(timeout=20)["output"] == ["STILL", "THERE"]


def test_a_deeply_nested_config_is_refused_by_name(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    with app_of(pipeline_of()).run(tmp_path) as ps:
        with pytest.raises(InvalidRequest, match="config"):
            ps.pipelines.start("words", {"more": deep})
        assert ps.jobs() == []


def test_a_config_out_of_reach_for_a_moment_is_never_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.adapters.files.blobs import FileBlobs

    read, fails = FileBlobs.get, [1]

    async def get(self: Any, uri: str, *args: Any) -> bytes:
        if uri.startswith("blob:") and fails:
            fails.pop()
            raise Unavailable("too many open files")
        return await read(self, uri, *args)

    monkeypatch.setattr(FileBlobs, "get", get)
    mine = "mine" * 5000
    with app_of(pipeline_of()).run(tmp_path) as ps:
        run = ps.pipelines.start("words", {"words": [mine]})
        assert run.config["words"] == [mine]
        ended = ps.get(run.id).wait(timeout=20)
        assert ps.pipelines.get(run.id).config["words"] == [mine]
        if ended.state is penstock.JobState.SUCCEEDED:  # it was not the worker that read first
            assert ps.get(run.id).result()["output"] == [mine.upper()]


# -- tenants ----------------------------------------------------------------------


def test_a_run_named_as_parent_by_another_tenant_is_not_retried(tmp_path: Path) -> None:
    with tenants(tmp_path, pipeline_of(), "victim", "evil") as (victim, evil):
        run = victim.pipelines.start("words", {"words": [SECRET]})
        victim.get(run.id).wait(timeout=20)
        job = evil.submit("job.pipeline.words", {}, parent=run.id)
        job.wait(timeout=20)
        record = evil.pipelines.get(job.job_id)
        assert (record.retry_of, record.trigger) == (None, "child")
        items = evil.pipelines.items(job.job_id, "upper")
        assert [item.reused for item in items] == [False]
        assert SECRET not in repr((record, items, evil.pipelines.items(job.job_id, "add")))
        mine = victim.submit("job.pipeline.words", {"words": [SECRET]}, parent=run.id)
        mine.wait(timeout=20)
        assert victim.pipelines.get(mine.job_id).retry_of == run.id


def test_an_item_of_another_tenant_s_run_is_unknown(tmp_path: Path) -> None:
    with tenants(tmp_path, pipeline_of(), "victim", "evil") as (victim, evil):
        run = victim.pipelines.start("words", {"words": [SECRET]})
        victim.get(run.id).wait(timeout=20)
        (theirs,) = victim.jobs(topic="job.pipeline.words.add")
        copied = msgspec.json.decode(victim.read(theirs.record.request.context_ptr))
        said = {}
        for name, input in {"there": copied, "not there": {**copied, "run": "nobody"}}.items():
            ended = evil.submit("job.pipeline.words.add", input).wait(timeout=20)
            assert ended.state is penstock.JobState.FAILED
            said[name] = ended.result.error_message.replace(str(input["run"]), "RUN")
        assert said["there"] == said["not there"]


def test_an_item_s_input_is_read_from_its_run_and_not_from_its_job(tmp_path: Path) -> None:
    secret = SECRET * 2000
    with tenants(tmp_path, pipeline_of(), "victim", "evil") as (victim, evil):
        run = victim.pipelines.start("words", {"words": [secret]})
        victim.get(run.id).wait(timeout=20)
        (item,) = victim.pipelines.items(run.id, "upper")
        assert item.input.startswith("blob:")
        own = evil.pipelines.start("words", {"words": ["mine"]})
        evil.get(own.id).wait(timeout=20)
        forged = {"seq": 0, "key": "0", "input": item.input}
        task = {"run": own.id, "stage": "add", "seq": 0, "item": forged}
        ended = evil.submit("job.pipeline.words.add", task).wait(timeout=20)
        end = msgspec.json.decode(evil.read(ended.result.result_ptr))
        assert evil.read(end["item"]["output"]) == b'"MINE,mine"'


def test_a_run_of_another_tenant_cannot_be_named_to_be_retried(tmp_path: Path) -> None:
    with tenants(tmp_path, pipeline_of(), "victim", "evil") as (victim, evil):
        run = victim.pipelines.start("words", {"words": [SECRET]})
        victim.get(run.id).wait(timeout=20)
        for attempt in (
            lambda: evil.pipelines.start("words", retry_of=run.id),
            lambda: evil.pipelines.retry_failed(run.id),
            lambda: evil.pipelines.items(run.id, "upper"),
            lambda: evil.pipelines.cancel(run.id),
        ):
            with pytest.raises(NotFound):
                attempt()
        assert evil.pipelines.runs(RunQuery(retry_of=run.id)) == []


def test_a_run_of_another_tenant_is_not_retried_for_the_owner_either(tmp_path: Path) -> None:
    with app_of(pipeline_of()).run(tmp_path) as ps:
        run = ps.pipelines.start("words", {"words": [SECRET]}, tenant="victim")
        ps.get(run.id).wait(timeout=20)
        with pytest.raises(NotFound):
            ps.pipelines.start("words", tenant="evil", retry_of=run.id)


def test_what_a_pipeline_remembers_is_its_tenant_s(tmp_path: Path) -> None:
    pipeline = penstock.Pipeline("memory", config=Config, single_flight=False)

    @pipeline.step()
    async def recall(ctx: Any) -> Any:
        before = await ctx.recall("words")
        await ctx.remember("words", list(ctx.config.words))
        return before

    with tenants(tmp_path, pipeline, "victim", "evil") as (victim, evil):

        def run(client: Any, *words: str) -> Any:
            started = client.pipelines.start("memory", {"words": list(words)})
            return client.get(started.id).result(timeout=20)["output"]

        assert run(victim, SECRET) is None
        assert run(evil, "mine") is None
        assert run(victim, "next") == [SECRET]


# -- every door -------------------------------------------------------------------


def test_a_hostile_config_is_refused_at_every_door_and_the_engine_lives(tmp_path: Path) -> None:
    deep = b"[" * 3000 + b"]" * 3000
    with app_of(pipeline_of()).run(tmp_path, http__listen="127.0.0.1:0") as ps:
        token = ps.keys.create("evil", (KeyRole.SUBMIT,), tenant="evil").token

        def post(path: str, body: bytes) -> int:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            request = urllib.request.Request(ps.url + path, body, headers, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        body = b'{"config": {"more": ' + deep + b"}}"
        assert 400 <= post("/v1/pipelines/words/runs", body) < 500
        body = b'{"topic": "job.pipeline.words", "input": {"more": ' + deep + b"}}"
        assert 400 <= post("/v1/jobs", body) < 500
        # Over the link, and by the command line.
        with penstock.connect(data=tmp_path) as linked:
            request = JobRequest(
                job_id="", topic="job.pipeline.words", context_ptr=encode_data(deep)
            )
            with pytest.raises(InvalidRequest):
                linked._engine.run(lambda api: api.submit([request]))
            with pytest.raises(NotFound):
                linked.pipelines.start("words", retry_of="no such run")
        config = '{"more": ' + deep.decode() + "}"
        for words in (["pipeline", "start", "words"], ["submit", "job.pipeline.words"]):
            option = "--input"
            command = [sys.executable, "-m", "penstock.cli", *words, option, config]
            done = subprocess.run(
                [*command, "--data", str(tmp_path)], capture_output=True, text=True, timeout=60
            )
            assert done.returncode not in (0, 1), done.stderr
            assert "Traceback" not in done.stderr
        assert ps.jobs() == []
        run = ps.pipelines.start("words", {"words": ["alive"]})
        assert ps.get(run.id).result(timeout=20)["output"] == ["ALIVE"]


def test_hostile_items_end_failed_whatever_they_hold(tmp_path: Path) -> None:
    with tenants(tmp_path, pipeline_of(), "victim", "evil") as (victim, evil):
        run = victim.pipelines.start("words", {"words": [SECRET]})
        victim.get(run.id).wait(timeout=20)
        own = evil.pipelines.start("words", {"words": ["mine"]})
        evil.get(own.id).wait(timeout=20)
        for task in (
            b"[" * 3000 + b"]" * 3000,
            b"{",
            b"\xff",
            msgspec.json.encode({"run": run.id, "stage": "add", "seq": 0}),
            msgspec.json.encode({"run": own.id, "stage": "add", "seq": 99}),
            msgspec.json.encode({"run": own.id, "stage": "add", "seq": -1}),
            msgspec.json.encode({"run": own.id, "stage": "add", "seq": 1 << 62}),
            msgspec.json.encode({"run": "../../x", "stage": "add", "seq": 0}),
        ):
            request = JobRequest(
                job_id="", topic="job.pipeline.words.add", context_ptr=encode_data(task)
            )
            (job,) = evil._engine.portal.run(evil.api.submit([request]))
            ended = evil.get(job.job_id).wait(timeout=20)
            assert ended.state is penstock.JobState.FAILED, task[:80]
            assert ended.result.error_code == "BAD_INPUT", task[:80]
            assert SECRET not in repr(ended)
        # A false child of another's run: that neither sees it nor waits for it.
        for fields in ({"parent": run.id}, {"workflow_id": run.id}):
            try:
                false = evil.submit("job.pipeline.words.add", {}, **fields)
            except penstock.PenstockError:
                continue
            false.wait(timeout=20)
        assert [job.record.request.tenant for job in victim.jobs(workflow_id=run.id)] == ["victim"]
        assert victim.pipelines.get(run.id).status is PipelineJobStatus.COMPLETED
