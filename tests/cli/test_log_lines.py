from __future__ import annotations

import json
import logging
import sys

import pytest

from penstock.app.service import JsonLines


def record(message: str, *args: object, **fields: str) -> logging.LogRecord:
    made = logging.LogRecord("penstock.job", logging.WARNING, "", 0, message, args, None)
    made.created = 1_700_000_000.25
    made.__dict__.update(fields)
    return made


def test_a_json_line_has_time_level_logger_and_message() -> None:
    assert json.loads(JsonLines().format(record("%s left", 3))) == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "warning",
        "logger": "penstock.job",
        "message": "3 left",
    }


def test_the_line_of_a_job_has_its_id_and_that_of_its_trace() -> None:
    line = json.loads(JsonLines().format(record("x", job_id="a-job", trace_id="f" * 32)))
    assert (line["job_id"], line["trace_id"]) == ("a-job", "f" * 32)


def test_whatever_a_job_writes_stays_one_line() -> None:
    text = 'two\nlines "and" \x1b[31m\ud800'
    line = JsonLines().format(record("%s", text))
    assert "\n" not in line
    assert "\x1b" not in line
    assert json.loads(line)["message"] == text


def test_an_exception_comes_with_its_traceback() -> None:
    made = record("it failed")
    with pytest.raises(ValueError, match="bad"):
        try:
            raise ValueError("bad")
        except ValueError:
            made.exc_info = sys.exc_info()
            raise
    assert "ValueError: bad" in json.loads(JsonLines().format(made))["exception"]
