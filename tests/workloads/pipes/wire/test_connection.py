from __future__ import annotations

import asyncio
import socket

import pytest
from tests.support.pipes.ends import Noted, Rough, here, on_both_loops

from penstock.workloads.pipes.wire.connection import Connection, NotConnected
from penstock.workloads.pipes.wire.messages import BadFrame, Bye, Kind, Refused, encode


@on_both_loops
async def test_both_sides_know_each_other() -> None:
    async with here() as node:
        there = await node.dial()
        known = await node.noted.connections.get()
        assert (there.peer.node_id, known.peer.node_id) == ("here", "there")
        assert (there.outgoing, known.outgoing) == (True, False)


@on_both_loops
async def test_frames_arrive_whole_and_in_order() -> None:
    sizes = [0, 1, 16 << 10, (16 << 10) + 1, 64 << 10, 300_000, 3_000_000, 5]
    async with here() as node:
        there = await node.dial()
        for n, size in enumerate(sizes):
            there.send(Kind.STEPS, bytes([n]) * size)
        for n, size in enumerate(sizes):
            kind, payload = await node.noted.frames.get()
            assert kind is Kind.STEPS
            assert bytes(payload) == bytes([n]) * size


@on_both_loops
async def test_a_frame_may_be_given_in_parts() -> None:
    parts = [b"a" * 10, memoryview(b"b" * 100_000), b"", b"c", memoryview(b"d" * 20_000)]
    async with here() as node:
        there = await node.dial()
        there.send(Kind.STEPS, *parts)
        there.send(Kind.STATE, *parts[:1])
        _, payload = await node.noted.frames.get()
        assert bytes(payload) == b"".join(parts)
        assert await node.noted.frames.get() == (Kind.STATE, b"a" * 10)


@on_both_loops
async def test_what_was_sent_may_be_changed_at_once() -> None:
    async with here() as node:
        there = await node.dial()
        for size in (100, 2_000_000):
            data = bytearray(b"x" * size)
            there.send(Kind.STEPS, memoryview(data))
            data[:] = b"y" * size
            _, payload = await node.noted.frames.get()
            assert bytes(payload) == b"x" * size


@on_both_loops
async def test_both_can_send_much_at_once() -> None:
    noted = Noted()
    async with here() as node:
        there = await node.dial(noted=noted)
        known = await node.noted.connections.get()
        for _ in range(20):
            there.send(Kind.STEPS, bytes(400_000))
            known.send(Kind.STEPS, bytes(400_000))
        for frames in (noted.frames, node.noted.frames):
            for _ in range(20):
                assert len((await frames.get())[1]) == 400_000


@on_both_loops
async def test_bytes_are_counted_without_what_tls_adds() -> None:
    async with here() as node:
        rough = await Rough.greeted(node.address)
        known = await node.noted.connections.get()
        received, sent = known.received_bytes, known.sent_bytes
        rough.say(Kind.STATE, bytes(1000))
        await node.noted.frames.get()
        assert known.received_bytes - received == 1005
        known.send(Kind.STATE, bytes(1000))
        assert known.sent_bytes - sent == 1005
        rough.close()


@on_both_loops
async def test_small_frames_leave_at_once() -> None:
    async with here() as node:
        for connection in (await node.dial(), await node.noted.connections.get()):
            assert connection._transport is not None
            raw = connection._transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@on_both_loops
async def test_the_way_is_measured() -> None:
    async with here() as node:
        there = await node.dial(ping=0.01)
        known = await node.noted.connections.get()
        while not (there.rtt and known.rtt):  # noqa: ASYNC110 - a PONG is told to nobody
            await asyncio.sleep(0.01)
        assert 0 < there.rtt_min <= there.rtt


# -- how it ends --------------------------------------------------------------------------


@on_both_loops
async def test_the_other_side_is_told_why_it_was_closed() -> None:
    noted = Noted()
    async with here() as node:
        there = await node.dial(noted=noted)
        there.send(Kind.STEPS, b"last words")
        there.close("enough")
        assert await noted.losses.get() == "enough"
        assert await node.noted.losses.get() == "it left: enough"
        assert (await node.noted.frames.get())[1] == b"last words"
        assert await node.noted.frames.get() == (Kind.BYE, encode(Bye("enough")))


