"""Files and batches through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from openai import (
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
)
from openai.types import Batch
from tests.support.fake_llm import FakeRunner
from tests.support.openai.door import Door, door

from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import LlmCode

CHAT: Final = "/v1/chat/completions"


def a_line(number: int, said: str = "hello there", **body: Any) -> dict[str, Any]:
    asked = {"model": "fake", "messages": [{"role": "user", "content": said}], **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": asked}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(client: AsyncOpenAI, content: bytes, name: str = "prompts.jsonl") -> str:
    return (await client.files.create(file=(name, content), purpose="batch")).id


async def started(client: AsyncOpenAI, *lines: Any, endpoint: Any = CHAT, **options: Any) -> Batch:
    file_id = await upload(client, jsonl(*lines))
    given: dict[str, Any] = {"completion_window": "24h", **options}
    return await client.batches.create(input_file_id=file_id, endpoint=endpoint, **given)


async def ended(client: AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(30):
        while batch.status not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    content = (await client.files.content(file_id)).content
    assert len(content) == (await client.files.retrieve(file_id)).bytes
    return [json.loads(line) for line in content.splitlines()]


@run_async
async def test_a_file_is_kept_told_of_read_and_deleted(tmp_path: Path) -> None:
    async with door(tmp_path) as home, home.client() as client:
        content = jsonl(a_line(1)) * 5000
        file = await client.files.create(file=("my prompts.jsonl", content), purpose="batch")
        assert file.id.startswith("file-")
        assert (file.object, file.bytes, file.purpose) == ("file", len(content), "batch")
        assert (file.filename, file.status) == ("my prompts.jsonl", "processed")
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).content == content
        assert [one.id async for one in client.files.list()] == [file.id]
        gone = await client.files.delete(file.id)
        assert (gone.id, gone.object, gone.deleted) == (file.id, "file", True)
        with pytest.raises(NotFoundError) as missing:
            await client.files.retrieve(file.id)
        assert missing.value.type == "invalid_request_error"
        with pytest.raises(NotFoundError):
            await client.files.content(file.id)
        with pytest.raises(NotFoundError):
            await client.files.delete(file.id)


@run_async
async def test_lists_come_page_by_page(tmp_path: Path) -> None:
    async with door(tmp_path) as home, home.client() as client:
        ids = [await upload(client, b"%d" % n) for n in range(7)]
        page = await client.files.list(limit=3)
        assert [file.id for file in page.data] == ids[:3:-1]
        assert page.has_more
        assert [file.id async for file in client.files.list(limit=3)] == ids[::-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
        assert [file.id async for file in client.files.list(purpose="batch_output")] == []
        made = [
            await client.batches.create(
                input_file_id=ids[0], endpoint=CHAT, completion_window="24h"
            )
            for _ in range(5)
        ]
        listed = [batch.id async for batch in client.batches.list(limit=2)]
        assert listed == [batch.id for batch in reversed(made)]
        with pytest.raises(NotFoundError, match="after"):
            await client.files.list(after="file-none")


@run_async
async def test_a_batch_is_answered_line_by_line(tmp_path: Path) -> None:
    async with door(tmp_path) as home, home.client() as client:
        batch = await started(
            client, *(a_line(n, f"say {n}") for n in range(30)), metadata={"for": "tests"}
        )
        assert batch.id.startswith("batch_")
        assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
        assert (batch.completion_window, batch.metadata) == ("24h", {"for": "tests"})
        assert batch.expires_at == batch.created_at + 86_400
        batch = await ended(client, batch)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
        assert batch.error_file_id is None
        assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        output = await lines_of(client, batch.output_file_id)
        assert [line["custom_id"] for line in output] == [f"line-{n}" for n in range(30)]
        for number, line in enumerate(output):
            body = line["response"]["body"]
            assert line["error"] is None
            assert line["response"]["status_code"] == 200
            assert body["object"] == "chat.completion"
            assert body["choices"][0]["message"]["content"] == f"SAY {number}"
            assert body["usage"]["total_tokens"] == 4
        assert batch.output_file_id is not None
        file = await client.files.retrieve(batch.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@run_async
async def test_completions_and_embeddings_are_answered_too(tmp_path: Path) -> None:
    async with door(tmp_path) as home, home.client() as client:
        completion = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "fake", "prompt": "one two", "echo": True},
        }
        batch = await ended(client, await started(client, completion, endpoint="/v1/completions"))
        (line,) = await lines_of(client, batch.output_file_id)
        assert line["response"]["body"]["choices"][0]["text"] == "one twoONE TWO"
        embedding = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "fake", "input": ["one", "two"], "encoding_format": "base64"},
        }
        batch = await ended(client, await started(client, embedding, endpoint="/v1/embeddings"))
        (line,) = await lines_of(client, batch.output_file_id)
        told = line["response"]["body"]["data"]
        assert [one["index"] for one in told] == [0, 1]
        assert all(isinstance(one["embedding"], str) for one in told)


@run_async
async def test_lines_that_fail_are_in_the_error_file(tmp_path: Path) -> None:
    runner = FakeRunner(fail_with={"poison": LlmCode.CONTEXT_EXCEEDED})
    async with door(tmp_path, runner) as home, home.client() as client:
        batch = await ended(
            client, await started(client, a_line(1), a_line(2, "poison"), a_line(3))
        )
        assert batch.status == "completed"
        assert len(await lines_of(client, batch.output_file_id)) == 2
        (failed,) = await lines_of(client, batch.error_file_id)
        assert failed["custom_id"] == "line-2"
        assert failed["response"]["status_code"] == 400
        assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"


@run_async
async def test_wrong_lines_are_named_and_nothing_is_submitted(tmp_path: Path) -> None:
    async with door(tmp_path) as home, home.client() as client:
        lines = (a_line(1), a_line(1), a_line(3, model="nobody"), a_line(4, temperature=9))
        batch = await ended(client, await started(client, *lines))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        told = [(error.line, error.param) for error in batch.errors.data]
        assert told == [(2, "custom_id"), (4, "body.temperature")]
        assert batch.output_file_id is None
        assert batch.failed_at is not None
        assert home.engine.open_jobs.waiting() == 0


@run_async
async def test_a_batch_can_be_cancelled(tmp_path: Path) -> None:
    runner = FakeRunner(delay=0.02)
    async with door(tmp_path, runner, flags={"concurrency": 2}) as home, home.client() as client:
        batch = await started(client, *(a_line(n) for n in range(200)))
        async with asyncio.timeout(20):
            while not (batch.request_counts and batch.request_counts.completed):
                batch = await client.batches.retrieve(batch.id)
        batch = await client.batches.cancel(batch.id)
        assert batch.status == "cancelling"
        batch = await ended(client, batch)
        assert batch.status == "cancelled"
        done = await lines_of(client, batch.output_file_id)
        rest = await lines_of(client, batch.error_file_id)
        assert len(done) + len(rest) == 200
        assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
        with pytest.raises(ConflictError, match="has ended"):
            await client.batches.cancel(batch.id)


@run_async
async def test_files_may_be_kept_for_a_time_of_their_own(tmp_path: Path) -> None:
    async with door(tmp_path) as home, home.client() as client:
        file = await client.files.create(
            file=("a.jsonl", jsonl(a_line(1))),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert file.expires_at == file.created_at + 7200
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        batch = await ended(client, batch)
        assert batch.output_file_id is not None
        output = await client.files.retrieve(batch.output_file_id)
        assert output.expires_at is not None
        assert abs(output.expires_at - output.created_at - 3600) <= 1


# -- what is refused ----------------------------------------------------------------


@run_async
async def test_what_can_not_be_a_file_is_refused_in_openais_shape(tmp_path: Path) -> None:
    async with door(tmp_path, flags={"openai__max_file": 2000}) as home, home.client() as client:
        with pytest.raises(BadRequestError) as refused:
            await client.files.create(file=b"x", purpose="fine-tune")
        assert (refused.value.param, refused.value.type) == ("purpose", "invalid_request_error")
        with pytest.raises(APIStatusError) as large:
            await upload(client, b"x" * 2001)
        assert (large.value.status_code, large.value.code) == (413, "request_too_large")
        with pytest.raises(BadRequestError):
            await client.files.create(
                file=b"x",
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 5},
            )
        assert (await client.files.list()).data == []


_B = b"--b\r\n"
_FILE = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nhello\r\n'
_PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
_FORMS: dict[str, tuple[bytes, int]] = {
    "fields after the file": (_B + _FILE + _B + _PURPOSE + b"--b--\r\n", 200),
    "no purpose": (_B + _FILE + b"--b--\r\n", 400),
    "no file": (_B + _PURPOSE + b"--b--\r\n", 400),
    "two files": (_B + _FILE + _B + _FILE + _B + _PURPOSE + b"--b--\r\n", 400),
    "purpose twice": (_B + _FILE + _B + _PURPOSE + _B + _PURPOSE + b"--b--\r\n", 400),
    "cut off": (_B + _PURPOSE + _B + _FILE, 400),
    "another boundary": (b"--x\r\n" + _PURPOSE + b"--x--\r\n", 400),
    "no headers": (_B + b"hello\r\n--b--\r\n", 400),
    "nameless": (_B + b"Content-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", 400),
    "a file as purpose": (_B + _FILE.replace(b'"file"', b'"purpose"') + b"--b--\r\n", 400),
    "not UTF-8": (_B + _FILE + _B + _PURPOSE.replace(b"batch", b"\xff") + b"--b--\r\n", 400),
    "endless fields": (_B + _PURPOSE.replace(b"batch", b"x" * 70_000) + b"--b--\r\n", 400),
    "nothing": (b"", 400),
}


def blobs(folder: Path) -> list[Path]:
    """Contents that are kept, or on the way there."""
    found = (folder / "data" / "blobs").rglob("*")
    return [path for path in found if path.is_file() and path.name != ".lock"]


async def posted(home: Door, content: bytes, kind: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {home.token}", "Content-Type": kind}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{home.url}/v1/files", data=content, headers=headers) as reply,
    ):
        return reply.status, await reply.json()


@pytest.mark.parametrize("kind", list(_FORMS))
@run_async
async def test_a_form_is_a_file_or_refused_with_nothing_left(tmp_path: Path, kind: str) -> None:
    content, status = _FORMS[kind]
    async with door(tmp_path, flags={"durability": "os"}) as home:
        got, told = await posted(home, content, "multipart/form-data; boundary=b")
        assert got == status, told
        if status == 200:
            assert told["bytes"] == 5
        else:
            assert set(told["error"]) == {"message", "type", "param", "code"}
        assert len(blobs(tmp_path)) == (status == 200)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "", "multipart/mixed"])
@run_async
async def test_what_is_no_form_is_refused(tmp_path: Path, kind: str) -> None:
    async with door(tmp_path) as home:
        status, told = await posted(home, b"{}", kind)
        assert status in (400, 415)
        assert told["error"]["type"] == "invalid_request_error"


@run_async
async def test_a_batch_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    async with door(tmp_path) as home, home.client() as client:
        file_id = await upload(client, jsonl(a_line(1)))
        with pytest.raises(NotFoundError):
            await client.batches.create(
                input_file_id="file-none", endpoint=CHAT, completion_window="24h"
            )
        with pytest.raises(BadRequestError) as endpoint:
            await client.batches.create(
                input_file_id=file_id, endpoint="/v1/moderations", completion_window="24h"
            )
        assert endpoint.value.param == "endpoint"
        with pytest.raises(BadRequestError) as window:
            await client.batches.create(
                input_file_id=file_id,
                endpoint=CHAT,
                completion_window="forever",  # type: ignore[arg-type]
            )
        assert window.value.param == "completion_window"
        with pytest.raises(NotFoundError):
            await client.batches.retrieve("batch_none")
        with pytest.raises(NotFoundError):
            await client.batches.cancel("../batches")


@run_async
async def test_keys_see_their_tenants_files_and_batches_alone(tmp_path: Path) -> None:
    async with door(tmp_path) as home:
        alice, bob = await _key(home, "alice", "acme"), await _key(home, "bob", "beta")
        reader = await home.engine.api.keys.create("reader", (KeyRole.APPROVE,), tenant="acme")
        async with (
            home.client(alice) as mine,
            home.client(bob) as others,
            home.client(reader.token) as looking,
        ):
            batch = await ended(mine, await started(mine, a_line(1)))
            assert batch.output_file_id is not None
            assert [one.id async for one in others.files.list()] == []
            assert [one.id async for one in others.batches.list()] == []
            for file_id in (batch.input_file_id, batch.output_file_id):
                with pytest.raises(NotFoundError):
                    await others.files.content(file_id)
            with pytest.raises(NotFoundError):
                await others.batches.retrieve(batch.id)
            assert (await looking.files.content(batch.output_file_id)).content
            with pytest.raises(PermissionDeniedError):
                await upload(looking, b"x")
            with pytest.raises(PermissionDeniedError):
                await looking.files.delete(batch.output_file_id)
        async with home.client("no-key") as nobody:
            with pytest.raises(AuthenticationError):
                await upload(nobody, b"x")


async def _key(home: Door, name: str, tenant: str) -> str:
    return (await home.engine.api.keys.create(name, (KeyRole.SUBMIT,), tenant=tenant)).token


@run_async
async def test_a_client_that_leaves_in_the_middle_of_an_upload_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with door(tmp_path, flags={"durability": "os"}) as home:
        _, writer = await home.connect()
        writer.write(
            home.head(
                "POST",
                "/v1/files",
                "Content-Type: multipart/form-data; boundary=b",
                "Content-Length: 9000000",
            )
            + _B
            + _FILE[:-2]
            + b"x" * 3_000_000
        )
        await writer.drain()
        await _until(lambda: blobs(tmp_path))
        writer.close()
        await _until(lambda: not blobs(tmp_path))


async def _until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 (a folder tells nobody)
            await asyncio.sleep(0.01)
