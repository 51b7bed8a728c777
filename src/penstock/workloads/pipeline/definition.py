"""A pipeline as it is declared: stages in order, each a plain function.

    news = Pipeline("news", config=NewsConfig)

    @news.map(over="sources", concurrency=5, retry=Retry(3), breaker="feeds")
    async def ingest(source, ctx): ...

    @news.map(over=ingest)
    def classify(article, ctx): ...

    @news.step(enabled="enable_brief")
    async def brief(results, ctx): ...

Stages are declared and not replayed, so there are no rules about what their code may do. What
is wrong with a definition is said where it is written.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from penstock import values
from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.core.job import NO_RETRY, Retry, RetryPolicy
from penstock.core.verdict import parse_duration
from penstock.ports.executor import Context
from penstock.workloads.pipeline import status
from penstock.workloads.pipeline.breakers import BreakerSettings
from penstock.workloads.pipeline.payloads import Codec
from penstock.workloads.pipeline.records import (
    STALE_AFTER,
    TOPIC,
    AlertRule,
    OnChange,
    OnOrphan,
    PipelineInfo,
    StageInfo,
    StageKind,
    WhenOpen,
)

CTX = "ctx"
"""The parameter by which a function asks for its context."""


class Shape(Struct, frozen=True):
    """A function's parameters, as far as they matter here."""

    takes_input: bool
    takes_ctx: bool
    is_async: bool
    """A coroutine function, or an async generator function."""
    is_generator: bool
    """It yields its outputs, plainly or asynchronously."""
    input_type: Any
    """What its input is converted to; Any leaves it as JSON has it."""
    output_type: Any
    """What it said it returns, or yields; Any is not checked."""
    parameter: str
    """The name of the parameter for the input."""


def shape_of(fn: Callable[..., Any], stage: str) -> Shape:
    """Look at a function once. Raises Misconfigured for one that can't be called as a stage."""
    if not callable(fn):
        raise Misconfigured(f"stage {stage}: {fn!r} can't be called")
    parameters = list(inspect.signature(fn).parameters.values())
    plain = [p for p in parameters if p.name != CTX]
    wanted = [p for p in plain if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(wanted) > 1 or any(p.kind is p.KEYWORD_ONLY for p in wanted):
        raise Misconfigured(
            f"stage {stage}: its function wants {', '.join(p.name for p in wanted)}",
            hint="a stage's function takes one input and, if it likes, ctx",
        )
    try:
        hints = typing.get_type_hints(fn)
    except Exception as error:
        raise Misconfigured(f"stage {stage}: its annotations can't be read: {error}") from error
    given = wanted[0] if wanted else next(iter(plain), None)
    yields = inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
    returned = hints.get("return", Any)
    if yields:  # T of `Iterator[T]`, `AsyncIterator[T]` or `Generator[T, ...]`
        returned = (*typing.get_args(returned), Any)[0]
    return Shape(
        takes_input=given is not None,
        takes_ctx=any(p.name == CTX for p in parameters),
        is_async=inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn),
        is_generator=yields,
        input_type=hints.get(given.name, Any) if given is not None else Any,
        output_type=returned,
        parameter=given.name if given is not None else "",
    )


_MODES = ("async", "thread", "process")


def mode_of(stage: str, mode: str | None, shape: Shape) -> str:
    if mode is None:
        return "async" if shape.is_async else "thread"
    if mode not in _MODES:
        raise Misconfigured(f"stage {stage}: mode {mode!r} is none of {', '.join(_MODES)}")
    if shape.is_async is not (mode == "async"):
        other = "an async function" if shape.is_async else "a plain function"
        raise Misconfigured(f"stage {stage}: {other} can't run with mode={mode!r}")
    if mode == "process" and shape.is_generator:
        raise Misconfigured(
            f"stage {stage}: a generator can't run in a process", hint="return a list"
        )
    return mode


