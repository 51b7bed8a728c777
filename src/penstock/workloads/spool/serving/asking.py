"""What a spooled job asks of the model. Pure."""

from __future__ import annotations

import base64

from msgspec import structs

from penstock.workloads.llm.values import (
    Chat,
    Completion,
    Embedding,
    Generation,
    ImagePart,
    ImageUrl,
    LlmCode,
    LlmFailure,
    Message,
    TextPart,
)
from penstock.workloads.spool.disk import Unfit
from penstock.workloads.spool.images import media_type
from penstock.workloads.spool.options import JobKind
from penstock.workloads.spool.serving.parents import History
from penstock.workloads.spool.serving.reading import IMAGES, PROMPT, Spooled


def embedding_of(job: Spooled) -> Embedding:
    if job.images:
        raise LlmFailure(LlmCode.NOT_SUPPORTED, "embeddings of images are not supported")
    if not job.prompt:
        raise Unfit(PROMPT, "is empty")
    return Embedding(inputs=(job.prompt,))


def generation_of(job: Spooled, history: History, *, max_tokens: int, seed: int) -> Generation:
    """`max_tokens` and `seed` are for a job that names none."""
    options = job.options
    ask = {
        "max_tokens": options.max_tokens or max_tokens,
        "stop": options.stop,
        "sampling": sampled(job, seed),
        "logprobs": options.logprobs,
        "schema": options.schema,
        "grammar": options.grammar,
    }
    if options.raw:
        if job.images:
            raise Unfit(IMAGES, "can't be part of a raw prompt")
        return Completion(prompts=(history.text + job.prompt,), **ask)  # type: ignore[arg-type]
    return Chat(messages=_conversation(job, history), **ask)  # type: ignore[arg-type]


def sampled(job: Spooled, seed: int) -> object:
    given = job.options.sampling
    return given if given.seed is not None else structs.replace(given, seed=seed)


def _conversation(job: Spooled, history: History) -> tuple[Message, ...]:
    system = job.options.system or history.system
    turns: list[Message] = [Message(role="system", content=system)] if system else []
    turns += [*history.messages, *job.options.messages]
    if job.images or job.prompt:
        turns.append(Message(role="user", content=_content(job)))
    return tuple(turns)


def _content(job: Spooled) -> str | tuple[TextPart | ImagePart, ...]:
    if not job.images:
        if job.kind is JobKind.VISION:
            raise Unfit(IMAGES, "there are none")
        return job.prompt
    images = tuple(ImagePart(ImageUrl(_data_uri(image))) for image in job.images)
    return (*images, TextPart(job.prompt)) if job.prompt else images


def _data_uri(image: bytes) -> str:
    kind = media_type(image)
    if kind is None:
        raise Unfit(IMAGES, "one is no JPEG, PNG, GIF or WebP picture")
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"
