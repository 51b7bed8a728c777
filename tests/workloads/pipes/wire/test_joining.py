from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from typing import Any

import pytest
from tests.support.pipes.ends import (
    Here,
    Noted,
    Rough,
    hello,
    here,
    identity,
    on_both_loops,
    patient,
)

from penstock.core.errors import Misconfigured
from penstock.workloads.pipes.wire import connection as module
from penstock.workloads.pipes.wire.connection import NotConnected, connect, listen
from penstock.workloads.pipes.wire.identity import new_key, parse
from penstock.workloads.pipes.wire.messages import Counters, Kind, Refused, encode


async def refused(node: Here, what: Refused, **dial: Any) -> NotConnected:
    """It is not let in; it is told why, it is counted, and others are let in as before."""
    with pytest.raises(NotConnected) as why:
        await node.dial(**dial)
    await node.counted(what)
    assert node.counters == {what: 1}
    assert why.value.what == what
    assert (await node.dial("another")).peer.node_id == "here"
    return why.value


async def dial_as(
    node: Here, said: Any, who: Any, counters: Counters | None = None
) -> NotConnected:
    with pytest.raises(NotConnected) as why:
        await connect(node.address, who, said, Noted(), patient(), counters)
    return why.value


@pytest.mark.seed("000", "18.11")
@on_both_loops
async def test_a_peer_with_another_networks_key_is_refused() -> None:
    async with here() as node:
        theirs = Counters()
        why = await dial_as(node, hello("there"), identity("there", new_key()), theirs)
        assert why.reason == f"{node.address}: it has another network's key"
        await node.counted(Refused.WRONG_KEY)
        assert node.counters == theirs == {Refused.WRONG_KEY: 1}
        await node.dial()


@on_both_loops
async def test_a_key_of_ones_own_making_does_not_help_who_trusts_everybody() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with here() as node:
        rough = await Rough.dial(node.address, context)
        await node.counted(Refused.NO_CERTIFICATE)
        await rough.ended()
        rough.close()
        careless = identity("careless", new_key()).client
        careless.verify_mode = ssl.CERT_NONE
        rough = await Rough.dial(node.address, careless)
        await node.counted(Refused.WRONG_KEY)
        await rough.ended()
        rough.close()
        assert node.counters == {Refused.NO_CERTIFICATE: 1, Refused.WRONG_KEY: 1}
        await node.dial()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 300, b"\x16\x03\x01" + b"\xff" * 90]
)
@on_both_loops
async def test_what_is_no_tls_is_refused(said: bytes) -> None:
    async with here() as node:
        rough = await Rough.dial(node.address, None)
        rough.writer.write(said)
        await rough.ended()
        await node.counted(Refused.NOT_TLS)
        rough.close()
        await node.dial()


@on_both_loops
async def test_old_tls_is_refused() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with here() as node:
        with pytest.raises(ssl.SSLError):
            await Rough.dial(node.address, context)
        await node.counted(Refused.NOT_TLS)


@on_both_loops
async def test_a_peer_of_another_protocol_is_refused_and_both_are_told() -> None:
    async with here() as node:
        why = await dial_as(node, hello("there", protocol=0), identity("there"))
        assert why.reason == f"{node.address}: it refused: protocol 0 is not 1"
        assert why.what == Refused.OLD_PROTOCOL
        assert node.counters == {Refused.OLD_PROTOCOL: 1}


@on_both_loops
async def test_a_node_of_another_protocol_is_not_joined() -> None:
    noted, counters = Noted(), Counters()
    listener = await listen(
        "127.0.0.1:0", identity("here"), hello("here", protocol=2), noted, patient()
    )
    with pytest.raises(NotConnected, match="protocol 2 is not 1"):
        await connect(
            listener.address, identity("there"), hello("there"), Noted(), counters=counters
        )
    assert counters == {Refused.OLD_PROTOCOL: 1}
    # That it was taken for a peer and left again is all the other one saw.
    assert await noted.losses.get() == "it left: protocol 2 is not 1"
    listener.close()
    await listener.wait_closed()
    await noted.every[0].wait_closed()


