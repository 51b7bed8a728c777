"""What a measurement needs of another engine."""

from __future__ import annotations

import subprocess
from typing import Protocol


class Peer(Protocol):
    bulk: bool
    """Whether it has a call that submits many jobs at once."""

    def clear(self) -> None:
        """Forget every job."""

    def submit(self, sent: int) -> None:
        """Enqueue one job that marks `sent`, and return when the engine has accepted it."""

    def submit_nap(self, sent: int) -> None:
        """The same for one that sleeps 20 ms before."""

    def submit_many(self, count: int) -> None:
        """Enqueue so many jobs: in one call if it has one, else one after another."""

    def start_workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        """Start so many worker processes; one command may start them all."""

    def server_pids(self) -> list[int]:
        """Processes that work for it besides the workers."""

    def close(self) -> None: ...
