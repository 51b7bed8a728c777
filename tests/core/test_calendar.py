"""What a cron expression means, and how a wrong one is refused."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from tests.support.rows import every

from penstock.core.calendar import MACROS, Calendar
from penstock.core.errors import InvalidRequest


def times(cron: str, zone: str, after: str, many: int) -> list[str]:
    """Local times with their offset, in short."""
    calendar = Calendar(cron, zone)
    start = datetime.fromisoformat(after).replace(tzinfo=ZoneInfo(zone)).timestamp()
    found = islice(calendar.after(start), many)
    shown = [datetime.fromtimestamp(time, ZoneInfo(zone)) for time in found]
    return [time.isoformat(timespec="minutes")[5:] for time in shown]


def test_it_is_read_in_its_time_zone() -> None:
    berlin = times("30 7 * * mon-fri", "Europe/Berlin", "2026-01-02T00:00", 2)
    assert berlin == ["01-02T07:30+01:00", "01-05T07:30+01:00"]
    new_york = times("30 7 * * mon-fri", "America/New_York", "2026-01-02T00:00", 2)
    assert new_york == ["01-02T07:30-05:00", "01-05T07:30-05:00"]


def test_a_sixth_field_in_front_is_the_second() -> None:
    calendar = Calendar("*/20 * * * * *")
    assert list(islice(calendar.after(1_700_000_000.0), 3)) == [
        1_700_000_000.0 + n for n in (20, 40, 60)
    ]


@pytest.mark.parametrize("macro", MACROS)
def test_every_macro_is_known(macro: str) -> None:
    assert Calendar(macro).next(0.0) == Calendar(MACROS[macro]).next(0.0)
    assert Calendar(f" {macro.upper()} ").next(0.0) == Calendar(MACROS[macro]).next(0.0)


# -- the turns of the clocks --------------------------------------------------------


def test_a_time_that_is_left_out_in_spring_comes_once_at_the_turn() -> None:
    shown = times("30 2 * * *", "Europe/Berlin", "2026-03-28T00:00", 3)
    assert shown == ["03-28T02:30+01:00", "03-29T03:00+02:00", "03-30T02:30+02:00"]
    shown = times("*/15 2 * * *", "America/New_York", "2026-03-08T00:00", 2)
    assert shown == ["03-08T03:00-04:00", "03-09T02:00-04:00"]
    shown = times("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", 2)
    assert shown == ["10-04T02:30+11:00", "10-05T02:15+11:00"]


def test_a_time_that_comes_twice_in_autumn_counts_once() -> None:
    shown = times("30 2 * * *", "Europe/Berlin", "2026-10-25T00:00", 2)
    assert shown == ["10-25T02:30+02:00", "10-26T02:30+01:00"]
    shown = times("30 1 * * *", "America/New_York", "2026-11-01T00:00", 2)
    assert shown == ["11-01T01:30-04:00", "11-02T01:30-05:00"]
    shown = times("45 1 * * *", "Australia/Lord_Howe", "2026-04-05T00:00", 2)
    assert shown == ["04-05T01:45+11:00", "04-06T01:45+10:30"]


def test_one_restarted_between_the_two_showings_does_not_fire_again() -> None:
    calendar = Calendar("45 2 * * *", "Europe/Berlin")
    second_showing = datetime.fromisoformat("2026-10-25T02:30+01:00").timestamp()
    following = calendar.next(second_showing)
    assert following == datetime.fromisoformat("2026-10-26T02:45+01:00").timestamp()


def test_every_hour_is_every_real_hour() -> None:
    shown = times("30 * * * *", "Europe/Berlin", "2026-10-25T01:00", 4)
    assert shown == [
        "10-25T01:30+02:00",
        "10-25T02:30+02:00",
        "10-25T02:30+01:00",
        "10-25T03:30+01:00",
    ]
    shown = times("30 * * * *", "Europe/Berlin", "2026-03-29T01:00", 2)
    assert shown == ["03-29T01:30+01:00", "03-29T03:30+02:00"]


def test_after_half_an_hours_turn_no_minute_is_lost() -> None:
    shown = times("0 */2 * * *", "Australia/Lord_Howe", "2026-04-05T00:30", 2)
    assert shown == ["04-05T02:00+10:30", "04-05T04:00+10:30"]


# -- the last ones ------------------------------------------------------------------


def test_the_last_times_of_a_long_silence_are_found_without_reading_it_all() -> None:
    calendar = Calendar("* * * * * *", "Europe/Berlin")
    last, more = calendar.last(3, 0.0, 1_700_000_000.5)
    assert last == [1_699_999_998.0, 1_699_999_999.0, 1_700_000_000.0]
    assert more


def test_a_time_that_was_dealt_with_is_not_among_the_last() -> None:
    calendar = Calendar("* * * * *")
    assert calendar.last(5, 1_700_000_040.0, 1_700_000_100.0) == ([1_700_000_100.0], False)
    assert calendar.last(5, 1_700_000_100.0, 1_700_000_100.0) == ([], False)
    assert calendar.last(5, 1_700_000_100.0, 1_600_000_000.0) == ([], False)


# -- refused --------------------------------------------------------------------------


@every(
    "cron, said",
    [
        ("61 * * * *", "minute '61'"),
        ("* 24 * * *", "hour '24'"),
        ("* * 0 * *", "day of the month '0'"),
        ("* * * 13 *", "month '13'"),
        ("* * * jan-foo *", "month 'jan-foo'"),
        ("* * * * 8", "weekday '8'"),
        ("* * * * mon#6", "weekday 'mon#6'"),
        ("60 * * * * *", "second '60'"),
        ("*/0 * * * *", "minute '*/0'"),
        ("5-1 * * * *", "minute '5-1'"),
        ("1,,2 * * * *", "minute '1,,2'"),
        ("", "has 0 fields"),
        ("*", "has 1 field"),
        ("* * * *", "has 4 fields"),
        ("* * * * * * *", "has 7 fields"),
        ("@never", "unknown"),
        ("0 0 30 2 *", "never fires"),
        ("0 0 31 4,6,9,11 *", "never fires"),
        ("0 " * 500, "longer than 200"),
    ],
)
def test_a_wrong_cron_is_refused_and_says_what_would_be_right(cron: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Calendar(cron)
    assert refused.value.field == "cron"
    assert said in refused.value.problem
    assert refused.value.hint


@pytest.mark.parametrize(
    ("zone", "hint"),
    [
        ("Europe/Berln", "did you mean Europe/Berlin?"),
        ("europe/berlin", "did you mean Europe/Berlin?"),
        ("berlin", "did you mean Europe/Berlin?"),
        ("../../etc/passwd", "IANA"),
        ("/etc/localtime", "IANA"),
        ("", "IANA"),
        ("x" * 100_000, "IANA"),
    ],
)
def test_an_unknown_time_zone_is_refused(zone: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Calendar("* * * * *", zone)
    assert refused.value.field == "timezone"
    assert hint in refused.value.hint
