"""HOST:PORT, as people write it."""

from __future__ import annotations


def parse_host_port(text: str, *, usual: int | None = None) -> tuple[str, int]:
    """`127.0.0.1:7470`, `[::1]:7470`, `localhost:0`, or `:7470` for all interfaces, whose host is
    "". With a `usual` port it may be left out. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if usual is not None and (not colon or text.endswith("]")):
        host, colon, port = text, ":", str(usual)
    bare = host.removeprefix("[").removesuffix("]")
    if not (colon and port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{text!r} is not HOST:PORT, as 127.0.0.1:7470")
    if ":" in bare and bare == host:
        raise ValueError(f"{text!r}: write the address in brackets, as [::1]:7470")
    return bare, int(port)


def parse_address(text: str) -> tuple[str, int]:
    """The same with a host in any case. Raises ValueError."""
    host, port = parse_host_port(text)
    if not host:
        raise ValueError(f"{text!r} is not HOST:PORT, as 127.0.0.1:7470")
    return host, port
