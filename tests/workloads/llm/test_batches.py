"""Batches on a whole engine: what is asked of the engine API, and what becomes of each line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.fake_llm import FakeRunner

from penstock.adapters.http.engine_api import http_engine_api
from penstock.adapters.link.client import Link
from penstock.adapters.link.proxy import remote_api
from penstock.app.engine import Engine
from penstock.config import load
from penstock.control.engine_api import LocalEngineApi
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    NotPermitted,
    TooLarge,
    Unavailable,
)
from penstock.core.job import JobRequest
from penstock.lifecycles.batch import BatchStatus
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import Caller, KeyRole, Limit
from penstock.ports.store import AuditQuery, JobQuery
from penstock.testing.aio import run_async
from penstock.workloads.llm.batches import TOPIC, Batch, FileUpload, PageQuery, StoredFile
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.values import LlmCode

CHAT = "/v1/chat/completions"
ALICE = Caller("alice", frozenset({KeyRole.SUBMIT}), "acme", "k1")
BOB = Caller("bob", frozenset({KeyRole.SUBMIT}), "beta", "k2")
READER = Caller("reader", frozenset({KeyRole.APPROVE}), "acme", "k3")


class House:
    def __init__(self, engine: Engine, runner: FakeRunner) -> None:
        self.engine, self.runner, self.api = engine, runner, engine.api

    async def upload(self, content: bytes, api: LocalEngineApi | None = None) -> StoredFile:
        upload = FileUpload((api or self.api).batches)
        for start in range(0, len(content), 1000):
            await upload.write(content[start : start + 1000])
        return await upload.keep("prompts.jsonl")

    async def create(self, *lines: Any, **options: Any) -> Batch:
        file = await self.upload(b"".join(map(encoded, lines)))
        return await self.api.batches.create(file.id, CHAT, **options)

    async def until(self, batch: Batch, fits: Callable[[Batch], bool]) -> Batch:
        async with asyncio.timeout(30):
            while not fits(batch):
                batch = await self.api.batches.get(batch.id)
                await asyncio.sleep(0.01)
        return batch

    async def ended(self, batch: Batch) -> Batch:
        return await self.until(batch, lambda batch: batch.has_ended)

    async def begun(self, batch: Batch) -> Batch:
        return await self.until(batch, lambda batch: batch.request_counts.completed >= 20)

    async def lines(self, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        file = await self.api.batches.file(file_id)
        content = await self.api.batches.read_file(file_id, 0, 1 << 30)
        assert len(content) == file.bytes
        return [msgspec.json.decode(line) for line in content.splitlines()]


@asynccontextmanager
async def house(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    **runner: Any,
) -> AsyncIterator[House]:
    flags = {
        "data_dir": str(folder),
        "durability": "memory",
        "timeouts__lease": 1.0,
        "timeouts__lost_grace": 1.0,
        **(settings or {}),
    }
    fake = FakeRunner(**runner)
    executors = [LlmExecutor(fake, ["fake"])]
    async with Engine(load(flags=flags), executors, listen=False) as engine:
        yield House(engine, fake)


def blobs(folder: Path) -> list[Path]:
    """The contents that are kept below a data directory, or on the way there."""
    found = (folder / "blobs").rglob("*")
    return [path for path in found if path.is_file() and path.name != ".lock"]


def encoded(line: Any) -> bytes:
    return line if isinstance(line, bytes) else msgspec.json.encode(line) + b"\n"


def a_line(number: int = 1, said: str = "hello", **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": said}]}
    line = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}
    return {**line, **fields}


@run_async
async def test_every_line_is_answered_in_the_order_of_the_file(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        batch = await home.create(*(a_line(n, f"say {n}") for n in range(1, 601)))
        assert batch.status is BatchStatus.VALIDATING
        batch = await home.ended(batch)
        assert (batch.status, batch.errors) == (BatchStatus.COMPLETED, ())
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (600, 600, 0)
        output = await home.lines(batch.output_file_id)
        assert batch.error_file_id is None
        assert [line["custom_id"] for line in output] == [f"line-{n}" for n in range(1, 601)]
        assert len({line["id"] for line in output}) == 600
        told = [line["response"]["body"]["choices"][0]["message"]["content"] for line in output]
        assert told == [f"SAY {n}" for n in range(1, 601)]
        first = output[0]
        assert set(first) == {"id", "custom_id", "response", "error"}
        assert first["error"] is None
        assert first["response"]["status_code"] == 200
        assert first["response"]["body"]["object"] == "chat.completion"
        assert len(home.runner.asked) == 600


@run_async
async def test_lines_are_jobs_of_a_workflow_in_the_name_of_whoever_made_the_batch(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as home:
        alice = home.api.serving(ALICE)
        file = await home.upload(encoded(a_line()) + encoded(a_line(2)), alice)
        batch = await home.ended(await alice.batches.create(file.id, CHAT, metadata={"a": "b"}))
        job = await alice.get(batch.id)
        assert (job.request.topic, job.request.principal) == (TOPIC, "alice")
        jobs = await alice.find(JobQuery(workflow_id=batch.id))
        assert jobs == (await alice.find(JobQuery(child_of=batch.id)))[::-1]
        assert [job.request.step_index for job in jobs] == [1, 2]
        request = jobs[1].request
        assert (request.tenant, request.principal) == ("acme", "alice")
        assert (request.topic, request.priority) == ("job.llm.fake", "batch")
        assert request.labels == {"openai.batch": batch.id, "openai.custom_id": "line-2"}
        assert request.deadline == batch.expires_at == batch.created_at + 86_400
        assert batch.metadata == {"a": "b"}


@run_async
async def test_lines_that_fail_are_told_of_apart_and_the_others_go_on(tmp_path: Path) -> None:
    failing = {"poison": LlmCode.CONTEXT_EXCEEDED}
    async with house(tmp_path, fail_with=failing) as home:
        said = ["one", "poison", "three"]
        batch = await home.ended(await home.create(*(a_line(n, s) for n, s in enumerate(said))))
        assert batch.status is BatchStatus.COMPLETED
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
        done = await home.lines(batch.output_file_id)
        assert [line["custom_id"] for line in done] == ["line-0", "line-2"]
        (failed,) = await home.lines(batch.error_file_id)
        assert (failed["custom_id"], failed["error"]) == ("line-1", None)
        assert failed["response"]["status_code"] == 400
        assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"


_GOOD = encoded(a_line())
_BAD: dict[str, tuple[bytes, str, str]] = {
    "no JSON": (b"hello\n", "invalid_json_line", "line"),
    "cut off": (_GOOD[:40] + b"\n", "invalid_json_line", "line"),
    "not UTF-8": (b'{"custom_id": "\xff"}\n', "invalid_json_line", "line"),
    "an array": (b"[]\n", "invalid_json_line", "line"),
    "blank": (b"\n", "invalid_json_line", "line"),
    "without custom_id": (encoded({**a_line(), "custom_id": None}), "invalid_request", "custom_id"),
    "custom_id empty": (encoded(a_line(custom_id="")), "invalid_request", "custom_id"),
    "custom_id long": (encoded(a_line(custom_id="x" * 600)), "invalid_request", "custom_id"),
    "custom_id twice": (_GOOD, "invalid_request", "custom_id"),
    "GET": (encoded(a_line(9, method="GET")), "invalid_request", "method"),
    "another url": (encoded(a_line(9, url="/v1/embeddings")), "invalid_request", "url"),
    "no body": (encoded(a_line(9, body="x")), "invalid_request", "body"),
    "bad body": (encoded(a_line(9, body={"model": "fake"})), "invalid_request", "body.messages"),
    "a stream": (
        encoded(a_line(9, body={**a_line()["body"], "stream": True})),
        "invalid_request",
        "stream",
    ),
}


@pytest.mark.parametrize("model", ["nobody", "no/such model!"])
@run_async
async def test_a_line_whose_model_does_not_exist_fails_alone(tmp_path: Path, model: str) -> None:
    async with house(tmp_path) as home:
        unknown = a_line(2, body={**a_line()["body"], "model": model})
        batch = await home.ended(await home.create(a_line(1), unknown, a_line(3)))
        assert batch.status is BatchStatus.COMPLETED
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        (failed,) = await home.lines(batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("line-2", 404)
        assert failed["response"]["body"]["error"]["code"] == "model_not_found"
        assert failed["response"]["body"]["error"]["param"] == "model"


@pytest.mark.parametrize("kind", list(_BAD))
@run_async
async def test_a_bad_line_fails_the_batch_and_nothing_is_submitted(
    tmp_path: Path, kind: str
) -> None:
    bad, code, param = _BAD[kind]
    async with house(tmp_path) as home:
        batch = await home.ended(await home.create(_GOOD, bad, encoded(a_line(3))))
        assert batch.status is BatchStatus.FAILED
        assert [(error.line, error.code, error.param) for error in batch.errors] == [
            (2, code, param)
        ]
        assert batch.failed_at is not None
        assert await home.api.find(JobQuery(workflow_id=batch.id)) == []
        assert home.runner.asked == []


@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\n"])
@run_async
async def test_a_file_without_lines_fails_the_batch(tmp_path: Path, content: bytes) -> None:
    async with house(tmp_path) as home:
        batch = await home.ended(await home.create(content))
        assert (batch.status, batch.errors[0].code) == (BatchStatus.FAILED, "empty_file")


@run_async
async def test_more_lines_than_50_000_fail_the_batch(tmp_path: Path) -> None:
    lines = b"".join(b'{"custom_id":"%d"}\n' % n for n in range(50_001))
    async with house(tmp_path) as home:
        batch = await home.ended(await home.create(lines))
        assert batch.status is BatchStatus.FAILED
        assert len(batch.errors) == 100  # enough is enough


@run_async
async def test_windows_line_ends_a_byte_order_mark_and_blank_lines_at_the_end_do_no_harm(
    tmp_path: Path,
) -> None:
    content = b"\xef\xbb\xbf" + _GOOD.strip() + b"\r\n" + encoded(a_line(2)).strip() + b"\r\n\r\n"
    async with house(tmp_path) as home:
        batch = await home.ended(await home.create(content))
        assert (batch.status, batch.request_counts.completed) == (BatchStatus.COMPLETED, 2)


@run_async
async def test_no_more_jobs_than_allowed_are_in_the_queue_at_a_time(tmp_path: Path) -> None:
    async with house(
        tmp_path, {"openai__max_batch_jobs": 250, "concurrency": 8}, delay=0.001
    ) as home:
        most = 0

        def look(_: object) -> None:
            nonlocal most
            most = max(most, home.engine.open_jobs.waiting() + len(home.engine.open_jobs.held))

        home.engine.store.listen(look)
        batch = await home.ended(await home.create(*(a_line(n) for n in range(1000))))
        assert batch.request_counts.completed == 1000
        assert 200 <= most <= 251, "its lines' jobs, and its own"


@run_async
async def test_one_job_at_a_time_is_enough(tmp_path: Path) -> None:
    async with house(tmp_path, {"openai__max_batch_jobs": 1}) as home:
        batch = await home.ended(await home.create(*(a_line(n) for n in range(30))))
        assert batch.request_counts.completed == 30


@run_async
async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    async with house(tmp_path, {"limits__max_waiting": 300, "concurrency": 8}) as home:
        batch = await home.ended(await home.create(*(a_line(n) for n in range(1000))))
        assert (batch.status, batch.request_counts.completed) == (BatchStatus.COMPLETED, 1000)


@run_async
async def test_a_cancelled_batch_ends_with_what_was_done(tmp_path: Path) -> None:
    async with house(
        tmp_path, {"concurrency": 4, "openai__max_batch_jobs": 300}, delay=0.02
    ) as home:
        batch = await home.create(*(a_line(n) for n in range(1000)))
        await home.begun(batch)
        asked = await home.api.batches.cancel(batch.id)
        assert asked.status is BatchStatus.CANCELLING
        assert (await home.api.batches.cancel(batch.id)).cancelling_at == asked.cancelling_at
        batch = await home.ended(batch)
        assert batch.status is BatchStatus.CANCELLED
        counts = batch.request_counts
        done, rest = (
            await home.lines(batch.output_file_id),
            await home.lines(batch.error_file_id),
        )
        assert (len(done), len(done) + len(rest)) == (counts.completed, 1000)
        assert (counts.total, counts.failed) == (1000, 0)  # what did not run did not fail
        assert counts.completed >= 20
        assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
        assert home.engine.open_jobs.waiting() == 0
        with pytest.raises(Conflict, match="has ended"):
            await home.api.batches.cancel(batch.id)


@run_async
async def test_a_batch_that_is_cancelled_while_it_is_validated_submits_nothing(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as home:
        batch = await home.create(*(a_line(n) for n in range(3000)))
        await home.api.batches.cancel(batch.id)
        batch = await home.ended(batch)
        assert (batch.status, batch.output_file_id) == (BatchStatus.CANCELLED, None)
        assert await home.api.find(JobQuery(workflow_id=batch.id)) == []


@run_async
async def test_what_did_not_run_in_time_is_told_as_expired(tmp_path: Path) -> None:
    async with house(
        tmp_path, {"concurrency": 2, "openai__max_batch_jobs": 250}, delay=0.05
    ) as home:
        batch = await home.create(*(a_line(n) for n in range(400)), completion_window="3s")
        batch = await home.ended(batch)
        assert batch.status is BatchStatus.EXPIRED
        assert batch.expired_at is not None
        done, rest = (
            await home.lines(batch.output_file_id),
            await home.lines(batch.error_file_id),
        )
        assert done
        assert len(done) + len(rest) == 400
        assert {line["error"]["code"] for line in rest} == {"batch_expired"}
        assert {line["response"] for line in rest} == {None}
        told = {line["custom_id"] for line in done + rest}
        assert len(told) == 400


@run_async
async def test_a_model_whose_worker_is_away_at_first_is_waited_for(tmp_path: Path) -> None:
    flags = {"data_dir": str(tmp_path), "durability": "memory", "timeouts__lease": 5.0}
    async with Engine(load(flags=flags), listen=False) as engine:
        home = House(engine, FakeRunner())
        batch = await home.create(a_line())
        await asyncio.sleep(0.1)
        engine.open_jobs.learn(("job.llm.fake",), {})
        await home.until(batch, lambda batch: batch.status is BatchStatus.IN_PROGRESS)


# -- files --------------------------------------------------------------------------


@run_async
async def test_a_file_over_the_limit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with house(tmp_path, {"openai__max_file": 5000, "durability": "os"}) as home:
        assert (await home.upload(b"x" * 5000)).bytes == 5000
        with pytest.raises(TooLarge, match="longer than 5,000 bytes"):
            await home.upload(b"x" * 5001)
        assert len(await home.api.batches.files(PageQuery())) == 1
        assert len(blobs(tmp_path)) == 1


@run_async
async def test_the_input_of_a_batch_can_not_be_deleted_before_it_has_ended(tmp_path: Path) -> None:
    async with house(tmp_path, delay=0.05) as home:
        batch = await home.create(a_line(1, "a few words to say"))
        with pytest.raises(Conflict, match="has not ended"):
            await home.api.batches.delete_file(batch.input_file_id)
        await home.ended(batch)
        await home.api.batches.delete_file(batch.input_file_id)
        with pytest.raises(NotFound):
            await home.api.batches.file(batch.input_file_id)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": 10}, "expires_after.seconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@run_async
async def test_what_a_batch_can_not_have_is_refused(
    tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    async with house(tmp_path) as home:
        with pytest.raises(InvalidRequest) as refused:
            await home.create(a_line(), **options)
        assert refused.value.field == field
        assert await home.api.batches.list(PageQuery()) == []


@run_async
async def test_an_endpoint_or_file_that_takes_no_batches_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        batch = await home.ended(await home.create(a_line()))
        assert batch.output_file_id is not None
        with pytest.raises(InvalidRequest, match="purpose batch_output"):
            await home.api.batches.create(batch.output_file_id, CHAT)
        with pytest.raises(InvalidRequest, match="takes no batches"):
            await home.api.batches.create(batch.input_file_id, "/v1/moderations")
        with pytest.raises(NotFound):
            await home.api.batches.create("file-none", CHAT)


# -- from elsewhere -----------------------------------------------------------------


@run_async
async def test_over_a_socket_all_of_it_can_be_asked(tmp_path: Path) -> None:
    flags = {"data_dir": str(tmp_path), "durability": "memory", "http__listen": "127.0.0.1:0"}
    executor = LlmExecutor(FakeRunner(), ["fake"])
    async with Engine(load(flags=flags), [executor]) as engine:
        link = Link(engine.addresses[0])
        await link.connect()
        far = remote_api(link).batches
        upload = FileUpload(far)
        await upload.write(encoded(a_line()))
        file = await upload.keep("a.jsonl")
        await upload.drop()
        assert await far.file(file.id) == file == (await far.files(PageQuery()))[0]
        batch = await far.create(file.id, CHAT, metadata={"from": "afar"})
        batch = await House(engine, FakeRunner()).ended(batch)
        assert await far.get(batch.id) == batch == (await far.list(PageQuery()))[0]
        assert batch.output_file_id is not None
        assert b"HELLO" in await far.read_file(batch.output_file_id, 0, 10_000)
        with pytest.raises(Conflict):
            await far.cancel(batch.id)
        await far.delete_file(file.id)
        await link.close()
        web = http_engine_api(engine.url, (tmp_path / "token").read_text())
        with pytest.raises(Unavailable, match="are not available through this HTTP client"):
            await web.batches.files(PageQuery())
        await web.close()


# -- rights -------------------------------------------------------------------------


@run_async
async def test_another_tenants_file_or_batch_is_answered_as_one_that_does_not_exist(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as home:
        alice, bob = home.api.serving(ALICE).batches, home.api.serving(BOB).batches
        file = await home.upload(encoded(a_line()), home.api.serving(ALICE))
        batch = await home.ended(await alice.create(file.id, CHAT))
        assert file.tenant == batch.tenant == "acme"
        for there in (file.id, "file-none"):
            for question in (
                bob.file(there),
                bob.read_file(there, 0, 9),
                bob.delete_file(there),
                bob.create(there, CHAT),
            ):
                with pytest.raises(NotFound, match=f"no file '{there}'"):
                    await question
        for there in (batch.id, "batch_none"):
            for asked in (bob.get(there), bob.cancel(there)):
                with pytest.raises(NotFound, match=f"no batch '{there}'"):
                    await asked
        assert await bob.files(PageQuery()) == await bob.files(PageQuery(tenant="acme")) == []
        assert await bob.list(PageQuery()) == await bob.list(PageQuery(tenant="acme")) == []
        assert len(await alice.files(PageQuery())) == 2
        assert [one.id for one in await alice.list(PageQuery())] == [batch.id]


@run_async
async def test_an_upload_is_its_callers_and_takes_the_right_to_submit(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        alice, bob = home.api.serving(ALICE).batches, home.api.serving(BOB).batches
        upload, name = FileUpload(alice), "0" * 32
        with pytest.raises(NotPermitted):
            await upload.keep("x", tenant="beta")
        await alice.write_upload(name, 0, b"alice")
        await bob.write_upload(name, 0, b"bob")
        await bob.drop_upload(name)
        digest = sha256(b"alice").hexdigest()
        kept = await alice.keep_upload(name, digest, 5, "x", "batch")
        assert await alice.read_file(kept.id, 0, 9) == b"alice"
        reader = home.api.serving(READER).batches
        with pytest.raises(NotPermitted):
            await reader.write_upload(name, 0, b"x")
        file = await home.upload(encoded(a_line()), home.api.serving(ALICE))
        assert (await reader.file(file.id)).id == file.id
        with pytest.raises(NotPermitted):
            await reader.delete_file(file.id)
        with pytest.raises(NotPermitted):
            await reader.create(file.id, CHAT)
        batch = await home.ended(await alice.create(file.id, CHAT))
        with pytest.raises(NotPermitted):
            await reader.cancel(batch.id)
        entries = await home.api.audit.read(AuditQuery(action="batch.*"))
        assert [(entry.principal, entry.action, entry.outcome) for entry in entries] == [
            ("reader", "batch.cancel", "refused"),
            ("alice", "batch.create", "done"),
            ("reader", "batch.create", "refused"),
        ]


# -- upkeep -------------------------------------------------------------------------


@run_async
async def test_pruning_spares_what_an_unfinished_batch_needs_and_takes_the_rest(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, {"concurrency": 2, "durability": "os"}, delay=0.01) as home:
        old = await home.ended(await home.create(a_line()))
        batch = await home.create(*(a_line(n) for n in range(200)))
        await home.begun(batch)
        cleaned = await home.api.prune(0.0)
        assert cleaned.jobs == 2, "the old batch and its line"
        with pytest.raises(NotFound):
            await home.api.batches.get(old.id)
        assert [file.id for file in await home.api.batches.files(PageQuery())] == [
            batch.input_file_id
        ]
        batch = await home.ended(batch)
        assert batch.request_counts.completed == 200
        assert len(await home.lines(batch.output_file_id)) == 200
        assert (await home.api.prune(0.0)).jobs == 201
        assert await home.api.batches.files(PageQuery()) == []
        assert await home.api.find(JobQuery(states=(JobState.SUCCEEDED,))) == []


@run_async
async def test_files_of_an_earlier_data_directory_are_taken_over(tmp_path: Path) -> None:
    old = tmp_path / "openai"
    for folder in ("files", "content", "batches"):
        (old / folder).mkdir(parents=True)
    (old / "content" / "c1").write_bytes(encoded(a_line()))
    kept = {"id": "file-a", "filename": "../a.jsonl", "purpose": "batch", "tenant": "acme"}
    record = {"file": {**kept, "created_at": 1.0, "bytes": 1}, "content": "c1"}
    (old / "files" / "file-a.json").write_bytes(msgspec.json.encode(record))
    async with house(tmp_path, {"durability": "os"}) as home:
        alice = home.api.serving(ALICE).batches
        assert (await alice.file("file-a")).filename == "../a.jsonl"
        assert await alice.read_file("file-a", 0, 10_000) == encoded(a_line())
        assert not old.exists()
        batch = await home.ended(await alice.create("file-a", CHAT))
        assert batch.request_counts.completed == 1


@run_async
async def test_a_batchs_job_can_be_cancelled_like_any_other(tmp_path: Path) -> None:
    async with house(tmp_path, {"concurrency": 2}, delay=0.02) as home:
        batch = await home.create(*(a_line(n) for n in range(500)))
        await home.begun(batch)
        await home.api.cancel(batch.id)
        batch = await home.ended(batch)
        assert (await home.api.get(batch.id)).state is JobState.CANCELLED
        assert batch.status is BatchStatus.CANCELLED
        done = await home.lines(batch.output_file_id)
        assert 20 <= len(done) < 500
        assert len(await home.lines(batch.error_file_id)) == 500 - len(done)
        assert home.engine.open_jobs.waiting() == 0


@run_async
async def test_a_limit_of_one_job_at_a_time_lets_the_lines_of_a_batch_run(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        await home.api.limits.put(Limit(name="one", key=("tenant",), concurrency=1))
        batch = await home.ended(await home.create(*(a_line(n) for n in range(10))))
        assert (batch.status, batch.request_counts.completed) == (BatchStatus.COMPLETED, 10)


@run_async
async def test_a_batch_whose_input_is_another_tenants_fails(tmp_path: Path) -> None:
    """A job of the topic may be submitted by anybody, with any record."""
    async with house(tmp_path) as home:
        file = await home.upload(encoded(a_line()), home.api.serving(ALICE))
        now = (await home.api.status()).started_at
        record = {"endpoint": CHAT, "input_file_id": file.id, "completion_window": "24h"}
        given = msgspec.json.encode({**record, "expires_at": now + 1000, "tenant": "acme"})
        bob = home.api.serving(BOB)
        request = JobRequest(job_id="mine", topic=TOPIC, context_ptr=await bob.put_blob(given))
        (job,) = await bob.submit([request])
        job = await bob.wait(job.job_id)
        batch = await bob.batches.get("mine")
        assert (job.state, batch.status) == (JobState.FAILED, BatchStatus.FAILED)
        assert (batch.tenant, batch.errors[0].code) == ("beta", "not_found")
