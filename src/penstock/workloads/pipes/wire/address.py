"""HOST:PORT."""

from __future__ import annotations

from penstock.core.errors import Misconfigured


def parse(address: str) -> tuple[str, int]:
    """Host and port; `[::1]:7000` for IPv6, `:7000` for all interfaces. Raises Misconfigured."""
    host, colon, port = address.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if (
        not colon
        or not (port.isascii() and port.isdecimal())
        or int(port) > 65535
        or (":" in bare and bare == host)
    ):
        raise Misconfigured(f"{address!r} is not an address", hint="write HOST:PORT")
    return bare, int(port)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
