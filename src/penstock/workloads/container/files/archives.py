"""Archives, unpacked into a tree of files: nothing of what they say is trusted.

Only files and folders are taken: links, devices and everything else refuse the whole archive. It
is read piece by piece and the caps are checked on the way, so that one that would become huge is
given up early, by what comes out of it and not by what it says of itself. Blocking code, meant
for a thread.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, BinaryIO, NamedTuple, TypeVar, cast

from penstock.workloads.container.config import InputRules
from penstock.workloads.container.files.tree import BadFile, Tree
from penstock.workloads.container.protocol.paths import checked_path

T = TypeVar("T")

_PIECE = 256 << 10
_SMALL = 1 << 20
"""Up to so many bytes no archive is a bomb, however small it was: a short text packs well."""
_HEADER = 8 << 10
"""Bytes of one header of a tar: `tarfile` needs a time for it that grows with its square."""
_LIST = 1 << 20
"""Bytes of a zip's list of files for every thousand that are allowed."""
_EXTENDED = b"xgXLK"
"""Kinds of tar headers whose content describes the entry that follows."""
_PAX = b"xgX"
_DIGITS = re.compile(rb"[0-9]{101}")
"""More in a row than a name has; `tarfile` would search through them again from each."""
_MOST_SHARED = 100
# What the readers of the standard library raise over an archive that is damaged or made up.
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    ValueError,
)


class Member(NamedTuple):
    name: str
    is_folder: bool
    executable: bool
    pieces: Iterable[bytes]


def unpack(
    archive: BinaryIO, kind: str, tree: Tree, rules: InputRules, *, folder: str = "."
) -> None:
    """Put everything below a folder of the tree. Raises BadFile, with a part of it unpacked."""
    size = archive.seek(0, os.SEEK_END)
    archive.seek(0)
    unpacked = UnpackedSize(max(_SMALL, int(size * rules.max_ratio)))
    members = _zip_members if kind == "zip" else _tar_members
    for number, member in enumerate(_sound(members(archive, unpacked, rules)), 1):
        if number > 2 * rules.max_files:
            raise BadFile(f"has more than {2 * rules.max_files} entries")
        try:
            _unpack(member, tree, folder)
        except BadFile as error:
            raise BadFile(f"has an entry {_shown(member.name)} that {error}") from None


def _unpack(member: Member, tree: Tree, folder: str) -> None:
    if member.is_folder:
        if not _is_top(member.name):
            tree.folder(_placed(folder, member.name))
        return
    with tree.file(_placed(folder, member.name), executable=member.executable) as write:
        for piece in _sound(member.pieces):
            write(piece)


def _placed(folder: str, name: str) -> str:
    try:
        path = checked_path(name)
        return path if folder == "." else checked_path(f"{folder}/{path}")
    except ValueError as error:
        raise BadFile(f"has a bad path: it {error}") from None


def _is_top(name: str) -> bool:
    """Whether it is the folder that was packed, as many programs put it first."""
    return not name.startswith("/") and all(part in ("", ".") for part in name.split("/"))


class UnpackedSize:
    """How much has come out of an archive."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0

    def count(self, size: int) -> None:
        self._total += size
        if self._total > self._most:
            raise BadFile(
                f"becomes more than {self._most} bytes, far more than an archive of its size may"
            )


def _sound(steps: Iterable[T]) -> Iterator[T]:
    """The same; what goes wrong with a reader is the archive's fault."""
    steps = iter(steps)
    while True:
        try:
            step = next(steps)
        except StopIteration:
            return
        except BadFile:
            raise
        except _DAMAGE as error:
            raise BadFile(f"is damaged: {str(error) or type(error).__name__}") from error
        yield step


# tar


def _tar_members(archive: BinaryIO, unpacked: UnpackedSize, rules: InputRules) -> Iterator[Member]:
    stream = ForwardReader(decompressed(archive), unpacked.count, most_extended=4 * rules.max_files)
    with tarfile.TarFile(fileobj=cast("IO[bytes]", stream)) as tar:
        while (found := tar.next()) is not None:
            check_shared(tar)
            if not (found.isdir() or found.isreg()):
                raise BadFile(f"has an entry {_shown(found.name)} that is {_tar_kind(found)}")
            if found.issparse() or found.size < 0:
                raise BadFile(f"has an entry {_shown(found.name)} whose size can't be believed")
            yield Member(
                found.name,
                found.isdir(),
                bool(found.mode & 0o111),
                stream.pieces(found.size) if found.isreg() else (),
            )
    stream.check_end()


def check_shared(tar: tarfile.TarFile) -> None:
    """Raise BadFile for many fields that hold for all entries: each gets a copy of them."""
    if len(tar.pax_headers) > _MOST_SHARED:
        raise BadFile(f"has more than {_MOST_SHARED} fields that hold for all entries")


