"""The three things that can be asked of a model: how each is read, answered and streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from penstock.api.openai.bodies import AnyBody, ChatBody, CompletionBody, EmbeddingBody
from penstock.api.openai.telling import Origin, chat_completion, embedding_list, text_completion
from penstock.api.openai.voices import ChatVoice, TextVoice, Voice
from penstock.workloads.llm.values import EmbeddingResult, LlmResult


class Endpoint(Struct, frozen=True):
    path: str
    body: type[AnyBody]
    result: type[LlmResult] | type[EmbeddingResult]
    """What its job ends with."""
    tell: Callable[[Any, Origin, Any], Struct]
    """OpenAI's object, made of the body and the result."""
    voice: Callable[[Any, Origin], Voice] | None = None
    """How it is told in parts."""


CHAT = Endpoint("/v1/chat/completions", ChatBody, LlmResult, chat_completion, ChatVoice)
COMPLETIONS = Endpoint("/v1/completions", CompletionBody, LlmResult, text_completion, TextVoice)
EMBEDDINGS = Endpoint("/v1/embeddings", EmbeddingBody, EmbeddingResult, embedding_list)
ENDPOINTS = {one.path: one for one in (CHAT, COMPLETIONS, EMBEDDINGS)}
