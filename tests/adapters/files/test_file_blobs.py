"""What FileBlobs promises beyond the contract: durability, damage, full disks, sources."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.adapters.files.blobs import FileBlobs
from penstock.core.errors import Misconfigured, StoreFailed, StoreFull, TooLarge, UnreadablePointer
from penstock.testing.aio import run_async

LARGE = b"x" * 10_000
TOMORROW = time.time() + 86_400


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data" / "blobs"


@pytest.fixture
def blobs(root: Path) -> FileBlobs:
    return FileBlobs(root)


def blob_path(root: Path, uri: str) -> Path:
    digest = uri.removeprefix("blob:sha256-")
    return root / digest[:2] / digest


def files_in(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def failing(error: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    return fail


# Tiny payloads


def test_a_tiny_payload_is_put_and_got_without_waiting(blobs: FileBlobs) -> None:
    for coroutine in (blobs.put(b"1"), blobs.get("data:application/json;base64,MQ==")):
        with pytest.raises(StopIteration):
            coroutine.send(None)


@run_async
async def test_a_tiny_payload_touches_no_disk(blobs: FileBlobs, root: Path) -> None:
    assert await blobs.get(await blobs.put(b"1")) == b"1"
    assert files_in(root.parent) == []


# Files


@run_async
async def test_a_blob_is_a_private_file_named_by_its_hash(blobs: FileBlobs, root: Path) -> None:
    path = blob_path(root, await blobs.put(LARGE))
    assert path.read_bytes() == LARGE
    assert mode(path) == 0o600
    assert mode(root) == mode(path.parent) == 0o700
    assert files_in(root) == [path]


@run_async
async def test_content_then_name_are_flushed_before_put_returns(
    blobs: FileBlobs, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def logged_fsync(handle: int) -> None:
        steps.append("flush " + ("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"))
        fsync(handle)

    def logged_rename(path: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    await blobs.put(LARGE)
    assert steps[-3:] == ["flush file", "rename", "flush folder"]
    steps.clear()
    await blobs.put(LARGE)
    assert steps == ["flush folder"], "the first writer may not have flushed it yet"
    upload, digest = "ab" * 16, sha256(LARGE + b"2").hexdigest()
    await blobs.write_part(upload, 0, LARGE + b"2")
    await blobs.finish_upload(upload, digest, len(LARGE) + 1, "text/plain")
    steps.clear()
    await blobs.finish_upload(upload, digest, len(LARGE) + 1, "text/plain")
    assert steps == ["flush folder"]


@run_async
async def test_files_are_written_and_read_off_the_event_loop(
    blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops_thread, used = threading.get_ident(), set()
    fsync = os.fsync

    def logged(handle: int) -> None:
        used.add(threading.get_ident())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", logged)
    await blobs.put(LARGE)
    assert used
    assert loops_thread not in used


@run_async
async def test_a_blob_can_be_read_by_another_store_on_the_same_folder(root: Path) -> None:
    uri = await FileBlobs(root).put(LARGE)
    assert await FileBlobs(root).get(uri) == LARGE


@pytest.mark.parametrize("damage", [b"y" * 10_000, b"x" * 9_999, b""])
@run_async
async def test_a_damaged_blob_is_never_handed_out_and_mended_by_putting_it_again(
    blobs: FileBlobs, root: Path, damage: bytes
) -> None:
    uri = await blobs.put(LARGE)
    blob_path(root, uri).write_bytes(damage)
    with pytest.raises(UnreadablePointer, match="is damaged"):
        await blobs.get(uri)
    assert await blobs.put(LARGE) == uri
    assert await blobs.get(uri) == LARGE


@run_async
async def test_a_stream_of_a_damaged_blob_does_not_come_to_its_end(
    blobs: FileBlobs, root: Path
) -> None:
    uri = await blobs.put(LARGE)
    blob_path(root, uri).write_bytes(b"x" * 9_999 + b"y")
    seen = b""
    with pytest.raises(UnreadablePointer, match="is damaged"):
        async for piece in blobs.stream(uri, 4096):
            seen += piece
    assert len(seen) < len(LARGE)


@run_async
async def test_a_blob_over_a_lowered_limit_is_refused(root: Path) -> None:
    uri = await FileBlobs(root).put(LARGE)
    with pytest.raises(TooLarge, match="pointer: 10,000 bytes"):
        await FileBlobs(root, max_size=9_999).get(uri)


@run_async
async def test_a_blob_that_may_not_be_read_says_so(
    blobs: FileBlobs, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = await blobs.put(LARGE)
    monkeypatch.setattr(Path, "open", failing(errno.EACCES))
    with pytest.raises(UnreadablePointer, match="Permission denied"):
        await blobs.get(uri)


@run_async
async def test_a_root_that_is_no_folder_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("a file")
    with pytest.raises(StoreFailed, match=r"can't be stored in .*blobs"):
        await FileBlobs(tmp_path / "blobs").put(LARGE)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EIO, StoreFailed),
    ],
)
@pytest.mark.parametrize("step", ["write", "flush", "rename"])
@run_async
async def test_a_write_that_fails_leaves_nothing_behind(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: int, raised: type[Exception], step: str
) -> None:
    blobs = FileBlobs(root)
    await blobs.put(b"z" * 10_000)
    before = files_in(root)
    for folder in range(256):
        (root / f"{folder:02x}").mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr("builtins.open", _full_file(error))
        elif step == "flush":
            patch.setattr(os, "fsync", failing(error))
        else:
            patch.setattr(Path, "rename", failing(error))
        with pytest.raises(raised):
            await blobs.put(LARGE)
    assert files_in(root) == before
    assert await blobs.get(await blobs.put(LARGE)) == LARGE


def _full_file(error: int) -> Callable[..., object]:
    really_open = open

    def open_full(*args: object, **options: object) -> object:
        file = really_open(*args, **options)  # type: ignore[call-overload]
        if "x" in str(args[1:2]):
            file.close()
            failing(error)()
        return file

    return open_full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@run_async
async def test_a_disk_that_is_really_full_is_reported_and_left_clean(small_disk: Path) -> None:
    blobs = FileBlobs(small_disk / "blobs")
    with pytest.raises(StoreFull, match="no space left"):
        await blobs.put(b"x" * (1 << 20))
    assert files_in(small_disk) == []
    assert await blobs.get(await blobs.put(LARGE)) == LARGE


# Collecting


@run_async
async def test_collect_clears_drafts_of_writes_that_were_cut_short(
    blobs: FileBlobs, root: Path
) -> None:
    path = blob_path(root, await blobs.put(LARGE))
    draft = path.with_name(f".{path.name}.0123")
    draft.write_bytes(b"half")
    assert await blobs.collect([], 0) == 0
    assert draft.exists()
    os.utime(draft, (1, 1))
    assert await blobs.collect([], 2) == 0, "a draft is no blob"
    assert files_in(root) == [path]


@run_async
async def test_collect_on_a_folder_that_was_never_used_finds_nothing(blobs: FileBlobs) -> None:
    assert await blobs.collect([], TOMORROW) == 0


@run_async
async def test_collect_leaves_other_files_alone(blobs: FileBlobs, root: Path) -> None:
    await blobs.put(LARGE)
    (root / "README").write_text("mine")
    await blobs.collect([], TOMORROW)
    assert (root / "README").exists()


@run_async
async def test_a_blob_put_while_others_collect_is_always_there(root: Path) -> None:
    """Each put is of a blob that is old enough to go: either it is touched or rewritten."""
    writer, sweeper = FileBlobs(root), FileBlobs(root)
    done = False

    async def sweep() -> None:
        while not done:
            await sweeper.collect([], time.time() - 60)

    sweeping = asyncio.create_task(sweep())
    for _ in range(30):
        uri = await writer.put(LARGE)
        os.utime(blob_path(root, uri), (1, 1))
        await writer.put(LARGE)
        assert await writer.get(uri) == LARGE
    done = True
    await sweeping


# Others' pointers


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    (folder / "a b.json").write_bytes(b"[1]")
    return folder


@run_async
async def test_a_file_below_a_listed_folder_can_be_read(root: Path, inbox: Path) -> None:
    blobs = FileBlobs(root, sources=[inbox.as_uri()])
    uri = (inbox / "a b.json").as_uri()
    assert await blobs.get(uri) == b"[1]"
    assert [piece async for piece in blobs.stream(uri, 2)] == [b"[1", b"]"]
    assert await blobs.read(uri, 1, 2) == b"1]"
    assert await blobs.read(uri, 2, 9) == b"]"
    found = await blobs.stat(uri)
    assert (found.size, found.media_type) == (3, "application/json")


@run_async
async def test_a_file_elsewhere_is_refused_even_in_the_data_directory(
    root: Path, inbox: Path
) -> None:
    blobs = FileBlobs(root, sources=[inbox.as_uri()])
    (token := root.parent / "token").parent.mkdir(parents=True)
    token.write_text("secret")
    sibling = inbox.with_name("inbox2")
    sibling.mkdir()
    (sibling / "a").write_text("x")
    for path in (token, sibling / "a", Path("/etc/hostname")):
        with pytest.raises(UnreadablePointer, match="not below any allowed source"):
            await blobs.get(path.as_uri())


@run_async
async def test_a_link_that_leads_out_of_a_listed_folder_is_refused(
    root: Path, inbox: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("x")
    (inbox / "way").symlink_to(tmp_path / "secret")
    (inbox / "up").symlink_to(tmp_path)
    blobs = FileBlobs(root, sources=[inbox.as_uri()])
    for path in (inbox / "way", inbox / "up" / "secret"):
        with pytest.raises(UnreadablePointer, match="not below any allowed source"):
            await blobs.get(path.as_uri())


@run_async
async def test_a_link_within_a_listed_folder_is_followed(root: Path, inbox: Path) -> None:
    (inbox / "link").symlink_to(inbox / "a b.json")
    (elsewhere := inbox.with_name("also")).symlink_to(inbox)
    blobs = FileBlobs(root, sources=[elsewhere.as_uri()])
    assert await blobs.get((elsewhere / "link").as_uri()) == b"[1]"


@run_async
async def test_what_is_no_regular_file_is_refused_at_once(root: Path, inbox: Path) -> None:
    os.mkfifo(inbox / "pipe")
    blobs = FileBlobs(root, sources=[inbox.as_uri()])
    for path in (inbox, inbox / "pipe"):
        with pytest.raises(UnreadablePointer, match="not a regular file"):
            await blobs.get(path.as_uri())


@run_async
async def test_a_missing_file_says_so(root: Path, inbox: Path) -> None:
    blobs = FileBlobs(root, sources=[inbox.as_uri()])
    with pytest.raises(UnreadablePointer, match="does not exist"):
        await blobs.get((inbox / "none").as_uri())


@run_async
async def test_a_file_over_the_limit_is_refused(root: Path, inbox: Path) -> None:
    (inbox / "big").write_bytes(b"x" * 101)
    blobs = FileBlobs(root, max_size=100, sources=[inbox.as_uri()])
    with pytest.raises(TooLarge):
        await blobs.get((inbox / "big").as_uri())
    with pytest.raises(TooLarge):
        await blobs.stat((inbox / "big").as_uri())


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no file of unknown size")
@run_async
async def test_the_limit_holds_where_no_size_is_known_in_advance(root: Path) -> None:
    blobs = FileBlobs(root, max_size=100, sources=["file:///proc"])
    with pytest.raises(TooLarge):
        await blobs.get("file:///proc/self/maps")


@run_async
async def test_other_schemes_are_read_through_fsspec_below_their_source(root: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/bucket/in/a.json", b"[2]")
    blobs = FileBlobs(root, sources=["memory://bucket/in"])
    assert await blobs.get("memory://bucket/in/a.json") == b"[2]"
    assert (await blobs.stat("memory://bucket/in/a.json")).size == 3
    assert await blobs.read("memory://bucket/in/a.json", 1, 5) == b"2]"
    with pytest.raises(UnreadablePointer, match="does not exist"):
        await blobs.get("memory://bucket/in/b.json")
    for uri in ("memory://bucket/inside", "memory://bucket/in/../x", "memory://other/in/a.json"):
        with pytest.raises(UnreadablePointer):
            await blobs.get(uri)


@run_async
async def test_a_scheme_that_nothing_can_read_says_what_is_missing(root: Path) -> None:
    blobs = FileBlobs(root, sources=["nothing-knows-this://host"])
    with pytest.raises(UnreadablePointer, match="nothing installed can read"):
        await blobs.get("nothing-knows-this://host/a")


class Web(BaseHTTPRequestHandler):
    """Serves /a/ok and /secret; /a/away leads to the latter."""

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        body = {"/a/ok": b"[3]", "/a/big": b"x" * 5_000, "/secret": b"secret"}.get(path, b"")
        self.send_response(200 if body else 302 if path == "/a/away" else 404)
        self.send_header("Location", "/secret")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def web() -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="https: pointers need aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@run_async
async def test_a_web_page_below_an_allowed_address_can_be_read(root: Path, web: str) -> None:
    blobs = FileBlobs(root, max_size=1_000, sources=[f"{web}/a"])
    assert await blobs.get(f"{web}/a/ok") == b"[3]"
    assert await blobs.get(f"{web}/a/ok?signature=x") == b"[3]"
    assert await blobs.read(f"{web}/a/ok", 0, 2) == b"[3"
    assert await blobs.read(f"{web}/a/ok", 1, 5) == b"3]", "it can't be sought in"
    with pytest.raises(TooLarge):
        await blobs.get(f"{web}/a/big")
    with pytest.raises(UnreadablePointer, match="does not exist"):
        await blobs.get(f"{web}/a/none")
    with pytest.raises(UnreadablePointer, match="not below any allowed source"):
        await blobs.get(f"{web}/secret")


@run_async
async def test_a_server_can_not_redirect_to_what_is_not_allowed(root: Path, web: str) -> None:
    blobs = FileBlobs(root, sources=[f"{web}/a"])
    with pytest.raises(UnreadablePointer, match="is redirected by its server"):
        await blobs.get(f"{web}/a/away")


def test_a_source_that_is_not_safe_is_refused_at_once(root: Path) -> None:
    with pytest.raises(Misconfigured, match="sources"):
        FileBlobs(root, sources=["https://host/a/../b"])


def test_fsspec_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, penstock.adapters.files.blobs;"
        "print([m for m in ('fsspec', 'aiohttp') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
