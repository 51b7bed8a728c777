"""A job's two streams: bounded, readable while they grow, and there after a crash."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.testing.aio import run_async
from penstock.workloads.container.files import output as kept
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.job import Stream, StreamCount

OUT, ERR = Stream.STDOUT, Stream.STDERR


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "job" / "logs"


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# What is kept


@pytest.mark.parametrize("total", [0, 5, 1000, 1001, 3000, 20_000])
@run_async
async def test_what_is_read_while_it_is_written_is_what_is_kept_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    monkeypatch.setattr(kept, "_PIECE", 150)
    output, data = Output(folder, 2000), random.Random(total).randbytes(total)

    async def read() -> bytes:
        return b"".join([piece async for piece in output.pieces(OUT)])

    reading = asyncio.create_task(read())
    for start in range(0, total, 70):
        output.write(OUT, data[start : start + 70])
        await asyncio.sleep(0)
    output.end()
    assert await reading == (data if total <= 2000 else data[:1000] + data[-1000:])
    output.close()


def test_the_two_streams_are_kept_apart(folder: Path) -> None:
    output = Output(folder, 100)
    output.write(OUT, b"one")
    output.write(ERR, b"two")
    output.write(OUT, b"three")
    assert (output.text(OUT), output.text(ERR)) == ("onethree", "two")
    assert output.count(OUT) == StreamCount(8, 8, False)
    output.close()


def test_the_start_and_the_end_are_kept_and_a_line_tells_what_lies_between(
    folder: Path,
) -> None:
    output = Output(folder, 20)
    for number in range(2000):
        output.write(OUT, b"line %04d\n" % number)
    output.end()
    assert output.text(OUT) == "line 0000\n[… 19,980 bytes left out …]\nline 1999\n"
    count = output.count(OUT)
    assert (count.bytes, count.kept, count.truncated) == (20_000, 20, True)
    output.close()


def test_a_stream_that_just_fits_is_kept_whole(folder: Path) -> None:
    output = Output(folder, 7)
    output.write(OUT, b"1234")
    output.write(OUT, b"567")
    assert output.text(OUT) == "1234567"
    assert not output.count(OUT).truncated
    output.close()


def test_a_limit_of_one_byte_keeps_the_first(folder: Path) -> None:
    output = Output(folder, 1)
    output.write(OUT, b"abc")
    output.end()
    assert output.text(OUT) == "a\n[… 2 bytes left out …]\n"
    assert output.count(OUT) == StreamCount(3, 1, False)
    output.close()


def test_a_character_at_a_cut_is_left_out_as_a_whole(folder: Path) -> None:
    output = Output(folder, 8)
    output.write(OUT, "ab€xxxxxx€yz".encode())
    output.end()
    # Two of the three bytes of each '€' are within the kept ones.
    assert output.text(OUT) == "ab\n[… 12 bytes left out …]\nyz"


def test_wrong_bytes_are_replaced_and_right_ones_are_not(folder: Path) -> None:
    output = Output(folder, 1000)
    for byte in "naïve 😀 ".encode() + b"\xff\xe2\x82 end":
        output.write(OUT, bytes([byte]))
    assert output.text(OUT) == "naïve 😀 \ufffd\ufffd end"


def test_an_unfinished_character_is_not_shown_until_it_is_certain(folder: Path) -> None:
    output = Output(folder, 1000)
    output.write(OUT, "a😀".encode()[:-1])
    assert output.text(OUT) == "a"
    output.end()
    assert output.text(OUT) == "a\ufffd"


def test_a_new_output_begins_with_nothing_though_files_are_there(tmp_path: Path) -> None:
    old = Output(tmp_path / "logs", 1000)
    old.write(OUT, b"old")
    old.missed()
    old.close()
    new = Output(tmp_path / "logs", 1000)
    assert new.count(OUT) == StreamCount(0, 0, False)
    new.write(OUT, b"new")
    new.close()
    assert Output.reopen(tmp_path / "logs", 1000).text(OUT) == "new"


def test_nobody_but_the_worker_can_read_the_files(tmp_path: Path) -> None:
    output = Output(tmp_path / "job" / "logs", 10)
    output.write(OUT, b"x" * 100)
    output.close()
    for path in (tmp_path / "job").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "job").stat().st_mode & 0o077 == 0


# Whatever is written


_GIGABYTE = """
import sys, tracemalloc
from pathlib import Path
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.job import Stream, StreamCount

