"""Which model a job means."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.workloads.llm.values import LlmCode, LlmFailure


def chosen(wanted: str, names: Sequence[str], default: str) -> str:
    """Its name, or the one that contains what was said, ignoring case; the default for none."""
    if not wanted:
        return default
    if wanted in names:
        return wanted
    near = [name for name in names if wanted.lower() in name.lower()]
    if len(near) == 1:
        return near[0]
    what = f"{wanted!r} may be {_listed(near)}" if near else f"there is no model {wanted!r}"
    hint = "" if near else f"; there is {_listed(names)}"
    raise LlmFailure(LlmCode.MODEL_NOT_FOUND, what + hint)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names[:8]) if names else "none"
