"""Recordings: what reaches the model, and what is refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.api.openai.live.conftest import Running
from tests.support.openai.door import door, said, saying

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import AudioPart, ChatRequest, Delta, TextPart

WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(28)


@run_async
async def test_a_recording_is_transcribed_by_a_chat(tmp_path: Path) -> None:
    runner = saying(Delta(text="Hello."), said("Hello."))
    async with door(tmp_path, runner) as one, one.client() as client:
        told = await client.audio.transcriptions.create(
            model="fake", file=("a.wav", WAV), language="en", temperature=0.2
        )
        assert told.text == "Hello."
        for fields in ({"response_format": "srt"}, {"temperature": 7}):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.audio.transcriptions.create(
                    model="fake", file=("a.wav", WAV), **fields
                )
            assert refused.value.param == next(iter(fields))
        with pytest.raises(openai.BadRequestError, match="not a WAV or MP3"):
            await client.audio.transcriptions.create(model="fake", file=("a.wav", b"hello"))
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.audio.transcriptions.create(model="nobody", file=("a.wav", WAV))
    (request,) = runner.asks
    assert isinstance(request, ChatRequest)
    content = request.messages[0].content
    assert isinstance(content, tuple)
    text, audio = content
    assert isinstance(text, TextPart)
    assert text.text == "Transcribe audio to text (language: en)"
    assert isinstance(audio, AudioPart)
    assert base64.b64decode(audio.input_audio.data) == WAV
    assert (audio.input_audio.format, request.sampling.temperature) == ("wav", 0.2)


@run_async
async def test_audio_in_a_chat_reaches_the_model(tmp_path: Path) -> None:
    runner = saying(said("x"))
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}
    async with door(tmp_path, runner) as one, one.client() as client:
        asked = {"type": "text", "text": "What is it?"}
        messages: Any = [{"role": "user", "content": [asked, part]}]
        await client.chat.completions.create(model="fake", messages=messages)
        with pytest.raises(openai.BadRequestError, match="only for the role user"):
            messages = [{"role": "system", "content": [part]}]
            await client.chat.completions.create(model="fake", messages=messages)
    (request,) = runner.asks
    assert isinstance(request, ChatRequest)
    assert isinstance((request.messages[0].content or "")[1], AudioPart)


def test_a_model_that_can_not_hear_says_so(running: Running, client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support audio") as refused:
        client.audio.transcriptions.create(model=model, file=("a.wav", WAV))
    assert (refused.value.code, refused.value.param) == ("unsupported_value", "file")
