"""How a connection comes about: dialing another node, and listening for others."""

from __future__ import annotations

import asyncio
import errno
import socket

from penstock.core.errors import Misconfigured
from penstock.ports.tls import Tls
from penstock.workloads.pipes.wire.address import join, parse
from penstock.workloads.pipes.wire.connection import (
    MAX_QUEUE,
    Admit,
    Connection,
    Handler,
    NotConnected,
    Refusal,
    Terms,
    refusing,
)
from penstock.workloads.pipes.wire.frames import MAX_STEPS, Counters, Refused
from penstock.workloads.pipes.wire.identity import Identity
from penstock.workloads.pipes.wire.messages import Hello


async def connect(
    address: str,
    identity: Identity,
    hello: Hello,
    handler: Handler,
    *,
    ping: float = 1.0,
    silence: float = 5.0,
    timeout: float = 10.0,
    steps: int = MAX_STEPS,
    queue: int = MAX_QUEUE,
    counters: Counters | None = None,
    admit: Admit | None = None,
) -> Connection:
    """The handler was told `connected` when this returns. Raises NotConnected with the reason,
    after `timeout` seconds at the latest."""
    host, port = parse(address)
    connection = Connection(
        Tls(identity.client, server_side=False),
        hello,
        handler,
        Terms(ping=ping, silence=silence, handshake=timeout, steps=steps, queue=queue),
        Counters() if counters is None else counters,
        outgoing=True,
        admit=refusing(admit),
    )
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(lambda: connection, host or "127.0.0.1", port)
            await connection.greeted
    except asyncio.CancelledError:
        connection.abort()
        raise
    except Exception as error:
        connection.close("given up")
        await connection.wait_closed()
        if isinstance(error, NotConnected):
            raise NotConnected(f"{address}: {error.reason}", error.what) from None
        if isinstance(error, TimeoutError):
            raise NotConnected(f"{address}: no answer in {timeout:g} s") from None
        if isinstance(error, OSError | ValueError):  # A host that can't even be looked up.
            raise NotConnected(f"{address}: {error}") from None
        raise
    return connection


MAX_HANDSHAKES = 64
"""Peers that are not known yet, at once. For one more, the oldest is given up: who only holds
connections open must open them faster than others need to say who they are."""
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def listen(
    address: str,
    identity: Identity,
    hello: Hello,
    handler: Handler,
    *,
    ping: float = 1.0,
    silence: float = 5.0,
    timeout: float = 10.0,
    steps: int = MAX_STEPS,
    queue: int = MAX_QUEUE,
    counters: Counters | None = None,
    admit: Admit | None = None,
) -> Listener:
    """`timeout` is for a peer's handshake. Raises Misconfigured if the address can't be had."""
    terms = Terms(ping=ping, silence=silence, handshake=timeout, steps=steps, queue=queue)
    counters = Counters() if counters is None else counters
    return Listener(await _bound(address), identity, hello, handler, terms, counters, admit)


class Listener:
    """Goes on whatever a peer does. Of each node it has one connection at most."""

    def __init__(
        self,
        bound: socket.socket,
        identity: Identity,
        hello: Hello,
        handler: Handler,
        terms: Terms,
        counters: Counters,
        admit: Admit | None,
    ) -> None:
        self.address = join(*bound.getsockname()[:2])
        """HOST:PORT, with the port that it was given."""
        self._socket, self._identity = bound, identity
        self._hello, self._handler = hello, handler
        self._terms, self._counters, self._admit = terms, counters, refusing(admit)
        self._known: dict[str, Connection] = {}
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._accepting = asyncio.create_task(self._accept())
        # Even if it ends before it began.
        self._accepting.add_done_callback(lambda _: bound.close())

    @property
    def handshakes(self) -> int:
        """Peers that are not known yet."""
        return len(self._strangers)

    def close(self) -> None:
        """No new ones; those that are there stay."""
        self._accepting.cancel()
        for task in self._strangers:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._strangers, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                peer = await accepted(self._socket)
            except OSError as error:
                if error.errno in _FULL:
                    # Nothing tells when there is room again.
                    await asyncio.sleep(0.1)
                continue
            self._take(peer)

    def _take(self, peer: socket.socket) -> None:
        if len(self._strangers) >= MAX_HANDSHAKES:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
            self._counters.add(Refused.TOO_MANY_HANDSHAKES)
        task = asyncio.create_task(self._greet(peer))
        self._strangers[task] = None
        task.add_done_callback(lambda done: self._strangers.pop(done, None))

    async def _greet(self, peer: socket.socket) -> None:
        def admit(hello: Hello) -> Refusal:
            refusal = self._refusal(hello)
            if refusal is None:
                self._known[hello.node_id] = connection
            return refusal

        connection = Connection(
            Tls(self._identity.server, server_side=True),
            self._hello,
            self._handler,
            self._terms,
            self._counters,
            outgoing=False,
            admit=admit,
        )
        try:
            await self._meet(connection, peer)
            if connection.closed is not None:
                # It still takes room, until it has read why.
                await connection.wait_closed()
        except asyncio.CancelledError:
            connection.abort()
            raise

    async def _meet(self, connection: Connection, peer: socket.socket) -> None:
        seconds, loop = self._terms.handshake, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                await loop.connect_accepted_socket(lambda: connection, peer)
                await connection.greeted
        except TimeoutError:
            connection.refuse(Refused.HANDSHAKE_TIMEOUT, f"no HELLO in {seconds:g} s")
        except OSError as error:
            # Counted where it was found.
            connection.close(str(error))

    def _refusal(self, peer: Hello) -> Refusal:
        self._known = {name: one for name, one in self._known.items() if one.closed is None}
        if peer.node_id in self._known:
            return Refused.SECOND_CONNECTION, f"{peer.node_id!r} is connected already"
        return self._admit(peer)


async def accepted(bound: socket.socket) -> socket.socket:
    peer, _ = await asyncio.get_running_loop().sock_accept(bound)
    # A small frame is to leave at once. asyncio does this only for sockets that it made.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


async def _bound(address: str) -> socket.socket:
    host, port = parse(address)
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, where = infos[0]
        return _listening(family, where)
    except (OSError, ValueError) as error:
        raise Misconfigured(f"can't listen at {address}: {error}") from None


def _listening(family: int, where: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(128)
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound
