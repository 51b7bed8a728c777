"""Language models in the application: `penstock.ask`, and llama.cpp as the engine of its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from penstock.app.client import DefaultClient
from penstock.config import Settings, load
from penstock.core.errors import JobCancelled, Misconfigured, Unavailable
from penstock.core.job import Priority
from penstock.workloads.function.options import SubmitOptions
from penstock.workloads.llm.answers import Answer, TextStream, answer_of, question, topic_for
from penstock.workloads.llm.values import model_of

if TYPE_CHECKING:
    from penstock.app.application import Session
    from penstock.app.client import Client, JobHandle
    from penstock.workloads.llm.config import ModelConfig
    from penstock.workloads.llm.executor import LlmExecutor
    from penstock.workloads.llm.runner import Runner
    from penstock.workloads.llm.values import ModelFacts

Tell = Callable[[str], None]
_POLL = 0.5
"""Seconds between two checks whether a model is paused."""


def ask(
    prompt: str,
    *,
    model: str = "",
    client: Client | None = None,
    tell: Tell | None = None,
    submit: SubmitOptions | None = None,
    **options: Any,
) -> Answer:
    """Ask a language model, and wait for its answer; `tell` is given the text as it comes, each
    part once. (Should a worker be lost, and the next one say something else, only the answer that
    is returned has it.)

    Without a client: the engine on the data folder, or one in this process. Without a model: the
    first that is served. `options` are those of `question`, as `max_tokens=100, temperature=0`.
    Raises JobFailed and its kin, and Unavailable if the model's engine can't work now.
    """
    engine = client or _default.client()
    topic, request = _prepared(engine.topics(), model, prompt, tell, options)
    handle = engine.submit(topic, request, **_urgent(submit))
    with unless_paused(engine, handle):
        if tell is None:
            return answer_of(handle.job_id, handle.result())
        stream = TextStream(tell)
        for update in handle.follow():
            stream.add(update)
        return stream.finished(answer_of(handle.job_id, handle.result()))


async def aask(
    prompt: str,
    *,
    model: str = "",
    client: Client | None = None,
    tell: Tell | None = None,
    submit: SubmitOptions | None = None,
    **options: Any,
) -> Answer:
    """The same, to be awaited."""
    engine = client if client is not None else await asyncio.to_thread(_default.client)
    topic, request = _prepared(await engine.atopics(), model, prompt, tell, options)
    handle = await engine.asubmit(topic, request, **_urgent(submit))
    with unless_paused(engine, handle):
        if tell is None:
            return answer_of(handle.job_id, await handle.aresult())
        stream = TextStream(tell)
        async for update in handle.afollow():
            stream.add(update)
        return stream.finished(answer_of(handle.job_id, await handle.aresult()))


def _prepared(
    topics: Iterable[str], model: str, prompt: str, tell: Tell | None, options: Mapping[str, Any]
) -> tuple[str, Any]:
    """A job's topic and input."""
    request = replace(question(prompt, **options), stream=tell is not None)
    return topic_for(topics, model), msgspec.to_builtins(request)


@contextmanager
def unless_paused(client: Client, handle: JobHandle[Any]) -> Iterator[None]:
    """Cancel the job and raise Unavailable if its model is paused while the block waits for it."""
    found: list[str] = []

    async def watch() -> None:
        topic = handle.record.request.topic
        while not (why := (await client.api.status()).paused_topics.get(topic)):  # noqa: ASYNC110
            await asyncio.sleep(_POLL)
        found.append(why)
        await client.api.cancel(handle.job_id, reason=f"its model is paused: {why}", timeout=0.0)

    watching = asyncio.run_coroutine_threadsafe(watch(), client._engine.portal.loop)
    try:
        yield
    except JobCancelled as cancelled:
        if not found:
            raise
        model = model_of(handle.record.request.topic)
        raise Unavailable(f"the model {model} is paused: {found[0]}") from cancelled
    finally:
        watching.cancel()


def _urgent(options: SubmitOptions | None) -> SubmitOptions:
    """Interactive priority by default: somebody waits for the answer."""
    return {"priority": Priority.INTERACTIVE, **(options or {})}


# -- llama.cpp ------------------------------------------------------------------------------


def make_executor(app: Any, options: Mapping[str, Any]) -> LlmExecutor:
    """The executor of whole language models (entry point `penstock.executors`)."""
    from penstock.workloads.llm.executor import LlmExecutor

    config: ModelConfig | None = options.get("models")
    if config is None:
        return LlmExecutor(None)
    models = served_models(config)
    if not models:
        raise Misconfigured(
            "there is no model to serve", hint="get one with 'penstock model pull smollm2'"
        )
    return LlmExecutor(llama_runner(config), [model.name for model in models])


def served_models(config: ModelConfig) -> Sequence[ModelFacts]:
    """The models that a config names, the default first. Raises as `ModelStore.served`."""
    from penstock.models.store import ModelStore

    return ModelStore(config.models_dir or Path("models")).served(config.models)


def llama_runner(config: ModelConfig) -> Runner:
    from penstock.adapters.llama.runner import LlamaRunner

    return LlamaRunner(config)


def pipe_runner(settings: Settings) -> Runner:
    """Answers with a split model: this process is the node that has its end model. Raises
    Misconfigured, NotFound and InvalidRequest."""
    from penstock.workloads.pipes.node import Node
    from penstock.workloads.pipes.runner import PipeRunner
    from penstock.workloads.pipes.setup import pipe_config

    node = replace(settings.node, end_model=True)
    config = pipe_config(replace(settings, node=node))
    if config is None:
        raise Misconfigured("no split model is named", hint="set node.model, or use --split-model")
    return PipeRunner(Node(config))


def llama_version() -> str:
    """As `xllamacpp 2026.10.11549`. Raises LlmFailure if it is not installed."""
    from penstock.adapters.llama.process import engine_version

    return engine_version()


def check_llama() -> str:
    """Its version, after it was loaded in a process of its own; takes a second or so. Raises
    LlmFailure, which says what is missing and how to get it."""
    from penstock.adapters.llama.process import check_engine

    return check_engine()


# -- the engine that `ask` uses without a client -------------------------------------------


def _embedded() -> Session:
    from penstock.app.application import App
    from penstock.workloads.llm.config import ALL

    settings = load()
    if not settings.models.serve and not settings.node.end_model:
        settings = settings.changed(models__serve=(ALL,))
    return App().run(settings=settings)


def _check_served(client: Client) -> None:
    topic_for(client.topics())


_default = DefaultClient(_embedded, _check_served)
