"""Where an engine listens: a Unix socket, a TCP port of this machine, or TLS for other machines."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from msgspec import Struct

from penstock.core.errors import Misconfigured, NotRunning
from penstock.ports.address import parse_host_port

PORT = 7480
"""The usual port of TLS."""
_TLS = ("penstock://", "tls://")


class Address(Struct, frozen=True):
    path: Path | None = None
    host: str = ""
    port: int = 0
    tls: bool = False
    via: str = ""
    """The address of what stands between, as a NATS server; it says itself whether it is safe."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """`penstock://host:7480`, `unix:/run/penstock.sock`, a bare path, or
        `tcp://127.0.0.1:7077`."""
        for scheme in (*_TLS, "tcp://"):
            if text.startswith(scheme):
                return cls._at(text, text.removeprefix(scheme).rstrip("/"), scheme in _TLS)
        path = text.removeprefix("unix:").removeprefix("//")
        if not path or "://" in path:
            raise _invalid(text)
        return cls(path=Path(path))

    @classmethod
    def _at(cls, text: str, place: str, tls: bool) -> Address:
        try:
            host, port = parse_host_port(place, usual=PORT if tls else None)
        except ValueError:
            raise _invalid(text) from None
        if not host:
            raise _invalid(text)
        return cls(host=host, port=port, tls=tls)

    @property
    def is_local(self) -> bool:
        """Whether what is sent there stays on this machine."""
        if self.path is not None or self.host.lower() == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check_private(self) -> None:
        """Raises Misconfigured if others could read what is sent there."""
        if not (self.via or self.tls or self.is_local):
            raise Misconfigured(
                f"{self} is not on this machine: the token and all jobs would be sent "
                "there without encryption",
                hint=f"connect to the engine's TLS address, as penstock://{self.host}:{PORT}",
            )

    def unreachable(self, why: str = "") -> NotRunning:
        return NotRunning(
            f"no engine answers at {self}" + (f": {why}" if why else ""),
            hint="start one with 'penstock up', or name another with --data or --connect",
        )

    def __str__(self) -> str:
        if self.via:
            return self.via
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'penstock' if self.tls else 'tcp'}://{host}:{self.port}"


def _invalid(text: str) -> Misconfigured:
    return Misconfigured(
        f"{text!r} is not an address",
        hint="write penstock://HOST:PORT, tcp://127.0.0.1:PORT, or unix:/PATH",
    )
