"""Arguments and options that commands of the spool and of language models share."""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from os import fstat
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from penstock.cli.groups import nearest
from penstock.cli.parameters import read_object, read_source
from penstock.core.errors import InvalidRequest, NotFound
from penstock.lifecycles.spool import Status
from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.config import SpoolOptions
from penstock.workloads.spool.disk.ids import check_job_id
from penstock.workloads.spool.disk.workspace import Workspace

F = TypeVar("F", bound=Callable[..., Any])

placed = click.argument("workspace", type=click.Path(path_type=Path))
"""A spool has no engine to be found: its folder is always the first argument."""
STATUS = click.Choice(
    [one.value for one in (Status.QUEUED, Status.RUNNING, Status.DONE, Status.FAILED)],
    case_sensitive=False,
)


def check_folder(path: Path) -> None:
    """Nothing but a folder may lie where a workspace is to be."""
    if path.exists() and not path.is_dir():
        raise InvalidRequest("workspace", f"{path} is a file, not a folder")


def workspace_at(path: Path) -> Workspace:
    """One that exists. Raises NotFound."""
    check_folder(path)
    workspace = Workspace(path)
    if not workspace.folder(Status.QUEUED).is_dir():
        what = f"{path} is no workspace" if path.exists() else f"there is no workspace {path}"
        raise NotFound(what, hint=f"'penstock spool submit {path} \"…\"' makes one")
    return workspace


def ids_given(given: Sequence[str]) -> list[str]:
    """The ids on the command line; without any, or for `-`, those on standard input."""
    words: list[str] = []
    for text in given or ("-",):
        words += piped().decode("utf-8", "replace").split() if text == "-" else [text]
    return [check_job_id(word) for word in words]


def piped() -> bytes:
    """What comes on standard input; nothing if that is a terminal."""
    return b"" if sys.stdin.isatty() else sys.stdin.buffer.read()


def is_piped() -> bool:
    """Whether something may come: a terminal would have to be typed at, a device is no prompt."""
    try:
        mode = fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return not stat.S_ISCHR(mode)


_SAMPLING = Sampling.__struct_fields__
_OPTIONS = tuple(name for name in SpoolOptions.__struct_fields__ if name != "sampling")
_UNKNOWN = re.compile(r"Object contains unknown field (.*)")


def asked(command: F) -> F:
    """Give a command the options of a generation; `options_of` makes sense of them."""
    for option in reversed(
        (
            click.option("--model", metavar="NAME", help="Which model, if several are served."),
            click.option("--system", metavar="TEXT|@FILE", help="The system prompt."),
            click.option("--max-tokens", type=int, metavar="N", help="Where the answer ends."),
            click.option("--temperature", type=float, help="0 always takes the likeliest word."),
            click.option("--top-p", type=float, help="Choose among the likeliest, up to this."),
            click.option("--top-k", type=int, help="Choose among so many; 0: among all."),
            click.option("--min-p", type=float, help="Leave out what is less likely than this."),
            click.option("--repeat-penalty", type=float, help="Above 1: repeat less."),
            click.option("--seed", type=int, help="The same seed gives the same answer."),
            click.option(
                "--stop", multiple=True, metavar="TEXT", help="End before this; may be repeated."
            ),
            click.option(
                "--schema", metavar="JSON|FILE", help="A JSON schema that the answer follows."
            ),
            click.option(
                "--grammar", metavar="FILE", help="A GBNF grammar that the answer follows."
            ),
        )
    ):
        command = option(command)
    return command


def read_asked(said: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, with what their files hold."""
    given = {name: value for name, value in said.items() if not (value is None or value == ())}
    if "system" in given:
        given["system"] = _text("--system", given["system"])
    if "schema" in given:
        given["schema"] = _schema(given["schema"])
    if "grammar" in given:
        given["grammar"] = _text("--grammar", "@" + given["grammar"].removeprefix("@"))
    return given


def options_of(values: Mapping[str, Any]) -> SpoolOptions:
    """Raises InvalidRequest, which names the field. Sampling lies beside the others."""
    flat = {name: value for name, value in values.items() if name not in _SAMPLING}
    sampling = {name: value for name, value in values.items() if name in _SAMPLING}
    try:
        return msgspec.convert(flat | ({"sampling": sampling} if sampling else {}), SpoolOptions)
    except msgspec.ValidationError as error:
        message, _, where = str(error).replace("`", "").partition(" - at $")
    if unknown := _UNKNOWN.fullmatch(message):
        known = (*_OPTIONS, *_SAMPLING)
        raise InvalidRequest(unknown[1], f"there is no such option{nearest(unknown[1], known)}")
    field = where.removeprefix(".sampling").strip(".")
    raise InvalidRequest(field or "options", message[0].lower() + message[1:])


def _schema(source: str) -> dict[str, Any]:
    is_text = source.lstrip().startswith("{")
    text = source if is_text else "@" + source.removeprefix("@")
    return read_object("--schema", read_source("--schema", text))


def _text(option: str, source: str) -> str:
    data = read_source(option, source) if source.startswith("@") else source.encode()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"is not UTF-8: byte {error.start} can't be read", param_hint=option
        ) from error
