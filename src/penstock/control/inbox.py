"""Accepts the jobs of an inbox.

A row is removed after its job was accepted. If the engine dies in between, the job is submitted
again under the same id, which changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from penstock.control.gateway import Gateway
from penstock.control.store_retry import Retry
from penstock.core.errors import InvalidRequest, PenstockError, StoreFailed, TooMany, Unavailable
from penstock.core.job import JobRequest
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.inbox import Inbox, InboxRow

log = logging.getLogger(__name__)

_ROWS = 500
"""Rows that are accepted in one commit."""
_FULL_PAUSE = 1.0
"""Seconds until jobs for which the engine has no room are tried again."""
_OPTIONS = frozenset(
    {
        *("priority", "adapter_id", "env", "workflow_id", "step_index", "labels"),
        *("idempotency_key", "timeout", "dispatch_timeout", "deadline", "run_at", "retry"),
        *("idempotent", "capability", "risk_tags", "estimated_cost", "after", "if_parent_fails"),
        *("takes_results", "unique"),
    }
)
"""Fields of a JobRequest that a submitter may set."""


class InboxService:
    """Takes rows from an inbox until it is cancelled."""

    def __init__(self, inbox: Inbox, gateway: Gateway, blobs: Blobs, clock: Clock) -> None:
        self._inbox, self._gateway, self._blobs, self._clock = inbox, gateway, blobs, clock
        self._retry = Retry(clock)

    async def run(self) -> None:
        try:
            while True:
                found = await self._retry("read the inbox", lambda: self._inbox.read(_ROWS))
                if not found:
                    await self._inbox.wait()
                elif not await self._accept(found):
                    await self._clock.sleep(_FULL_PAUSE)
        finally:
            await self._inbox.close()

    async def _accept(self, found: Sequence[InboxRow]) -> bool:
        """Submit these rows; False if there is no room for some of them now."""
        try:
            await self._submit(found)
        except (TooMany, StoreFailed, Unavailable) as error:
            log.warning("jobs of the inbox wait: %s", error)
            return False
        except PenstockError as error:
            if len(found) == 1:
                log.warning("job %r of the inbox is refused: %s", found[0].job_id, error)
                number, why = found[0].number, str(error)
                await self._retry("refuse a job", lambda: self._inbox.refuse(number, why))
                return True
            half = len(found) // 2
            return await self._accept(found[:half]) and await self._accept(found[half:])
        numbers = [row.number for row in found]
        await self._retry("empty the inbox", lambda: self._inbox.remove(numbers))
        return True

    async def _submit(self, found: Sequence[InboxRow]) -> None:
        by_user: dict[str, list[JobRequest]] = {}
        for row in found:
            by_user.setdefault(row.user, []).append(await self._request(row))
        for user, requests in by_user.items():
            await self._gateway.submit(requests, by=f"sql:{user}")

    async def _request(self, row: InboxRow) -> JobRequest:
        for name in row.options.keys() - _OPTIONS:
            raise InvalidRequest("options", f"unknown field {name!r}")
        pointer = "" if row.input is None else await self._blobs.put(row.input)
        named = {"job_id": row.job_id, "topic": row.topic, "tenant": row.tenant}
        try:
            return msgspec.convert({**row.options, **named, "context_ptr": pointer}, JobRequest)
        except msgspec.ValidationError as error:
            raise InvalidRequest("options", str(error)) from None