@on_both_loops
async def test_a_hello_that_names_another_node_is_refused() -> None:
    async with here() as node:
        why = await dial_as(node, hello("somebody"), identity("there"))
        assert "it says it is 'somebody', and its certificate says 'there'" in why.reason
        assert node.counters == {Refused.NODE_ID_MISMATCH: 1}


@on_both_loops
async def test_a_node_that_claims_another_id_is_not_joined() -> None:
    listener = await listen("127.0.0.1:0", identity("here"), hello("somebody"), Noted())
    with pytest.raises(NotConnected, match="its certificate says 'here'"):
        await connect(listener.address, identity("there"), hello("there"), Noted())
    listener.close()
    await listener.wait_closed()


@on_both_loops
async def test_our_own_node_id_is_refused() -> None:
    async with here() as node:
        why = await dial_as(node, hello("here"), identity("here"))
        assert "'here' is the id of both nodes" in why.reason
        assert node.counters == {Refused.OWN_NODE_ID: 1}


@on_both_loops
async def test_a_second_connection_of_the_same_peer_is_refused() -> None:
    async with here() as node:
        first = await node.dial()
        why = await refused(node, Refused.SECOND_CONNECTION)
        assert "'there' is connected already" in why.reason
        assert first.closed is None


@on_both_loops
async def test_of_two_connections_at_the_same_moment_one_is_let_in() -> None:
    async with here() as node:
        both = await asyncio.gather(node.dial(), node.dial(), return_exceptions=True)
        assert sorted(type(one).__name__ for one in both) == ["Connection", "NotConnected"]
        assert node.noted.connections.qsize() == 1


@on_both_loops
async def test_who_left_may_come_again() -> None:
    async with here() as node:
        for _ in range(3):
            there = await node.dial()
            there.close("for now")
            await node.noted.losses.get()
        assert not node.counters


@on_both_loops
async def test_the_node_itself_may_refuse_a_peer() -> None:
    async with here(admit=lambda peer: "draining" if peer.node_id == "there" else "") as node:
        assert "draining" in (await refused(node, Refused.NOT_ADMITTED)).reason


@on_both_loops
async def test_who_dials_may_refuse_too() -> None:
    async with here() as node:
        with pytest.raises(NotConnected, match="there already"):
            await node.dial(admit=lambda peer: f"{peer.node_id} is there already")
        assert await node.noted.losses.get() == "it left: here is there already"


@pytest.mark.parametrize(
    ("kind", "size", "what"),
    [
        (Kind.STEPS, 10, Refused.UNKNOWN_KIND),
        (Kind.PING, 8, Refused.UNKNOWN_KIND),
        (Kind.HELLO, 5000, Refused.OVERSIZED),
    ],
)
@on_both_loops
async def test_nothing_is_taken_before_hello(kind: Kind, size: int, what: Refused) -> None:
    async with here() as node:
        rough = await Rough.dial(node.address, identity("there").client)
        rough.say(kind, bytes(size))
        assert (await rough.why()).what == what
        assert node.counters == {what: 1}
        assert node.noted.connections.empty()
        rough.close()


@on_both_loops
async def test_a_hello_that_can_not_be_read_is_refused() -> None:
    async with here() as node:
        rough = await Rough.dial(node.address, identity("there").client)
        rough.say(Kind.HELLO, b"\x81\xa8protocol\x01")
        assert (await rough.why()).what == Refused.BAD_FRAME
        rough.close()


# -- peers that do not come to the point ----------------------------------------------------


@on_both_loops
async def test_a_peer_that_says_nothing_has_a_deadline() -> None:
    async with here(handshake=0.1) as node:
        silent = await Rough.dial(node.address, None)
        await silent.ended()
        assert node.counters == {Refused.HANDSHAKE_TIMEOUT: 1}
        silent.close()
        shaken = await Rough.dial(node.address, identity("there").client)
        assert (await shaken.why()).what == Refused.HANDSHAKE_TIMEOUT
        shaken.close()


@on_both_loops
async def test_a_peer_that_goes_away_before_hello_is_counted() -> None:
    async with here() as node:
        (await Rough.dial(node.address, None)).close()
        await node.counted(Refused.HANDSHAKE_BROKEN)
        (await Rough.dial(node.address, identity("there").client)).close()
        await node.counted(Refused.HANDSHAKE_BROKEN, 2)
        assert node.noted.connections.empty()