OUT, output = Stream.STDOUT, Output(Path(sys.argv[1]), 1 << 20)
chunk = bytes(range(256)) * 256
tracemalloc.start()
for _ in range((1 << 30) // len(chunk)):
    output.write(OUT, chunk)
print(tracemalloc.get_traced_memory()[1])
assert output.count(OUT) == StreamCount(1 << 30, 1 << 20, False)
assert output.page(OUT, -10, 10).data == chunk[-10:]
output.close()
"""


def test_a_gigabyte_takes_neither_memory_nor_disk(tmp_path: Path) -> None:
    """In a process of its own: threads that other tests left behind would be counted as well."""
    argv = [sys.executable, "-c", _GIGABYTE, str(tmp_path / "logs")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1 << 20
    assert on_disk(tmp_path / "logs") < 2 << 20


def test_one_huge_write_is_cut_too(tmp_path: Path) -> None:
    output = Output(tmp_path / "logs", 100)
    output.write(OUT, b"a" * 50 + b"b" * 10_000_000 + b"c" * 50)
    assert on_disk(tmp_path / "logs") < 3 * kept.SMALLEST
    output.end()
    assert output.text(OUT) == "a" * 50 + "\n[… 10,000,000 bytes left out …]\n" + "c" * 50
    output.close()


def test_many_small_writes_under_a_small_limit_are_few_files(tmp_path: Path) -> None:
    output = Output(tmp_path / "logs", 2)
    for _ in range(10_000):
        output.write(OUT, b"0123456789")
    assert len(list((tmp_path / "logs").iterdir())) <= 3
    assert on_disk(tmp_path / "logs") < 3 * kept.SMALLEST
    output.close()


def test_a_full_disk_costs_bytes_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(tmp_path / "logs", 100)
    output.write(OUT, b"before ")
    write = os.write

    def full(handle: int, data: memoryview) -> int:
        if len(data) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[:2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(3):
            output.write(OUT, b"12")
            output.write(OUT, b"345")
    output.write(OUT, b" after")
    output.end()
    assert output.count(OUT).bytes == 7 + 15 + 6
    text = output.text(OUT)
    assert text.startswith("before \n[… 2 bytes left out …]\n34\n[…")
    assert text.endswith("[… 1 byte left out …]\n after")
    output.close()
    again = Output.reopen(tmp_path / "logs", 100)
    again.end()
    assert again.text(OUT) == text


# Pages


def test_a_page_is_found_by_the_offset_in_the_stream(folder: Path) -> None:
    output = Output(folder, 10)
    output.write(OUT, b"0123456789abcdefghij")
    page = output.page(OUT, 2, 2)
    assert (page.offset, page.data, page.next, page.skipped, page.end) == (2, b"23", 4, 0, False)
    page = output.page(OUT, 4, 100)
    assert (page.offset, page.data, page.next) == (4, b"4", 5)
    page = output.page(OUT, 5, 100)
    assert (page.offset, page.data, page.next, page.skipped) == (15, b"fghij", 20, 10)
    output.close()


def test_a_negative_offset_counts_from_the_end(folder: Path) -> None:
    output = Output(folder, 10)
    output.write(OUT, b"0123456789abcdefghij")
    assert output.page(OUT, -3, 100).data == b"hij"
    page = output.page(OUT, -8, 100)
    assert (page.offset, page.data, page.skipped) == (15, b"fghij", 3)
    assert output.page(OUT, -1000, 2).data == b"01"
    output.close()


def test_a_page_beyond_the_end_leads_back_to_the_end(folder: Path) -> None:
    output = Output(folder, 10)
    output.write(OUT, b"abc")
    page = output.page(OUT, 10**20, 10)
    assert (page.offset, page.data, page.next, page.skipped) == (3, b"", 3, 0)


def test_the_last_page_says_so_only_after_the_end(folder: Path) -> None:
    output = Output(folder, 10)
    output.write(OUT, b"abc")
    assert not output.page(OUT, 0, 10).end
    output.end()
    assert output.page(OUT, 0, 10).end
    assert not output.page(OUT, 0, 2).end
    assert not output.page(OUT, 0, 0).end
    assert output.page(ERR, 0, 10).end


def test_what_is_kept_can_be_read_after_close(folder: Path) -> None:
    output = Output(folder, 10)
    output.write(OUT, b"abc")
    output.close()
    assert output.page(OUT, 0, 10).data == b"abc"
    with pytest.raises(ValueError, match="closed"):
        output.write(OUT, b"d")


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    output = Output(tmp_path / "logs", 100)
    for _ in range(100):
        output.write(OUT, b"x" * 10_000)
        output.text(OUT)
        output.page(OUT, 0, 10)
    output.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_in_another_thread_sees_no_wrong_byte(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "SMALLEST", 100)
    output = Output(folder, 1000)
    pattern = bytes(range(251)) * 40
    problems: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for offset in (0, -300):
                page = output.page(OUT, offset, 1000)
                start = page.offset % 251
                if page.data != pattern[start : start + len(page.data)]:
                    problems.append(f"{page.offset}: {page.data!r}")
            output.text(OUT)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(5000):
        output.write(OUT, pattern[:251])
    done.set()
    reader.join()
    output.close()
    assert not problems


# Waiting and listening


@run_async
async def test_everyone_who_waits_is_woken_by_the_byte_they_wait_for(folder: Path) -> None:
    output = Output(folder, 100)
    early = [asyncio.create_task(output.more(OUT, 0, 30)) for _ in range(100)]
    late = asyncio.create_task(output.more(OUT, 5, 30))
    other = asyncio.create_task(output.more(ERR, 0, 30))
    await asyncio.sleep(0)
    output.write(OUT, b"abc")
    await asyncio.gather(*early)
    assert not late.done()
    output.write(OUT, b"def")
    await late
    assert not other.done()
    output.end()
    await other


@run_async
async def test_who_asks_for_what_is_there_does_not_wait(folder: Path) -> None:
    output = Output(folder, 100)
    output.write(OUT, b"abc")
    await output.more(OUT, 2, 30)
    await output.more(OUT, -1, 30)
    output.end()
    await output.more(OUT, 3, 30)
    await output.more(ERR, 0, 30)


@run_async
async def test_patience_ends_and_leaves_nothing_behind(folder: Path) -> None:
    output = Output(folder, 100)
    await output.more(OUT, 0, 0)
    await output.more(OUT, 0, 0.001)
    waiting = asyncio.create_task(output.more(OUT, 0, 30))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    output.write(OUT, b"x")
    output.close()


@run_async
async def test_close_wakes_who_waits(folder: Path) -> None:
    output = Output(folder, 100)
    waiting = asyncio.create_task(output.more(OUT, 0, 30))
    await asyncio.sleep(0)
    output.close()
    await waiting


def test_a_listener_hears_also_what_is_not_kept_and_can_do_no_harm(folder: Path) -> None:
    output = Output(folder, 2)
    heard: list[tuple[Stream, bytes]] = []

    def fail(stream: Stream, data: bytes) -> None:
        raise RuntimeError("no")

    output.listen(fail)
    output.listen(lambda stream, data: heard.append((stream, data)))
    output.write(OUT, b"abcdef")
    output.write(ERR, b"g")
    assert heard == [(OUT, b"abcdef"), (ERR, b"g")]


# After a restart


def test_a_gap_is_remembered(folder: Path) -> None:
    output = Output(folder, 100)
    output.write(OUT, b"abc")
    assert not output.count(OUT).gap
    output.missed()
    assert output.count(OUT).gap
    output.close()
    assert Output.reopen(folder, 100).count(ERR).gap


PATTERN = bytes(value * 7 % 251 for value in range(251)) * 5000

CHILD = """
import mmap, random, struct, sys
from pathlib import Path
from penstock.workloads.container.job import Stream
from penstock.workloads.container.files import output as kept
from penstock.workloads.container.files.output import Output

folder, seed, limit, kept.SMALLEST = Path(sys.argv[1]), *map(int, sys.argv[2:])
chance = random.Random(seed)
pattern = bytes(value * 7 % 251 for value in range(251)) * 5000
with open(folder / "told", "r+b") as file:
    told = mmap.mmap(file.fileno(), 16)
output = Output(folder / "logs", limit)
total = 0
print("ready", flush=True)
while True:
    size = chance.choice([1, 10, 100, 5000, 100_000])
    start = total % 251
    struct.pack_into("q", told, 8, total + size)
    output.write(Stream.STDOUT, pattern[start : start + size])
    total += size
    struct.pack_into("q", told, 0, total)
"""


def test_a_worker_that_is_killed_in_mid_write_leaves_the_truth(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    limit = chance.choice([1, 101, 4096, 1 << 20])
    smallest = chance.choice([50, 5000, kept.SMALLEST])
    (tmp_path / "told").write_bytes(bytes(16))
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(seed), str(limit), str(smallest)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(chance.random() * 0.1)
        child.send_signal(signal.SIGKILL)
    with open(tmp_path / "told", "rb") as file:
        told = mmap.mmap(file.fileno(), 16, access=mmap.ACCESS_READ)
        done, begun = struct.unpack("qq", told)
        told.close()

    output = Output.reopen(tmp_path / "logs", limit)
    count = output.count(OUT)
    assert done <= count.bytes <= begun, f"seed {seed}"
    assert count.kept <= limit
    assert count.kept >= min(done, (limit + 1) // 2)
    output.end()
    found, at = 0, 0
    while not (page := output.page(OUT, at, 100_000)).end or page.data:
        start = page.offset % 251
        assert page.data == PATTERN[start : start + len(page.data)], f"seed {seed}"
        found, at = found + len(page.data), page.next
    assert found == count.kept
    output.write(OUT, b"and on")
    assert output.count(OUT).bytes == count.bytes + 6
    output.close()
