"""Workers that reach the engine through a NATS server."""

from __future__ import annotations

import os
import socket

from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.nats.connection import NatsOptions
from penstock.adapters.nats.tunnel import NatsDialer, NatsPulse
from penstock.config import Settings
from penstock.core.errors import Misconfigured


def nats_options(settings: Settings) -> NatsOptions:
    """Raises Misconfigured if nats-py is not installed, or the address is none."""
    try:
        import nats  # noqa: F401  (only whether it is there)
    except ImportError as error:
        raise Misconfigured(
            "NATS needs the package nats-py", hint="pip install 'penstock[nats]'"
        ) from error
    bus = settings.bus
    options = NatsOptions(
        url=bus.url,
        prefix=bus.prefix,
        credentials=bus.credentials,
        ca=bus.ca,
        certificate=bus.certificate,
        private_key=bus.private_key,
    )
    options.check()
    return options


class NatsWorker:
    """How a worker process gets to the engine through NATS."""

    def __init__(self, settings: Settings, worker_id: str, token: str) -> None:
        """Without a token, that of the data directory is used. Raises Misconfigured."""
        self._options = nats_options(settings)
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self.address = Address(via=str(self._options))
        self.dial = NatsDialer(self._options, self.worker_id)
        if not token:
            try:
                token = settings.token_file.read_text().strip()
            except OSError as error:
                raise Misconfigured(
                    "a worker that joins through NATS needs the engine's token",
                    hint=f"set PENSTOCK_TOKEN to what is in {settings.token_file} of the engine",
                ) from error
        self.token = token

    def pulse(self, interval: float) -> NatsPulse:
        return NatsPulse(self._options, self.worker_id, interval)

    async def probe(self) -> None:
        """Connect once. Raises NotRunning while there is no engine."""
        link = Link(self.address, token=self.token, dial=self.dial)
        try:
            await link.connect()
        finally:
            await link.close()

    async def close(self) -> None:
        await self.dial.close()
