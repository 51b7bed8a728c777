"""What is answered: OpenAI's objects, whole and in chunks."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from penstock.workloads.llm.values import TokenLogprob, ToolCall, Usage


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
