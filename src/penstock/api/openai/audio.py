"""`/v1/audio/transcriptions`: a recording as text, by a model that hears.

As in llama.cpp's server, it is a chat: the model is given the recording and told to transcribe it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.api.openai.answers import JobOrigin
from penstock.api.openai.endpoints import Endpoint
from penstock.api.openai.form import FORM, read_form
from penstock.api.openai.requests import Asking, Parsed, unsupported
from penstock.api.problems import Refused
from penstock.core.errors import InvalidRequest
from penstock.workloads.llm.values import (
    AudioPart,
    ChatRequest,
    InputAudio,
    LlmResult,
    Message,
    Sampling,
    TextPart,
)

if TYPE_CHECKING:
    from penstock.api.call import Call

_MAGIC: tuple[tuple[bytes, Literal["wav", "mp3"]], ...] = (
    *((b"RIFF", "wav"), (b"ID3", "mp3")),
    *((b"\xff\xfb", "mp3"), (b"\xff\xf3", "mp3"), (b"\xff\xf2", "mp3")),
)


class TranscriptionForm(Asking, frozen=True, kw_only=True):
    given = "file"
    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    """A recording: WAV or MP3."""
    language: str = ""
    """As `en`: told to the model."""
    prompt: str = ""
    """Further instructions to the model."""
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    response_format: Literal["json"] = "json"


class Transcription(Struct, frozen=True):
    text: str


def chat_request(body: TranscriptionForm, options: Mapping[str, Any]) -> ChatRequest:
    kind = next((kind for magic, kind in _MAGIC if options["data"].startswith(magic)), None)
    if kind is None:
        raise InvalidRequest("file", "is not a WAV or MP3 recording")
    text = "Transcribe audio to text"
    text += f" (language: {body.language})" if body.language else ""
    text += f"\n{body.prompt}" if body.prompt else ""
    audio = AudioPart(InputAudio(b64encode(options["data"]).decode(), kind))
    return ChatRequest(
        messages=(Message(role="user", content=(TextPart(text), audio)),),
        sampling=Sampling(temperature=body.temperature),
    )


def transcription(body: TranscriptionForm, origin: JobOrigin, result: LlmResult) -> Transcription:
    return Transcription(result.choices[0].text)


async def read_transcription(call: Call) -> Parsed:
    data = bytearray()
    most = call.services.options.max_upload // 4 * 3 - (64 << 10)  # as base64 it is longer

    async def keep(part: bytes) -> None:
        data.extend(part)
        if len(data) > most:
            raise Refused(413, "TOO_LARGE", f"the recording has more than {most} bytes")

    form = await read_form(call, keep)
    if form.filename is None:
        raise InvalidRequest("file", "is missing", hint="it is required")
    fields = form.fields
    if fields.get("response_format", "json") != "json":
        raise unsupported("response_format", "only json is")
    if fields.get("stream", "false").lower() not in ("false", "0"):
        raise unsupported("stream", "a transcription comes whole")
    try:
        temperature = float(fields.get("temperature") or 0)
    except ValueError:
        raise InvalidRequest("temperature", "must be a number") from None
    if not 0 <= temperature <= 1:
        raise InvalidRequest("temperature", "must be between 0 and 1")
    body = TranscriptionForm(
        model=fields.get("model", ""),
        file=form.filename,
        language=fields.get("language", "")[:40],
        prompt=fields.get("prompt", ""),
        temperature=temperature,
    )
    return Parsed(body, {"data": bytes(data)})


TRANSCRIPTIONS = Endpoint(
    path="/v1/audio/transcriptions",
    name="create_transcription",
    body=TranscriptionForm,
    body_type=FORM,
    read=read_transcription,
    request=chat_request,
    answer=Transcription,
    whole=transcription,
    summary="Turn a recording into text",
    description="By a model with an audio projector. One job, as for a chat.",
)
OPERATIONS = (TRANSCRIPTIONS.operation(),)
