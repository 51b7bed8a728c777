"""A model's answer at a terminal: who gives it, how it is shown as it comes, what it took."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.cli.paper import console
from penstock.cli.place import Place, client_at
from penstock.cli.terminal import echo_content
from penstock.cli.words import layers, plural, span
from penstock.core.errors import InvalidRequest, NotRunning
from penstock.ports.engine_api import JobUpdate, Progressed, Streamed
from penstock.workloads.llm.values import ChatRequest, HopTime, LlmResult, Message, model_of
from penstock.workloads.spool.config import SpoolOptions

if TYPE_CHECKING:
    from penstock.app.client import Client


def chat_of(messages: Sequence[Message], options: SpoolOptions) -> ChatRequest:
    """A request for what comes next in a conversation, told as it is made."""
    if options.system:
        messages = [Message(role="system", content=options.system), *messages]
    return ChatRequest(
        messages=tuple(messages),
        max_tokens=options.max_tokens,
        stop=options.stop,
        sampling=options.sampling,
        schema=options.schema,
        grammar=options.grammar,
        stream=True,
    )


def piped_text() -> str:
    """All of standard input, without the end of its last line."""
    try:
        return sys.stdin.buffer.read().removesuffix(b"\n").decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            "prompt", f"standard input is not UTF-8: byte {error.start} can't be read"
        ) from error


async def engine_for(place: Place, wanted: str, opened: AsyncExitStack) -> tuple[Client, bool]:
    """The engine that runs and serves a model, or else one in this process (True)."""
    from penstock.app.application import App
    from penstock.app.llm import llama_version
    from penstock.workloads.llm.config import ALL

    client = await _running(place, opened)
    if client is not None and (place.connect or _serves(await client.atopics())):
        return client, False
    llama_version()
    settings = place.settings()
    models = (wanted,) if wanted else settings.models or (ALL,)
    settings = replace(settings, models=models)
    if client is not None:
        # Its folder is taken, so this one has its own for as long as it is needed.
        folder = opened.enter_context(TemporaryDirectory(prefix="penstock-ask-"))
        settings = replace(settings, data_dir=Path(folder), http="", listen=("unix:",))
    return await opened.enter_async_context(App().run(settings=settings)), True


async def _running(place: Place, opened: AsyncExitStack) -> Client | None:
    try:
        return await opened.enter_async_context(client_at(place))
    except NotRunning:
        if place.connect:
            raise
        return None


def _serves(topics: Sequence[str]) -> bool:
    return any(map(model_of, topics))


class Patience:
    """A sign of life on standard error until there is something to read; on a terminal only."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._status = console(err=True).status("") if sys.stderr.isatty() else None

    def __enter__(self) -> Patience:
        self.say(self._text)
        return self

    def say(self, text: str) -> None:
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(text))  # a plain string would be markup
            self._status.start()

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()

    def __exit__(self, *error: object) -> None:
        self.end()


class Paper:
    """The answer on standard output, as it comes."""

    def __init__(self, patience: Patience, *, silent: bool = False) -> None:
        self._patience, self._silent = patience, silent
        self._attempt = 0
        self.text = ""
        """What was said so far."""

    def add(self, update: JobUpdate) -> None:
        from penstock.workloads.llm.answers import piece_of

        if isinstance(update, Progressed) and update.message and not self.text:
            self._patience.say(update.message)
        if not isinstance(update, Streamed) or (piece := piece_of(update)) is None:
            return
        if update.attempt != self._attempt:
            self._begin_again(update.attempt)
        self._write(piece.text)

    def finish(self, text: str) -> None:
        """Print what of the answer was not told while it was made."""
        if not text.startswith(self.text):
            self._begin_again(self._attempt)
        self._write(text[len(self.text) :])

    def __enter__(self) -> Paper:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the line."""
        self._patience.end()
        if self.text and not self.text.endswith("\n"):
            self._put("\n")

    def _begin_again(self, attempt: int) -> None:
        if self.text:
            self._put("\n")
        self._attempt, self.text = attempt, ""

    def _write(self, text: str) -> None:
        if text:
            self._patience.end()
            self.text += text
            self._put(text)

    def _put(self, text: str) -> None:
        if not self._silent:
            echo_content(text, nl=False)
            sys.stdout.flush()


def stats_of(result: LlmResult, seconds: float) -> str:
    """How many tokens it took, and how fast they came."""
    usage, timings = result.usage, result.timings
    cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
    said = [
        f"{result.model}: {plural(usage.prompt_tokens, 'token')} read{cached}",
        f"{plural(usage.completion_tokens, 'token')} said",
        span(seconds),
    ]
    if timings.predicted_ms:
        said.insert(2, f"{usage.completion_tokens * 1000 / timings.predicted_ms:.0f} tokens/s")
    ended = f"; ended by {result.choices[0].finish_reason}"
    return ", ".join(said) + ended + "".join(f"\n  {_hop(hop)}" for hop in result.hops)


def _hop(hop: HopTime) -> str:
    """What a pass takes there."""
    passes = max(1, hop.passes)
    compute, queue, way = (
        span(ms / 1000 / passes) for ms in (hop.compute_ms, hop.queue_ms, hop.network_ms)
    )
    where = f"{hop.node}, {layers(hop.layers)}"
    return f"{where}: {compute} a pass, {queue} waiting, {way} on the way"
