"""Questions to a language model, and the answers in their jobs' updates and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from penstock.core.errors import Conflict, InvalidRequest, NotFound
from penstock.models.values import resolve_name
from penstock.ports.engine_api import JobUpdate, Streamed
from penstock.workloads.llm.splice import StreamSplice
from penstock.workloads.llm.values import (
    ChatRequest,
    Delta,
    LlmResult,
    Message,
    Sampling,
    Usage,
    topics_by_model,
)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A model's answer."""

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
) -> ChatRequest:
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
            ChatRequest,
        )
    except msgspec.ValidationError as error:
        raise InvalidRequest("question", str(error)) from error


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
    hint = f"there are: {', '.join(sorted(served))}"
    return served[resolve_name(wanted, served, hint=hint)]


def answer_of(job_id: str, result: Any) -> Answer:
    """The answer in a job's result."""
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


class TextStream:
    """Passes on each part of a text once, although a new attempt streams it again from its start
    and the last part may come with the whole answer only."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told = ""
        self._splice: StreamSplice | None = StreamSplice()

    def add(self, update: JobUpdate) -> None:
        """Text that was passed on can't be taken back: a different text is left out."""
        if not isinstance(update, Streamed) or self._splice is None:
            return
        piece = msgspec.json.decode(update.text, type=Delta)
        try:
            self._pass_on(self._splice.take((update.job_id, update.attempt), piece).text)
        except Conflict:
            self._splice = None

    def finished(self, answer: Answer) -> Answer:
        if answer.text.startswith(self._told):
            self._pass_on(answer.text[len(self._told) :])
        return answer

    def _pass_on(self, new: str) -> None:
        if new:
            self._told += new
            self._tell(new)
