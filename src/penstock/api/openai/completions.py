"""Text that goes on: `POST /v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.api.openai.answering import answered
from penstock.api.openai.answers import TextCompletion
from penstock.api.openai.bodies import CompletionBody
from penstock.api.openai.endpoints import COMPLETIONS
from penstock.api.openai.errors import OpenAiOperation
from penstock.api.operation import Pace
from penstock.api.reply import AnyReply
from penstock.ports.engine_api import KeyRole

if TYPE_CHECKING:
    from penstock.api.call import Call


async def create_completion(call: Call) -> AnyReply:
    return await answered(call, COMPLETIONS)


OPERATIONS = (
    OpenAiOperation(
        "POST",
        COMPLETIONS.path,
        create_completion,
        role=KeyRole.SUBMIT,
        body=CompletionBody,
        answer=TextCompletion,
        other_types=("text/event-stream",),
        refusals=(404, 408, 409, 429),
        pace=Pace.WAITS,
        summary="Have a model go on with a text",
        description="As OpenAI's, without a chat template. One job, as for a chat.",
    ),
)
