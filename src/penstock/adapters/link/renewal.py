"""What becomes of a call or a stream whose connection is lost.

A call that was not sent yet waits for the engine to come back. One that was sent is sent again,
unless it is one of `ONCE`: then its caller is told that the answer was lost. A stream goes on
after the last value that came.

A connection can also die without a word: a machine without power sends nothing. So the engine is
pinged, and one that lets three pings unanswered is lost. (The options of `ports/process.py` see
no farther than the next tunnel or proxy.)
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.adapters.link.address import Address
from penstock.adapters.link.proxy import ONCE
from penstock.core.errors import EngineUnavailable
from penstock.core.job import IdSource, JobRequest
from penstock.ports.clock import backoff
from penstock.ports.engine_api import Logged, Moved, StreamBatch, Streamed
from penstock.workloads.pipeline.records import PipelineEvent

RECONNECT_TIMEOUT = 60.0
"""Seconds that a call without a timeout of its own waits for an engine that was lost."""
HANDSHAKE_TIMEOUT = 10.0
"""Seconds within which an engine must have answered the first frame of the first connection."""
PING_INTERVAL = 10.0
"""Seconds between pings."""
MAX_UNANSWERED = 3
"""Pings in a row after which an engine that sent nothing is lost."""
_LEAST_SILENCE = 3.0
"""Seconds for which an engine may be silent, however short the reconnect_timeout is."""
_STEADY = 1.0
"""Seconds after which a connection was good, though no value of a stream came over it."""
_LATE = 2.0
"""Seconds beyond a caller's timeout after which an engine that is connected counts as lost."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class ConnectionLost(Exception):
    """The connection ended before the answer came."""

    def __init__(self, since: float | None = None) -> None:
        """`since` is when the engine was last heard of, on the monotonic clock."""
        super().__init__()
        self.since = time.monotonic() if since is None else since


def ping_interval(reconnect_timeout: float | None) -> float:
    """Such that an engine is not missed for longer than a call would wait for it, and that there is
    time for three tries to reach it."""
    if reconnect_timeout is None:
        return PING_INTERVAL
    return min(PING_INTERVAL, max(reconnect_timeout, _LEAST_SILENCE) / MAX_UNANSWERED)


def job_ids() -> IdSource:
    """Ids for what a client submits; the system is asked for randomness once."""
    source = random.Random(secrets.randbits(128))
    return IdSource(lambda: source.getrandbits(79))


def pauses() -> Iterator[float]:
    """Seconds between attempts to connect."""
    return backoff(_FIRST_PAUSE, _LONGEST_PAUSE, jitter=0.5)


class Sending:
    """One call, sent until it is answered or its time is over."""

    def __init__(
        self,
        address: Address,
        method: str,
        params: Mapping[str, Any],
        reconnect_timeout: float | None,
        ids: IdSource,
    ) -> None:
        self._address, self._method, self._reconnect_timeout = address, method, reconnect_timeout
        if method == "submit":
            params = _named(params, ids)
        elif method == "pipelines.start" and params.get("idempotency_key") is None:
            params = {**params, "idempotency_key": ids.next(time.time())}
        self.params = params
        self._began = time.monotonic()
        self._lost_at: float | None = None
        timeout: float | None = params.get("timeout")
        # An own timeout of 0 means no wait for the job's end; only these do nothing but wait.
        waits = method in ("wait", "wait_many")
        self.timeout: float | None = timeout if waits or timeout else None
        if waits and timeout is None:
            self._reconnect_timeout = None

    @property
    def is_once(self) -> bool:
        return self._method in ONCE

    @property
    def answer_timeout(self) -> float | None:
        """Seconds within which a connected engine must answer, if the caller has a timeout."""
        return None if self.timeout is None else max(0.0, self._left() or 0.0) + _LATE

    def lost(self, since: float) -> None:
        """Prepare to be sent again. Raises EngineUnavailable for what is sent once."""
        if self._lost_at is None:
            self._lost_at = max(self._began, since)
        if self.is_once:
            raise EngineUnavailable(
                f"the connection to {self._address} was lost before the engine answered "
                f"'{self._method}'",
                hint="it may have been done all the same: look before you call it again",
            )
        if self.timeout is not None:
            self.params = {**self.params, "timeout": max(0.0, self._left() or 0.0)}
        elif self._method == "submit":
            self.params = {"requests": self.params["requests"]}

    def time_left(self) -> float | None:
        """Seconds to wait for the engine; None: for ever. Raises EngineUnavailable at the end."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        left = self._left()
        if left is not None and left <= 0:
            raise self.unavailable()
        return left

    def _left(self) -> float | None:
        if self.timeout is not None:
            return self._began + self.timeout - time.monotonic()
        if self._reconnect_timeout is None:
            return None
        since = self._began if self._lost_at is None else self._lost_at
        return since + self._reconnect_timeout - time.monotonic()

    def unavailable(self) -> EngineUnavailable:
        if self._lost_at is None:
            what = f"the engine at {self._address} has not answered"
        else:
            what = f"the connection to {self._address} was lost, and could not be made again"
        since = self._began if self._lost_at is None else self._lost_at
        waited = time.monotonic() - since
        return EngineUnavailable(
            f"'{self._method}' failed: {what} for {waited:.1f} s",
            hint="is the engine running? Start it, or wait longer: connect(reconnect_timeout=...)",
        )


def _named(params: Mapping[str, Any], ids: IdSource) -> Mapping[str, Any]:
    """Give ids to requests, so that they can be sent twice and are one job.

    `fresh` tells the engine that it need not look those ids up.
    """
    requests: Sequence[JobRequest] = params["requests"]
    now = time.time()
    fresh = True
    named = []
    for request in requests:
        if request.job_id:
            fresh = False
        elif request.idempotency_key is None:
            request = replace(request, job_id=ids.next(now))
        named.append(request)
    return {"requests": named, "fresh": True} if fresh else {"requests": named}


class Reading(Sending):
    """One stream: where to go on after the connection was lost."""

    def __init__(
        self,
        address: Address,
        method: str,
        params: Mapping[str, Any],
        reconnect_timeout: float | None,
    ) -> None:
        super().__init__(address, method, dict(params), reconnect_timeout, _NO_IDS)
        self._piece = (0, 0)
        self._connected_at = self._began

    def connected(self) -> None:
        self._connected_at = time.monotonic()

    def lost(self, since: float) -> None:
        """After a connection that was good for a while, all of the time to reconnect is there."""
        if since - self._connected_at > _STEADY:
            self._lost_at = None
        super().lost(since)

    def is_new(self, value: object) -> bool:
        """Remember where the stream is; False for a value that came before."""
        self._lost_at = None
        params: dict[str, Any] = self.params  # type: ignore[assignment]
        match value:
            case StreamBatch():
                params["after"] = value.place
            case PipelineEvent(id=int(number)):
                params["after"] = number
            case Moved():
                params["after_move"] = value.transition.n
            case Logged():
                params["after_log"] = value.line.n
            case Streamed():
                piece = (value.attempt, value.n)
                if piece <= self._piece:
                    return False
                self._piece = piece
        return True


_NO_IDS = IdSource()