def policy_of(given: Retry | RetryPolicy | int | None) -> RetryPolicy:
    if isinstance(given, Retry):
        return given.policy
    if isinstance(given, int):
        return Retry(given).policy
    return given or NO_RETRY


def seconds(name: str, given: float | str | None) -> float | None:
    if given is None:
        return None
    try:
        length = parse_duration(given) if isinstance(given, str) else float(given)
    except ValueError as error:
        raise Misconfigured(f"{name}: {error}") from error
    if length < 0:
        raise Misconfigured(f"{name}: {given!r} is less than nothing")
    return length


C = TypeVar("C", OnChange, OnOrphan, WhenOpen)


def choice(kind: type[C], name: str, given: C | str) -> C:
    try:
        return kind(given)
    except ValueError:
        raise Misconfigured(f"{name}: {given!r} is none of {', '.join(kind)}") from None


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
        config_type: type | None,
        source: Source | None = None,
        key: Callable[[Any], str] | None = None,
        enabled: str | Callable[[Any], bool] | None = None,
        width: str = "",
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.info, self.shape, self.config_type = fn, info, shape, config_type
        self.source, self.key = source, key
        self.enabled = enabled if callable(enabled) else None
        self.width = width
        """The config field that says how many items run at once; may be ''."""
        self.name = info.name

    @functools.cached_property
    def codec(self) -> Codec:
        """Made once: looking at annotations takes longer than most calls."""
        return Codec(self.name, self.shape)

    def concurrency(self, config: Any) -> int:
        """How many of its items may run at once in a run with this config."""
        if not self.width:
            return self.info.concurrency
        given = config.get(self.width) if isinstance(config, Mapping) else None
        given = getattr(config, self.width, given)
        return max(1, given) if isinstance(given, int) else self.info.concurrency

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def in_child(self, ctx: Any, given: Any, about: dict[str, Any]) -> Any:
        """Run the function in a process that was started for it."""
        arguments: dict[str, Any] = {}
        if self.shape.takes_input:
            kind = self.shape.input_type
            value = given if kind is Any else values.convert(given, values.readable(kind))
            arguments[self.shape.parameter] = value
        if self.shape.takes_ctx:
            config, kind = about["config"], self.config_type
            typed = config if kind is None else msgspec.convert(config, kind)
            arguments[CTX] = ProcessStageContext(ctx, about, typed)
        return self.fn(**arguments)

    def __repr__(self) -> str:
        return f"<stage {self.name}>"


F = TypeVar("F", bound=Callable[..., Any])
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")


