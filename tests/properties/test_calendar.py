"""Cron times against a reading of every single minute around the turns of the clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.calendar import Calendar
from penstock.core.errors import InvalidRequest

DAY = 86_400.0
MINUTE = timedelta(minutes=1)

TURNS = [
    ("Europe/Berlin", "2026-03-29T01:00"),
    ("Europe/Berlin", "2026-10-25T01:00"),
    ("America/New_York", "2026-03-08T07:00"),
    ("America/New_York", "2026-11-01T06:00"),
    ("Australia/Lord_Howe", "2026-04-04T15:00"),  # half an hour
    ("Australia/Lord_Howe", "2026-10-03T15:30"),
    ("America/Santiago", "2026-09-06T04:00"),  # there is no midnight
    ("America/Havana", "2026-11-01T05:00"),  # midnight comes twice
    ("Pacific/Apia", "2011-12-30T10:00"),  # a whole day is left out
    ("UTC", "2026-01-01T00:00"),
]


@dataclass(frozen=True)
class Cron:
    text: str
    matches: Callable[[datetime], bool]
    fixed: bool


def field(low: int, high: int) -> st.SearchStrategy[tuple[str, frozenset[int]]]:
    every = st.just(("*", frozenset(range(low, high + 1))))
    steps = st.sampled_from([2, 3, 5, 7]).map(
        lambda n: (f"*/{n}", frozenset(range(low, high + 1, n)))
    )
    some = st.sets(st.integers(low, high), min_size=1, max_size=4).map(
        lambda chosen: (",".join(map(str, sorted(chosen))), frozenset(chosen))
    )
    return every | steps | some


@st.composite
def crons(draw: st.DrawFn) -> Cron:
    (minute, minutes), (hour, hours) = draw(field(0, 59)), draw(field(0, 23))
    weekday, weekdays = draw(field(0, 6))
    if draw(st.booleans()):
        weekday, weekdays = "*", frozenset(range(7))

    def matches(wall: datetime) -> bool:
        return wall.minute in minutes and wall.hour in hours and wall.isoweekday() % 7 in weekdays

    return Cron(f"{minute} {hour} * * {weekday}", matches, not hour.startswith("*"))


def expected(cron: Cron, zone: ZoneInfo, begin: float, end: float) -> list[float]:
    """By looking at each minute: slow, and by other code."""
    shown: dict[datetime, float] = {}
    found: set[float] = set()
    before: datetime | None = None
    # The turn at the very edge of the window needs a day on either side to be seen.
    for instant in range(int(begin - DAY) // 60 * 60, int(end + DAY), 60):
        wall = datetime.fromtimestamp(instant, UTC).astimezone(zone).replace(tzinfo=None)
        if not cron.fixed:
            if cron.matches(wall):
                found.add(instant)
        else:
            missing = before
            while missing is not None and (missing := missing + MINUTE) < wall:
                if missing not in shown and cron.matches(missing):
                    found.add(instant)
            if wall not in shown and cron.matches(wall):
                found.add(instant)
            shown.setdefault(wall, instant)
        before = wall if before is None else max(before, wall)
    return sorted(time for time in found if begin < time <= end)


def until(calendar: Calendar, begin: float, end: float) -> list[float]:
    found = []
    for time in calendar.after(begin):
        if time > end:
            break
        found.append(time)
    return found


windows = st.builds(
    lambda turn, shift: (turn[0], datetime.fromisoformat(turn[1] + "+00:00").timestamp() + shift),
    st.sampled_from(TURNS),
    st.integers(-20 * 3600, 4 * 3600).map(float),
)


@given(crons(), windows)
def test_its_times_are_those_that_the_wall_clock_shows(
    cron: Cron, window: tuple[str, float]
) -> None:
    zone, begin = window
    calendar = Calendar(cron.text, zone)
    end = begin + DAY
    assert until(calendar, begin, end) == expected(cron, ZoneInfo(zone), begin, end)


@given(crons(), windows, st.integers(1, 30))
def test_it_makes_no_difference_where_the_count_begins(
    cron: Cron, window: tuple[str, float], many: int
) -> None:
    zone, begin = window
    calendar = Calendar(cron.text, zone)
    at_a_stretch = list(islice(calendar.after(begin), many))
    assert at_a_stretch == sorted(set(at_a_stretch))
    step_by_step, time = [], begin
    for _ in range(many):
        following = calendar.next(time)
        assert following is not None
        step_by_step.append(time := following)
    assert step_by_step == at_a_stretch
    for earlier, later in zip([begin, *at_a_stretch], at_a_stretch, strict=False):
        for moment in (earlier, earlier + 0.5, (earlier + later) // 2, later - 0.25):
            assert calendar.next(moment) == later


@given(crons(), windows, st.integers(0, 40), st.floats(0, 3 * DAY))
def test_the_last_times_are_the_end_of_all_times(
    cron: Cron, window: tuple[str, float], most: int, length: float
) -> None:
    zone, begin = window
    calendar = Calendar(cron.text, zone)
    every = until(calendar, begin, begin + length)
    last, more = calendar.last(most, begin, begin + length)
    assert last == every[len(every) - most if len(every) > most else 0 :]
    assert more is (len(every) > most)


words = st.text("0123456789*/,-#LWlw@ mondecfri?_٣\x00", max_size=30)


@given(st.lists(words, max_size=7).map(" ".join) | st.text(max_size=60), st.text(max_size=30))
def test_nonsense_is_refused_by_field_and_never_crashes(cron: str, zone: str) -> None:
    try:
        calendar: Calendar | InvalidRequest = Calendar(cron, zone)
    except InvalidRequest as error:
        calendar = error
    if isinstance(calendar, InvalidRequest):
        assert calendar.field in ("cron", "timezone")
        assert calendar.hint
    else:
        following = calendar.next(1_700_000_000.0)
        assert following is None or following > 1_700_000_000.0
