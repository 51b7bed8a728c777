"""From what a model said to OpenAI's objects."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable
from itertools import accumulate

from msgspec import UNSET, Struct

from penstock.api.openai.answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    EmbeddingList,
    EmbeddingUsage,
    EmbeddingVector,
    LegacyLogprobs,
    TextChoice,
    TextCompletion,
    TokenUsage,
)
from penstock.api.openai.bodies import ChatBody, CompletionBody, EmbeddingBody
from penstock.core.errors import InvalidRequest
from penstock.workloads.llm.values import (
    Choice,
    EmbeddingResult,
    LlmResult,
    TokenLogprob,
    ToolCall,
)


class Origin(Struct, frozen=True):
    """The job that an answer is of."""

    job_id: str
    accepted_at: float
    model: str

    @property
    def created(self) -> int:
        return int(self.accepted_at)


def chat_completion(body: ChatBody, origin: Origin, result: LlmResult) -> ChatCompletion:
    return ChatCompletion(
        id=f"chatcmpl-{origin.job_id}",
        created=origin.created,
        model=origin.model,
        choices=tuple(_chat_choice(body, *numbered) for numbered in enumerate(result.choices)),
        usage=TokenUsage.of(result.usage),
        system_fingerprint=result.engine,
    )


def _chat_choice(body: ChatBody, index: int, choice: Choice) -> ChatChoice:
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


def chat_logprobs(tokens: tuple[TokenLogprob, ...] | None) -> ChatLogprobs:
    return ChatLogprobs(tokens or ())


def text_completion(body: CompletionBody, origin: Origin, result: LlmResult) -> TextCompletion:
    return TextCompletion(
        id=f"cmpl-{origin.job_id}",
        created=origin.created,
        model=origin.model,
        choices=tuple(_text_choice(body, *numbered) for numbered in enumerate(result.choices)),
        usage=TokenUsage.of(result.usage),
        system_fingerprint=result.engine,
    )


def _text_choice(body: CompletionBody, index: int, choice: Choice) -> TextChoice:
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


def embedding_list(body: EmbeddingBody, origin: Origin, result: EmbeddingResult) -> EmbeddingList:
    """Raises InvalidRequest where other dimensions were asked for than the model has."""
    size = len(result.vectors[0]) if result.vectors else 0
    if body.dimensions not in (None, size):
        raise InvalidRequest(
            "dimensions", f"the model's vectors have {size} numbers, not {body.dimensions}"
        )
    in_bytes = body.encoding_format == "base64"
    return EmbeddingList(
        data=tuple(
            EmbeddingVector(index=index, embedding=as_base64(vector) if in_bytes else vector)
            for index, vector in enumerate(result.vectors)
        ),
        model=origin.model,
        usage=EmbeddingUsage(result.usage.prompt_tokens, result.usage.prompt_tokens),
    )


def as_base64(vector: Iterable[float]) -> str:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()
