"""Variables that a job may set in its container.

Some names change what a program is or does before its first line runs, or are the worker's own;
they are refused unless the worker's configuration names them (`images.env`). Nothing of the
worker's own environment is ever handed on.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from penstock.workloads.container.protocol.fields import forbid, member, object_of, refuse, word_of

MAX_BYTES = 32_000
"""Of all names and values together."""
PREFIX = "PENSTOCK_"
"""Of the variables that the worker itself sets."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_DENIED = frozenset({"PATH", "HOME", "BASH_ENV", "ENV", "IFS", "NODE_OPTIONS", "PYTHONSTARTUP"})
_DENIED_STARTS = ("LD_", "DYLD_", "DOCKER_", "CONTAINER", PREFIX)
_DENIED_END = "_PROXY"


def read_env(
    value: Any, allowed: Collection[str] = (), *, field: str = "runtime.env"
) -> dict[str, str]:
    """The variables, each as text; one that is null is left out, as the protocol does."""
    env: dict[str, str] = {}
    size = 0
    for name, given in object_of(field, value).items():
        if given is None:
            continue
        where = member(field, name)
        if not _NAME.fullmatch(name):
            refuse(where, "is no name of a variable: letters, digits and _, not a digit first")
        if is_denied(name) and name not in allowed:
            forbid(where, "may not be set by a job on this worker")
        env[name] = word_of(where, given)
        size += len(name) + len(env[name].encode()) + 2
        if size > MAX_BYTES:
            refuse(field, f"is larger than {MAX_BYTES} bytes")
    return env


def is_denied(name: str) -> bool:
    """Programs look for proxies in small letters too."""
    return name in _DENIED or name.startswith(_DENIED_STARTS) or name.upper().endswith(_DENIED_END)
