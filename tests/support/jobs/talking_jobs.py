"""Jobs that print and log, in every mode."""

from __future__ import annotations

import logging
import sys

import penstock

app = penstock.App()
log = logging.getLogger(__name__)


def _talk() -> None:
    print("printed")
    print("complained", file=sys.stderr)
    log.info("logged")
    log.warning("warned")
    log.debug("too low")
    print("no end", end="")


@app.job("job.talk.async")
async def talk() -> None:
    _talk()


@app.job("job.talk.thread")
def talk_in_thread() -> None:
    _talk()


@app.job("job.talk.process", mode="process")
def talk_in_process() -> None:
    _talk()


@app.job("job.flood.thread")
def flood(count: int) -> int:
    for n in range(count):
        print("line", n)
    return count


@app.job("job.flood.process", mode="process")
def flood_in_process(count: int) -> int:
    for n in range(count):
        print("line", n)
    return count


@app.job("job.talk.ping")
async def ping() -> str:
    return "pong"
