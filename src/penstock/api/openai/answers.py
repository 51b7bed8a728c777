"""OpenAI's objects, whole and in chunks, and how they are made of what a model answered."""

from __future__ import annotations

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.api.openai.requests import ChatBody, CompletionBody
from penstock.core.errors import InvalidRequest
from penstock.workloads.llm.values import (
    Choice,
    TokenLogprob,
    ToolCall,
    Usage,
)


class CachedTokens(Struct, frozen=True):
    cached_tokens: int
    """Of the prompt, those that were computed before."""


class TokenUsage(Struct, frozen=True):
    """Counted in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, usage: Usage) -> TokenUsage:
        total = usage.prompt_tokens + usage.completion_tokens
        cached = CachedTokens(usage.cached_tokens)
        return cls(usage.prompt_tokens, usage.completion_tokens, total, cached)


# -- chat ---------------------------------------------------------------------------


class ChatLogprobs(Struct, frozen=True):
    content: tuple[TokenLogprob, ...]
    refusal: None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """None where the model only calls tools."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """What it thought before, where the model tells."""
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    """`chatcmpl-` and the id of the job."""
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: TokenUsage
    system_fingerprint: str
    """The engine that answered, with its version."""


class FunctionDelta(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


# -- completions --------------------------------------------------------------------


class LegacyLogprobs(Struct, frozen=True, kw_only=True):
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class TextChoice(Struct, frozen=True, kw_only=True):
    text: str
    index: int
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None


class TextCompletion(Struct, frozen=True, kw_only=True):
    id: str
    """`cmpl-` and the id of the job."""
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    usage: TokenUsage
    system_fingerprint: str
    """The engine that answered, with its version."""


class Chunk(Struct, frozen=True, kw_only=True):
    """A part of an answer."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[ChunkChoice | TextChoice, ...] | tuple[Any, ...]
    usage: TokenUsage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


# -- embeddings ---------------------------------------------------------------------


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingVector(Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: tuple[float, ...] | str
    """Numbers; with `encoding_format: base64`, their bytes."""


class EmbeddingList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[EmbeddingVector, ...]
    model: str
    usage: EmbeddingUsage


# -- made of what a model answered ---------------------------------------------------


class JobOrigin(Struct, frozen=True):
    """The job that an answer is of."""

    job_id: str
    accepted_at: float
    model: str

    @property
    def created(self) -> int:
        return int(self.accepted_at)


def chat_choice(body: ChatBody, index: int, choice: Choice) -> ChatChoice:
    calls = tool_calls_of(body, choice)
    message = ChatMessage(
        content=choice.text if choice.text or not calls else None,
        reasoning_content=choice.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
    return ChatChoice(
        index=index,
        message=message,
        logprobs=chat_logprobs(choice.logprobs) if body.logprobs else None,
        finish_reason=choice.finish_reason,
    )


def tool_calls_of(body: ChatBody, choice: Choice) -> tuple[ToolCall, ...]:
    return choice.tool_calls[:1] if body.parallel_tool_calls is False else choice.tool_calls


def arguments_of(call: ToolCall) -> Any:
    """As values, where an API has no JSON text for them."""
    try:
        return msgspec.json.decode(call.function.arguments or "{}")
    except msgspec.DecodeError:  # cut off at its limit
        return {}


def chat_logprobs(tokens: tuple[TokenLogprob, ...] | None) -> ChatLogprobs:
    return ChatLogprobs(tokens or ())


def text_choice(body: CompletionBody, index: int, choice: Choice) -> TextChoice:
    told = None if body.logprobs is None else legacy_logprobs(choice.logprobs or ())
    return TextChoice(
        text=echoed(body, index) + choice.text,
        index=index,
        logprobs=told,
        finish_reason=choice.finish_reason,
    )


def echoed(body: CompletionBody, index: int) -> str:
    """What is told before answer number `index`."""
    if not body.echo:
        return ""
    prompts = (body.prompt,) if isinstance(body.prompt, str) else body.prompt
    return str(prompts[index // (body.n or 1)])


def legacy_logprobs(tokens: Iterable[TokenLogprob], offset: int = 0) -> LegacyLogprobs:
    """In the form of completions; `offset` is where in the text the first token begins."""
    tokens = tuple(tokens)
    ends = accumulate((len(one.token) for one in tokens), initial=offset)
    return LegacyLogprobs(
        tokens=tuple(one.token for one in tokens),
        token_logprobs=tuple(one.logprob for one in tokens),
        top_logprobs=tuple({top.token: top.logprob for top in one.top_logprobs} for one in tokens),
        text_offset=tuple(ends)[:-1],
    )


def shortened(vector: tuple[float, ...], dimensions: int | None) -> tuple[float, ...]:
    """The first numbers of a vector, with length one again. Raises InvalidRequest."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise InvalidRequest(
            "dimensions", f"must be at most {len(vector)}, the size of the model's vectors"
        )
    cut = vector[:dimensions]
    length = math.sqrt(sum(number * number for number in cut)) or 1.0
    return tuple(number / length for number in cut)


def as_base64(vector: Iterable[float]) -> str:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()
