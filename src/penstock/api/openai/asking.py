"""From OpenAI's requests to what is asked of a model."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from penstock.api.openai.bodies import (
    MAX_INPUTS,
    MAX_STOPS,
    AnyBody,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    Generating,
    JsonObjectFormat,
    JsonSchemaFormat,
    Texts,
    ToolWanted,
)
from penstock.core.check import check_pairs
from penstock.core.errors import InvalidRequest
from penstock.workloads.llm.values import (
    Chat,
    Completion,
    Embedding,
    ImagePart,
    LlmRequest,
    Message,
    Sampling,
    TextPart,
)

_SEEDS = (1 << 32) - 1
_COMPLETION = 16
"""Tokens of a completion that says nothing of how many it wants."""
_IMAGE = re.compile(r"data:image/(png|jpe?g|gif|webp);base64,", re.IGNORECASE)

UNSUPPORTED = {
    "audio": "sound is not made here",
    "functions": "is the older form of tools",
    "function_call": "is the older form of tool_choice",
    "moderation": "nothing is moderated here",
    "reasoning_effort": "can't be set for a local model",
    "verbosity": "can't be set for a local model",
    "web_search_options": "nothing is searched here",
}
"""Fields that would change the answer; `null` passes."""


def ask_of(body: AnyBody) -> LlmRequest:
    """What a body asks of its model. Raises InvalidRequest, naming the field."""
    match body:
        case ChatBody():
            return chat_of(body)
        case CompletionBody():
            return completion_of(body)
        case EmbeddingBody():
            return Embedding(inputs=_texts("input", body.input))


def labels_of(body: AnyBody) -> dict[str, str]:
    """The labels of its job."""
    labels = {} if body.user is None else {"user": body.user}
    if isinstance(body, Generating) and body.metadata:
        labels |= body.metadata
    if labels:
        check_pairs("metadata", labels)
    return labels


# -- chat ---------------------------------------------------------------------------


def chat_of(body: ChatBody) -> Chat:
    for name, why in UNSUPPORTED.items():
        if getattr(body, name) is not None:
            raise _unsupported(name, why)
    if body.modalities not in (None, (), ("text",)):
        raise _unsupported("modalities", "only text is made here")
    for index, message in enumerate(body.messages):
        _check_message(f"messages[{index}]", message)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    _check_format(body)
    wanted = body.response_format
    schema = wanted.json_schema.schema if isinstance(wanted, JsonSchemaFormat) else None
    return Chat(
        **_common(body),
        messages=body.messages,
        max_tokens=_most(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        schema=schema,
        json_object=isinstance(wanted, JsonObjectFormat),
        tools=tuple(msgspec.to_builtins(tool) for tool in body.tools or ()),
        tool_choice=_tool_choice(body),
    )


def _most(body: ChatBody) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if None not in (new, old) and new != old:
        raise InvalidRequest("max_tokens", "differs from max_completion_tokens: give one of them")
    return old if new is None else new


def _check_format(body: ChatBody) -> None:
    held = isinstance(body.response_format, JsonObjectFormat | JsonSchemaFormat)
    if held and body.grammar is not None:
        raise InvalidRequest("grammar", "can't be given together with response_format")


def _tool_choice(body: ChatBody) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "needs tools")
        return None
    if not isinstance(choice, ToolWanted):
        return choice
    if choice.function.name not in [tool.function.name for tool in body.tools]:
        raise InvalidRequest(
            "tool_choice.function.name", f"there is no tool {choice.function.name[:64]!r}"
        )
    wanted: dict[str, Any] = msgspec.to_builtins(choice)
    return wanted


def _check_message(where: str, message: Message) -> None:
    content = message.content
    if not isinstance(content, str):
        _check_parts(where, message.role, content)
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequest(f"{where}.tool_call_id", "is missing", hint="it says which call it is")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls", "are only for the role assistant")


def _check_parts(where: str, role: str, content: tuple[TextPart | ImagePart, ...] | None) -> None:
    if content is None:
        if role == "assistant":
            return
        raise InvalidRequest(f"{where}.content", "is missing")
    if not content:
        raise InvalidRequest(f"{where}.content", "has no parts")
    for index, part in enumerate(content):
        if isinstance(part, ImagePart):
            _check_image(f"{where}.content[{index}].image_url", role, part.image_url.url)


def _check_image(where: str, role: str, url: str) -> None:
    if role != "user":
        raise InvalidRequest(where, "images are only for the role user")
    if not _IMAGE.match(url[:40]):
        raise InvalidRequest(
            f"{where}.url",
            "is not an image in a data: URI",
            hint="nothing is fetched: send data:image/png;base64,... (or jpeg, gif, webp)",
        )


# -- completions and embeddings -----------------------------------------------------


def completion_of(body: CompletionBody) -> Completion:
    prompts = _texts("prompt", body.prompt)
    if body.suffix:
        raise _unsupported("suffix", "text is only continued here, not filled in")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise _unsupported("best_of", "every answer is told: it must equal n")
    if body.echo:
        if body.logprobs is not None:
            raise _unsupported("echo", "can't be had together with logprobs")
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise _unsupported("echo", "needs prompts that are text")
    return Completion(
        **_common(body),
        prompts=prompts,
        max_tokens=body.max_tokens or _COMPLETION,
        logprobs=body.logprobs,
    )


def _texts(field: str, given: Texts) -> tuple[str | tuple[int, ...], ...]:
    """The inputs, each text or tokens."""
    if isinstance(given, str):
        given = (given,)
    if given and all(isinstance(one, int) for one in given):
        given = (given,)  # type: ignore[assignment]
    if not given:
        raise InvalidRequest(field, "is empty")
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(field, f"{len(given)} inputs; at most {MAX_INPUTS} are allowed")
    for index, one in enumerate(given):
        if isinstance(one, int) or type(one) is not type(given[0]):
            raise InvalidRequest(f"{field}[{index}]", "texts and tokens can't be mixed")
        if not one:
            raise InvalidRequest(f"{field}[{index}]" if len(given) > 1 else field, "is empty")
    return given  # type: ignore[return-value]


# -- both ---------------------------------------------------------------------------


def _common(body: Generating) -> dict[str, Any]:
    if body.logit_bias:
        raise _unsupported("logit_bias", "single tokens can't be favoured here")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "needs stream to be true")
    if body.top_p == 0:
        raise InvalidRequest("top_p", "must be more than 0")
    return {
        "stop": _stops(body.stop),
        "sampling": Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            repeat_penalty=body.repeat_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            seed=None if body.seed is None else body.seed % _SEEDS,
        ),
        "grammar": body.grammar,
        "n": body.n or 1,
        "stream": bool(body.stream),
    }


def _stops(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else given or ()
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"{len(stops)} texts; at most {MAX_STOPS} are allowed")
    if "" in stops:
        raise InvalidRequest("stop", "an empty text can't end an answer")
    return stops


class Unsupported(InvalidRequest):
    """A field of OpenAI's that can't be honoured here."""

    code = "UNSUPPORTED_PARAMETER"


def _unsupported(field: str, why: str) -> Unsupported:
    return Unsupported(field, f"is not supported: {why}", hint="leave it out")
