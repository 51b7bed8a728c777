"""Dramatiq's actors: imported by its producer and by its workers, as Dramatiq wants it."""

from __future__ import annotations

import os
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from marks import mark

broker = RedisBroker(url=os.environ["BENCH_REDIS"])
# It would open a port for metrics, which nobody asks for here.
broker.middleware = [m for m in broker.middleware if type(m).__name__ != "Prometheus"]
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(sent: int = 0) -> None:
    mark(sent)


@dramatiq.actor
def nap(sent: int = 0) -> None:
    time.sleep(0.02)
    mark(sent)
