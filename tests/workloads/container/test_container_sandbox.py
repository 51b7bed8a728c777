"""A job's folder: its input is all there or none of it, and nothing stays behind."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import os
import stat
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.support.rows import every

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.testing.aio import run_async
from penstock.workloads.container.config import InputRules
from penstock.workloads.container.engine import EngineError, Mount
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import BadInput, JobFolders, Sandbox
from penstock.workloads.container.files.tree import Tree
from penstock.workloads.container.job import (
    BuildSpec,
    ContainerJob,
    ErrorCode,
    InputFile,
    Mode,
    Stream,
)
from penstock.workloads.container.timeouts import in_thread

LARGE = os.urandom(3_000_000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture
def sandbox(root: Path, blobs: MemoryBlobs) -> Sandbox:
    return JobFolders(root, InputRules(), blobs).sandbox("job-1")


def job(*inputs: InputFile, **fields: Any) -> ContainerJob:
    return ContainerJob(job_id="job-1", inputs=inputs, **fields)


def text(path: str, content: str = "x", **fields: Any) -> InputFile:
    return InputFile(path=path, text=content, **fields)


def tar(**files: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as packed:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            packed.addfile(info, io.BytesIO(data))
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def found(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def container_user() -> Iterator[None]:
    """As the user in a container, where that can be tried."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


