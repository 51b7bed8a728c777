"""Node processes that are hosts of their own: each in a network namespace, and between them a
wire that delays, loses and cuts. (netem would do the same where the kernel has it.)

All of it ends with its processes: nothing has a name, and nothing is left behind.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import random
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.chaos.pipes_network import NodeProcess, Processes
from tests.support.chaos.pipes_nodes import MovedOut, MoveOut

from penstock.workloads.pipes.config import LayerRange

_GET_FILE = 438
"""The number of pidfd_getfd, which Python has no name for."""
_PACKET = 1 << 16


class Wire(threading.Thread):
    """Carries packets of IP. What is set may be changed at any time."""

    def __init__(self, delay: float = 0.0, loss: float = 0.0, seed: int = 1) -> None:
        super().__init__(name="wire", daemon=True)
        self.delay, self.loss = delay, loss
        self.cuts: set[tuple[str, str]] = set()
        """From whom nothing reaches whom."""
        self.carried = self.dropped = 0
        self._chance = random.Random(seed)
        self._files: dict[str, int] = {}
        self._under_way: list[tuple[float, int, str, bytes]] = []
        self._news, self._wake = os.pipe()
        self._is_over = False

    def cut(self, one: str, other: str) -> None:
        self.cuts |= {(one, other), (other, one)}

    def mend(self) -> None:
        self.cuts = set()

    def join_host(self, address: str, file: int) -> None:
        os.set_blocking(file, False)
        self._files = {**self._files, address: file}
        os.write(self._wake, b".")

    def close(self) -> None:
        self._is_over = True
        os.write(self._wake, b".")
        self.join()
        for file in (*self._files.values(), self._news, self._wake):
            os.close(file)

    def run(self) -> None:
        while not self._is_over:
            due = self._under_way[0][0] - time.monotonic() if self._under_way else None
            files = [self._news, *self._files.values()]
            readable, _, _ = select.select(files, [], [], max(0.0, due) if due is not None else due)
            for file in readable:
                if file == self._news:
                    os.read(file, 4096)
                else:
                    self._take(file)
            self._hand_out()

    def _take(self, file: int) -> None:
        try:
            packet = os.read(file, _PACKET)
        except OSError:  # its host is gone
            self._files = {a: f for a, f in self._files.items() if f != file}
            os.close(file)
            return
        if packet[0] >> 4 != 4:
            return
        route = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
        if route in self.cuts or self._chance.random() < self.loss:
            self.dropped += 1
            return
        self.carried += 1
        due = time.monotonic() + self.delay
        heapq.heappush(self._under_way, (due, self.carried, route[1], packet))

    def _hand_out(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, address, packet = heapq.heappop(self._under_way)
            try:
                os.write(self._files[address], packet)
            except (KeyError, OSError):  # as on a real wire
                self.dropped += 1


class Hosts(Processes):
    """Each node in a network of its own, with an address that follows from its id."""

    def __init__(self, nursery: str, source: Path, wire: Wire, **defaults: Any) -> None:
        super().__init__(nursery, source, **defaults)
        self.wire = wire
        wire.start()
        self.callback(wire.close)

    def cut(self, one: str, other: str) -> None:
        self.wire.cut(address_of(one), address_of(other))

    async def add(self, node_id: str, *layers: LayerRange | None, **more: Any) -> NodeProcess:
        node = await self.born(node_id)
        node.tell(MoveOut(address_of(node_id)))
        moved = await node.said(MovedOut)
        self.wire.join_host(address_of(node_id), _file_of(node.pid, moved.fd))
        listen = f"{address_of(node_id)}:7000"
        await node.start(self.config(node_id, *layers, listen=listen, **more))
        self.nodes[node_id] = node
        return node


def address_of(node_id: str) -> str:
    return f"10.77.0.{ord(node_id) - ord('a') + 1}"


def _file_of(pid: int, number: int) -> int:
    """A file of another process."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        file = int(libc.syscall(_GET_FILE, process, number, 0))
        if file < 0:
            raise OSError(ctypes.get_errno(), "its file can't be had")
        return file
    finally:
        os.close(process)