@on_both_loops
async def test_the_reason_arrives_though_the_peer_is_still_sending() -> None:
    async with here() as node:
        rough = await Rough.greeted(node.address)
        known = await node.noted.connections.get()
        rough.say(Kind.STATE, bytes(1_000_000))
        known.close("enough")
        rough.say(Kind.STATE, bytes(1_000_000))
        assert (await rough.why()).reason == "enough"
        rough.close()


@on_both_loops
async def test_lost_is_told_once_however_often_it_is_closed() -> None:
    noted = Noted()
    async with here() as node:
        there = await node.dial(noted=noted)
        known = await node.noted.connections.get()
        there.close("one")
        there.close("two")
        known.close("three")
        assert await noted.losses.get() == "one"
        assert await node.noted.losses.get() == "three"
        await asyncio.sleep(0.05)
        assert noted.losses.empty()
        assert node.noted.losses.empty()


@on_both_loops
async def test_close_does_not_call_the_handler_from_within() -> None:
    noted = Noted()
    async with here() as node:
        there = await node.dial(noted=noted)
        there.close("done")
        assert noted.losses.empty()
        assert await noted.losses.get() == "done"


@on_both_loops
async def test_nothing_can_be_sent_after_the_end() -> None:
    async with here() as node:
        there = await node.dial()
        there.close("done")
        with pytest.raises(ConnectionResetError, match="done"):
            there.send(Kind.STATE, b"")


@on_both_loops
async def test_a_frame_that_the_peer_would_refuse_is_not_sent() -> None:
    async with here(steps=1000) as node:
        there = await node.dial(steps=1000)
        with pytest.raises(ValueError, match="STEPS of 1001 bytes: 1000 are allowed"):
            there.send(Kind.STEPS, bytes(1000), b"x")
        there.send(Kind.STEPS, bytes(1000))
        assert len((await node.noted.frames.get())[1]) == 1000


@on_both_loops
async def test_a_peer_that_vanishes_is_lost() -> None:
    async with here() as node:
        rough = await Rough.greeted(node.address)
        rough.close()
        await node.noted.losses.get()


class Closing(Noted):
    """Closes at the first frame."""

    def received(self, connection: Connection, kind: Kind, payload: memoryview) -> None:
        super().received(connection, kind, payload)
        connection.close("that will do")


@on_both_loops
async def test_no_frame_is_given_after_the_end() -> None:
    async with here(Closing()) as node:
        rough = await Rough.greeted(node.address)
        for n in range(5):
            rough.say(Kind.STATE, bytes([n]))
        assert (await rough.why()).reason == "that will do"
        await node.noted.losses.get()
        assert node.noted.frames.qsize() == 1
        rough.close()


class Refusing(Noted):
    def received(self, connection: Connection, kind: Kind, payload: memoryview) -> None:
        raise BadFrame("not like this")


@on_both_loops
async def test_a_frame_that_the_handler_refuses_ends_the_connection() -> None:
    async with here(Refusing()) as node:
        rough = await Rough.greeted(node.address)
        rough.say(Kind.STATE, b"x")
        assert await rough.why() == Bye("not like this", Refused.BAD_FRAME)
        assert await node.noted.losses.get() == "not like this"
        assert node.counters[Refused.BAD_FRAME] == 1
        rough.close()


class Broken(Noted):
    def received(self, connection: Connection, kind: Kind, payload: memoryview) -> None:
        raise RuntimeError("a bug")


@on_both_loops
async def test_an_error_in_the_handler_is_reported_and_ends_that_connection_alone() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: told.append(context["exception"])
    )
    async with here(Broken()) as node:
        rough = await Rough.greeted(node.address)
        other = await node.dial("other")
        rough.say(Kind.STATE, b"x")
        assert (await rough.why()).reason == "an error at the other end: RuntimeError"
        assert [str(error) for error in told] == ["a bug"]
        assert other.closed is None
        rough.close()


