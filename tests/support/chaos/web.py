"""A web application of several processes that submits jobs and runs them: no framework, ASGI."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from tests.support.chaos.jobs import app, short

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


async def web(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    number = int(scope["path"].strip("/"))
    job = await short.options(key=f"n{number}").asubmit(number)
    body = json.dumps({"job_id": job.job_id, "pid": os.getpid()}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def lifespan(receive: Receive, send: Send) -> None:
    async with AsyncExitStack() as stack:
        await receive()
        if os.environ.get("PENSTOCK_X_HOW") == "start":
            await app.astart()
            stack.push_async_callback(app.aclose)
        else:
            await stack.enter_async_context(app.run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
    await send({"type": "lifespan.shutdown.complete"})
