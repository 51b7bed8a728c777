"""Whatever is written: what is kept is the stream's, at its place, and reads as the stream does."""

from __future__ import annotations

from codecs import getincrementaldecoder
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.workloads.container.files import output as kept
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.job import Stream

OUT = Stream.STDOUT

# Bytes that make characters, halves of characters, and nonsense.
BYTES = st.lists(
    st.one_of(
        st.sampled_from(
            [b"a", b"\n", "é".encode(), "€".encode(), "😀".encode(), "\U0010ffff".encode()]
        ),
        st.sampled_from(
            [b"\x80", b"\xbf", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0", b"\xc0", b"\xff"]
        ),
        st.binary(min_size=1, max_size=3),
    ),
    max_size=20,
).map(b"".join)
WRITES = st.lists(BYTES, max_size=12)
LIMITS = st.integers(min_value=1, max_value=60)


def whole(data: bytes, *, front: bool) -> bytes:
    """Without the part of a character at a cut."""
    if front:
        decoder = getincrementaldecoder("utf-8")("replace")
        decoder.decode(data)
        return data.removesuffix(decoder.getstate()[0])
    inside = next((at for at, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
    return data[min(inside, 3) :]


def expected_text(data: bytes, limit: int) -> str:
    head, tail = (limit + 1) // 2, limit // 2
    if len(data) <= limit:
        return data.decode(errors="replace")
    front = whole(data[:head], front=True)
    back = whole(data[len(data) - tail :], front=False)
    left = len(data) - len(front) - len(back)
    text = front.decode(errors="replace")
    if text and not text.endswith("\n"):
        text += "\n"
    line = f"[… {left:,} byte{'s' if left > 1 else ''} left out …]\n"
    return text + line + back.decode(errors="replace")


def all_pages(output: Output, size: int) -> list[tuple[int, bytes]]:
    pages = []
    at = 0
    while True:
        page = output.page(OUT, at, size)
        assert page.offset == at + page.skipped
        assert page.next == page.offset + len(page.data)
        if page.data:
            pages.append((page.offset, page.data))
        at = page.next
        if page.end:
            return pages


def check(output: Output, stream: bytes, limit: int, size: int) -> None:
    head, tail = (limit + 1) // 2, limit // 2
    wanted = set(range(min(head, len(stream)))) | set(
        range(max(len(stream) - tail, 0), len(stream))
    )
    got: dict[int, int] = {}
    for start, data in all_pages(output, size):
        assert stream[start : start + len(data)] == data
        got.update(enumerate(data, start))
    assert set(got) == wanted
    count = output.count(OUT)
    assert (count.bytes, count.kept) == (len(stream), len(wanted))
    assert output.text(OUT) == expected_text(stream, limit)


@given(WRITES, LIMITS, st.integers(1, 30), st.integers(1, 200))
@example([b"\xe2\x82", b"a" * 50], 4, 3, 1)
@example([b"abcdefgh", "€€€€€€".encode()], 8, 30, 1)
def test_pages_put_together_are_the_stream_without_its_middle(
    writes: list[bytes], limit: int, size: int, segment: int
) -> None:
    stream = b"".join(writes)
    with TemporaryDirectory() as folder:
        smallest, kept.SMALLEST = kept.SMALLEST, segment
        try:
            output = Output(Path(folder) / "logs", limit)
            for data in writes:
                output.write(OUT, data)
            output.end()
            check(output, stream, limit, size)
            output.close()
            again = Output.reopen(Path(folder) / "logs", limit)
            again.end()
            check(again, stream, limit, size)
        finally:
            kept.SMALLEST = smallest


@given(WRITES, WRITES, LIMITS, st.integers(1, 200))
def test_a_reopened_output_goes_on_as_if_nothing_had_been(
    first: list[bytes], second: list[bytes], limit: int, segment: int
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "logs"
        smallest, kept.SMALLEST = kept.SMALLEST, segment
        try:
            output = Output(folder, limit)
            for data in first:
                output.write(OUT, data)
            output.close()
            output = Output.reopen(folder, limit)
            for data in second:
                output.write(OUT, data)
            output.end()
            check(output, b"".join(first + second), limit, 7)
            output.close()
        finally:
            kept.SMALLEST = smallest


@given(BYTES, st.lists(st.integers(0, 40)), LIMITS)
def test_text_does_not_depend_on_how_the_bytes_were_cut_into_writes(
    stream: bytes, cuts: list[int], limit: int
) -> None:
    edges = [0, *sorted(cuts), len(stream)]
    with TemporaryDirectory() as folder:
        output = Output(Path(folder), limit)
        for start, stop in pairwise(edges):
            output.write(OUT, stream[start:stop])
        output.end()
        assert output.text(OUT) == expected_text(stream, limit)
        output.close()
