"""A pipeline that is small enough to know by heart."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.app.pipelines import Pipeline


class TinyConfig(Struct, frozen=True, kw_only=True):
    numbers: tuple[int, ...] = (1, 2, 3)
    """Those below zero fail, until they are mended."""
    pause: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Seconds that each takes."""


mended: set[str] = set()
"""Keys of items that fail no more."""


def a_tiny_pipeline(name: str = "tiny", **options: Any) -> Pipeline:
    tiny = Pipeline(name, config=TinyConfig, cancel_grace=0.1, **options)

    @tiny.map(over="numbers", concurrency=2, key=str)
    async def double(number: int, ctx: Any) -> int:
        ctx.emit({"number": number})
        await asyncio.sleep(ctx.config.pause)
        if number < 0 and ctx.key not in mended:
            raise ValueError(f"{number} is below zero")
        return 2 * number

    @tiny.step(of=double)
    async def total(results: Any, ctx: Any) -> int:
        return sum([number async for number in results])

    return tiny
