"""How the command line reads durations and moments, and writes ids, times and tables."""

from __future__ import annotations

import datetime as dt
import io
import time

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli.formats import Whole, moment, plural, short_id, size, span
from penstock.cli.options import DURATION, MOMENT, PAIR, SIZE
from penstock.cli.output import JobId, Listing, Wrapped
from penstock.core.job import IdSource


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0.0 ms"),
        (0.0004, "0.4 ms"),
        (0.312, "312 ms"),
        (4.2, "4.2 s"),
        (59.4, "59 s"),
        (59.6, "1m 00s"),
        (192, "3m 12s"),
        (3600 * 5 + 180, "5h 03m"),
        (86_400 * 12 + 3600 * 4, "12d 4h"),
    ],
)
def test_a_duration_is_said_in_few_characters(seconds: float, said: str) -> None:
    assert span(seconds) == said


@given(st.floats(0, 1e9))
def test_a_duration_never_takes_more_than_a_column(seconds: float) -> None:
    assert len(span(seconds)) <= 10


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("2h", 7200),
        ("7d", 604800),
    ],
)
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "5 parsecs", "1e3", "nan", "inf", "5M"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        DURATION.convert(text, None, None)


def test_a_moment_is_absolute_or_from_now() -> None:
    assert MOMENT.convert("2030-01-31T18:00:00Z", None, None) == 1896112800
    assert MOMENT.convert("2030-01-31T19:00:00+01:00", None, None) == 1896112800
    local = dt.datetime(2030, 1, 31, 18).timestamp()
    assert MOMENT.convert("2030-01-31T18:00:00", None, None) == local
    assert 299 < MOMENT.convert("+5m", None, None) - time.time() <= 300


@pytest.mark.parametrize("text", ["", "tomorrow", "+", "+soon", "12:00", "0000-00-00"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a"):
        MOMENT.convert(text, None, None)


def test_a_pair_is_split_at_its_first_equals_sign() -> None:
    assert PAIR.convert("a=b=c", None, None) == ("a", "b=c")
    assert PAIR.convert("a=", None, None) == ("a", "")


def test_generated_ids_are_shortened_to_their_end_and_others_are_not() -> None:
    job_id = IdSource().next(1e9)
    assert job_id.endswith(short_id(job_id))
    assert len(short_id(job_id)) == 8
    assert short_id("my-own-name-for-this-job-x") == "my-own-name-for-this-job-x"


def test_ids_made_in_turn_differ_when_shortened() -> None:
    ids = IdSource()
    assert len({short_id(ids.next(1e9)) for _ in range(1000)}) == 1000


def test_a_moment_of_another_day_has_its_date() -> None:
    now = dt.datetime(2030, 1, 31, 18).timestamp()
    assert moment(now - 3600, now) == "17:00:00.000"
    assert moment(now - 86_400, now) == "2030-01-30 18:00:00"


def test_sizes_and_counts_read_well() -> None:
    assert (size(12), size(2048), size(3 << 40)) == ("12 B", "2.0 KiB", "3.0 TiB")
    assert (plural(1, "job"), plural(2000, "job")) == ("1 job", "2,000 jobs")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_listing_fits_its_width_and_cuts_its_longest_cells(width: int) -> None:
    listing = Listing([{"JOB": "k3f9x2ab", "STATE": "SUCCEEDED", "NOTE": "because " * 30}])
    page = Console(file=io.StringIO(), width=width, color_system=None)
    with page.capture() as captured:
        page.print(listing)
    lines = captured.get().splitlines()
    assert len(lines) == 2
    assert all(len(line) <= width for line in lines)
    assert lines[1].startswith("k3f9x2ab  SUCCEEDED  because")
    assert lines[1].rstrip().endswith("…")


def test_whole_cells_are_never_cut_and_numbers_are_aligned_to_the_right() -> None:
    rows = [{"ID": Whole("0123456789ab"), "N": number, "NOTE": "x" * 99} for number in (7, 1_000)]
    page = Console(file=io.StringIO(), width=30, color_system=None)
    with page.capture() as captured:
        page.print(Listing(rows))
    _, first, second = captured.get().splitlines()
    assert first.startswith("0123456789ab      7  xxxx")
    assert second.startswith("0123456789ab  1,000  xxxx")


def test_a_wide_table_has_whole_ids_and_more_columns() -> None:
    row = {"JOB": JobId(IdSource().next(1e9)), "+PRIORITY": "batch", "NOTE": "x" * 99, "ERROR": ""}
    page = Console(file=io.StringIO(), width=60, color_system=None)
    with page.capture() as captured:
        page.print(Listing([row]), Listing([row], wide=True))
    narrow, short, wide, whole = (line.split() for line in captured.get().splitlines())
    assert (narrow, wide) == (["JOB", "NOTE"], ["JOB", "PRIORITY", "NOTE"])
    assert row["JOB"] == whole[0]
    assert whole[0].endswith(short[0])


def test_wrapped_cells_keep_all_their_words() -> None:
    page = Console(file=io.StringIO(), width=20, color_system=None)
    with page.capture() as captured:
        page.print(Listing([{"A": "a", "WHY": Wrapped("one two three four five six")}]))
    assert " ".join(captured.get().split()) == "A WHY a one two three four five six"


@pytest.mark.parametrize(
    ("text", "count"),
    [("512", 512), ("64m", 64 << 20), ("2g", 2 << 30), ("1.5k", 1536), ("1MiB", 1 << 20)],
)
def test_a_size_is_read_as_docker_writes_it_and_as_we_do(text: str, count: int) -> None:
    assert SIZE.convert(text, None, None) == count
