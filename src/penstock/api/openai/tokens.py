"""`/tokenize` and `/detokenize`, in the shapes of llama.cpp's server and of vLLM at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from penstock.api.openai.answers import JobOrigin
from penstock.api.openai.endpoints import Endpoint
from penstock.api.openai.requests import Asking, ChatTurn, Token, message_of
from penstock.core.errors import InvalidRequest
from penstock.workloads.llm.values import TokenizeRequest, TokenizeResult


class TokenizeBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `content`, `prompt` and `messages`."""

    given = "content"
    content: str | None = None
    """The text, as llama.cpp's server names it."""
    prompt: str | None = None
    """The same, as vLLM names it."""
    messages: tuple[ChatTurn, ...] | None = None
    """A conversation, written by the model's chat template."""
    add_special: bool | None = None
    """Whether the model's first tokens come before those of a `content`; no by default."""
    add_special_tokens: bool | None = None
    """The same for a `prompt`; yes by default."""
    parse_special: bool = True
    """Whether the names of special tokens are these tokens."""


class TokenizeAnswer(Struct, frozen=True, kw_only=True):
    tokens: tuple[int, ...]
    count: int
    model: str


class DetokenizeBody(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    given = "tokens"
    tokens: tuple[Token, ...]


class DetokenizeAnswer(Struct, frozen=True, kw_only=True):
    content: str
    """As llama.cpp's server names it."""
    prompt: str
    """The same, as vLLM names it."""
    model: str


def tokenize_request(body: TokenizeBody, options: Mapping[str, Any]) -> TokenizeRequest:
    names = [n for n in ("content", "prompt", "messages") if getattr(body, n) is not None]
    if len(names) != 1:
        problem = "is missing" if not names else f"can't be combined with {names[1]}"
        raise InvalidRequest(names[0] if names else "content", problem)
    if body.messages is not None:
        turns = enumerate(body.messages)
        messages = tuple(message_of(f"messages[{n}]", one) for n, one in turns)
        if not messages:
            raise InvalidRequest("messages", "is empty")
        return TokenizeRequest(messages=messages, add_special=True)
    special = body.add_special
    if body.prompt is not None:
        special = body.add_special_tokens is not False
    text = body.prompt if body.prompt is not None else body.content
    return TokenizeRequest(text=text, add_special=bool(special), parse_special=body.parse_special)


def tokenize_answer(
    body: TokenizeBody, origin: JobOrigin, result: TokenizeResult
) -> TokenizeAnswer:
    return TokenizeAnswer(tokens=result.tokens, count=len(result.tokens), model=origin.model)


def detokenize_request(body: DetokenizeBody, options: Mapping[str, Any]) -> TokenizeRequest:
    return TokenizeRequest(tokens=body.tokens)


def detokenize_answer(
    body: DetokenizeBody, origin: JobOrigin, result: TokenizeResult
) -> DetokenizeAnswer:
    return DetokenizeAnswer(content=result.text, prompt=result.text, model=origin.model)


TOKENIZE = Endpoint(
    path="/tokenize",
    name="tokenize",
    body=TokenizeBody,
    request=tokenize_request,
    result=TokenizeResult,
    answer=TokenizeAnswer,
    whole=tokenize_answer,
    large=False,
    summary="Turn a text or a conversation into tokens",
    description="As llama.cpp's server and vLLM have it. One job, as for a chat.",
)
DETOKENIZE = Endpoint(
    path="/detokenize",
    name="detokenize",
    body=DetokenizeBody,
    request=detokenize_request,
    result=TokenizeResult,
    answer=DetokenizeAnswer,
    whole=detokenize_answer,
    large=False,
    summary="Turn tokens into text",
    description="As llama.cpp's server and vLLM have it. One job, as for a chat.",
)
OPERATIONS = (TOKENIZE.operation(), DETOKENIZE.operation())
