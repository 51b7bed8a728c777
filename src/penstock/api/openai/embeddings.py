"""Texts as vectors: `POST /v1/embeddings`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.api.openai.answering import answered
from penstock.api.openai.answers import EmbeddingList
from penstock.api.openai.bodies import EmbeddingBody
from penstock.api.openai.endpoints import EMBEDDINGS
from penstock.api.openai.errors import OpenAiOperation
from penstock.api.operation import Pace
from penstock.api.reply import AnyReply
from penstock.ports.engine_api import KeyRole

if TYPE_CHECKING:
    from penstock.api.call import Call


async def create_embedding(call: Call) -> AnyReply:
    return await answered(call, EMBEDDINGS)


OPERATIONS = (
    OpenAiOperation(
        "POST",
        EMBEDDINGS.path,
        create_embedding,
        role=KeyRole.SUBMIT,
        body=EmbeddingBody,
        answer=EmbeddingList,
        refusals=(404, 408, 409, 429),
        pace=Pace.WAITS,
        summary="Make vectors of texts",
        description="As OpenAI's; each vector has length one. One job, as for a chat.",
    ),
)
