"""What the lines of OpenAI's batch files say: each is a request to one of its endpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.api.decoding import read_json
from penstock.api.openai.asking import ask_of
from penstock.api.openai.bodies import AnyBody, ChatBody, CompletionBody, EmbeddingBody, Generating
from penstock.api.openai.errors import ModelNotFound, OpenAiError, tell
from penstock.api.openai.telling import Origin, chat_completion, embedding_list, text_completion
from penstock.api.reply import encode
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.job import Job
from penstock.workloads.llm.batches import Asked
from penstock.workloads.llm.values import EmbeddingResult, LlmResult, is_model_name, topic_of

_BODIES: dict[str, type[Any]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
}
_said = msgspec.json.Decoder(LlmResult).decode
_vectors = msgspec.json.Decoder(EmbeddingResult).decode


class OpenAiDialect:
    """See `penstock.workloads.llm.batches.Dialect`."""

    endpoints = tuple(_BODIES)

    def __init__(self, topic_for: Callable[[str], str] = topic_of) -> None:
        """`topic_for` says which topic a model's jobs have now, whether it is served or not."""
        self._topic_for = topic_for

    def ask(self, endpoint: str, body: bytes) -> Asked:
        asked = _read(endpoint, body)
        if not is_model_name(asked.model):
            raise ModelNotFound(f"the model {asked.model[:120]!r} does not exist")
        if isinstance(asked, Generating) and asked.stream:
            raise InvalidRequest("stream", "is of no use in a batch: nobody reads along")
        return Asked(self._topic_for(asked.model), encode(ask_of(asked)))

    def tell(self, endpoint: str, body: bytes, job: Job, result: bytes) -> bytes:
        asked = _read(endpoint, body)
        origin = Origin(job.job_id, job.accepted_at, asked.model)
        match asked:
            case ChatBody():
                return encode(chat_completion(asked, origin, _said(result)))
            case CompletionBody():
                return encode(text_completion(asked, origin, _said(result)))
            case EmbeddingBody():
                return encode(embedding_list(asked, origin, _vectors(result)))

    def refuse(self, error: PenstockError) -> tuple[int, bytes]:
        told = tell(error)
        return told.status, encode(OpenAiError(told.fault))


def _read(endpoint: str, body: bytes) -> AnyBody:
    read: AnyBody = read_json(body, _BODIES[endpoint], prefix="body")
    return read
