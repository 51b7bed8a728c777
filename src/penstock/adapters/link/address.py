"""Where an engine listens: a Unix socket or a TCP port."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from msgspec import Struct

from penstock.core.errors import Misconfigured, NotRunning


class Address(Struct, frozen=True):
    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """`unix:/run/penstock.sock`, a bare path, or `tcp://127.0.0.1:7077`."""
        if text.startswith("tcp://"):
            host, _, port = text.removeprefix("tcp://").rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise Misconfigured(
                    f"{text!r} is not an address", hint="write tcp://HOST:PORT, or unix:/PATH"
                )
            return cls(host=host.strip("[]"), port=int(port))
        path = text.removeprefix("unix:").removeprefix("//")
        if not path or "://" in path:
            raise Misconfigured(
                f"{text!r} is not an address", hint="write tcp://HOST:PORT, or unix:/PATH"
            )
        return cls(path=Path(path))

    @property
    def is_local(self) -> bool:
        """Whether what is sent there stays on this machine."""
        if self.path is not None or self.host.lower() == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check_local(self) -> None:
        """Raises Misconfigured if it is on another machine."""
        if not self.is_local:
            raise Misconfigured(
                f"{self} is not on this machine: the token and all jobs would be sent "
                "there without encryption",
                hint="connect to the engine's HTTPS address, or through a tunnel, as in "
                "'ssh -L 7077:127.0.0.1:7077 HOST', to tcp://127.0.0.1:7077",
            )

    def unreachable(self) -> NotRunning:
        return NotRunning(
            f"no engine answers at {self}",
            hint="start one with 'penstock up', or name another with --data or --connect",
        )

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"tcp://{self.host}:{self.port}"
