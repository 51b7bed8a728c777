"""How the system notices that the other end of a TCP connection is gone without a word.

A machine that loses its power or its network sends no FIN. Without these options a connection to
it stays open, and whoever reads from it waits for ever.
"""

from __future__ import annotations

import socket
from typing import Any

_IDLE, _INTERVAL, _PROBES = 15, 5, 3
"""Seconds of silence before the first probe, seconds between probes, and their number."""
_OPTIONS = {
    "TCP_KEEPIDLE": _IDLE,
    "TCP_KEEPALIVE": _IDLE,  # its name on macOS
    "TCP_KEEPINTVL": _INTERVAL,
    "TCP_KEEPCNT": _PROBES,
}
CALLER_TIMEOUT = 30.0
"""Seconds that what a client has sent may stay unacknowledged: an engine always reads."""
ENGINE_TIMEOUT = 300.0
"""The same for an engine: a client or worker that is busy may let it wait."""


def keep_alive(connection: Any, timeout: float) -> None:
    """Set the options that this platform has, if it is a TCP connection (or its listener)."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_OPTIONS, "TCP_USER_TIMEOUT": int(timeout * 1000)}.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