class Stuck(MemoryBlobs):
    """Gives one piece, and then nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.closed = False

    async def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
        try:
            yield b"one"
            self.asked.set()
            await asyncio.Event().wait()
        finally:
            self.closed = True


class Endless(MemoryBlobs):
    given = 0

    async def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
        while True:
            self.given += 1000
            yield bytes(1000)


class Broken(MemoryBlobs):
    async def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
        yield b"one"
        raise ConnectionError("the line is cut")


# Folders


@pytest.mark.parametrize("job_id", ["a", "../../etc", "a/b c", "x" * 5000, "é\n\0", "\ud800"])
def test_nothing_of_an_id_is_in_a_path(root: Path, job_id: str) -> None:
    folder = JobFolders(root, InputRules()).sandbox(job_id).folder
    assert folder.parent == root
    assert folder.name == sha256(f"/{job_id}".encode(errors="surrogatepass")).hexdigest()


@run_async
async def test_only_the_worker_can_get_into_the_folder(sandbox: Sandbox) -> None:
    sandbox.folder.parent.mkdir()
    sandbox.folder.mkdir(mode=0o777)
    await sandbox.prepare(job(outputs=True))
    assert mode(sandbox.folder) == 0o700


# Input


@pytest.mark.seed("003", "4.3")
@run_async
async def test_files_are_written_as_they_were_given(sandbox: Sandbox, blobs: MemoryBlobs) -> None:
    pointer = await blobs.put(LARGE, "application/octet-stream")
    archive = tar(**{"x": b"1", "y/z": b"2"})
    packed = await blobs.put(tar(big=LARGE), "application/gzip")
    mounts = await sandbox.prepare(
        job(
            text("a.txt", "héllo"),
            InputFile(path="b/c.bin", base64=encoded(b"\0\xff")),
            InputFile(path="b/large", pointer=pointer),
            InputFile(path="unpacked", base64=encoded(archive), archive="tar"),
            InputFile(path=".", pointer=packed, archive="tar"),
        )
    )
    assert mounts == (Mount(sandbox.folder / "input", "/input", True),)
    assert found(sandbox.folder / "input") == {
        "a.txt": "héllo".encode(),
        "b/c.bin": b"\0\xff",
        "b/large": LARGE,
        "unpacked/x": b"1",
        "unpacked/y/z": b"2",
        "big": LARGE,
    }
    assert os.listdir(sandbox.folder) == ["input"]


@run_async
async def test_the_container_can_read_its_input_and_not_change_it(sandbox: Sandbox) -> None:
    await sandbox.prepare(job(text("d/read"), text("d/run", executable=True)))
    folder = sandbox.folder / "input"
    assert [mode(folder / name) for name in (".", "d", "d/read", "d/run")] == [
        0o555,
        0o555,
        0o444,
        0o555,
    ]
    inside = os.open(folder, os.O_RDONLY)
    try:
        with container_user():
            os.close(os.open("d/read", os.O_RDONLY, dir_fd=inside))
            for path in ("d/read", "new", "d/new"):
                with pytest.raises(PermissionError):
                    os.open(path, os.O_WRONLY | os.O_CREAT, dir_fd=inside)
    finally:
        os.close(inside)


@run_async
async def test_without_files_there_is_nothing_to_mount(sandbox: Sandbox) -> None:
    assert await sandbox.prepare(job()) == ()
    assert found(sandbox.folder) == {}


@run_async
async def test_the_container_can_write_to_its_output(sandbox: Sandbox) -> None:
    mounts = await sandbox.prepare(job(outputs=True, user=(1234, 5678)))
    output = sandbox.folder / "output"
    assert mounts == (Mount(output, "/output", False),)
    if os.geteuid() == 0:
        assert (output.stat().st_uid, output.stat().st_gid) == (1234, 5678)
    inside = os.open(output, os.O_RDONLY)
    try:
        with container_user():
            os.close(os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=inside))
    finally:
        os.close(inside)


@run_async
async def test_what_an_earlier_attempt_left_is_gone(sandbox: Sandbox) -> None:
    await sandbox.prepare(job(text("old"), outputs=True))
    (sandbox.folder / "output" / "old").touch()
    await sandbox.prepare(job(text("new"), outputs=True))
    assert found(sandbox.folder) == {"input/new": b"x"}
    assert sorted(os.listdir(sandbox.folder)) == ["input", "output"]


# Input that can't be


@every(
    "inputs, field, said",
    [
        ([text("a"), text("../b")], "inputs[1].path", "'..'"),
        ([text("/a")], "inputs[0].path", "absolute"),
        ([text("a"), text("./a")], "inputs[1].path", "there already"),
        ([text("a"), text("a/b")], "inputs[1].path", "where a file is"),
        ([text("a/b"), text("a")], "inputs[1].path", "there already"),
        ([text("a", "x" * 1001)], "inputs[0].path", "may have 1000 bytes"),
        ([text(f"{n}", "x" * 900) for n in range(3)], "inputs[2].path", "all files together"),
        ([text(f"{n}") for n in range(6)], "inputs[5].path", "at most 5 files"),
        ([text("a", "nonsense", archive="tar")], "inputs[0].archive", "damaged"),
        (
            [InputFile(path=".", base64=encoded(tar(**{"../x": b""})), archive="tar")],
            "inputs[0].archive",
            "bad path",
        ),
        (
            [text("a"), InputFile(path=".", base64=encoded(tar(a=b"")), archive="tar")],
            "inputs[1].archive",
            "there already",
        ),
    ],
)
@run_async
async def test_bad_input_names_its_field_and_leaves_nothing(
    root: Path, inputs: list[InputFile], field: str, said: str
) -> None:
    rules = InputRules(max_files=5, max_file_bytes=1000, max_bytes=2000)
    sandbox = JobFolders(root, rules).sandbox("j")
    with pytest.raises(BadInput, match=said) as caught:
        await sandbox.prepare(job(*inputs, outputs=True))
    assert isinstance(caught.value, EngineError)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_FIELD, field)
    assert str(caught.value).startswith(field)
    assert not sandbox.folder.exists()


@run_async
async def test_a_pointer_that_leads_nowhere_is_input_that_can_not_be_had(
    root: Path, sandbox: Sandbox
) -> None:
    missing = InputFile(path="a", pointer="blob:sha256-" + "0" * 64)
    brokenly = InputFile(path="a", pointer="blob:x", archive="tar")
    for box, file in (
        (sandbox, missing),
        (JobFolders(root, InputRules()).sandbox("no blobs"), missing),
        (JobFolders(root, InputRules(), Broken()).sandbox("broken"), missing),
        (JobFolders(root, InputRules(), Broken()).sandbox("broken archive"), brokenly),
    ):
        with pytest.raises(BadInput) as caught:
            await box.prepare(job(text("first"), file))
        assert caught.value.code == ErrorCode.INPUT_UNAVAILABLE
        assert caught.value.field == "inputs[1].pointer"
        assert caught.value.exit_code is None
        assert not box.folder.exists()


@pytest.mark.parametrize("archive", ["", "tar"])
@run_async
async def test_a_pointer_that_leads_to_too_much_is_not_followed_to_its_end(
    root: Path, archive: str
) -> None:
    blobs = Endless()
    rules = InputRules(max_file_bytes=100_000, max_bytes=100_000)
    sandbox = JobFolders(root, rules, blobs).sandbox("j")
    with pytest.raises(BadInput, match="too large") as caught:
        await sandbox.prepare(job(InputFile(path="a", pointer="blob:x", archive=archive)))
    assert caught.value.code == ErrorCode.INVALID_FIELD
    assert blobs.given == 101_000
    assert not sandbox.folder.exists()


@run_async
async def test_a_full_disk_leaves_nothing(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(BadInput, match="No space left") as caught:
        patch.setattr(Tree, "_write", full)
        await sandbox.prepare(job(text("a")))
    assert caught.value.code == ErrorCode.INPUT_UNAVAILABLE
    assert not sandbox.folder.exists()


@run_async
async def test_what_the_job_wrote_stays_when_its_input_is_bad(sandbox: Sandbox) -> None:
    output = Output(sandbox.logs, 1000)
    output.write(Stream.STDERR, b"pulling")
    with pytest.raises(BadInput):
        await sandbox.prepare(job(text("a"), text("a")))
    output.write(Stream.STDERR, b" failed")
    output.close()
    assert Output.reopen(sandbox.logs, 1000).text(Stream.STDERR) == "pulling failed"
    assert os.listdir(sandbox.folder) == ["stderr.0"]


@pytest.mark.parametrize("archive", ["", "tar"])
@run_async
async def test_a_cancel_leaves_nothing(root: Path, archive: str) -> None:
    blobs = Stuck()
    sandbox = JobFolders(root, InputRules(), blobs).sandbox("j")
    before = len(os.listdir("/proc/self/fd"))
    file = InputFile(path="a", pointer="blob:x", archive=archive)
    preparing = asyncio.create_task(sandbox.prepare(job(text("first"), file)))
    await blobs.asked.wait()
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert blobs.closed
    assert not sandbox.folder.exists()
    assert len(os.listdir("/proc/self/fd")) <= before


@run_async
async def test_a_cancel_waits_for_the_thread() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()
        done.set()

    working = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait)
    working.cancel()
    await asyncio.sleep(0)
    working.cancel()
    assert not working.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert done.is_set()


# Build


def building(*context: InputFile) -> ContainerJob:
    spec = BuildSpec(dockerfile="FROM scratch\n", context=context)
    return ContainerJob(job_id="j", mode=Mode.BUILD, build=spec)


@run_async
async def test_a_build_has_its_dockerfile_and_its_context(sandbox: Sandbox) -> None:
    archive = InputFile(path="src", base64=encoded(tar(**{"m.py": b"1"})), archive="tar")
    files = building(text("run.sh", executable=True), archive)
    folder = await sandbox.build_context(files)
    assert found(folder) == {"Dockerfile": b"FROM scratch\n", "run.sh": b"x", "src/m.py": b"1"}
    # They keep their modes in the image.
    assert [mode(folder / name) for name in ("Dockerfile", "run.sh", "src")] == [
        0o644,
        0o755,
        0o755,
    ]
    assert await sandbox.build_context(building()) == folder
    assert found(folder) == {"Dockerfile": b"FROM scratch\n"}


@run_async
async def test_a_context_can_not_bring_a_dockerfile_of_its_own(sandbox: Sandbox) -> None:
    with pytest.raises(BadInput, match="there already") as caught:
        await sandbox.build_context(building(text("Dockerfile")))
    assert caught.value.field == "runtime.build.context[0].path"
    assert not sandbox.folder.exists()


@run_async
async def test_a_dockerfile_that_is_too_large_is_named(root: Path) -> None:
    sandbox = JobFolders(root, InputRules(max_file_bytes=5)).sandbox("j")
    with pytest.raises(BadInput) as caught:
        await sandbox.build_context(building())
    assert caught.value.field == "runtime.build.dockerfile"


# Afterwards


@run_async
async def test_all_of_it_stays_until_it_is_deleted(sandbox: Sandbox) -> None:
    output = Output(sandbox.logs, 1000)
    output.write(Stream.STDOUT, b"said")
    output.close()
    await sandbox.build_context(building())
    sandbox.keep_build_log(b"Step 1")
    await sandbox.prepare(job(text("a"), outputs=True))
    (sandbox.output / "made").write_bytes(b"result")
    (sandbox.output / "link").symlink_to("made")
    assert sandbox.output_size() == 6
    left = ["build", "build.log", "input", "output", "stdout.0"]
    assert sorted(os.listdir(sandbox.folder)) == left
    await sandbox.delete()
    await sandbox.delete()
    assert not sandbox.folder.exists()
    assert sandbox.output_size() == 0
