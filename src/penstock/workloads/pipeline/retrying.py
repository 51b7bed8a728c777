"""What an exception says about trying again.

    transient   worth another try: the connection, the other side (HTTP 408, 425, 429, 5xx),
                `penstock.Retry`, and whatever is not known to be one of the others
    timeout     it took longer than it may; worth another try
    permanent   the same input gives the same failure: wrong values and types, missing keys,
                failed checks, files that are not there, other HTTP 4xx, bugs
    cancelled   it was asked to end; never tried again

An unknown exception, a bare RuntimeError for one, is transient: to try once too often costs
a little time, to give up on what would have worked loses an item.
"""

from __future__ import annotations

import asyncio
import math
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec
from msgspec import Struct

from penstock.core.errors import InvalidRequest, Misconfigured, NotFound, NotPermitted
from penstock.core.job import RETRY_REQUESTED, Cancelled, Retry, RetryPolicy, backoff
from penstock.workloads.pipeline.records import ErrorClass, WhenOpen

BREAKER_OPEN = "BREAKER_OPEN"
"""The error code of an item that failed because its breaker was open."""


class BreakerOpen(Exception):
    """An item was not run because its breaker is open, and it is not to wait."""

    def __init__(self, name: str, until: float, when_open: WhenOpen) -> None:
        super().__init__(f"circuit breaker {name} is open")
        self.name, self.until, self.when_open = name, until, when_open


MAX_MESSAGE = 2_000
MAX_RETRY_AFTER = 3_600.0
"""Seconds; another side that asks for more is asked again after an hour."""

TIMEOUT = "TIMEOUT"
CANCELLED = "CANCELLED"

_PERMANENT: tuple[type[BaseException], ...] = (
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    AttributeError,
    ArithmeticError,
    NameError,
    ImportError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    SystemExit,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    msgspec.MsgspecError,
    InvalidRequest,
    Misconfigured,
    NotFound,
    NotPermitted,
)
_TRANSIENT: tuple[type[BaseException], ...] = (ConnectionError, EOFError)
_TRANSIENT_NAMES = frozenset(
    {"ClientConnectionError", "ClientPayloadError", "TransportError", "NetworkError"}
)
"""Of HTTP clients that need not be installed: aiohttp, httpx."""
_WORTH_A_TRY = frozenset({ErrorClass.TRANSIENT, ErrorClass.TIMEOUT})
_TRANSIENT_STATUS = frozenset({408, 425, 429})


class Failure(Struct, frozen=True, kw_only=True):
    """Why a call ended without a result."""

    error_class: ErrorClass
    code: str
    """The exception's class, or a code of Penstock's."""
    message: str
    kinds: tuple[str, ...] = ()
    """Every name by which a RetryPolicy may know it, most special first."""
    retry_after: float | None = None
    """Seconds after which the other side wants to be asked again."""

    @property
    def counts_for_breaker(self) -> bool:
        """Whether it speaks against what the breaker guards; a bad item does not."""
        return self.error_class in _WORTH_A_TRY


def judge(error: BaseException, now: float | None = None) -> Failure:
    """Never raises. `now` is what a Retry-After that is a date is measured from; without it,
    such a date is passed over."""
    error_class = _class_of(error)
    return Failure(
        error_class=error_class,
        code=_code_of(error, error_class),
        message=bounded(_text_of(error)),
        kinds=_kinds_of(type(error)),
        retry_after=_retry_after(error, now),
    )


def next_try(policy: RetryPolicy, failure: Failure, attempt: int, chance: float) -> float | None:
    """Seconds until the call is tried again, or None.

    `attempt` is the one that failed, from 1; `chance` is in [0, 1). `on` and `never` may name
    exception classes, codes and error classes; without `on`, only transient failures and
    timeouts are tried again. What the other side asked for goes before the backoff.
    """
    if attempt > policy.retries or not _wanted(policy, failure):
        return None
    if failure.retry_after is not None:
        return min(failure.retry_after, MAX_RETRY_AFTER)
    return backoff(policy, attempt, chance)


