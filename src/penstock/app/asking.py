"""`penstock.ask`: a question to a language model, as a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from penstock.app.alone import Alone
from penstock.config import load
from penstock.core.errors import InvalidRequest, JobCancelled, NotFound, Unavailable
from penstock.core.job import Priority
from penstock.core.llm import (
    Chat,
    LlmResult,
    Message,
    Piece,
    Sampling,
    Usage,
    model_of,
    topics_by_model,
)
from penstock.ports.desk import JobUpdate, Streamed
from penstock.workloads.function.options import SubmitOptions

if TYPE_CHECKING:
    from penstock.app.application import Session
    from penstock.app.client import Client
    from penstock.app.handle import JobHandle

__all__ = [
    "Answer",
    "aask",
    "answer_of",
    "ask",
    "model_of",
    "piece_of",
    "question",
    "topic_for",
    "unless_paused",
]

Tell = Callable[[str], None]
_LOOK = 0.5
"""Seconds between two looks at whether a model is paused."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a model said."""

    job_id: str
    model: str
    text: str
    finish_reason: str
    """`stop`, or `length` if it had more to say."""
    usage: Usage = Usage()
    engine: str = ""

    def __str__(self) -> str:
        return self.text


def question(
    prompt: str,
    *,
    system: str = "",
    max_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    schema: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Chat:
    """The request of one question. `sampling` is `temperature`, `top_p`, `top_k`, `min_p`,
    `repeat_penalty`, `seed` … Raises InvalidRequest."""
    messages = [Message(role="user", content=prompt)]
    if system:
        messages.insert(0, Message(role="system", content=system))
    try:
        return msgspec.convert(
            {
                "kind": "chat",
                "messages": msgspec.to_builtins(messages),
                "max_tokens": max_tokens,
                "stop": list(stop),
                "schema": None if schema is None else dict(schema),
                "sampling": msgspec.to_builtins(msgspec.convert(sampling, Sampling)),
            },
            Chat,
        )
    except msgspec.ValidationError as error:
        raise InvalidRequest("question", str(error)) from error


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
    engine = client or _alone.client()
    topic = topic_for(engine.topics(), model)
    request = replace(question(prompt, **options), stream=tell is not None)
    handle = engine.submit(topic, msgspec.to_builtins(request), **_urgent(submit))
    with unless_paused(engine, handle):
        if tell is None:
            return answer_of(handle.job_id, handle.result())
        teller = _Teller(tell)
        for update in handle.follow():
            teller.add(update)
        return teller.finished(answer_of(handle.job_id, handle.result()))


async def aask(
    prompt: str,
    *,
    model: str = "",
    client: Client | None = None,
    tell: Tell | None = None,
    submit: SubmitOptions | None = None,
    **options: Any,
) -> Answer:
    """The same for who is in an event loop."""
    engine = client if client is not None else await asyncio.to_thread(_alone.client)
    topic = topic_for(await engine.atopics(), model)
    request = replace(question(prompt, **options), stream=tell is not None)
    handle = await engine.asubmit(topic, msgspec.to_builtins(request), **_urgent(submit))
    with unless_paused(engine, handle):
        if tell is None:
            return answer_of(handle.job_id, await handle.aresult())
        teller = _Teller(tell)
        async for update in handle.afollow():
            teller.add(update)
        return teller.finished(answer_of(handle.job_id, await handle.aresult()))


@contextmanager
def unless_paused(client: Client, handle: JobHandle) -> Iterator[None]:
    """Who waits for an answer does not wait for an engine that can't work now: the job is
    cancelled then, and Unavailable raised with the reason."""
    found: list[str] = []

    async def watch() -> None:
        topic = handle.record.request.topic
        while not (why := (await client.desk.status()).paused_topics.get(topic)):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)
        found.append(why)
        await client.desk.cancel(handle.job_id, reason=f"its model is paused: {why}", timeout=0.0)

    watching = asyncio.run_coroutine_threadsafe(watch(), client._portal.loop)
    try:
        yield
    except JobCancelled as cancelled:
        if not found:
            raise
        model = model_of(handle.record.request.topic)
        raise Unavailable(f"the model {model} is paused: {found[0]}") from cancelled
    finally:
        watching.cancel()


class _Teller:
    """Tells a text once, whoever says it: after the loss of a worker another begins again, and
    what comes last may come with the whole."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told = ""
        self._attempt = 0
        self._text = ""
        """What this attempt has said."""

    def add(self, update: JobUpdate) -> None:
        if not isinstance(update, Streamed) or (piece := piece_of(update)) is None:
            return
        if update.attempt != self._attempt:
            self._attempt, self._text = update.attempt, ""
        self._text += piece.text
        self._tell_new(self._text)

    def finished(self, answer: Answer) -> Answer:
        self._tell_new(answer.text)
        return answer

    def _tell_new(self, text: str) -> None:
        """What was told can't be taken back: of another text nothing is told."""
        if len(text) > len(self._told) and text.startswith(self._told):
            new, self._told = text[len(self._told) :], text
            self._tell(new)


def _urgent(options: SubmitOptions | None) -> SubmitOptions:
    """Somebody waits for it, so it is urgent unless it says otherwise."""
    return {"priority": Priority.INTERACTIVE, **(options or {})}


def topic_for(topics: Iterable[str], wanted: str = "") -> str:
    """The topic of a model that is served, whole here or split over nodes. Raises NotFound."""
    served = topics_by_model(topics)
    if not served:
        raise NotFound(
            "the engine that is running here serves no language model",
            hint="start it with 'penstock up --model auto', or join it with"
            " 'penstock worker --model auto'",
        )
    if not wanted:
        return next(iter(served.values()))
    alike = [name for name in served if wanted.lower() in name.lower()]
    if wanted in served or len(alike) == 1:
        return served.get(wanted) or served[alike[0]]
    raise NotFound(f"no model {wanted!r} is served", hint=f"there are: {', '.join(sorted(served))}")


def piece_of(update: JobUpdate) -> Piece | None:
    """What is said next, if that is what an update tells."""
    if not isinstance(update, Streamed):
        return None
    return msgspec.json.decode(update.text, type=Piece)


def answer_of(job_id: str, result: Any) -> Answer:
    """From what the job returned."""
    whole = msgspec.convert(result, LlmResult)
    choice = whole.choices[0]
    return Answer(
        job_id=job_id,
        model=whole.model,
        text=choice.text,
        finish_reason=choice.finish_reason,
        usage=whole.usage,
        engine=whole.engine,
    )


def _embedded() -> Session:
    from penstock.app.application import App
    from penstock.app.models import ALL

    settings = load()
    if not settings.models and not settings.pipe_end_model:
        settings = replace(settings, models=(ALL,))
    return App().run(settings=settings)


def _check_served(client: Client) -> None:
    topic_for(client.topics())


_alone = Alone(_embedded, _check_served)
