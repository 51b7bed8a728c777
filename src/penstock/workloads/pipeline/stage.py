"""One stage of a pipeline, as it was declared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from penstock.workloads.pipeline.in_child import call_in_child
from penstock.workloads.pipeline.records import StageInfo
from penstock.workloads.pipeline.shape import Shape

Source = Callable[..., Any]
"""A function of (config, ctx) that gives the items of a map stage."""


class Stage:
    """One declared stage. Called, it is the plain function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        info: StageInfo,
        shape: Shape,
        *,
        source: Source | None = None,
        key: Callable[[Any], str] | None = None,
        enabled: Callable[[Any], bool] | None = None,
        width: str = "",
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.info, self.shape = fn, info, shape
        self.source, self.key, self.enabled = source, key, enabled
        self.width = width
        """The config field that says how many items run at once; may be ''."""
        self.name = info.name
        self.config_type: type | None = None

    @property
    def upstream(self) -> str:
        """The stage whose outputs it maps over, or whose results it is given; may be ''."""
        kind, _, name = self.info.over.partition(":")
        return name if kind == "stage" else self.info.of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def in_child(self, ctx: Any, given: Any, about: dict[str, Any]) -> Any:
        """Run the function in a process that was started for it; see `in_child`."""
        return call_in_child(self.fn, self.shape, self.config_type, ctx, given, about)

    def __repr__(self) -> str:
        return f"<stage {self.name}>"
