"""What options are made of: durations, moments, pairs, JSON. Each refusal says what to write."""

from __future__ import annotations

import datetime as dt
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from penstock.core.job import Priority
from penstock.core.verdict import Rate, parse_rate, parse_size
from penstock.lifecycles.canonical import JobState

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic in newer versions of click only

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)")


class _Duration(ParamType):
    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = _DURATION.fullmatch(value.strip())
        if found is None or found[2] not in _UNITS:
            self.fail(f"{value!r} is not a duration; write 30, 500ms, 30s, 5m, 2h or 7d", param)
        return float(found[1]) * _UNITS[found[2]]


class _Moment(ParamType):
    name = "moment"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        if value.startswith("+"):
            return time.time() + DURATION.convert(value[1:], param, ctx)
        try:
            return dt.datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError, OSError):
            self.fail(
                f"{value!r} is not a time; write +30s, or 2030-01-31T18:00:00Z"
                " (without a zone it is your local time)",
                param,
            )


class _Pair(ParamType):
    name = "pair"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, said = value.partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not KEY=VALUE", param)
        return key, said


class _Rate(ParamType):
    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Rate:
        if isinstance(value, Rate):
            return value
        try:
            return parse_rate(value)
        except ValueError as error:
            self.fail(str(error), param)


class _Size(ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param)


DURATION, MOMENT, PAIR, RATE, SIZE = _Duration(), _Moment(), _Pair(), _Rate(), _Size()
STATE = click.Choice([state.value for state in JobState], case_sensitive=False)
PRIORITY = click.Choice([priority.value for priority in Priority])

as_json = click.option("--json", "json", is_flag=True, help="Print JSON.")


def limited(default: int, *short: str, most: int | None = None) -> Callable[[F], F]:
    """The option --limit of a listing."""
    return click.option(
        *(*short, "--limit"),
        type=click.IntRange(1, most),
        default=default,
        show_default=True,
        help="Maximum number of results.",
    )


def several(name: str, sentence: str) -> Callable[[F], F]:
    """An option KEY=VALUE that may be given more than once."""
    return click.option(name, type=PAIR, multiple=True, metavar="KEY=VALUE", help=sentence)


def read_source(option: str, source: str) -> bytes:
    """What an option's value means: itself, @FILE, or - for standard input."""
    if source == "-":
        return sys.stdin.buffer.read()
    if not source.startswith("@"):
        return source.encode("utf-8", "surrogateescape")
    try:
        with open(source[1:], "rb") as file:
            return file.read()
    except OSError as error:
        raise click.BadParameter(
            f"can't read {source[1:]}: {error.strerror}", param_hint=option
        ) from error


def read_object(option: str, text: bytes, where: str = "") -> dict[str, Any]:
    """A JSON object: the arguments of a job by name."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{where}not valid JSON: {error}", param_hint=option) from error
    except RecursionError:
        raise click.BadParameter(f"{where}nested too deeply", param_hint=option) from None
    if not isinstance(value, dict):
        raise click.BadParameter(
            f'{where}expected a JSON object, as {{"text": "hello"}}, got {_kind(value)}',
            param_hint=option,
        )
    return value


def read_lines(option: str, text: bytes) -> Iterator[dict[str, Any]]:
    """A JSON object from each line that isn't empty."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield read_object(option, line, f"line {number}: ")


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
