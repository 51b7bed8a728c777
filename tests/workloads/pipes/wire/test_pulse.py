from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from penstock.workloads.pipes.wire.connection import Pulse


class Handle:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Time:
    """Stepped by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self._order = count()
        self._due: list[tuple[float, int, Handle, Callable[..., Any], tuple[Any, ...]]] = []

    def later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Handle:
        handle = Handle()
        heapq.heappush(self._due, (self.now + delay, next(self._order), handle, callback, args))
        return handle

    def to(self, when: float) -> None:
        while self._due and self._due[0][0] <= when:
            due, _, handle, callback, args = heapq.heappop(self._due)
            self.now = max(self.now, due)
            if not handle.cancelled:
                callback(*args)
        self.now = when

    def sleep_through(self, when: float) -> None:
        """The process is stopped: what was due is called when it wakes."""
        self.now = when
        self.to(when)


class Watched:
    def __init__(self, ping: float = 1.0, silence: float = 5.0) -> None:
        self.time = Time()
        self.asked: list[int] = []
        self.silences: list[float] = []
        self.pulse = Pulse(
            ping,
            silence,
            self.asked.append,
            self.found,
            later=self.time.later,
            clock=lambda: self.time.now,
        )
        self.pulse.start()

    def found(self, seconds: float) -> None:
        self.silences.append(seconds)
        self.pulse.stop()

    def hear(self) -> None:
        self.pulse.heard = self.time.now


def test_it_asks_at_once_and_then_once_every_interval() -> None:
    watched = Watched()
    assert watched.asked == [1]
    watched.time.to(103.5)
    assert watched.asked == [1, 2, 3, 4]


def test_silence_is_found_at_the_deadline() -> None:
    watched = Watched()
    watched.time.to(102.0)
    watched.hear()
    watched.time.to(106.9)
    assert watched.silences == []
    watched.time.to(107.0)
    assert watched.silences == [5.0]


def test_silence_is_told_once_and_nothing_is_asked_after_it() -> None:
    watched = Watched()
    watched.time.to(105.0)
    asked = list(watched.asked)
    watched.time.to(200.0)
    assert watched.silences == [5.0]
    assert watched.asked == asked


def test_whoever_is_heard_is_never_silent() -> None:
    watched = Watched()
    for step in range(1, 100):
        watched.time.to(100 + step)
        watched.hear()
    assert watched.silences == []


def test_a_process_that_was_stopped_reads_first_before_it_blames_a_peer() -> None:
    watched = Watched()
    watched.time.sleep_through(160.0)
    assert watched.silences == []
    watched.time.to(160.5)
    watched.hear()
    watched.time.to(165.4)
    assert watched.silences == []


def test_so_does_one_that_was_stopped_for_just_as_long_as_a_peer_may_be_silent() -> None:
    watched = Watched()
    watched.time.to(100.5)
    watched.time.sleep_through(105.1)
    assert watched.silences == []
    watched.hear()
    watched.time.to(110.0)
    assert watched.silences == []


def test_a_peer_that_is_still_silent_after_that_is_found() -> None:
    watched = Watched()
    watched.time.sleep_through(160.0)
    watched.time.to(161.0)
    assert watched.silences == [61.0]


def test_the_way_is_measured_by_the_answers() -> None:
    watched = Watched()
    pulse = watched.pulse
    assert pulse.rtt == pulse.rtt_min == 0.0
    watched.time.to(100.5)
    pulse.answered(1)
    assert pulse.rtt == pulse.rtt_min == 0.5
    watched.time.to(101.1)
    pulse.answered(2)
    assert pulse.rtt == pytest.approx(0.5 + 0.2 * (0.1 - 0.5))
    assert pulse.rtt_min == pytest.approx(0.1)


def test_an_answer_that_was_not_asked_for_or_comes_twice_says_nothing() -> None:
    watched = Watched()
    watched.time.to(100.5)
    watched.pulse.answered(1)
    watched.time.to(100.9)
    watched.pulse.answered(1)
    watched.pulse.answered(99)
    assert watched.pulse.rtt == 0.5


def test_a_way_that_got_longer_is_seen_in_the_end() -> None:
    watched = Watched(silence=1000.0)
    watched.time.to(100.01)
    watched.pulse.answered(1)
    for number in range(2, 40):
        watched.time.to(100 + number - 1 + 0.3)
        watched.pulse.answered(number)
    assert watched.pulse.rtt_min == pytest.approx(0.3)


def test_what_is_never_answered_is_forgotten() -> None:
    watched = Watched(silence=10_000.0)
    watched.time.to(1100.0)
    assert len(watched.pulse._asked) <= 16