class Unwelcoming(Noted):
    def connected(self, connection: Connection) -> None:
        super().connected(connection)
        raise RuntimeError("a bug")


@on_both_loops
async def test_an_error_while_a_peer_is_welcomed_is_told_to_who_dials() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: told.append(context["exception"])
    )
    noted = Unwelcoming()
    async with here() as node:
        with pytest.raises(NotConnected, match="RuntimeError"):
            await node.dial(noted=noted)
        assert await noted.losses.get() == "an error at the other end: RuntimeError"
        assert await node.noted.losses.get() == "it left: an error at the other end: RuntimeError"
        assert len(told) == 1


@on_both_loops
async def test_a_reason_that_is_too_long_is_cut() -> None:
    async with here() as node:
        (await node.dial()).close("why " * 10_000)
        assert (await node.noted.losses.get()) == ("it left: " + "why " * 250)
        assert not node.counters


# -- peers that do wrong ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size", "what"),
    [
        (77, 0, Refused.UNKNOWN_KIND),
        (Kind.HELLO, 0, Refused.UNKNOWN_KIND),
        (Kind.PING, 9, Refused.OVERSIZED),
        (Kind.OPEN, 1 << 20, Refused.OVERSIZED),
        (Kind.STEPS, 10_001, Refused.OVERSIZED),
        (Kind.STEPS, (1 << 32) - 1, Refused.OVERSIZED),
    ],
)
@on_both_loops
async def test_a_frame_that_may_not_come_ends_the_connection(
    kind: int, size: int, what: Refused
) -> None:
    async with here(steps=10_000) as node:
        rough = await Rough.greeted(node.address)
        rough.say(kind, b"", size)
        bye = await rough.why()
        assert bye.what == what
        assert await node.noted.losses.get() == bye.reason
        assert node.counters == {what: 1}
        rough.close()
        assert (await node.dial()).peer.node_id == "here"


@on_both_loops
async def test_an_end_in_the_middle_of_a_frame_is_told_as_such() -> None:
    async with here() as node:
        rough = await Rough.greeted(node.address)
        rough.say(Kind.STEPS, b"half", size=8)
        await rough.writer.drain()
        rough.writer.close()
        assert (await node.noted.losses.get()).startswith("in the middle of a frame")
        assert node.counters == {Refused.TRUNCATED: 1}


@on_both_loops
async def test_a_peer_that_says_nothing_is_found_by_the_deadline() -> None:
    async with here(ping=0.05, silence=0.3) as node:
        rough = await Rough.greeted(node.address)
        known = await node.noted.connections.get()
        reason = await node.noted.losses.get()
        assert reason.startswith("silent for")
        assert known.closed == reason
        assert node.counters == {Refused.SILENT: 1}
        await rough.ended()


@on_both_loops
async def test_a_peer_that_answers_is_not_silent() -> None:
    async with here(ping=0.02, silence=0.4) as node:
        await node.dial(ping=100.0, silence=100.0)
        known = await node.noted.connections.get()
        answers, greeting = 40, known.received_bytes
        # A PONG is told to nobody.
        while (  # noqa: ASYNC110
            known.received_bytes < greeting + answers * 13 and node.noted.losses.empty()
        ):
            await asyncio.sleep(0.02)
        assert node.noted.losses.empty()


@on_both_loops
async def test_a_peer_that_does_not_read_is_given_up() -> None:
    async with here(queue=1 << 20, ping=100.0, silence=100.0) as node:
        rough = await Rough.greeted(node.address)
        known = await node.noted.connections.get()
        with pytest.raises(ConnectionResetError, match="it does not read"):
            for _ in range(10_000):
                known.send(Kind.STEPS, bytes(100_000))
                await asyncio.sleep(0)
        assert (await node.noted.losses.get()).startswith("it does not read")
        assert node.counters == {Refused.NOT_READING: 1}
        rough.close()
