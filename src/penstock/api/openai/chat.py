"""Chats: `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.api.openai.answering import answered
from penstock.api.openai.answers import ChatCompletion
from penstock.api.openai.bodies import ChatBody
from penstock.api.openai.endpoints import CHAT
from penstock.api.openai.errors import OpenAiOperation
from penstock.api.operation import Pace
from penstock.api.reply import AnyReply
from penstock.ports.engine_api import KeyRole

if TYPE_CHECKING:
    from penstock.api.call import Call


async def create_chat_completion(call: Call) -> AnyReply:
    return await answered(call, CHAT)


OPERATIONS = (
    OpenAiOperation(
        "POST",
        CHAT.path,
        create_chat_completion,
        role=KeyRole.SUBMIT,
        body=ChatBody,
        large=True,
        answer=ChatCompletion,
        other_types=("text/event-stream",),
        refusals=(404, 408, 409, 429),
        pace=Pace.WAITS,
        summary="Have a model go on with a conversation",
        description=(
            "As OpenAI's. The request is one job, named by the header `x-penstock-job`: the same "
            "rules, limits and journal hold as for any other. It is cancelled when the client "
            "leaves, unless there was an `Idempotency-Key`: the same request with the same key "
            "is answered with the same job then."
        ),
    ),
)
