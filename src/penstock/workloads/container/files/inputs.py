"""The input files of a job: written where its container will see them."""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from penstock.core.errors import TooLarge
from penstock.ports.blobs import Blobs
from penstock.workloads.container.config import InputRules
from penstock.workloads.container.engine import EngineError
from penstock.workloads.container.files.archives import unpack
from penstock.workloads.container.files.tree import BadFile, Tree
from penstock.workloads.container.job import ErrorCode, InputFile
from penstock.workloads.container.protocol.paths import checked_folder, checked_path
from penstock.workloads.container.timeouts import in_thread

PointerCheck = Callable[[str], Awaitable[object]]
"""Raises an error if the job may not follow a pointer."""


class BadInput(EngineError):
    """A file of a job that can't be had, or can't be taken."""

    exit_code = None

    def __init__(
        self, message: str, *, field: str, code: ErrorCode = ErrorCode.INVALID_FIELD
    ) -> None:
        super().__init__(f"{field} {message}")
        self.code = code
        self.field = field
        """Its path in the job, as `inputs[2].path`."""


class InputWriter:
    """Writes the files of one list of a job into a tree."""

    def __init__(
        self,
        tree: Tree,
        rules: InputRules,
        blobs: Blobs | None,
        spool: Path,
        check: PointerCheck | None = None,
    ) -> None:
        """`spool` is a folder for archives that are fetched; nothing stays in it."""
        self._tree = tree
        self._rules = rules
        self._blobs = blobs
        self._spool = spool
        self._check = check

    async def place(self, field: str, files: Sequence[InputFile]) -> None:
        """Raises BadInput, with some of them written."""
        for index, file in enumerate(files):
            where = f"{field}[{index}]"
            with _telling(where, f"{where}.path", file.path):
                if file.pointer is not None:
                    await self._fetch(f"{where}.pointer", file, file.pointer)
                else:
                    await in_thread(self._write, file, _given(file))

    async def write(self, field: str, path: str, text: str) -> None:
        """A file that is not in a list."""
        with _telling(field, field, path):
            await in_thread(self._write, InputFile(path=path), text.encode())

    def _write(self, file: InputFile, data: bytes) -> None:
        if file.archive:
            self._unpack(file, BytesIO(data))
            return
        with self._tree.file(_path(file), executable=bool(file.executable)) as write:
            write(data)

    async def _fetch(self, field: str, file: InputFile, uri: str) -> None:
        if file.archive:
            with TemporaryFile(dir=self._spool) as spooled:
                await self._copy(field, uri, Capped(spooled, self._rules.max_bytes).write)
                await in_thread(self._unpack, file, spooled)
            return
        with self._tree.file(_path(file), executable=bool(file.executable)) as write:
            await self._copy(field, uri, write)

    async def _copy(self, field: str, uri: str, write: Callable[[bytes], Any]) -> None:
        if self._blobs is None:
            said = "can't be followed: this worker has nowhere to fetch files from"
            raise BadInput(said, field=field, code=ErrorCode.INPUT_UNAVAILABLE)
        if self._check is not None:
            with _fetching(field):
                await self._check(uri)
        pieces = self._blobs.stream(uri)
        try:
            while piece := await _next(field, pieces):
                await in_thread(write, piece)
        finally:
            if (close := getattr(pieces, "aclose", None)) is not None:
                await close()

    def _unpack(self, file: InputFile, archive: BinaryIO) -> None:
        folder = _checked(checked_folder, file.path)
        if folder != ".":
            self._tree.folder(folder)
        try:
            unpack(archive, file.archive or "", self._tree, self._rules, folder=folder)
        except BadFile as error:
            raise BadArchive(str(error)) from error


class BadArchive(BadFile):
    """An archive that can't be unpacked."""


class Capped:
    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file = file
        self._left = most
        self._most = most

    def write(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise BadArchive(f"is too large: it may have {self._most} bytes")
        self._file.write(data)


async def _next(field: str, pieces: AsyncIterator[bytes]) -> bytes:
    """The next piece that is not empty; an empty one at the end."""
    with _fetching(field):
        async for piece in pieces:
            if piece:
                return piece
    return b""


@contextmanager
def _fetching(field: str) -> Iterator[None]:
    try:
        yield
    except TooLarge as error:
        raise BadInput(f"leads to too much: {error}", field=field) from error
    # Whatever it is that keeps the content from coming, to the job it is all one.
    except Exception as error:
        said = f"can't be had: {str(error) or type(error).__name__}"
        raise BadInput(said, field=field, code=ErrorCode.INPUT_UNAVAILABLE) from error


def _given(file: InputFile) -> bytes:
    """What was checked with the job."""
    return (file.text or "").encode() if file.base64 is None else a2b_base64(file.base64)


def _path(file: InputFile) -> str:
    return _checked(checked_path, file.path)


def _checked(check: Callable[[str], str], path: str) -> str:
    try:
        return check(path)
    except ValueError as error:
        raise BadFile(str(error)) from None


@contextmanager
def _telling(where: str, path_field: str, path: str) -> Iterator[None]:
    try:
        yield
    except BadArchive as error:
        raise BadInput(str(error), field=f"{where}.archive") from error
    except BadFile as error:
        raise BadInput(f"({path[:60]!r}) {error}", field=path_field) from error
    except OSError as error:
        said = f"({path[:60]!r}) can't be written: {error.strerror or error}"
        raise BadInput(said, field=where, code=ErrorCode.INPUT_UNAVAILABLE) from error
