"""The look at a whole input file before anything of it is submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.control.batch_lines import LineCheck, off_loop, raw_lines
from penstock.control.batch_surroundings import Surroundings
from penstock.core.errors import InvalidRequest, NotFound, UnknownTopic
from penstock.ports.batches import Batch

PATIENCE = 1.0
"""Seconds until a model that nobody serves is looked for again."""
_BREATH = 100
"""Lines after which others get a turn."""


async def check_lines(
    batch: Batch, around: Surroundings, is_wanted: Callable[[], bool]
) -> LineCheck:
    """What is wrong with them; breaks off when nobody wants to know any more."""
    check = LineCheck(batch.endpoint, around.dialect)
    try:
        async for number, raw in raw_lines(around.shelf, batch.input_file_id, around.longest):
            await off_loop(len(raw), check.look, number, raw)
            if check.is_enough or not is_wanted():
                return check
            if number % _BREATH == 0:
                await asyncio.sleep(0)
    except (InvalidRequest, NotFound) as error:
        check.blame(error, None)
    if not check.errors:
        await _check_topics(check, around, is_wanted)
    return check


async def _check_topics(
    check: LineCheck, around: Surroundings, is_wanted: Callable[[], bool]
) -> None:
    """A worker may be about to come back after a restart: who is away at first is waited for."""
    clock = around.clock
    until = clock.now() + around.grace
    for topic, number in check.topics.items():
        while not (known := around.knows(topic)) and clock.now() < until and is_wanted():
            await clock.sleep(PATIENCE)
        if not known:
            check.blame(UnknownTopic("body.model", f"nothing here serves {topic!r}"), number)
