"""The jobs that taskiq's workers run."""

from __future__ import annotations

import asyncio
import os

from marks import mark
from taskiq_nats import PullBasedJetStreamBroker

broker = PullBasedJetStreamBroker([os.environ["BENCH_NATS"]], pull_consume_batch=100)


@broker.task(task_name="noop")
async def noop(sent: int = 0) -> None:
    mark(sent)


@broker.task(task_name="nap")
async def nap(sent: int = 0) -> None:
    await asyncio.sleep(0.02)
    mark(sent)