class Definition:
    """The stages of one pipeline, and how its jobs are to be treated."""

    def __init__(
        self,
        name: str,
        *,
        config: type | None = None,
        policy: str | Callable[..., Any] = "document",
        single_flight: bool = True,
        on_change: OnChange | str = OnChange.RESUME,
        on_orphan: OnOrphan | str = OnOrphan.RESUME,
        stale_after: float | str | None = STALE_AFTER,
        cancel_grace: float | str = 5.0,
        timeout: float | str | None = None,
        alerts: Iterable[AlertRule] = (),
        on_alert: Callable[..., Any] | None = None,
        on_end: Callable[..., Any] | None = None,
        breakers: Mapping[str, Mapping[str, float]] | None = None,
        resources: Mapping[str, Callable[[], Any]] | None = None,
        summary_after: str | None = None,
        doc: str = "",
    ) -> None:
        if not _NAME.fullmatch(str(name)):
            hint = "use letters, digits, - and _"
            raise Misconfigured(f"{name!r} can't name a pipeline", hint=hint)
        self.name = name
        self.topic = TOPIC + name
        self.config_type = config
        self.policy = policy
        """A name of `status.POLICIES`, or a function of the stages' records."""
        status.policy_of(policy)
        self.single_flight = single_flight
        self.on_change = choice(OnChange, "on_change", on_change)
        self.on_orphan = choice(OnOrphan, "on_orphan", on_orphan)
        self.stale_after = seconds("stale_after", stale_after)
        """Seconds without progress after which a job is stale; None: never."""
        self.cancel_grace = seconds("cancel_grace", cancel_grace) or 0.0
        """Seconds that running items have to stop before they are cancelled, or abandoned."""
        self.timeout = seconds("timeout", timeout)
        self.alerts = tuple(alerts)
        self.on_alert = on_alert
        """Called with (record, alert) for each alert of a finished run, plain or async."""
        self.on_end = on_end
        """Called with the final record, once, plain or async."""
        self.breakers = {
            name: BreakerSettings.of(name, given) for name, given in (breakers or {}).items()
        }
        self.resources = dict(resources or {})
        """Made once a job when first asked for by `ctx.resource(name)`; closed at its end."""
        self.summary_after = summary_after
        """The stage after which the run summary is made; None: the last one."""
        self.doc = doc
        self.stages: dict[str, Stage] = {}

    # -- declaring ----------------------------------------------------------------

    def map(
        self,
        over: Stage | str | Source | None = None,
        *,
        name: str | None = None,
        key: Callable[[Any], str] | None = None,
        concurrency: int | str = 5,
        rate: float | None = None,
        timeout: float | str | None = None,
        stage_timeout: float | str | None = None,
        retry: Retry | RetryPolicy | int | None = None,
        breaker: str | None = None,
        when_open: WhenOpen | str = WhenOpen.WAIT,
        mode: str | None = None,
        distributed: bool = False,
        enabled: str | Callable[[Any], bool] | None = None,
        needs: Sequence[Stage | str] = (),
        critical: bool = False,
        counts: bool = True,
        min_ok: int = 0,
        max_failed: float | None = None,
        version: str = "",
    ) -> Callable[[F], F]:
        """One call an item. `over` is a stage (its outputs), the name of a config field, or a
        function of (config, ctx) that gives items. Without it: the config field whose name is
        the plural of the function's parameter. `concurrency` is a number, or the name of the
        config field that holds it."""

        def declare(fn: F) -> F:
            stage = name or str(getattr(fn, "__name__", ""))
            shape = shape_of(fn, stage)
            over_, source = self._over(stage, over, shape)
            width = concurrency if isinstance(concurrency, str) else ""
            at_once = self._width(stage, concurrency)
            if at_once < 1:
                raise Misconfigured(f"stage {stage}: concurrency must be at least 1")
            if rate is not None and rate <= 0:
                raise Misconfigured(f"stage {stage}: rate must be above 0")
            info = StageInfo(
                name=stage,
                kind=StageKind.MAP,
                over=over_,
                needs=self._needs(stage, needs),
                mode=mode_of(stage, mode, shape),
                concurrency=at_once,
                rate=None if rate is None else float(rate),
                timeout=seconds(f"stage {stage}: timeout", timeout),
                stage_timeout=seconds(f"stage {stage}: stage_timeout", stage_timeout),
                retry=policy_of(retry),
                breaker=breaker,
                when_open=choice(WhenOpen, f"stage {stage}: when_open", when_open),
                enabled=self._flag(stage, enabled),
                critical=critical,
                counts=counts,
                min_ok=min_ok,
                max_failed=max_failed,
                distributed=distributed,
                version=version,
                doc=inspect.getdoc(fn) or "",
            )
            return self._add(fn, info, shape, source=source, key=key, enabled=enabled, width=width)

        return declare

    def step(
        self,
        of: Stage | str | None = None,
        *,
        name: str | None = None,
        timeout: float | str | None = None,
        retry: Retry | RetryPolicy | int | None = None,
        breaker: str | None = None,
        when_open: WhenOpen | str = WhenOpen.WAIT,
        mode: str | None = None,
        distributed: bool = False,
        enabled: str | Callable[[Any], bool] | None = None,
        needs: Sequence[Stage | str] = (),
        critical: bool = False,
        counts: bool = True,
        version: str = "",
    ) -> Callable[[F], F]:
        """One call, given the results of the stage `of` (the one before it, if not said). A
        stage that is named is needed, as by `needs`; the one before it is not."""

        def declare(fn: F) -> F:
            stage = name or str(getattr(fn, "__name__", ""))
            shape = shape_of(fn, stage)
            before = self._known(stage, of) if of is not None else next(reversed(self.stages), "")
            wanted = needs if of is None else (of, *needs)
            info = StageInfo(
                name=stage,
                kind=StageKind.STEP,
                of=before,
                needs=self._needs(stage, wanted),
                mode=mode_of(stage, mode, shape),
                timeout=seconds(f"stage {stage}: timeout", timeout),
                retry=policy_of(retry),
                breaker=breaker,
                when_open=choice(WhenOpen, f"stage {stage}: when_open", when_open),
                enabled=self._flag(stage, enabled),
                critical=critical,
                counts=counts,
                distributed=distributed,
                version=version,
                doc=inspect.getdoc(fn) or "",
            )
            return self._add(fn, info, shape, enabled=enabled)

        return declare

    def _add(self, fn: F, info: StageInfo, shape: Shape, **more: Any) -> F:
        if not _NAME.fullmatch(info.name):
            raise Misconfigured(f"{info.name!r} can't name a stage", hint="give it name=...")
        if info.name in self.stages:
            raise Misconfigured(f"pipeline {self.name} has a stage {info.name} already")
        stage = Stage(fn, info, shape, config_type=self.config_type, **more)
        self.stages[info.name] = stage
        self.__dict__.pop("fingerprint", None)
        return stage  # type: ignore[return-value]

    def _over(
        self, stage: str, over: Stage | str | Source | None, shape: Shape
    ) -> tuple[str, Source | None]:
        if isinstance(over, Stage):
            return f"stage:{self._known(stage, over)}", None
        if isinstance(over, str):
            if over in self.stages:
                return f"stage:{over}", None
            if over in self.config_fields or self.config_type is None:
                return f"config:{over}", None
            raise Misconfigured(
                f"stage {stage}: {over!r} is neither a stage before it nor a field of its config",
                hint=self._hint(),
            )
        if over is not None:
            return f"source:{getattr(over, '__qualname__', 'function')}", over
        plural = shape.parameter + "s"
        if plural in self.config_fields:
            return f"config:{plural}", None
        raise Misconfigured(
            f"stage {stage}: say what it maps over",
            hint=f"over= takes a stage, a field of the config (there is no {plural!r}) or a"
            " function that gives items",
        )

    def _needs(self, stage: str, needs: Sequence[Stage | str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._known(stage, one) for one in needs))

    def _known(self, stage: str, named: Stage | str) -> str:
        """The name of a stage that runs before `stage`: what keeps a definition from cycles."""
        name = named.name if isinstance(named, Stage) else named
        if name == stage:
            raise Misconfigured(f"stage {stage} waits for itself", hint="that is a cycle")
        if name not in self.stages:
            raise Misconfigured(
                f"stage {stage} uses {name!r}, which is not a stage before it", hint=self._hint()
            )
        return name

    def _flag(self, stage: str, enabled: str | Callable[[Any], bool] | None) -> str:
        if isinstance(enabled, str):
            if self.config_type is not None and enabled not in self.config_fields:
                raise Misconfigured(
                    f"stage {stage}: the config has no field {enabled!r}", hint=self._hint()
                )
            return enabled
        return "" if enabled is None else getattr(enabled, "__qualname__", "function")

    def _width(self, stage: str, concurrency: int | str) -> int:
        """The number itself, or the default of the config field that is named."""
        if isinstance(concurrency, int):
            return concurrency
        self._flag(stage, concurrency)
        default = next((one.default for one in self._fields if one.name == concurrency), 1)
        return default if isinstance(default, int) else 1

    def _hint(self) -> str:
        stages = ", ".join(self.stages) or "none"
        fields = ", ".join(self.config_fields) or "none"
        return f"stages so far: {stages}; fields of the config: {fields}"

    # -- config -------------------------------------------------------------------

    @functools.cached_property
    def config_fields(self) -> tuple[str, ...]:
        return tuple(field.name for field in self._fields)

    @functools.cached_property
    def _fields(self) -> tuple[Any, ...]:
        if self.config_type is None:
            return ()
        return tuple(msgspec.inspect.type_info(self.config_type).fields)  # type: ignore[attr-defined]

    def config_of(self, given: Any) -> Any:
        """The config as its type. Raises InvalidRequest, naming the field."""
        if self.config_type is not None and isinstance(given, self.config_type):
            given = msgspec.to_builtins(given)
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise InvalidRequest("config", f"expected an object, got {type(given).__name__}")
        if self.config_type is None:
            return dict(given)
        for name in given:
            if name not in self.config_fields:
                hint = f"there are {', '.join(self.config_fields)}"
                raise InvalidRequest(f"config.{name}", "unknown field", hint=hint)
        try:
            return msgspec.convert(dict(given), self.config_type)
        except msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$")
            field = path.rstrip("`").lstrip(".")
            raise InvalidRequest(f"config.{field}" if field else "config", problem) from error

    def plain_config(self, given: Any) -> dict[str, Any]:
        """The config with all its defaults, as JSON has it: what is frozen in the record."""
        return _plain(self.config_of(given))

    # -- describing ---------------------------------------------------------------

    def check(self) -> None:
        """Raise Misconfigured where it can't be run."""
        if not self.stages:
            hint = "declare one with map or step"
            raise Misconfigured(f"pipeline {self.name} has no stages", hint=hint)
        if self.summary_after is not None and self.summary_after not in self.stages:
            raise Misconfigured(f"pipeline {self.name}: there is no stage {self.summary_after!r}")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the stages' names, order, kinds, inputs and versions; not with their code:
        say `version=` where results of the old code are not to be kept."""
        return fingerprint_of([stage.info for stage in self.stages.values()])

    def info(self) -> PipelineInfo:
        self.check()
        schema = {} if self.config_type is None else _plain(msgspec.json.schema(self.config_type))
        return PipelineInfo(
            name=self.name,
            topic=self.topic,
            stages=tuple(stage.info for stage in self.stages.values()),
            fingerprint=self.fingerprint,
            config_schema=schema,
            policy=self.policy if isinstance(self.policy, str) else "custom",
            single_flight=self.single_flight,
            on_change=self.on_change,
            on_orphan=self.on_orphan,
            stale_after=self.stale_after,
            alerts=self.alerts,
            doc=self.doc,
        )

    def __repr__(self) -> str:
        return f"<pipeline {self.name}: {', '.join(self.stages) or 'no stages'}>"


def fingerprint_of(stages: Iterable[StageInfo]) -> str:
    """Names what the stages are to each other, by name, kind, input and version."""
    parts = [(s.name, s.kind, s.over, s.of, s.needs, s.version) for s in stages]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def _plain(value: Any) -> dict[str, Any]:
    """As JSON has it: what comes back from a store or over a wire is then the same."""
    return msgspec.json.decode(msgspec.json.encode(value))  # type: ignore[no-any-return]


# -- loading ----------------------------------------------------------------------


def load_pipeline(reference: str) -> Definition:
    """The pipeline `module:name`. Raises Misconfigured."""
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise Misconfigured(f"there is no pipeline {reference!r}", hint="write module:name")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        raise Misconfigured(f"can't import {module_name}: {error}") from error
    if not isinstance(found, Definition):
        raise Misconfigured(f"{module_name} has no pipeline {name!r}", hint="write module:name")
    return found
