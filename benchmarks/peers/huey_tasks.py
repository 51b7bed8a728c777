"""Huey's tasks: imported by its producer and by its consumer, as Huey wants it."""

from __future__ import annotations

import os
import time

from huey import SqliteHuey
from marks import mark

huey = SqliteHuey(
    "bench",
    filename=os.environ["BENCH_HUEY_FILE"],
    fsync=bool(os.environ["BENCH_HUEY_FSYNC"]),
)


@huey.task()
def noop(sent: int = 0) -> None:
    mark(sent)


@huey.task()
def nap(sent: int = 0) -> None:
    time.sleep(0.02)
    mark(sent)
