"""Options of a generation by a language model, and the errors for a model's failures."""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Mapping
from os import fstat
from typing import Any

import click

from penstock.cli.groups import nearest
from penstock.cli.options import converted, options, read_object, read_source
from penstock.cli.output import warn
from penstock.core.errors import (
    InvalidRequest,
    Misconfigured,
    NotFound,
    PenstockError,
    Unavailable,
)
from penstock.workloads.llm.schemas import hold_of
from penstock.workloads.llm.values import LlmCode, LlmFailure, Sampling
from penstock.workloads.spool.config import SpoolOptions

PULL = "get one with 'penstock model pull smollm2'"

_KINDS: Mapping[LlmCode, tuple[type[PenstockError], str]] = {
    LlmCode.MODEL_NOT_FOUND: (NotFound, "'penstock model list' shows those there are"),
    LlmCode.MODEL_INVALID: (Misconfigured, "fetch it again, or name another file"),
    LlmCode.NOT_SUPPORTED: (Misconfigured, ""),
    LlmCode.ENGINE_MISSING: (Unavailable, ""),
    LlmCode.OUT_OF_MEMORY: (Unavailable, "a smaller model, --context or --workers takes less"),
    LlmCode.ENGINE_CRASHED: (Unavailable, ""),
}


def model_error(failure: LlmFailure) -> PenstockError:
    """The failure of a model as an error that says what to do."""
    kind, hint = _KINDS.get(failure.code, (PenstockError, ""))
    return kind(failure.message, hint=hint)


def is_piped() -> bool:
    """Whether something may come: a terminal would have to be typed at, a device is no prompt."""
    try:
        mode = fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return not stat.S_ISCHR(mode)


_SAMPLING = Sampling.__struct_fields__
_OPTIONS = tuple(name for name in SpoolOptions.__struct_fields__ if name != "sampling")
_UNKNOWN = re.compile(r"object contains unknown field (.*)")


generation_options = options(
    """
    --model NAME             Which model, if several are served.
    --system TEXT|@FILE      The system prompt.
    --max-tokens N           Maximum length of the answer.
    --temperature NUMBER     0 always takes the likeliest token.
    --top-p NUMBER           Sample from the likeliest tokens up to this probability.
    --top-k N                Sample from this many tokens; 0: from all.
    --min-p NUMBER           Leave out tokens less likely than this.
    --repeat-penalty NUMBER  Above 1: repeat less.
    --seed N                 The same seed gives the same answer.
    --stop TEXT...           End before this; may be repeated.
    --schema JSON|FILE       A JSON schema that the answer follows.
    --grammar FILE           A GBNF grammar that the answer follows.
    """
)
"""The options of a generation; `options_of` makes sense of them."""


def read_given(said: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, with what their files hold."""
    given = {name: value for name, value in said.items() if not (value is None or value == ())}
    if "system" in given:
        given["system"] = _text("--system", given["system"])
    if "schema" in given:
        given["schema"] = schema = _schema(given["schema"])
        if loose := hold_of(schema).loose:
            warn(f"the answer may break this of the schema: {', '.join(loose)}")
    if "grammar" in given:
        given["grammar"] = _text("--grammar", "@" + given["grammar"].removeprefix("@"))
    return given


def options_of(values: Mapping[str, Any]) -> SpoolOptions:
    """Raises InvalidRequest, which names the field. Sampling lies beside the others."""
    flat = {name: value for name, value in values.items() if name not in _SAMPLING}
    sampling = {name: value for name, value in values.items() if name in _SAMPLING}
    try:
        return converted(flat | ({"sampling": sampling} if sampling else {}), SpoolOptions)
    except InvalidRequest as error:
        field, problem = error.field.removeprefix("sampling").strip("."), error.problem
    if unknown := _UNKNOWN.fullmatch(problem):
        known = (*_OPTIONS, *_SAMPLING)
        raise InvalidRequest(unknown[1], f"there is no such option{nearest(unknown[1], known)}")
    raise InvalidRequest(field or "options", problem)


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