def bounded(text: str, most: int = MAX_MESSAGE) -> str:
    """Text that can be stored: at most so long, without lone surrogates and NULs."""
    if len(text) > most:
        text = f"{text[: most - 40]}... ({len(text)} characters in all)"
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _wanted(policy: RetryPolicy, failure: Failure) -> bool:
    if failure.error_class is ErrorClass.CANCELLED:
        return False
    names = {failure.code, str(failure.error_class), *failure.kinds}
    if failure.code == RETRY_REQUESTED:
        return True
    if names & set(policy.never):
        return False
    if policy.on:
        return bool(names & set(policy.on))
    # A stage that fails items while its breaker is open wants them to fail at once.
    return failure.error_class in _WORTH_A_TRY and failure.code != BREAKER_OPEN


def _class_of(error: BaseException) -> ErrorClass:
    if isinstance(error, Cancelled | asyncio.CancelledError | KeyboardInterrupt):
        return ErrorClass.CANCELLED
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return ErrorClass.TIMEOUT
    if isinstance(error, Retry | BreakerOpen):
        return ErrorClass.TRANSIENT
    status = _status_of(error)
    if status is not None:
        transient = status in _TRANSIENT_STATUS or status >= 500
        return ErrorClass.TRANSIENT if transient else ErrorClass.PERMANENT
    if isinstance(error, _TRANSIENT) or _TRANSIENT_NAMES.intersection(_kinds_of(type(error))):
        return ErrorClass.TRANSIENT
    return ErrorClass.PERMANENT if isinstance(error, _PERMANENT) else ErrorClass.TRANSIENT


def _code_of(error: BaseException, error_class: ErrorClass) -> str:
    if error_class is ErrorClass.CANCELLED:
        return CANCELLED
    if isinstance(error, BreakerOpen):
        return BREAKER_OPEN
    if isinstance(error, Retry):
        return RETRY_REQUESTED
    if isinstance(error, TimeoutError):
        return TIMEOUT
    return type(error).__name__


def _status_of(error: BaseException) -> int | None:
    """The HTTP status that an exception carries; None if it carries none above 399."""
    response = _get(error, "response")
    found = [_get(error, "status"), _get(error, "status_code")]
    found += [_get(response, "status_code"), _get(response, "status"), _get(error, "code")]
    for status in found:
        if isinstance(status, int) and not isinstance(status, bool) and 400 <= status <= 599:
            return int(status)
    return None


def _retry_after(error: BaseException, now: float | None) -> float | None:
    if isinstance(error, Retry):
        return _seconds(error.after)
    said = _get(error, "retry_after")
    if said is None:
        said = _header(_get(error, "headers"))
    if said is None:
        said = _header(_get(_get(error, "response"), "headers"))
    return _delay(said, now) if isinstance(said, str) else _seconds(said)


def _header(headers: Any) -> Any:
    """Retry-After, however the mapping spells it."""
    try:
        pairs = headers.items()
        return next((value for name, value in pairs if str(name).lower() == "retry-after"), None)
    except Exception:
        return None


def _delay(said: str, now: float | None) -> float | None:
    """Of a header: seconds, or a date."""
    try:
        return _seconds(float(said))
    except ValueError:
        pass
    if now is None:
        return None
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - now)
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def _seconds(said: Any) -> float | None:
    """What was said, if it makes sense; else the policy says when."""
    if isinstance(said, int | float) and not isinstance(said, bool) and math.isfinite(said):
        return max(0.0, float(said))
    return None


def _get(holder: Any, name: str) -> Any:
    """An attribute of something that anybody may have written."""
    try:
        return getattr(holder, name, None)
    except Exception:
        return None


def _text_of(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return f"(its message can't be shown: {name}.__str__ raised)"
    return text or name


def _kinds_of(error: type[BaseException]) -> tuple[str, ...]:
    """Its classes, plainly and with their modules."""
    pairs = ((cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for cls in error.__mro__[:-1])
    return tuple(dict.fromkeys(name for pair in pairs for name in pair))
