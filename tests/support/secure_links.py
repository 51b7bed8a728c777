"""Engines that listen over TLS, and peers that speak to them as they like."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.link.frames import AnyFrame, Frame, FrameProtocol
from penstock.adapters.link.identity import WorkerIdentity, client_context
from penstock.adapters.link.secure import Security, open_secure
from penstock.app.engine import Engine
from penstock.config import load
from penstock.ports.credentials import JoinToken
from penstock.ports.tls import tls_context


@dataclass
class Secured:
    """An engine with an address for other machines."""

    engine: Engine
    folder: Path

    @property
    def address(self) -> Address:
        return next(one for one in self.engine.addresses if one.tls)

    @property
    def authority(self) -> Path:
        return self.engine.settings.link_dir / "authority.pem"

    @property
    def refused(self) -> dict[str, int]:
        assert self.engine._server is not None
        return dict(self.engine._server.refused)

    async def token(self, **options: Any) -> JoinToken:
        new = await self.engine.api.credentials.create_token(**options)
        return JoinToken.parse(new.token)

    async def joined(self, worker_id: str, token: JoinToken | None = None) -> WorkerIdentity:
        """A worker's identity, in a folder of its own."""
        identity = WorkerIdentity(self.folder / f"of-{worker_id}", worker_id)
        await identity.join(self.address, token or await self.token())
        return identity

    def client(self, key: str, timeout: float = 5.0) -> Link:
        """A client with an API key."""
        security = Security(client_context(self.authority, check_hostname=False))
        return Link(self.address, token=key, reconnect_timeout=timeout, security=security)

    def link(self, identity: WorkerIdentity) -> Link:
        return Link(self.address, reconnect_timeout=5.0, security=identity.security())

    async def works(self) -> bool:
        """Whether a good client is served."""
        link = self.client(self.engine.settings.token_file.read_text().strip())
        await link.connect()
        await link.close()
        return True


@asynccontextmanager
async def secured(folder: Path, **flags: Any) -> AsyncIterator[Secured]:
    settings = load(
        environ={},
        flags={
            "data_dir": str(folder / "engine"),
            "durability": "memory",
            "link.listen": "127.0.0.1:0",
            **flags,
        },
    )
    async with asyncio.timeout(30), Engine(settings, []) as engine:
        yield Secured(engine, folder)


class RawPeer:
    """Sends the frames that it is told to, and keeps what comes."""

    def __init__(self, protocol: FrameProtocol, received: asyncio.Queue[AnyFrame | None]) -> None:
        self._protocol, self._received = protocol, received

    @classmethod
    async def connect(cls, address: Address, context: ssl.SSLContext) -> RawPeer:
        received: asyncio.Queue[AnyFrame | None] = asyncio.Queue()
        protocol = FrameProtocol(
            received.put_nowait, lambda error: received.put_nowait(None), unacknowledged=30
        )
        await open_secure(protocol, address, Security(context))
        return cls(protocol, received)

    def send(self, *frames: Frame) -> None:
        for frame in frames:
            self._protocol.send(frame)

    def send_bytes(self, data: bytes) -> None:
        assert self._protocol.transport is not None
        self._protocol.transport.write(data)

    async def next(self) -> AnyFrame | None:
        """None at the end."""
        async with asyncio.timeout(10):
            return await self._received.get()

    async def end(self) -> list[AnyFrame]:
        """All that comes until the connection ends."""
        frames = []
        while (frame := await self.next()) is not None:
            frames.append(frame)
        return frames

    def close(self) -> None:
        self._protocol.close()


def unverified() -> ssl.SSLContext:
    context = tls_context(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_NONE
    return context