@on_both_loops
async def test_strangers_are_bounded_and_do_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 4)
    async with here() as node:
        strangers = [await Rough.dial(node.address, None) for _ in range(4)]
        while node.listener.handshakes < 4:  # noqa: ASYNC110 - nobody is told of a stranger
            await asyncio.sleep(0.001)
        await node.dial()
        assert node.listener.handshakes <= 4
        await strangers[0].ended()
        assert node.counters == {Refused.TOO_MANY_HANDSHAKES: 1}
        for stranger in strangers:
            stranger.close()


@on_both_loops
async def test_a_refused_peer_that_stays_takes_the_room_of_a_stranger() -> None:
    async with here() as node:
        rough = await Rough.dial(node.address, identity("there").client)
        rough.say(Kind.STEPS, b"")
        await node.counted(Refused.UNKNOWN_KIND)
        assert node.listener.handshakes == 1
        rough.close()
        while node.listener.handshakes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@on_both_loops
async def test_a_closed_listener_ends_strangers_and_leaves_peers() -> None:
    async with here() as node:
        there = await node.dial()
        stranger = await Rough.dial(node.address, None)
        while not node.listener.handshakes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        node.listener.close()
        await node.listener.wait_closed()
        await stranger.ended()
        stranger.close()
        assert there.closed is None
        with pytest.raises(NotConnected):
            await node.dial("late")


@on_both_loops
async def test_a_process_without_a_free_descriptor_listens_again_later() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, told: None)  # asyncio says so
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with here() as node:
        with socket.socket() as early:
            # Of all numbers below the limit none is free, so that nothing can be accepted.
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                early.connect(parse(node.address))
                await asyncio.sleep(0.05)
                assert node.listener.handshakes == 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await node.dial()).peer.node_id == "here"


# -- nobody there -----------------------------------------------------------------------------


@on_both_loops
async def test_an_address_where_nobody_listens_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(NotConnected, match=f"127.0.0.1:{port}: .*") as why:
        await connect(f"127.0.0.1:{port}", identity("there"), hello("there"), Noted())
    assert why.value.what == ""


@pytest.mark.parametrize("address", ["nobody.invalid:1", "a..b:1", f"{'x' * 70}:1", "a\0b:1"])
@on_both_loops
async def test_a_host_that_can_not_be_found_is_told_as_such(address: str) -> None:
    with pytest.raises(NotConnected):
        await connect(address, identity("there"), hello("there"), Noted(), patient())
    with pytest.raises(Misconfigured, match="can't listen"):
        await listen(address, identity("there"), hello("there"), Noted())


@on_both_loops
async def test_who_never_answers_has_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(NotConnected, match=r"no answer in 0\.1 s"):
            await connect(
                address, identity("there"), hello("there"), Noted(), patient(handshake=0.1)
            )


@on_both_loops
async def test_dialing_can_be_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        dialing = asyncio.create_task(
            connect(address, identity("there"), hello("there"), Noted(), patient(handshake=50.0))
        )
        peer, _ = await asyncio.to_thread(mute.accept)
        dialing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialing
        with peer:
            peer.settimeout(30)
            while await asyncio.to_thread(peer.recv, 4096):
                pass


@on_both_loops
async def test_an_address_that_is_taken_is_told_as_such() -> None:
    async with here() as node:
        with pytest.raises(Misconfigured, match=f"can't listen at {node.address}"):
            await listen(node.address, identity("other"), hello("other"), Noted())


@on_both_loops
async def test_a_listener_knows_the_port_it_was_given() -> None:
    async with here() as node:
        host, port = parse(node.address)
        assert host == "127.0.0.1"
        assert port > 0


@on_both_loops
async def test_no_frame_is_lost_that_comes_together_with_hello() -> None:
    async with here() as node:
        rough = await Rough.dial(node.address, identity("there").client)
        head = len(encode(hello("there"))).to_bytes(4, "little") + bytes([Kind.HELLO])
        rough.writer.write(
            head + encode(hello("there")) + b"\x01\0\0\0" + bytes([Kind.STATE]) + b"x"
        )
        assert await node.noted.frames.get() == (Kind.STATE, b"x")
        rough.close()
