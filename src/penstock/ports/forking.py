"""Files and sockets that a forked child must not keep open.

A child that holds a copy of its parent's lock, listening socket or connection keeps it alive
after the parent's death: nobody can take the lock, and nobody notices that the parent is gone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet


class FileOwner(Protocol):
    def filenos(self) -> Iterable[int]:
        """The file descriptors that it has open now; negative ones are ignored."""


_owners: WeakSet[FileOwner] = WeakSet()


def close_in_children(owner: FileOwner) -> None:
    """Close what `owner` has open in every child that this process forks, while it lives."""
    _owners.add(owner)


def fileno_of(transport: asyncio.BaseTransport | None) -> int:
    connection = None if transport is None else transport.get_extra_info("socket")
    return -1 if connection is None else int(connection.fileno())


def _close() -> None:
    """Put /dev/null in the place of each: its owner may close it once more, and must not hit a
    file that has got its number meanwhile."""
    null = os.open(os.devnull, os.O_RDWR)
    for owner in list(_owners):
        for fileno in owner.filenos():
            if fileno >= 0:
                with suppress(OSError):
                    os.dup2(null, fileno, inheritable=False)
    _owners.clear()
    os.close(null)


os.register_at_fork(after_in_child=_close)