def _tar_kind(found: tarfile.TarInfo) -> str:
    if found.issym() or found.islnk():
        return "a link"
    return "a device or a pipe" if found.isdev() else "neither a file nor a folder"


class ForwardReader:
    """A stream that `tarfile` can read on, and skip in, but not go back in.

    Its headers are short and well-formed: for others `tarfile` could need minutes, in which it
    lets no other thread run."""

    def __init__(
        self,
        stream: IO[bytes],
        count: Callable[[int], None],
        *,
        most_extended: int,
        header: int = _HEADER,
    ) -> None:
        """`count` is told how many bytes were read."""
        self._stream = stream
        self._count = count
        self._header, self._extended_left = header, most_extended
        self._describes = b""
        """The kind of header whose content is read next; empty before a header."""
        self._at = 0
        self._last = b""
        """What was read last."""

    def check_end(self) -> None:
        """`tarfile` takes a header that is damaged, or missing in part, for the end."""
        if self._last.strip(b"\0") or len(self._last) not in (0, tarfile.BLOCKSIZE):
            raise BadFile("is damaged: it ends where an entry should be")

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> int:
        if offset < self._at:
            raise BadFile("is damaged: an entry lies before the one in front of it")
        for _ in self.pieces(offset - self._at):
            pass
        return self._at

    def read(self, size: int) -> bytes:
        # Headers are read whole; their length stands in the archive.
        if not 0 <= size <= self._header:
            raise BadFile(f"has a header of {size} bytes")
        data = self._read(size)
        kind, self._describes = self._describes, b""
        if kind and kind in _PAX:
            _check_pax(data)
        elif not kind and (found := data[156:157]) and found in _EXTENDED:
            self._describes = found
            self._extended_left -= 1
            if self._extended_left < 0:
                raise BadFile("has too many extended headers")
        return data

    def _read(self, size: int) -> bytes:
        self._last = self._stream.read(size)
        self._at += len(self._last)
        self._count(len(self._last))
        return self._last

    def pieces(self, size: int) -> Iterator[bytes]:
        while size:
            if not (data := self._read(min(size, _PIECE))):
                raise BadFile("is damaged: it ends in the middle of an entry")
            size -= len(data)
            yield data


def _check_pax(data: bytes) -> None:
    """Raise BadFile for what is not a list of records, each with its length in front."""
    records, at = data.rstrip(b"\0"), 0
    while at < len(records):
        length, _, _ = records[at : at + 8].partition(b" ")
        end = at + (int(length) if length.isdigit() else 0)
        record = records[at:end]
        if len(record) != end - at or not record.endswith(b"\n") or b"=" not in record:
            raise BadFile("is damaged: it has an extended header that is not one")
        at = end
    if _DIGITS.search(records):
        raise BadFile("has an extended header with an endless number")


def decompressed(archive: BinaryIO) -> BinaryIO:
    """The archive itself, or what it unpacks to; what damage raises is left to the caller."""
    start = archive.read(6)
    archive.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=archive))
    if start.startswith(b"BZh"):
        return cast("BinaryIO", bz2.BZ2File(archive))
    if start == b"\xfd7zXZ\0":
        # A dictionary takes memory only as far as it is filled, which is capped.
        return cast("BinaryIO", lzma.LZMAFile(archive))
    return archive


# zip


def _zip_members(archive: BinaryIO, unpacked: UnpackedSize, rules: InputRules) -> Iterator[Member]:
    most = _LIST * (1 + rules.max_files // 1000)
    with zipfile.ZipFile(cast("IO[bytes]", CappedFile(archive, most))) as found:
        for info in found.infolist():
            kind = stat.S_IFMT(mode := info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                what = "a link" if kind == stat.S_IFLNK else "neither a file nor a folder"
                raise BadFile(f"has an entry {_shown(info.filename)} that is {what}")
            if info.flag_bits & 1:
                raise BadFile(f"has an entry {_shown(info.filename)} that is encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise BadFile(f"has an entry {_shown(info.filename)} that is packed in a rare way")
            is_folder = info.is_dir() or kind == stat.S_IFDIR
            pieces = () if is_folder else _zip_pieces(found, info, unpacked)
            # The name as it was: zipfile itself cuts one at a NUL.
            yield Member(info.orig_filename, is_folder, bool(mode & 0o111), pieces)


def _zip_pieces(
    found: zipfile.ZipFile, info: zipfile.ZipInfo, unpacked: UnpackedSize
) -> Iterator[bytes]:
    with found.open(info) as file:
        while data := file.read(_PIECE):
            unpacked.count(len(data))
            yield data


class CappedFile:
    """A file of which only so much is read at once: a zip's whole list of files is one read."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file = file
        self._most = most

    def read(self, size: int = -1) -> bytes:
        if size > self._most:
            raise BadFile(f"has a list of files that is {size} bytes long")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True


def _shown(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")
