"""The config of a pipeline run, as the input of its job: a JSON object."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest

MAX_DEPTH = 100
"""Objects and lists within each other. Reading and writing deeper ones may fail."""


def read_config(payload: bytes) -> dict[str, Any]:
    """Decode the input of a run's job; no input is an empty config. Raises InvalidRequest."""
    if not payload:
        return {}
    try:
        config = msgspec.json.decode(payload)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest("config", f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest("config", f"expected an object, got {type(config).__name__}")
    check_depth(config)
    return config


def check_depth(config: dict[str, Any]) -> None:
    """Raise InvalidRequest for a config that is nested too deeply to be stored."""
    level: list[Any] = [config]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list | tuple)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest("config", f"is nested more than {MAX_DEPTH} levels deep")
