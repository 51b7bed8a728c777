"""The one seam to whatever computes: used by the spool, by jobs of an engine, by the HTTP API.

A Runner holds models in memory and computes many answers at once. It runs no queue: whoever
calls has taken care of who may, who is first, and what happens after a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.workloads.llm.tools import ToolAnswer, is_forced, plan_of, wants_tools
from penstock.workloads.llm.values import (
    ChatRequest,
    Completion,
    CompletionRequest,
    Delta,
    EmbeddingRequest,
    EmbeddingResult,
    GenerationRequest,
    HopTime,
    LlmFailure,
    LlmResult,
    ModelFacts,
    Timings,
    TokenizeRequest,
    TokenizeResult,
    Usage,
)

if TYPE_CHECKING:
    from penstock.workloads.llm.health import RunnerHealth

Loading = Callable[[float, str], None]
"""How far a model is loaded (0 to 1), and what is being done."""
TOGETHER = 64
"""Answers of one job that are asked for at once: the slots that most engines have and more, and
few enough that who comes later is not behind all of a large job."""
T = TypeVar("T")


class ProgressListener(Protocol):
    """Hears how an answer comes about; the Context of a job is one. Called from any thread."""

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        """How far its prompt was read (0 to 1), or what it waits for."""

    def log(self, text: str, level: str = "info") -> None:
        """What happened to it, as when another node took over."""


class Runner(Protocol):
    """Everything raises LlmFailure, with a code that says why, and the others go on."""

    @property
    def engine(self) -> str:
        """Name and version, as `xllamacpp 2026.10.11549`."""

    @property
    def health(self) -> RunnerHealth:
        """Whether the engine of each model is loading, ready, ill or gone."""

    def for_tenant(self, tenant: str) -> Runner:
        """The same runner, which uses again what it computed for this tenant and for no other."""

    async def models(self) -> Sequence[ModelFacts]:
        """All that it could load, the default one first."""

    async def load(self, model: str = "", on_progress: Loading | None = None) -> ModelFacts:
        """Have it in memory, unloading others if it must; the default one without a name."""

    async def unload(self, model: str) -> None:
        """Give its memory back once its jobs have ended."""

    def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        """Answer number `choice`: Deltas as they come, then one Completion. A runner for which an
        answer may have a history before its first Delta tells it to `watch`.

        Closing the generator ends the computation within a token. Answers that were under way
        when the engine died raise ENGINE_CRASHED; the next call finds a new one.
        """

    async def embed(self, model: str, ask: EmbeddingRequest) -> EmbeddingResult: ...

    async def tokenize(self, model: str, ask: TokenizeRequest) -> TokenizeResult: ...

    async def close(self) -> None:
        """End every computation, and give everything back."""


def choices_of(ask: GenerationRequest) -> int:
    """How many answers it wants in all."""
    return ask.n * (len(ask.prompts) if isinstance(ask, CompletionRequest) else 1)


async def answer(
    runner: Runner,
    model: str,
    ask: GenerationRequest,
    tell: Callable[[Delta], None] | None = None,
    watch: ProgressListener | None = None,
) -> LlmResult:
    """All of its answers, computed side by side. When it is cancelled, or one fails, all end."""
    count = choices_of(ask)
    if count == 1:
        only = await _said(runner, model, ask, 0, tell, watch)
        return LlmResult(
            model=model,
            engine=runner.engine,
            choices=(only.choice,),
            usage=only.usage,
            timings=only.timings,
            hops=_hops(only.hops) if only.hops else (),
        )
    said = await side_by_side(count, lambda choice: _said(runner, model, ask, choice, tell, watch))
    return LlmResult(
        model=model,
        engine=runner.engine,
        choices=tuple(one.choice for one in said),
        usage=_used(said, ask.n),
        timings=Timings(
            sum(one.timings.prompt_ms for one in said),
            sum(one.timings.predicted_ms for one in said),
        ),
        hops=_hops(hop for one in said for hop in one.hops),
    )


async def side_by_side(
    count: int, work: Callable[[int], Awaitable[T]], most: int = TOGETHER
) -> list[T]:
    """What `work` makes of each number below `count`, at most so many at once. When it is
    cancelled, or one fails, all end."""
    if count == 1:
        return [await work(0)]
    left = iter(range(count))
    done: dict[int, T] = {}

    async def go_on() -> None:
        for number in left:
            done[number] = await work(number)

    async with _together() as group:
        for _ in range(min(most, count)):
            group.create_task(go_on())
    return [done[number] for number in range(count)]


async def _said(
    runner: Runner,
    model: str,
    ask: GenerationRequest,
    choice: int,
    tell: Callable[[Delta], None] | None,
    watch: ProgressListener | None,
) -> Completion:
    async with aclosing(generate(runner, model, ask, choice, watch)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Completion):
                return piece
            if tell is not None:
                tell(piece)
    raise RuntimeError("a runner ended an answer without saying so")


def generate(
    runner: Runner,
    model: str,
    ask: GenerationRequest,
    choice: int = 0,
    watch: ProgressListener | None = None,
) -> AsyncGenerator[Delta | Completion, None]:
    """As `Runner.generate`, with tools for every model: calls that are forced are, and a model
    whose template does not support tools is told of them in words."""
    if isinstance(ask, ChatRequest) and wants_tools(ask):
        return _with_tools(runner, model, ask, choice, watch)
    return runner.generate(model, ask, choice, watch)


async def _with_tools(
    runner: Runner, model: str, ask: ChatRequest, choice: int, watch: ProgressListener | None
) -> AsyncGenerator[Delta | Completion, None]:
    if not is_forced(ask):
        try:
            async with aclosing(runner.generate(model, ask, choice, watch)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        except LlmFailure as failure:
            if failure.facts.get("tools") is not False:
                raise
    plan = plan_of(ask)
    written = ToolAnswer(plan)
    async with aclosing(runner.generate(model, plan.request, choice, watch)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Completion):
                for end in written.end(piece):
                    yield end
            elif (call := written.add(piece)) is not None:
                yield call


def _used(said: Sequence[Completion], n: int) -> Usage:
    total = Usage()
    for index, one in enumerate(said):
        first = index % n == 0
        prompt = one.usage if first else Usage(0, one.usage.completion_tokens, 0)
        total = total + prompt
    return total


def _hops(hops: Iterable[HopTime]) -> tuple[HopTime, ...]:
    """Each node with its layers once."""
    found: dict[tuple[str, str], HopTime] = {}
    for hop in hops:
        before = found.get((hop.node, hop.layers))
        found[hop.node, hop.layers] = hop if before is None else before + hop
    return tuple(found.values())


class _together(asyncio.TaskGroup):
    """A group that raises the first failure itself, not a group of them."""

    async def __aexit__(self, *error: object) -> None:
        try:
            await super().__aexit__(*error)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
