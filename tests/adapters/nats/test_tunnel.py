"""Connections through NATS, when messages are lost on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.adapters.nats.tunnel import NatsTransport
from penstock.testing.aio import run_async


class FakeClient:
    max_payload = 64

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def publish(self, subject: str, data: bytes) -> None:
        self.sent.append(data)

    async def flush(self, timeout: int) -> None:
        pass


class Recorder(asyncio.Protocol):
    def __init__(self) -> None:
        self.data, self.ends = b"", list[Exception | None]()
        self.pauses = 0

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, error: Exception | None) -> None:
        self.ends.append(error)

    def pause_writing(self) -> None:
        self.pauses += 1

    def resume_writing(self) -> None:
        self.pauses -= 1


def opened(client: Any) -> tuple[NatsTransport, Recorder]:
    protocol = Recorder()
    return NatsTransport(client, "s", protocol, lambda one: None), protocol


def numbered(client: FakeClient) -> list[tuple[bytes, int, bytes]]:
    return [(data[:1], int.from_bytes(data[1:5], "big"), data[5:]) for data in client.sent]


@run_async
async def test_bytes_arrive_in_order_in_parts_that_the_server_allows() -> None:
    client = FakeClient()
    sender, _ = opened(client)
    receiver, got = opened(client)
    sent = bytes(range(200))
    sender.write(sent)
    sender.close()
    async with asyncio.timeout(5):
        while not sender._has_ended:  # noqa: ASYNC110  (there is nothing else to wait for)
            await asyncio.sleep(0)
    assert max(map(len, client.sent)) <= client.max_payload
    for message in numbered(client):
        receiver.receive(*message)
    assert got.data == sent
    receiver.end(None)


@pytest.mark.parametrize("lost", [0, 1, 2])
@run_async
async def test_a_lost_message_ends_the_connection_and_nothing_after_it_is_delivered(
    lost: int,
) -> None:
    client = FakeClient()
    sender, _ = opened(client)
    receiver, got = opened(client)
    sender.write(bytes(230))
    await asyncio.sleep(0.01)
    messages = numbered(client)
    assert len(messages) == 4
    whole = b"".join(data for _, _, data in messages[:lost])
    del messages[lost]
    for message in messages:
        receiver.receive(*message)
    assert got.data == whole
    assert [str(end) for end in got.ends] == ["NATS lost a message"]
    sender.end(None)


@run_async
async def test_a_writer_is_asked_to_pause_until_all_is_sent() -> None:
    client = FakeClient()
    sender, protocol = opened(client)
    sender.set_write_buffer_limits(high=100)
    sender.write(bytes(500))
    assert protocol.pauses == 1
    await asyncio.sleep(0.01)
    assert protocol.pauses == 0
    sender.abort()
    await asyncio.sleep(0.01)
    assert protocol.ends == [None]
