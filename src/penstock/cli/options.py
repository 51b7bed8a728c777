"""Option types, and the options that commands share.

The same option means the same everywhere: it is declared here once.
"""

from __future__ import annotations

import datetime as dt
import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from penstock.cli.output import Form
from penstock.core.errors import InvalidRequest
from penstock.core.job import Priority, RetryPolicy
from penstock.core.verdict import parse_rate, parse_size
from penstock.lifecycles.canonical import JobState

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=msgspec.Struct)

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic in newer versions of click only

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)")


_SHORT_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgKMG])|[bB])?")


class Parsed(ParamType):
    """A parameter that a function reads; what the function refuses is a mistake of the caller."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # a default
        try:
            return self._parse(value.strip())
        except ValueError as error:
            self.fail(str(error), param)


def _duration(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a duration; write 30, 500ms, 30s, 5m, 2h or 7d")
    return float(found[1]) * _UNITS[found[2]]


def _moment(text: str) -> float:
    if text.startswith("+"):
        return time.time() + _duration(text[1:])
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r} is not a time; write +30s, or 2030-01-31T18:00:00Z"
            " (without a zone it is your local time)"
        ) from None


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"{text!r} is not KEY=VALUE")
    return key, value


def _size(text: str) -> int:
    whole = text
    if short := _SHORT_SIZE.fullmatch(text):  # as Docker writes it
        whole = f"{short[1]}{short[2].upper()}iB" if short[2] else f"{short[1]}B"
    try:
        return parse_size(whole)
    except ValueError:
        problem = f"{text!r} is not a size; write 64m, 2g, 512MiB or a number of bytes"
        raise ValueError(problem) from None


DURATION, MOMENT = Parsed("duration", _duration), Parsed("moment", _moment)
PAIR, RATE, SIZE = Parsed("pair", _pair), Parsed("rate", parse_rate), Parsed("size", _size)
STATE = click.Choice([state.value for state in JobState], case_sensitive=False)
PRIORITY = click.Choice([priority.value for priority in Priority])

_LINE = re.compile(
    r"(?P<names>-[^\s,]+(?:, -[^\s,]+)*)(?: (?!as )(?P<value>\S+))?"
    r"(?: as (?P<parameter>\w+))?  +(?P<help>.+)"
)
_RANGE = re.compile(r"(\d+)\.\.(\d*)")
_TYPES: Mapping[str, Any] = {
    "DURATION": DURATION,
    "TIME": MOMENT,
    "KEY=VALUE": PAIR,
    "RATE": RATE,
    "SIZE": SIZE,
    "N": int,
    "TOKENS": int,
    "NUMBER": float,
}


def options(text: str, **types: Any) -> Callable[[F], F]:
    """Options as the help shows them, one on each line: names, value and sentence.

    `-n, --limit 1..1000=20  Maximum number.` is a number from 1 to 1000, by default 20; `...` after
    a value says that it may be repeated, `!` that it is required, and `--all as everything` names
    the parameter. An option without a value is a flag. The type is that of `types`, by parameter,
    or follows from the value.
    """
    return together(*_by_parameter(text, **types).values())


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _by_parameter(text: str, **types: Any) -> dict[str, Callable[[Any], Any]]:
    lines = re.sub(r"\n {6,}", " ", inspect.cleandoc(text)).splitlines()
    return dict(_option(line, types) for line in lines)


def _option(line: str, types: Mapping[str, Any]) -> tuple[str, Callable[[Any], Any]]:
    found = _LINE.fullmatch(line)
    assert found is not None, line
    names = found["names"].split(", ")
    parameter = found["parameter"] or names[-1].partition("/")[0].lstrip("-").replace("-", "_")
    if (value := found["value"]) is None:
        is_pair = "/" in names[-1]
        flag: dict[str, Any] = {"default": None} if is_pair else {"is_flag": True}
        return parameter, click.option(*names, parameter, help=found["help"], **flag)
    several, required = value.endswith("..."), "!" in value
    metavar, equals, default = value.removesuffix("...").replace("!", "").partition("=")
    if "=VALUE" in value:
        metavar, equals = value.removesuffix("..."), ""
    kind = types.get(parameter) or _TYPES.get(metavar.partition("|")[0])
    if bounds := _RANGE.fullmatch(metavar):
        kind = click.IntRange(int(bounds[1]), int(bounds[2]) if bounds[2] else None)
    return parameter, click.option(
        *names,
        parameter,
        type=kind,
        metavar=None if isinstance(kind, click.Choice) else "N" if bounds else metavar,
        default=default if equals else None,
        show_default=True if equals and default else None,
        multiple=several,
        required=required,
        help=found["help"],
    )


as_lines = options("--json  Print JSON lines.")


def started(default: bool | None) -> Callable[[F], F]:
    """Whether a command that starts something waits for its end. Ctrl-C then cancels it."""
    usual = "wait" if default else "detach"
    return click.option(
        "--wait/--detach",
        " /-d",
        "wait",
        default=default,
        help=f"Wait until it ends, or return at once; the default is to {usual}.",
    )


serving = options(
    """
    --app MODULE:APP                        The application whose jobs to run.
    --pipeline NAME... as pipelines         A pipeline to serve as well, as MODULE:NAME; may be
            repeated.
    --containers ENGINE as containers__engine  Run container jobs as well: auto, docker, podman, oci
            or unix:///PATH.
    --model NAME... as models__serve        A language model to serve as well: its name, a file, or
            'auto' for all that 'penstock model list' shows; may be repeated.
    --concurrency N                         How many jobs to run at once.
    """
)
"""The options that say which jobs a process runs. All but --app are named as their settings."""
job_options = options(
    """
    --priority PRIORITY             How urgent it is.
    --env KEY=VALUE...              Environment of the job; may be repeated.
    --label KEY=VALUE...            Label of the job; may be repeated.
    --timeout DURATION              Maximum run time of one attempt.
    --retries 0..                   Maximum number of retries.
    --idempotent/--not-idempotent   Whether it is safe to run twice.
    --capability CAPABILITY         Declared capability, for safety rules.
    --risk-tag TAG... as risk_tags  Declared risk, for safety rules; may be repeated.
    --cost NUMBER as estimated_cost  Estimated cost, for safety rules.
    """,
    priority=PRIORITY,
)
"""The options of a job; `job_fields` makes sense of them."""
SHARED: Mapping[str, Callable[[Any], Any]] = _by_parameter(
    """
    --json                         Print JSON.
    -v, --verbose                  Log more.
    --yes                          Do not ask for confirmation.
    --reason TEXT=                 Why; kept in the history.
    --state STATE... as states     In this state; may be repeated.
    --before SEQ                   Next page: older than this.
    --input JSON|@FILE|- as given  The arguments, a JSON object.
    --tenant TENANT=default        Its tenant.
    --wait                         Wait for the end.
    --wait-timeout DURATION        Maximum time to wait; running work continues.
    --interval DURATION=1s         Refresh interval.
    """,
    states=STATE,
    before=int,
) | {
    "form": together(
        click.option(
            *("-o", "--format", "form"),
            type=click.Choice([one.value for one in Form]),
            default=Form.TABLE.value,
            help="How to print it: a table, a wide one, names only, or JSON.",
        ),
        options("-q, --quiet  Names only, as -o name.\n--json  Print JSON."),
    )
}
"""Options by the parameter of a command that has them."""


def job_fields(said: dict[str, Any]) -> dict[str, Any]:
    """Options as fields of a job, without those not given."""
    renamed = {"workflow": "workflow_id", "step": "step_index", "label": "labels"}
    fields = {
        renamed.get(name, name): value for name, value in said.items() if value not in (None, ())
    }
    for name in ("env", "labels"):
        if name in fields:
            fields[name] = dict(fields[name])
    if (retries := fields.pop("retries", None)) is not None:
        fields["retry"] = RetryPolicy(retries=retries)
    return fields


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


def converted(values: Mapping[str, Any], kind: type[S]) -> S:
    """A Struct with these values. Raises InvalidRequest, which names the field."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).replace("`", "").partition(" - at $")
    raise InvalidRequest(where.strip("."), message[0].lower() + message[1:])


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
