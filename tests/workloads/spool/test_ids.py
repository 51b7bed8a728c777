"""Ids of spooled jobs: which are, how they sort, and that no two are alike."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from tests.support.rows import every

from penstock.core.errors import InvalidRequest
from penstock.workloads.spool.disk.workspace import SpoolIds, check_job_id, is_job_id, order_of

GOOD = {
    "of the document": "1736700000_12345_0",
    "of the original": "00001736700000123456_12345_000000",
    "one digit": "7",
    "128 digits": "7" * 128,
}
BAD = {
    "empty": "",
    "a slash": "1736700000/12345",
    "up and away": "../../etc/passwd",
    "a dot": "1.2",
    "dots": "..",
    "129 digits": "7" * 129,
    "5,000 digits": "7" * 5000,
    "a null byte": "1\x002",
    "an underscore before": "_1",
    "an underscore behind": "1_",
    "two underscores": "1__2",
    "a line end": "1_2\n",
    "a blank": "1 2",
    "letters": "abc",
    "digits of another script": "١٢٣",
    "a minus": "-1",
}


@pytest.mark.parametrize("job_id", GOOD.values(), ids=GOOD)
def test_an_id_of_either_form_is_one(job_id: str) -> None:
    assert is_job_id(job_id)
    assert check_job_id(job_id) == job_id


@every("text", BAD.values())
def test_what_breaks_the_rule_is_refused_in_one_short_printable_line(text: str) -> None:
    assert not is_job_id(text)
    with pytest.raises(InvalidRequest) as refused:
        check_job_id(text)
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()


@pytest.mark.seed("004", "9.3")
def test_counters_sort_as_numbers() -> None:
    ids = ["100_7_10", "100_7_2", "100_12_0", "99_99_99"]
    assert sorted(ids, key=order_of) == ["99_99_99", "100_7_2", "100_7_10", "100_12_0"]


def test_seconds_and_microseconds_are_one_timeline() -> None:
    ids = [
        "00001736700001000000_1_000000",
        "1736700002_9_0",
        "1736700000_9_0",
        "1736700000500000_1_0",
    ]
    assert sorted(ids, key=order_of) == [ids[2], ids[3], ids[0], ids[1]]


def test_a_padded_number_counts_microseconds_however_small() -> None:
    assert order_of("00000000000000000005_1_0") < order_of("1_1_0")


@pytest.mark.seed("004", "9.1")
def test_an_id_names_the_second_the_process_and_a_counter() -> None:
    source = SpoolIds(counter=count())
    assert source.next(1736700000.9) == f"1736700000_{os.getpid()}_0"
    assert source.next(1736700000.9) == f"1736700000_{os.getpid()}_1"


def test_all_sources_of_a_process_count_together() -> None:
    assert SpoolIds().next(1.0) != SpoolIds().next(1.0)


@pytest.mark.seed("004", "9.2")
def test_threads_never_get_the_same_id() -> None:
    source = SpoolIds()
    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(source.next, [1.0] * 8000))
    assert len(set(ids)) == len(ids)


def test_a_forked_process_makes_ids_of_its_own() -> None:
    source = SpoolIds()
    source.next(1.0)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, source.next(1.0).encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)
    assert theirs != source.next(1.0)
    assert re.fullmatch(rf"1_{child}_\d+", theirs)
