"""A stage's function in a process of its own: what it is called with there.

The child finds the `Stage` under its function's name, as it finds any job, and the stage runs
itself by `Stage.in_child`. Of the context, only what can be told over a socket is there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock import values
from penstock.core.errors import Misconfigured
from penstock.ports.executor import Context
from penstock.workloads.pipeline.shape import Shape


class ProcessStageContext:
    """What a stage's function has as `ctx` in a process of its own."""

    def __init__(self, ctx: Context, about: dict[str, Any], config: Any) -> None:
        self._ctx = ctx
        self.job_id, self.attempt = ctx.job_id, ctx.attempt
        self.stage, self.key = about["stage"], about["key"]
        self.pipeline, self.trace_id = about["pipeline"], about["trace_id"]
        self.config = config
        self.cancel = ctx.cancel

    def cancelled(self) -> bool:
        return self.cancel.requested

    def check(self) -> None:
        self.cancel.raise_if_requested()

    def remaining(self) -> float:
        return self._ctx.remaining()

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        self._ctx.progress(fraction, message)

    def log(self, text: str, level: str = "info") -> None:
        self._ctx.log(text, level=level)

    def __getattr__(self, name: str) -> Any:
        raise Misconfigured(
            f"ctx.{name} is not there in a process of its own", hint="use mode='thread'"
        )


def call_in_child(
    fn: Any, shape: Shape, config_type: type | None, ctx: Context, given: Any, about: dict[str, Any]
) -> Any:
    arguments: dict[str, Any] = {}
    if shape.takes_input:
        kind = shape.input_type
        arguments[shape.parameter] = (
            given if kind is Any else values.convert(given, values.readable(kind))
        )
    if shape.takes_ctx:
        config = about["config"]
        typed = config if config_type is None else msgspec.convert(config, config_type)
        arguments["ctx"] = ProcessStageContext(ctx, about, typed)
    return fn(**arguments)
