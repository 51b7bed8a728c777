"""What commands share that talk to a model: how it fails, and how long it takes to load."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cli.paper import console
from penstock.core.errors import (
    Misconfigured,
    NotFound,
    PenstockError,
    Unavailable,
)
from penstock.core.llm import LlmCode, LlmFailure

if TYPE_CHECKING:
    from penstock.workloads.spool.runner import Loading

PULL = "get one with 'penstock models pull smollm2'"
INSTALL = "install it with: pip install 'penstock[llm]'"

_KINDS: Mapping[LlmCode, tuple[type[PenstockError], str]] = {
    LlmCode.MODEL_NOT_FOUND: (NotFound, "'penstock models list' shows those there are"),
    LlmCode.MODEL_INVALID: (Misconfigured, "fetch it again, or name another file"),
    LlmCode.ENGINE_MISSING: (Unavailable, INSTALL),
    LlmCode.OUT_OF_MEMORY: (Unavailable, "a smaller model, --context or --workers takes less"),
    LlmCode.ENGINE_CRASHED: (Unavailable, ""),
}


@contextmanager
def told() -> Iterator[None]:
    """Turn the failure of a model into an error that says what to do."""
    try:
        yield
    except LlmFailure as failure:
        raise explained(failure) from failure


def explained(failure: LlmFailure) -> PenstockError:
    kind, hint = _KINDS.get(failure.code, (PenstockError, ""))
    return kind(failure.message, hint=hint)


@contextmanager
def loading(name: str) -> Iterator[Loading]:
    """A bar on standard error while a model is loaded; none where nobody looks."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("loading {task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}", style="dim"),
        console=console(err=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(name, total=1.0, said="")

        def tell(fraction: float, said: str) -> None:
            bar.update(task, completed=fraction, said=said)

        yield tell


def rate(tokens_per_second: float | None) -> str:
    """`31 tokens/s`, or nothing if it is not known."""
    return f"{tokens_per_second:.0f} tokens/s" if tokens_per_second else ""
