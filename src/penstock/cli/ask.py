"""`penstock ask`: a question to a language model, as a job, and its answer as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.app.service import cancelling
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import layers, plural, span
from penstock.cli.generation import generation_options, is_piped, options_of, read_given
from penstock.cli.groups import command
from penstock.cli.live import Spinner, TextStream
from penstock.cli.options import PRIORITY, options
from penstock.cli.output import echo, print_json
from penstock.core.errors import InvalidRequest
from penstock.core.job import Priority
from penstock.ports.engine_api import JobUpdate, Progressed
from penstock.workloads.llm.values import ChatRequest, HopTime, LlmResult, Message, model_of
from penstock.workloads.spool.config import SpoolOptions

if TYPE_CHECKING:
    from penstock.app.client import Client


@command()
@click.argument("prompt", nargs=-1, metavar="[PROMPT…]")
@generation_options
@options(
    """
    --priority PRIORITY  How urgent it is; by default interactive.
    --stats              Print how many tokens it took, and how fast they came.
    """,
    priority=PRIORITY,
)
async def ask(
    engine: EngineRef,
    /,
    prompt: tuple[str, ...],
    priority: str | None,
    stats: bool,
    json: bool,
    **said: Any,
) -> int:
    """Ask a language model; prints its answer as it comes.

    The prompt is given as words, on standard input, or both, as in
    'cat notes.txt | penstock ask "In one sentence:"'. It is a job of the running
    engine; if none runs that serves a model, it runs in this process. Ctrl-C cancels it.
    """
    options = options_of(read_given(said))
    request = chat_of([Message(role="user", content=_prompt(prompt))], options)
    return await ask_once(engine, request, options.model, priority, stats, json)


def _prompt(words: tuple[str, ...]) -> str:
    given = [" ".join(words)] if words else []
    if is_piped():
        given += filter(None, [piped_text()])
    if not given or not "".join(given).strip():
        raise click.UsageError("there is no prompt: give it as words, or on standard input")
    return "\n\n".join(given)


def chat_of(messages: Sequence[Message], options: SpoolOptions) -> ChatRequest:
    """A request for the next message of a conversation, streamed."""
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


async def ask_once(
    engine: EngineRef,
    request: ChatRequest,
    wanted: str,
    priority: str | None,
    stats: bool,
    json: bool,
) -> int:
    from penstock.app.llm import unless_paused
    from penstock.workloads.llm.answers import answer_of

    with Spinner("looking for a model") as spinner:
        async with engine_for(engine, wanted) as (client, topic, is_own):
            spinner.end()
            waiting = f"{'loading' if is_own else 'waiting for'} {model_of(topic)}"
            began = time.monotonic()
            handle = await client.asubmit(
                topic, msgspec.to_builtins(request), priority=Priority(priority or "interactive")
            )
            with unless_paused(client, handle), Answer(waiting, silent=json) as answer:
                async with cancelling(handle.acancel, lambda _: None) as interrupted:
                    async for update in handle.afollow():
                        answer.add(update)
                    await handle.await_end()
                if interrupted:
                    return Exit.INTERRUPTED
                returned = await handle.aresult()
                result = msgspec.convert(returned, LlmResult)
                answer.show(result.choices[0].text)
            if json:
                print_json(answer_of(handle.job_id, returned))
            if stats:
                echo(stats_of(result, time.monotonic() - began), err=True)
    return Exit.OK


@asynccontextmanager
async def engine_for(engine: EngineRef, wanted: str) -> AsyncIterator[tuple[Client, str, bool]]:
    """The engine that runs and serves a model, or else (True) one in this process; and the topic
    of the model that is wanted."""
    from penstock.app.application import App
    from penstock.app.llm import llama_version
    from penstock.workloads.llm.answers import topic_for
    from penstock.workloads.llm.config import ALL

    async def serves(client: Client) -> bool:
        return any(map(model_of, await client.atopics()))

    @asynccontextmanager
    async def own(running: Client | None) -> AsyncIterator[Client]:
        llama_version()
        settings = engine.settings()
        models = (wanted,) if wanted else settings.models.serve or (ALL,)
        settings = settings.changed(models__serve=models)
        with TemporaryDirectory(prefix="penstock-ask-") as folder:
            if running is not None:
                # Its folder is taken, so this one has its own for as long as it is needed.
                settings = settings.changed(
                    data_dir=Path(folder), http__listen="", listen=("unix:",)
                )
            async with App().run(settings=settings) as client:
                yield client

    async with engine.client_or(own, serves) as (client, is_own):
        # One of our own serves what is wanted and nothing else; a file has another name there.
        yield client, topic_for(await client.atopics(), "" if is_own else wanted), is_own


class Answer(TextStream):
    """An answer, as it comes."""

    ends_line = True

    def __init__(self, waiting: str = "", *, silent: bool = False) -> None:
        from penstock.workloads.llm import answers

        super().__init__(waiting, silent=silent)
        self._told = answers.TextStream(lambda new: self.show(self.text + new))

    def add(self, update: JobUpdate) -> None:
        if isinstance(update, Progressed) and update.message and not self.text:
            self.spinner.say(update.message)
        self._told.add(update)


def stats_of(result: LlmResult, seconds: float) -> str:
    """How many tokens it took, and how fast they came."""
    usage, timings = result.usage, result.timings
    cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
    said = [
        f"{result.model}: {plural(usage.prompt_tokens, 'prompt token')}{cached}",
        plural(usage.completion_tokens, "answer token"),
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
    return f"{where}: {compute} a pass, {queue} queued, {way} on the network{hop.lossy}"
