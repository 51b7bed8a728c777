from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.pipes.wire.connection import Splitter, head_of
from penstock.workloads.pipes.wire.messages import (
    HELLO_LIMITS,
    BadFrame,
    Kind,
    Refused,
    limits,
    steps_limit,
)

LIMITS = limits(steps=1 << 20)
# Around the sizes at which the splitter takes another way.
SIZES = st.one_of(
    st.integers(0, 40),
    st.sampled_from([16383, 16384, 16385, 65530, 65531, 65532, 65536, 65537, 200_000]),
)


def fed(splitter: Splitter, data: bytes) -> list[tuple[Kind, bytes]]:
    return [(kind, bytes(payload)) for kind, payload in splitter.feed(data)]


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<IB", len(payload), kind) + payload


@given(st.lists(SIZES, max_size=6), st.data())
def test_frames_come_out_as_they_went_in_wherever_the_bytes_are_cut(
    sizes: list[int], data: st.DataObject
) -> None:
    sent = [(Kind.STEPS, bytes([n]) * size) for n, size in enumerate(sizes)]
    stream = b"".join(head_of(kind, len(payload)) + payload for kind, payload in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    splitter, got = Splitter(LIMITS), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += fed(splitter, stream[begin:end])
    assert got == sent
    assert not splitter.within


def test_a_frame_can_be_cut_at_any_byte() -> None:
    stream = frame(Kind.PING, b"12345678") + frame(Kind.END, b"end") + frame(Kind.STATE, b"")
    for cut in range(len(stream) + 1):
        splitter = Splitter(LIMITS)
        got = fed(splitter, stream[:cut]) + fed(splitter, stream[cut:])
        assert got == [(Kind.PING, b"12345678"), (Kind.END, b"end"), (Kind.STATE, b"")]


@given(st.binary(max_size=300))
def test_random_bytes_are_frames_or_bad_and_nothing_else(data: bytes) -> None:
    with suppress(BadFrame):
        for kind, payload in fed(Splitter(LIMITS), data):
            assert len(payload) <= LIMITS[kind]


def test_a_payload_is_memory_of_its_own() -> None:
    splitter = Splitter(LIMITS)
    data = frame(Kind.STEPS, b"first") + frame(Kind.STEPS, b"other")
    (_, first), (_, other) = splitter.feed(data)
    first[:] = b"xxxxx"
    assert fed(splitter, frame(Kind.STEPS, b"third")) == [(Kind.STEPS, b"third")]
    assert bytes(other) == b"other"


@pytest.mark.parametrize("size", [100, 20_000, 100_000])
def test_an_unfinished_frame_is_known_as_such(size: int) -> None:
    splitter = Splitter(LIMITS)
    data = frame(Kind.STEPS, bytes(size))
    assert fed(splitter, data[:-1]) == []
    assert splitter.within
    assert len(fed(splitter, data[-1:])) == 1
    assert not splitter.within


@pytest.mark.parametrize(
    ("data", "what", "reason"),
    [
        (frame(77, b""), Refused.UNKNOWN_KIND, "a frame of kind 77 can't come here"),
        (frame(Kind.HELLO, b""), Refused.UNKNOWN_KIND, "a frame of HELLO can't come here"),
        (frame(Kind.PING, b"123456789"), Refused.OVERSIZED, "PING of 9 bytes: 8 are allowed"),
        (
            struct.pack("<IB", (1 << 20) + 1, Kind.STEPS),
            Refused.OVERSIZED,
            "STEPS of 1048577 bytes: 1048576 are allowed",
        ),
    ],
)
def test_what_may_not_come_is_refused_by_its_head_alone(
    data: bytes, what: Refused, reason: str
) -> None:
    with pytest.raises(BadFrame) as bad:
        fed(Splitter(LIMITS), data)
    assert (bad.value.what, bad.value.reason) == (what, reason)


def test_good_frames_before_a_bad_one_are_given() -> None:
    splitter, got = Splitter(LIMITS), []
    data = frame(Kind.END, b"one") + frame(77, b"")
    with pytest.raises(BadFrame):
        for kind, payload in splitter.feed(data):
            got.append((kind, bytes(payload)))
    assert got == [(Kind.END, b"one")]


def test_limits_that_change_count_from_the_next_frame_on() -> None:
    splitter, got = Splitter(HELLO_LIMITS), []
    data = frame(Kind.HELLO, b"hello") + frame(Kind.STATE, b"state")
    for kind, _ in splitter.feed(data):
        got.append(kind)
        splitter.limits = LIMITS
    assert got == [Kind.HELLO, Kind.STATE]


def test_only_hello_and_bye_may_come_from_a_stranger() -> None:
    assert set(HELLO_LIMITS) == {Kind.HELLO, Kind.BYE}
    assert set(LIMITS) == set(Kind) - {Kind.HELLO}


def test_the_largest_pass_fits_its_own_limit() -> None:
    assert steps_limit(hidden=576, tokens=512) > 576 * 512 * 4
