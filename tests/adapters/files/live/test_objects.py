"""Payloads in S3: a real HTTP server that speaks S3's protocol (moto), on loopback."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from secrets import token_hex

import pytest
import s3fs
from tests.support.waiting import eventually

import penstock
from penstock.adapters.files.blobs import FileBlobs
from penstock.core.errors import Misconfigured, StoreFailed, UnreadablePointer


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a client of the server needs in its environment."""
    log = tmp_path_factory.mktemp("s3") / "log"
    code = (
        "from moto.server import ThreadedMotoServer; import time\n"
        "server = ThreadedMotoServer('127.0.0.1', 0); server.start()\n"
        "print('port', server._server.port, flush=True); time.sleep(3600)"
    )
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-c", code], stdout=out, stderr=subprocess.DEVNULL
        )
    try:
        line = eventually(
            lambda: re.search(r"port (\d+)\n", log.read_text()), "the S3 server listens", within=50
        )
        assert line is not None
        yield {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{line[1]}",
        }
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    name = f"b{token_hex(8)}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return name


@pytest.mark.timeout(180)
def test_blobs_in_s3_are_put_read_in_parts_streamed_and_collected(bucket: str) -> None:
    blobs = FileBlobs(f"s3://{bucket}/p", inline_limit=64)
    data = bytes(i * 7 % 256 for i in range(300_000))

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 70_000):
            yield data[start : start + 70_000]

    async def scenario() -> None:
        small = await blobs.put(data[:1000])
        large = (await blobs.put_stream(pieces(), "image/png")).uri
        assert await blobs.get(small) == data[:1000]
        assert await blobs.read(large, 150_000, 10) == data[150_000:150_010]
        assert await blobs.read(large, len(data) - 3, 10) == data[-3:]
        assert b"".join([piece async for piece in blobs.stream(large, 90_000)]) == data
        assert (await blobs.stat(large)).size == len(data)
        assert await blobs.collect([], time.time() - 60) == 0
        assert await blobs.collect([large], time.time() + 60) == 1
        assert await blobs.get(large) == data
        with pytest.raises(UnreadablePointer, match="there is no blob"):
            await blobs.get(small)

    asyncio.run(scenario())


def jobs() -> tuple[penstock.App, penstock.JobFunction[..., str]]:
    app = penstock.App()

    @app.job("job.double", timeout=30)
    def double(text: str) -> str:
        return text * 2

    return app, double


@pytest.mark.timeout(120)
def test_an_engine_keeps_inputs_and_results_in_s3(tmp_path: Path, bucket: str) -> None:
    app, double = jobs()
    text = "x" * 20_000
    with app.run(tmp_path, storage__blobs=f"s3://{bucket}/penstock"):
        handle = double.submit(text)
        assert handle.result() == text * 2
    stored = s3fs.S3FileSystem(skip_instance_cache=True).find(f"{bucket}/penstock", detail=True)
    assert {20_011, 40_002} <= {info["size"] for info in stored.values()}
    assert not (tmp_path / "blobs").exists()
    with app.run(tmp_path, storage__blobs=f"s3://{bucket}/penstock") as client:
        assert client.get(handle.job_id).result() == text * 2


@pytest.mark.timeout(120)
def test_a_job_waits_out_a_store_that_fails(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.adapters.files.objects import ObjectFolder

    read, failures = ObjectFolder.read, [1, 2]

    def fails(self: ObjectFolder, uri: str) -> bytes:
        if failures:
            failures.pop()
            raise StoreFailed("the object store failed")
        return read(self, uri)

    monkeypatch.setattr(ObjectFolder, "read", fails)
    app, double = jobs()
    with app.run(tmp_path, storage__blobs=f"s3://{bucket}/penstock"):
        assert double.submit("y" * 20_000).result() == "y" * 40_000
    assert not failures


def test_a_scheme_without_its_package_is_told(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="nosuch://bucket"):
        FileBlobs("nosuch://bucket/x")


def test_a_bucket_that_is_not_there_fails_the_store_and_not_the_pointer(
    bucket: str, tmp_path: Path
) -> None:
    blobs = FileBlobs("s3://not-there/x", inline_limit=1)
    with pytest.raises(StoreFailed):
        asyncio.run(blobs.put(b"some bytes"))
