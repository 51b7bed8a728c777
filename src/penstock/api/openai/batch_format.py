"""The lines of OpenAI's batch files: each is a request to one of its endpoints."""

from __future__ import annotations

from collections.abc import Callable

from penstock.api.decoding import decoder
from penstock.api.openai.answers import JobOrigin
from penstock.api.openai.endpoints import BATCHED
from penstock.api.openai.errors import ModelNotFound, OpenAiError, tell
from penstock.api.openai.images import refuse_urls
from penstock.api.openai.requests import Generating, read_request
from penstock.api.reply import encode
from penstock.core.errors import InvalidRequest, PenstockError, UnknownTopic
from penstock.core.job import Job
from penstock.workloads.llm.batches import LineRequest
from penstock.workloads.llm.values import is_model_name, topic_of


class OpenAiBatchFormat:
    """See `penstock.workloads.llm.batches.BatchFormat`."""

    endpoints = tuple(BATCHED)

    def __init__(self, topic_for: Callable[[str], str] = topic_of) -> None:
        """`topic_for` names the topic of a model's jobs, whether it is served or not."""
        self._topic_for = topic_for

    def ask(self, endpoint: str, body: bytes) -> LineRequest:
        table = BATCHED[endpoint]
        parsed = read_request(body, table.body, prefix="body")
        asked = parsed.body
        if not asked.model:
            raise InvalidRequest("body.model", "is missing", hint="it is required")
        if not is_model_name(asked.model):
            raise ModelNotFound(f"the model {asked.model[:120]!r} does not exist")
        if isinstance(asked, Generating) and asked.stream:
            raise InvalidRequest("stream", "can't be used in a batch")
        request = table.request(asked, parsed.options)
        refuse_urls(request)
        return LineRequest(self._topic_for(asked.model), encode(request))

    def tell(self, endpoint: str, body: bytes, job: Job, result: bytes) -> bytes:
        table = BATCHED[endpoint]
        asked = read_request(body, table.body, prefix="body").body
        origin = JobOrigin(job.job_id, job.accepted_at, asked.model)
        return encode(table.whole(asked, origin, decoder(table.result).decode(result)))

    def refuse(self, error: PenstockError) -> tuple[int, bytes]:
        if isinstance(error, UnknownTopic):
            error = ModelNotFound(error.problem)
        refusal = tell(error)
        return refusal.status, encode(OpenAiError(refusal.fault))
