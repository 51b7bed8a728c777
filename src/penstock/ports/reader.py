"""One subscription within this process: a task that hands over whatever has gathered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from penstock.ports.bus import AnyMessage, Handler

log = logging.getLogger(__name__)


class Reader:
    """See `penstock.ports.bus.Subscription`. A handler that fails is given what comes next."""

    def __init__(
        self,
        subject: str,
        handler: Handler,
        forget: Callable[[Reader], None],
        group: str | None = None,
    ) -> None:
        self.subject, self.group = subject, group
        self._handler, self._forget = handler, forget
        self._gathered: list[AnyMessage] = []
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"bus {subject}")

    def take(self, messages: Sequence[AnyMessage]) -> None:
        self._gathered.extend(messages)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._gathered = self._gathered, []
            try:
                await self._handler(batch)
            except Exception:
                log.exception("a reader of %s failed on %d messages", self.subject, len(batch))

    async def close(self) -> None:
        self._forget(self)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
