from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.pipes.job import Hop, JobTime
from penstock.workloads.pipes.wire.messages import (
    Acked,
    Assign,
    BadFrame,
    Bye,
    End,
    Failed,
    Hello,
    Kind,
    Message,
    Open,
    Opened,
    State,
    decode,
    encode,
    kind_of,
    protocol_of,
)

JOB = bytes(range(16))
EACH: list[Message] = [
    Hello(node_id="a", boot="b", address="host:1", observer=True),
    Bye("reason", "what"),
    State((msgspec.Raw(b"\x93\x01\x02\x03"),)),
    Open(JOB, "pipe", "model", (Hop("a", 0, 5), Hop("b", 5, 9)), 100, b"key", 3.5),
    Opened(JOB, False, 5, "NO_ROOM", "the cache is full", True),
    Acked(JOB, 3, (JobTime("a", 0, 5, 10, 20),)),
    Failed(JOB, 3, "NODE_LOST", "it went away", "b"),
    End(JOB, True, 300.0, "done"),
    Assign("model", 3, 9, "a", 2),
]


@pytest.mark.parametrize("message", EACH, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(memoryview(encode(message)), type(message)) == message


def test_every_kind_but_the_binary_ones_has_a_message() -> None:
    assert {kind_of(message) for message in EACH} == set(Kind) - {Kind.PING, Kind.PONG, Kind.STEPS}


@pytest.mark.parametrize("of", [type(message) for message in EACH])
@given(data=st.binary(max_size=100))
def test_random_bytes_raise_bad_frames_only(of: type[Any], data: bytes) -> None:
    with suppress(BadFrame):
        assert isinstance(decode(memoryview(data), of), of)


def test_deeply_nested_bytes_are_a_bad_frame() -> None:
    with pytest.raises(BadFrame):
        decode(memoryview(b"\x91" * 4000 + b"\x00"), State)


@pytest.mark.parametrize(
    "message",
    [
        Open(b"short", "pipe", "model", (Hop("a", 0, 5),), 100),
        Open(JOB, "pipe", "model", (), 100),
        Open(JOB, "pipe", "model", (Hop("a", 0, 5),), 0),
        Open(JOB, "pipe", "model", (Hop("a", 0, 5),), 100, None, -1.0),
        Open(JOB, "p" * 300, "model", (Hop("a", 0, 5),), 100),
        Acked(JOB, -1),
        End(JOB, True, float("nan")),
        Assign("model", 1 << 40, 0, "a"),
    ],
)
def test_a_message_with_impossible_values_is_a_bad_frame(message: Message) -> None:
    with pytest.raises(BadFrame):
        decode(memoryview(encode(message)), type(message))


def test_fields_of_a_later_version_are_passed_over() -> None:
    later = msgspec.msgpack.encode([JOB, True, 5, "", "", False, "something new"])
    assert decode(memoryview(later), Opened) == Opened(JOB, True, 5)


def test_the_protocol_can_be_read_of_any_hello() -> None:
    assert protocol_of(memoryview(encode(Hello(node_id="a", boot="b", protocol=9)))) == 9
    assert protocol_of(memoryview(msgspec.msgpack.encode({"protocol": 3, "other": [1]}))) == 3
    assert protocol_of(memoryview(b"\xc1")) == 0
