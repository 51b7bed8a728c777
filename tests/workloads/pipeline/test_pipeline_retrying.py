"""What exceptions say about trying again."""

from __future__ import annotations

import asyncio
import email.message
import http.client
import json
import socket
import ssl
import urllib.error
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every

from penstock.core.errors import InvalidRequest, NotRunning, TooMany
from penstock.core.job import Cancelled, Retry, RetryPolicy
from penstock.workloads.pipeline.records import ErrorClass, WhenOpen
from penstock.workloads.pipeline.retrying import (
    MAX_MESSAGE,
    MAX_RETRY_AFTER,
    BreakerOpen,
    Failure,
    bounded,
    judge,
    next_try,
)

TRANSIENT, PERMANENT, TIMEOUT, CANCELLED = ErrorClass
NOW = 1_700_000_000.0


class HttpError(Exception):
    """As clients raise it; which attribute carries the status differs."""

    def __init__(self, **facts: Any) -> None:
        super().__init__("HTTP")
        self.__dict__.update(facts)


class ClientConnectionError(Exception):
    """Named as one of aiohttp."""


class ServerDisconnected(ClientConnectionError): ...


class ConnectTimeout(Exception):
    """Named as one of httpx."""


class Odd(Exception):
    """Raises wherever it is touched."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def validation_error() -> Exception:
    try:
        msgspec.convert("x", int)
    except msgspec.ValidationError as error:
        return error
    raise AssertionError


@every(
    "error, error_class",
    [
        (ConnectionError(), TRANSIENT),
        (ConnectionResetError(), TRANSIENT),
        (BrokenPipeError(), TRANSIENT),
        (EOFError(), TRANSIENT),
        (asyncio.IncompleteReadError(b"", 3), TRANSIENT),
        (socket.gaierror(-2, "unknown"), TRANSIENT),
        (urllib.error.URLError("refused"), TRANSIENT),
        (http.client.IncompleteRead(b""), TRANSIENT),
        (OSError(28, "No space left"), TRANSIENT),
        (RuntimeError("who knows"), TRANSIENT),
        (Exception("who knows"), TRANSIENT),
        (Retry("again"), TRANSIENT),
        (ServerDisconnected(), TRANSIENT),
        (NotRunning("gone"), TRANSIENT),
        (TooMany("busy", retry_after=3), TRANSIENT),
        (BreakerOpen("b", NOW, WhenOpen.FAIL), TRANSIENT),
        (TimeoutError(), TIMEOUT),
        (ConnectTimeout(), TIMEOUT),
        (ValueError(), PERMANENT),
        (json.JSONDecodeError("x", "", 0), PERMANENT),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), PERMANENT),
        (TypeError(), PERMANENT),
        (KeyError("k"), PERMANENT),
        (IndexError(), PERMANENT),
        (AttributeError(), PERMANENT),
        (AssertionError(), PERMANENT),
        (ZeroDivisionError(), PERMANENT),
        (NotImplementedError(), PERMANENT),
        (RecursionError(), PERMANENT),
        (ImportError(), PERMANENT),
        (FileNotFoundError(), PERMANENT),
        (PermissionError(), PERMANENT),
        (ssl.SSLCertVerificationError(), PERMANENT),
        (validation_error(), PERMANENT),
        (InvalidRequest("config.a", "wrong"), PERMANENT),
        (SystemExit(3), PERMANENT),
        (Cancelled(), CANCELLED),
        (asyncio.CancelledError(), CANCELLED),
        (Odd(), TRANSIENT),
    ],
)
def test_an_exception_has_a_class(error: BaseException, error_class: ErrorClass) -> None:
    assert judge(error).error_class is error_class


STATUSES = [
    (400, PERMANENT),
    (401, PERMANENT),
    (404, PERMANENT),
    (408, TRANSIENT),
    (410, PERMANENT),
    (422, PERMANENT),
    (425, TRANSIENT),
    (429, TRANSIENT),
    (451, PERMANENT),
    (500, TRANSIENT),
    (503, TRANSIENT),
    (599, TRANSIENT),
]


@every("status, error_class", STATUSES)
def test_an_http_status_decides_wherever_it_is_carried(
    status: int, error_class: ErrorClass
) -> None:
    for error in (
        HttpError(status=status),
        HttpError(status_code=status),
        HttpError(response=SimpleNamespace(status_code=status)),
        HttpError(response=SimpleNamespace(status=status)),
        urllib.error.HTTPError("http://x", status, "no", email.message.Message(), None),
    ):
        assert judge(error).error_class is error_class


@pytest.mark.parametrize("status", ["404", True, None, 200, 302, 0, -1, 1404])
def test_what_is_no_http_error_status_decides_nothing(status: Any) -> None:
    assert judge(HttpError(status=status)).error_class is TRANSIENT


def test_a_status_goes_before_the_kind_of_the_exception() -> None:
    class Answered(ValueError):
        status_code = 503

    assert judge(Answered()).error_class is TRANSIENT


# -- codes, kinds, messages ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("x"), "KeyError"),
        (TimeoutError(), "TIMEOUT"),
        (Cancelled(), "CANCELLED"),
        (asyncio.CancelledError(), "CANCELLED"),
        (Retry(), "RETRY"),
        (BreakerOpen("b", NOW, WhenOpen.SKIP), "BREAKER_OPEN"),
    ],
)
def test_an_exception_has_a_code(error: BaseException, code: str) -> None:
    assert judge(error).code == code


def test_an_exception_is_known_by_every_class_it_is_of() -> None:
    kinds = judge(ConnectionResetError()).kinds
    assert {"ConnectionResetError", "ConnectionError", "builtins.OSError", "Exception"} <= {*kinds}
    assert kinds[0] == "ConnectionResetError"
    assert "object" not in kinds


def test_a_message_is_never_empty_and_never_too_long() -> None:
    assert judge(ValueError()).message == "ValueError"
    message = judge(ValueError("x" * 1_000_000)).message
    assert len(message) <= MAX_MESSAGE
    assert "1000000 characters in all" in message


def test_an_exception_that_can_not_be_shown_is_judged_all_the_same() -> None:
    failure = judge(Odd())
    assert "Odd.__str__ raised" in failure.message
    assert failure.retry_after is None


@given(st.text(st.characters(), max_size=3 * 60), st.integers(50, 100))
def test_a_bounded_text_can_be_stored(text: str, most: int) -> None:
    stored = bounded(text, most)
    stored.encode()
    assert "\0" not in stored
    if len(text) <= most and "\0" not in text and text.isascii():
        assert stored == text


@given(st.text(max_size=500) | st.text("\0\ud800", max_size=500))
def test_a_bounded_text_is_never_longer_than_its_bound(text: str) -> None:
    assert len(bounded(text, 60)) <= 60


# -- Retry-After --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("Tue, 14 Nov 2023 22:14:00 GMT", 40.0),
        ("Tue, 14 Nov 2023 22:13:00 GMT", 0.0),
        ("soon", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("-5", 0.0),
        ("Tue, 99 Nov 2023 22:14:00 GMT", None),
    ],
)
def test_a_retry_after_header_is_seconds_or_a_date(said: str, seconds: float | None) -> None:
    for error in (
        HttpError(status=429, headers={"retry-after": said}),
        HttpError(status=429, response=SimpleNamespace(headers={"Retry-After": said})),
    ):
        assert judge(error, NOW).retry_after == seconds


def test_a_date_without_a_clock_is_passed_over() -> None:
    error = HttpError(status=429, headers={"Retry-After": "Tue, 14 Nov 2023 22:14:00 GMT"})
    assert judge(error).retry_after is None


@pytest.mark.parametrize(
    ("said", "seconds"), [(4, 4.0), (2.5, 2.5), ("9", 9.0), (True, None), (object(), None)]
)
def test_a_retry_after_attribute_is_heard(said: Any, seconds: float | None) -> None:
    assert judge(HttpError(retry_after=said), NOW).retry_after == seconds


def test_penstocks_own_signals_say_when() -> None:
    assert judge(Retry("later", after=12)).retry_after == 12
    assert judge(Retry("later")).retry_after is None
    assert judge(TooMany("busy", retry_after=3)).retry_after == 3


# -- the next try -------------------------------------------------------------------------

POLICY = RetryPolicy(3, delay=1.0, factor=2.0, max_delay=30.0, jitter=0.5)


def a_failure(error_class: ErrorClass = TRANSIENT, **fields: Any) -> Failure:
    return Failure(**{"error_class": error_class, "code": "X", "message": "", **fields})


def test_backoff_doubles_and_ends_with_the_retries() -> None:
    waits = [next_try(POLICY, a_failure(), attempt, 0.0) for attempt in (1, 2, 3, 4)]
    assert waits == [1.0, 2.0, 4.0, None]


def test_chance_takes_away_up_to_the_jitter() -> None:
    assert next_try(POLICY, a_failure(), 1, 0.5) == 0.75


@pytest.mark.parametrize(
    ("error_class", "tried"),
    [(TRANSIENT, True), (TIMEOUT, True), (PERMANENT, False), (CANCELLED, False)],
)
def test_only_what_may_pass_is_tried_again(error_class: ErrorClass, tried: bool) -> None:
    assert (next_try(POLICY, a_failure(error_class), 1, 0.0) is not None) is tried


def test_without_a_policy_nothing_is_tried_again() -> None:
    assert next_try(RetryPolicy(), judge(Retry("please")), 1, 0.0) is None


@every(
    "on, never, error, tried",
    [
        (("ValueError",), (), ValueError(), True),
        (("ValueError",), (), json.JSONDecodeError("x", "", 0), True),
        (("ValueError",), (), ConnectionError(), False),
        (("permanent",), (), KeyError(), True),
        (("TIMEOUT",), (), TimeoutError(), True),
        (("timeout",), (), ConnectTimeout(), True),
        ((), ("ConnectionError",), ConnectionResetError(), False),
        ((), ("timeout",), TimeoutError(), False),
        ((), ("ValueError",), RuntimeError(), True),
        (("OSError",), ("ConnectionError",), ConnectionResetError(), False),
        (("Exception",), (), Cancelled(), False),
        (("BaseException",), (), asyncio.CancelledError(), False),
        (("KeyError",), (), Retry("please"), True),
        ((), (), BreakerOpen("b", NOW, WhenOpen.FAIL), False),
        (("BREAKER_OPEN",), (), BreakerOpen("b", NOW, WhenOpen.FAIL), True),
    ],
)
def test_names_say_what_is_tried_again(
    on: tuple[str, ...], never: tuple[str, ...], error: BaseException, tried: bool
) -> None:
    policy = RetryPolicy(3, on=on, never=never)
    assert (next_try(policy, judge(error), 1, 0.0) is not None) is tried


def test_what_the_other_side_asks_for_goes_before_the_backoff() -> None:
    assert next_try(POLICY, a_failure(retry_after=17.0), 1, 0.9) == 17.0
    assert next_try(POLICY, a_failure(retry_after=0.0), 1, 0.9) == 0.0


@pytest.mark.parametrize(
    ("asked", "waits"), [(3_599.0, 3_599.0), (3_600.0, 3_600.0), (1e9, MAX_RETRY_AFTER)]
)
def test_nobody_is_waited_for_longer_than_an_hour(asked: float, waits: float) -> None:
    assert next_try(POLICY, a_failure(retry_after=asked), 1, 0.0) == waits


@given(
    st.builds(
        RetryPolicy,
        retries=st.integers(0, 20),
        delay=st.floats(0, 1e6),
        factor=st.floats(1, 100),
        max_delay=st.floats(0, 1e6),
        jitter=st.floats(0, 1),
    ),
    st.integers(1, 30),
    st.floats(0, 1, exclude_max=True),
    st.none() | st.floats(0, 1e12),
)
def test_a_wait_is_within_its_bounds_and_tries_are_counted(
    policy: RetryPolicy, attempt: int, chance: float, retry_after: float | None
) -> None:
    wait = next_try(policy, a_failure(retry_after=retry_after), attempt, chance)
    assert (wait is None) == (attempt > policy.retries)
    if wait is not None:
        assert 0 <= wait <= (policy.max_delay if retry_after is None else MAX_RETRY_AFTER)


def test_only_transient_failures_and_timeouts_speak_against_a_breaker() -> None:
    against = {kind for kind in ErrorClass if a_failure(kind).counts_for_breaker}
    assert against == {TRANSIENT, TIMEOUT}
