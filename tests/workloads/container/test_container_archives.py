"""Archives: what is sound is unpacked, and nothing else gets anywhere."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import resource
import stat
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.workloads.container.config import InputRules
from penstock.workloads.container.files.archives import unpack
from penstock.workloads.container.files.tree import BadFile, Tree

Packer = Callable[[dict[str, bytes]], tuple[str, bytes]]


def tar_of(*entries: tuple[tarfile.TarInfo, bytes], **options: object) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as tar:  # type: ignore[call-overload]
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def zip_of(*entries: tuple[zipfile.ZipInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for info, data in entries:
            packed.writestr(info, data)
    return file.getvalue()


def zip_entry(name: str, mode: int = 0o644, method: int = zipfile.ZIP_DEFLATED) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    info.compress_type = method
    return info


def plain_tar(files: dict[str, bytes]) -> tuple[str, bytes]:
    return "tar", tar_of(*((entry(name), data) for name, data in files.items()))


def gzipped(files: dict[str, bytes]) -> tuple[str, bytes]:
    return "tar", gzip.compress(plain_tar(files)[1])


def bzipped(files: dict[str, bytes]) -> tuple[str, bytes]:
    return "tar", bz2.compress(plain_tar(files)[1])


def xzipped(files: dict[str, bytes]) -> tuple[str, bytes]:
    return "tar", lzma.compress(plain_tar(files)[1])


def zipped(files: dict[str, bytes]) -> tuple[str, bytes]:
    return "zip", zip_of(*((zip_entry(name), data) for name, data in files.items()))


@pytest.fixture(params=[plain_tar, gzipped, bzipped, xzipped, zipped], ids=lambda p: p.__name__)
def pack(request: pytest.FixtureRequest) -> Packer:
    packer: Packer = request.param
    return packer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "above" / "input"


def unpacked(
    root: Path, kind: str, data: bytes, rules: InputRules | None = None, folder: str = "."
) -> dict[str, bytes]:
    rules = rules or InputRules()
    root.parent.mkdir(exist_ok=True)
    tree = Tree(root, rules)
    unpack(io.BytesIO(data), kind, tree, rules, folder=folder)
    tree.seal()
    return found(root)


def found(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def refused(
    root: Path, kind: str, data: bytes, match: str, rules: InputRules | None = None
) -> None:
    with pytest.raises(BadFile, match=match):
        unpacked(root, kind, data, rules)
    assert [path.name for path in root.parent.iterdir()] == [root.name]


# What is taken


def test_every_kind_of_archive_is_unpacked(root: Path, pack: Packer) -> None:
    files = {"a.txt": b"one", "b/c/d.bin": random.Random(3).randbytes(600_000), "b/empty": b""}
    assert unpacked(root, *pack(files)) == files


def test_an_archive_goes_into_the_folder_it_is_for(root: Path, pack: Packer) -> None:
    files = {"a": b"one", "b/c": b"two"}
    assert unpacked(root, *pack(files), folder="x/y") == {"x/y/a": b"one", "x/y/b/c": b"two"}


def test_a_folder_packed_as_dot_is_that_folder(root: Path) -> None:
    data = tar_of(
        (entry(".", tarfile.DIRTYPE), b""),
        (entry("./a", tarfile.DIRTYPE), b""),
        (entry("./a/f"), b"x"),
        (entry("./empty", tarfile.DIRTYPE), b""),
    )
    assert unpacked(root, "tar", data) == {"a/f": b"x"}
    assert (root / "empty").is_dir()


def test_what_was_executable_is(root: Path) -> None:
    data = tar_of((entry("run", mode=0o4755), b"#!"), (entry("read", mode=0o6600), b""))
    unpacked(root, "tar", data)
    assert stat.S_IMODE((root / "run").stat().st_mode) == 0o555
    assert stat.S_IMODE((root / "read").stat().st_mode) == 0o444
    assert stat.S_IMODE(root.stat().st_mode) == 0o555


def test_a_zip_keeps_executables_and_folders_too(root: Path) -> None:
    data = zip_of(
        (zip_entry("d/", stat.S_IFDIR | 0o755, zipfile.ZIP_STORED), b""),
        (zip_entry("run", stat.S_IFREG | 0o755), b"#!"),
    )
    assert unpacked(root, "zip", data) == {"run": b"#!"}
    assert (root / "d").is_dir()
    assert stat.S_IMODE((root / "run").stat().st_mode) == 0o555


def test_long_names_are_understood(root: Path) -> None:
    name = "/".join(["a" * 100] * 5) + "/é"
    for number, style in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        data = tar_of((entry(name), b"x"), format=style)
        assert unpacked(root.with_name(f"{number}"), "tar", data) == {name: b"x"}


def test_xz_of_several_streams_is_one_archive(root: Path) -> None:
    data = plain_tar({"a": b"x" * 1000})[1]
    packed = lzma.compress(data[:700]) + lzma.compress(data[700:])
    assert unpacked(root, "tar", packed) == {"a": b"x" * 1000}


def test_a_tar_without_its_end_mark_is_whole(root: Path) -> None:
    data = plain_tar({"a": b"x" * 512})[1][:1024]
    assert unpacked(root, "tar", data) == {"a": b"x" * 512}


# What is not


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../up", "a/../../up", "a\\b", "C:/x", "a\nb", "x" * 256, "d/" * 40 + "f"],
)
def test_a_name_that_leads_elsewhere_refuses_the_archive(root: Path, name: str) -> None:
    refused(root, "tar", tar_of((entry("ok"), b""), (entry(name), b"x")), "bad path")
    root.rename(root.with_name("first"))
    with pytest.raises(BadFile, match="bad path"):
        unpacked(root, "zip", zip_of((zip_entry(name), b"x")))


def test_a_name_with_a_nul_is_not_cut_at_it(root: Path) -> None:
    data = zip_of((zip_entry("fine#.sh"), b"x")).replace(b"fine#.sh", b"fine\0.sh")
    refused(root, "zip", data, "NUL")


def test_a_name_that_is_not_utf_8_is_refused(root: Path) -> None:
    data = bytearray(tar_of((entry("abc"), b"x"), format=tarfile.USTAR_FORMAT))
    data[0] = 0xFF
    checksum = sum(data[:148]) + 8 * 32 + sum(data[156:512])
    data[148:156] = b"%06o\0 " % checksum
    refused(root, "tar", bytes(data), "not UTF-8")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "a link"),
        (tarfile.LNKTYPE, "a link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"),
        (b"Z", "neither"),
    ],
)
def test_only_files_and_folders_are_taken(root: Path, kind: bytes, said: str) -> None:
    data = tar_of((entry("ok"), b"x"), (entry("bad", kind, linkname="/etc/passwd"), b""))
    refused(root, "tar", data, said)


def test_a_file_through_a_link_of_the_same_archive_is_never_written(root: Path) -> None:
    data = tar_of((entry("d", tarfile.SYMTYPE, linkname=".."), b""), (entry("d/up"), b"x"))
    refused(root, "tar", data, "a link")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFBLK])
def test_a_zip_has_files_and_folders_only_too(root: Path, kind: int) -> None:
    refused(root, "zip", zip_of((zip_entry("l", kind | 0o777), b"/etc")), "a link|neither")


def test_a_sparse_file_is_refused(root: Path) -> None:
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s"}
    headers["GNU.sparse.realsize"] = str(1 << 50)
    info = entry("s", pax_headers=headers)
    data = tar_of((info, b"1\n0\n0\n".ljust(512, b"\0")), format=tarfile.PAX_FORMAT)
    refused(root, "tar", data, "size can't be believed")


def test_the_same_path_twice_is_refused(root: Path) -> None:
    refused(root, "tar", tar_of((entry("a"), b"1"), (entry("./a"), b"2")), "is there already")


def test_a_path_can_not_be_a_file_and_a_folder(root: Path) -> None:
    refused(root, "tar", tar_of((entry("a"), b"1"), (entry("a/b"), b"2")), "where a file is")
    folder_second = tar_of((entry("a"), b"1"), (entry("a", tarfile.DIRTYPE), b""))
    refused(root.parent / "2" / "input", "tar", folder_second, "where a file is")
    file_second = tar_of((entry("a/b"), b"1"), (entry("a"), b"2"))
    refused(root.parent / "3" / "input", "tar", file_second, "is there already")


def test_an_encrypted_zip_is_refused(root: Path) -> None:
    data = bytearray(zip_of((zip_entry("a"), b"x")))
    data[data.index(b"PK\1\2") + 8] |= 1
    refused(root, "zip", bytes(data), "encrypted")


def test_rare_ways_to_pack_a_zip_are_refused(root: Path) -> None:
    data = zip_of((zip_entry("a", method=zipfile.ZIP_LZMA), b"x"))
    refused(root, "zip", data, "rare way")


# Caps


def test_too_many_files_are_refused(root: Path, pack: Packer) -> None:
    files = {f"f{number}": b"" for number in range(11)}
    refused(root, *pack(files), "one too many", InputRules(max_files=10))


def test_too_many_folders_are_refused(root: Path) -> None:
    data = tar_of(*((entry(f"d{number}", tarfile.DIRTYPE), b"") for number in range(11)))
    refused(root, "tar", data, "too many folders", InputRules(max_files=10))
    deep = tar_of((entry("/".join("abcdefghijkl")), b""))
    refused(root.parent / "2" / "input", "tar", deep, "too many folders", InputRules(max_files=10))


def test_the_same_folder_a_million_times_is_refused(root: Path) -> None:
    data = tar_of(*((entry("d", tarfile.DIRTYPE), b"") for _ in range(50)))
    refused(root, "tar", data, "more than 20 entries", InputRules(max_files=10))


def test_a_file_too_large_is_refused(root: Path, pack: Packer) -> None:
    rules = InputRules(max_file_bytes=1000)
    refused(root, *pack({"a": os.urandom(1001)}), "a file may have 1000 bytes", rules)


def test_too_much_in_all_is_refused(root: Path, pack: Packer) -> None:
    files = {f"f{number}": os.urandom(600) for number in range(2)}
    refused(root, *pack(files), "all files together", InputRules(max_bytes=1000))


@pytest.mark.parametrize("pack", [gzipped, bzipped, xzipped, zipped])
def test_a_bomb_is_given_up_early(root: Path, pack: Packer) -> None:
    packed = pack({"zeros": bytes(8 << 20)})
    refused(root, *packed, "far more than an archive of its size")
    assert sum(map(len, found(root).values())) < 2 << 20


def test_zip_entries_that_share_their_bytes_are_a_bomb_too(root: Path) -> None:
    data = zip_of((zip_entry("a"), bytes(200 << 10)))
    at = data.index(b"PK\1\2")
    end = data.index(b"PK\5\6")
    listed = b"".join(data[at:end].replace(b"a", b"%c" % (97 + n)) for n in range(26))
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 26, 26, len(listed), at, 0)
    # Each points to the same local header, whose name is then wrong for all but one.
    refused(root, "zip", data[:at] + listed + tail, "damaged|far more")


def test_a_small_text_may_have_packed_well(root: Path) -> None:
    packed = gzipped({"spaces": b" " * 500_000})
    assert len(unpacked(root, *packed)["spaces"]) == 500_000


def test_a_huge_header_is_not_read(root: Path) -> None:
    header = entry("x", b"x")
    header.size = 1 << 40
    data = header.tobuf(tarfile.GNU_FORMAT) + bytes(10_000)
    refused(root, "tar", data, "header of")


def test_headers_upon_headers_are_given_up(root: Path) -> None:
    one = entry("x", b"g").tobuf(tarfile.USTAR_FORMAT)
    refused(root, "tar", one * 5000, "damaged")


def test_a_negative_size_leads_nowhere(root: Path) -> None:
    header = entry("x")
    header.size = -512
    refused(root, "tar", header.tobuf(tarfile.GNU_FORMAT) * 3, "size can't|damaged")


def test_a_list_of_files_that_is_huge_is_not_read(root: Path) -> None:
    size = 3 << 20
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, size, 0, 0)
    refused(root, "zip", b"PK\1\2" + bytes(size - 4) + tail, "list of files")


def test_xz_that_asks_for_a_lot_of_memory_takes_none(root: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]
    data = bytearray(lzma.compress(plain_tar({"a": b"x"})[1], filters=filters))
    # The size of the dictionary stands in the block's header, which ends with its own checksum.
    start, length = 12, (data[12] + 1) * 4
    block = data[start : start + length]
    where = block.index(b"\x21\x01") + 2
    block[where] = 39
    block[-4:] = struct.pack("<L", zlib.crc32(bytes(block[:-4])))
    data[start : start + length] = block
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(BadFile):  # where the machine does not promise it that much
        unpacked(root, "tar", bytes(data))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_large_file_is_never_in_memory_as_a_whole(root: Path, tmp_path: Path) -> None:
    kind, data = gzipped({"big": random.Random(1).randbytes(1 << 20) * 20})
    (tmp_path / "archive").write_bytes(data)
    root.parent.mkdir()
    rules = InputRules()
    tracemalloc.start()
    try:
        with open(tmp_path / "archive", "rb") as file:
            unpack(file, kind, Tree(root, rules), rules)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (root / "big").stat().st_size == 20 << 20
    assert peak < 4 << 20


# Damage


def test_half_an_archive_is_refused(root: Path, pack: Packer) -> None:
    kind, data = pack({"a": os.urandom(100_000), "b": os.urandom(100_000)})
    refused(root, kind, data[: len(data) // 2], "damaged")


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize(
    "data", [b"", b"nonsense", b"\x1f\x8b", b"BZh9", b"\xfd7zXZ\0", b"PK\3\4" * 99]
)
def test_what_is_no_archive_is_refused(root: Path, kind: str, data: bytes) -> None:
    refused(root, kind, data, "damaged")


def test_a_header_that_is_damaged_is_not_taken_for_the_end(root: Path) -> None:
    data = bytearray(plain_tar({"a": b"x" * 512, "b": b"y"})[1])
    data[1024 + 5] ^= 0xFF
    refused(root, "tar", bytes(data), "ends where an entry should be")


def test_a_zip_whose_content_is_not_what_was_packed_is_refused(root: Path) -> None:
    info = zip_entry("a", method=zipfile.ZIP_STORED)
    data = zip_of((info, b"content")).replace(b"content", b"CONTENT", 1)
    refused(root, "zip", data, "damaged.*CRC")


def test_no_damage_does_harm(tmp_path: Path, pack: Packer) -> None:
    chance = random.Random(7)
    kind, sound = pack({"a/b": b"some text " * 50, "c": bytes(1000), "d/e/f": b""})
    rules = InputRules(max_files=20, max_file_bytes=100_000, max_bytes=200_000)
    outcomes = set()
    for number in range(150):
        data = bytearray(sound)
        for _ in range(chance.choice([1, 1, 3, 20])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        root = tmp_path / f"{number}" / "input"
        root.parent.mkdir()
        try:
            unpacked(root, kind, bytes(data), rules)
            outcomes.add("unpacked")
        except BadFile:
            outcomes.add("refused")
        assert [path.name for path in root.parent.iterdir()] == ["input"]
        assert not any(path.is_symlink() for path in root.rglob("*"))
    assert "refused" in outcomes
