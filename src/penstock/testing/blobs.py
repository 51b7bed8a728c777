"""What every `Blobs` must do, as tests. Subclass, make the store, and run pytest:

class TestMyBlobs(BlobsContract):
    def make(self, folder, *, inline_limit, max_size):
        return MyBlobs(folder, inline_limit=inline_limit, max_size=max_size)
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest, TooLarge, UnreadablePointer
from penstock.ports.blobs import Blobs
from penstock.testing.aio import run_async

INLINE_LIMIT = 64
MAX_SIZE = 100_000

TINY = b'{"text":"hello"}'
LARGE = b'["' + b"x" * 10_000 + b'"]'
LONG_AGO = 0.0


async def pieces(data: bytes, size: int = 7000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


class BlobsContract(ABC):
    @abstractmethod
    def make(self, folder: Path, *, inline_limit: int, max_size: int) -> Blobs:
        """A new, empty store; `folder` is a place of its own to keep it in."""

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Blobs:
        return self.make(tmp_path, inline_limit=INLINE_LIMIT, max_size=MAX_SIZE)

    @pytest.mark.parametrize("size", [0, 1, INLINE_LIMIT, INLINE_LIMIT + 1, MAX_SIZE])
    @run_async
    async def test_what_was_put_is_what_one_gets(self, blobs: Blobs, size: int) -> None:
        data = bytes(i * 7 % 256 for i in range(size))
        assert await blobs.get(await blobs.put(data)) == data

    @run_async
    async def test_a_tiny_payload_rides_in_its_pointer(self, blobs: Blobs) -> None:
        uri = await blobs.put(TINY)
        assert uri == 'data:application/json,{"text":"hello"}'

    @run_async
    async def test_a_larger_payload_is_named_by_its_content(self, blobs: Blobs) -> None:
        uri = await blobs.put(LARGE)
        assert uri.startswith("blob:sha256-")
        assert await blobs.put(LARGE) == uri
        assert await blobs.put(LARGE + b" ") != uri

    @pytest.mark.parametrize("data", [TINY, LARGE])
    @run_async
    async def test_stat_tells_size_and_media_type(self, blobs: Blobs, data: bytes) -> None:
        uri = await blobs.put(data)
        stat = await blobs.stat(uri)
        assert (stat.uri, stat.size, stat.media_type) == (uri, len(data), "application/json")

    @pytest.mark.parametrize("data", [TINY, LARGE])
    @pytest.mark.parametrize("media_type", ["image/png", "text/plain;charset=utf-8"])
    @run_async
    async def test_a_media_type_travels_with_the_pointer(
        self, blobs: Blobs, data: bytes, media_type: str
    ) -> None:
        uri = await blobs.put(data, media_type)
        assert (await blobs.stat(uri)).media_type == media_type
        assert await blobs.get(uri) == data

    @pytest.mark.parametrize("data", [TINY, LARGE])
    @pytest.mark.parametrize("media_type", ["", "png", "a/b,c", "a/b\nc/d", "a/" + "b" * 200])
    @run_async
    async def test_what_is_no_media_type_is_refused(
        self, blobs: Blobs, data: bytes, media_type: str
    ) -> None:
        with pytest.raises(InvalidRequest, match="media_type"):
            await blobs.put(data, media_type)

    @pytest.mark.parametrize("data", [b"", TINY, LARGE])
    @pytest.mark.parametrize("chunk", [1000, 1 << 20])
    @run_async
    async def test_a_stream_gives_the_whole_in_pieces(
        self, blobs: Blobs, data: bytes, chunk: int
    ) -> None:
        pieces = [piece async for piece in blobs.stream(await blobs.put(data), chunk)]
        assert b"".join(pieces) == data
        assert all(0 < len(piece) <= chunk for piece in pieces)

    @pytest.mark.parametrize("size", [0, 10, INLINE_LIMIT, 10_000])
    @pytest.mark.parametrize(("start", "length"), [(0, 5), (3, 4), (0, 0), (9, 1 << 20), (10, 1)])
    @run_async
    async def test_a_part_is_as_long_as_asked_for_unless_it_ends(
        self, blobs: Blobs, size: int, start: int, length: int
    ) -> None:
        data = bytes(i * 7 % 256 for i in range(size))
        part = await blobs.read(await blobs.put(data), start, length)
        assert part == data[start : start + length]

    @run_async
    async def test_parts_make_the_whole(self, blobs: Blobs) -> None:
        uri = await blobs.put(LARGE)
        parts = [await blobs.read(uri, at, 3000) for at in range(0, len(LARGE) + 3000, 3000)]
        assert b"".join(parts) == LARGE
        assert parts[-1] == b""

    @pytest.mark.parametrize("size", [0, 1, 3 * MAX_SIZE])
    @run_async
    async def test_a_stream_of_any_length_is_stored_and_read_in_parts(
        self, blobs: Blobs, size: int
    ) -> None:
        data = bytes(i * 7 % 256 for i in range(size))
        stat = await blobs.put_stream(pieces(data), "image/png")
        assert stat.uri == f"blob:sha256-{sha256(data).hexdigest()};type=image/png"
        assert (stat.size, stat.media_type) == (size, "image/png")
        assert b"".join([piece async for piece in blobs.stream(stat.uri, 9000)]) == data
        assert await blobs.read(stat.uri, size // 2, 100) == data[size // 2 :][:100]
        assert await blobs.stat(stat.uri) == stat

    @run_async
    async def test_a_stream_over_its_limit_is_refused_and_leaves_nothing(
        self, blobs: Blobs
    ) -> None:
        blobs.max_artifact = MAX_SIZE
        with pytest.raises(TooLarge):
            await blobs.put_stream(pieces(b"x" * (MAX_SIZE + 1)))
        assert await blobs.collect([], time.time() + 86_400) == 0

    @run_async
    async def test_parts_of_an_upload_may_come_twice(self, blobs: Blobs) -> None:
        data, upload = LARGE * 2, "ab" * 16
        digest = sha256(data).hexdigest()
        for at in (0, 5000, 0, 5000, 10_000, 15_000, 20_000):
            await blobs.write_part(upload, at, data[at : at + 5000])
        first = await blobs.finish_upload(upload, digest, len(data), "text/plain")
        assert await blobs.finish_upload(upload, digest, len(data), "text/plain") == first
        assert await blobs.get(first.uri) == data

    @pytest.mark.parametrize(("size", "digest"), [(4, "0" * 64), (3, ""), (5, "")])
    @run_async
    async def test_an_upload_that_is_not_what_was_announced_is_refused(
        self, blobs: Blobs, size: int, digest: str
    ) -> None:
        await blobs.write_part("cd" * 16, 0, b"data")
        with pytest.raises(InvalidRequest):
            await blobs.finish_upload(
                "cd" * 16, digest or sha256(b"data").hexdigest(), size, "text/plain"
            )

    @run_async
    async def test_an_upload_that_was_dropped_can_be_begun_anew(self, blobs: Blobs) -> None:
        await blobs.write_part("ef" * 16, 0, b"longer than the second")
        await blobs.drop_upload("ef" * 16)
        await blobs.drop_upload("ef" * 16)
        await blobs.write_part("ef" * 16, 0, b"short")
        stat = await blobs.finish_upload("ef" * 16, sha256(b"short").hexdigest(), 5, "text/plain")
        assert await blobs.get(stat.uri) == b"short"

    @run_async
    async def test_a_payload_over_the_limit_is_refused(self, blobs: Blobs) -> None:
        with pytest.raises(TooLarge, match="100,001 bytes; at most 100,000"):
            await blobs.put(b"x" * (MAX_SIZE + 1))

    @run_async
    async def test_a_pointer_that_carries_more_than_the_limit_is_refused(
        self, blobs: Blobs
    ) -> None:
        with pytest.raises(TooLarge):
            await blobs.get("data:," + "x" * (MAX_SIZE + 1))

    @pytest.mark.parametrize(
        "uri",
        [
            "",
            "hello",
            "/etc/hostname",
            "data:no-comma",
            "data:application/json;base64,!!!!",
            "data:application/json;base64,YQ",
            "data:,50%",
            "blob:",
            "blob:sha256-",
            "blob:sha256-" + "0" * 63,
            "blob:sha256-" + "A" * 64,
            "blob:md5-" + "0" * 32,
            "blob:sha256-" + "0" * 64 + ";type=",
            "blob:sha256-" + "0" * 64 + "/../x",
            "file:///etc/hostname",
            "https://example.com/",
            "nothing-knows-this:x",
        ],
    )
    @run_async
    async def test_a_pointer_that_is_malformed_or_not_allowed_is_refused(
        self, blobs: Blobs, uri: str
    ) -> None:
        with pytest.raises(UnreadablePointer) as refusal:
            await blobs.get(uri)
        assert refusal.value.field == "pointer"
        with pytest.raises(UnreadablePointer):
            await blobs.stat(uri)
        with pytest.raises(UnreadablePointer):
            _ = [piece async for piece in blobs.stream(uri)]
        with pytest.raises(UnreadablePointer):
            await blobs.read(uri, 0, 1)

    @run_async
    async def test_a_blob_that_was_never_put_is_unreadable(self, blobs: Blobs) -> None:
        nowhere = "blob:sha256-" + "0" * 64
        with pytest.raises(UnreadablePointer, match="there is no blob"):
            await blobs.get(nowhere)
        with pytest.raises(UnreadablePointer, match="there is no blob"):
            await blobs.read(nowhere, 0, 1)

    @run_async
    async def test_many_at_once_do_not_disturb_each_other(self, blobs: Blobs) -> None:
        payloads = [b"%d" % (i // 2) * 100 for i in range(16)]
        uris = await asyncio.gather(*map(blobs.put, payloads))
        assert await asyncio.gather(*map(blobs.get, uris)) == payloads

    @run_async
    async def test_collect_deletes_what_is_neither_kept_nor_new(self, blobs: Blobs) -> None:
        kept, dropped = await blobs.put(LARGE), await blobs.put(LARGE + b" ")
        tomorrow = time.time() + 86_400
        assert await blobs.collect([kept, await blobs.put(TINY)], tomorrow) == 1
        assert await blobs.get(kept) == LARGE
        with pytest.raises(UnreadablePointer):
            await blobs.get(dropped)

    @run_async
    async def test_collect_keeps_a_blob_under_any_of_its_media_types(self, blobs: Blobs) -> None:
        uri = await blobs.put(LARGE, "text/plain")
        assert await blobs.collect([uri], time.time() + 86_400) == 0
        assert await blobs.get(uri) == LARGE

    @run_async
    async def test_collect_spares_what_was_put_lately(self, blobs: Blobs) -> None:
        uri = await blobs.put(LARGE)
        assert await blobs.collect([], LONG_AGO) == 0
        assert await blobs.get(uri) == LARGE

    @pytest.mark.parametrize("again", ["put", "stat"])
    @run_async
    async def test_collect_spares_an_old_blob_that_was_named_again(
        self, blobs: Blobs, again: str
    ) -> None:
        uri = await blobs.put(LARGE)
        await asyncio.sleep(0.02)
        between = time.time()
        await asyncio.sleep(0.02)
        await (blobs.put(LARGE) if again == "put" else blobs.stat(uri))
        assert await blobs.collect([], between) == 0
        assert await blobs.get(uri) == LARGE

    @run_async
    async def test_collect_ignores_pointers_to_what_it_does_not_keep(self, blobs: Blobs) -> None:
        foreign = ["", "data:,x", "s3://bucket/key", "blob:nonsense"]
        assert await blobs.collect(foreign, time.time() + 86_400) == 0

    @run_async
    async def test_what_was_collected_can_be_put_again(self, blobs: Blobs) -> None:
        uri = await blobs.put(LARGE)
        assert await blobs.collect([], time.time() + 86_400) == 1
        assert await blobs.put(LARGE) == uri
        assert await blobs.get(uri) == LARGE
