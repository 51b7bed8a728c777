"""`penstock ask`: a question to a language model, as a job, and its answer as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from penstock.cli.exits import Exit
from penstock.cli.interrupt import interruptible
from penstock.cli.llm import told
from penstock.cli.paper import console, print_json
from penstock.cli.parameters import PRIORITY, as_json
from penstock.cli.place import Place, client_at, placed
from penstock.cli.place import run as run_async
from penstock.cli.spool_found import harmless
from penstock.cli.spool_jobs import is_piped
from penstock.cli.spool_options import asked, options_of, read_asked
from penstock.cli.words import plural, span
from penstock.core.errors import InvalidRequest, NotRunning
from penstock.core.llm import TOPICS, Chat, LlmResult, Message, topic_of
from penstock.ports.desk import JobUpdate, Streamed
from penstock.workloads.spool.options import SpoolOptions

if TYPE_CHECKING:
    from penstock.app.client import Client


@click.command()
@click.argument("prompt", nargs=-1, metavar="[PROMPT…]")
@asked
@click.option("--priority", type=PRIORITY, help="How urgent it is; interactive if nothing is said.")
@click.option("--stats", is_flag=True, help="Tell how many tokens it took, and how fast they came.")
@as_json
@placed
@click.pass_obj
def ask(
    place: Place,
    /,
    prompt: tuple[str, ...],
    priority: str | None,
    stats: bool,
    json: bool,
    **said: Any,
) -> int:
    """Ask a language model; its answer is shown as it comes.

    The prompt is given as words, on standard input, or both, as in
    'cat notes.txt | penstock ask "In one sentence:"'. It is a job of the engine that runs; if
    none does that serves a model, it runs in this process. Ctrl-C cancels it.
    """
    options = options_of(read_asked(said))
    request = _question(_prompt(prompt), options)
    with told():
        return run_async(_ask(place, request, options.model, priority, stats, json))


def _prompt(words: tuple[str, ...]) -> str:
    given = [" ".join(words)] if words else []
    if is_piped():
        try:
            given += filter(None, [sys.stdin.buffer.read().removesuffix(b"\n").decode()])
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                "prompt", f"standard input is not UTF-8: byte {error.start} can't be read"
            ) from error
    if not given or not "".join(given).strip():
        raise click.UsageError("there is no prompt: give it as words, or on standard input")
    return "\n\n".join(given)


def _question(prompt: str, options: SpoolOptions) -> Chat:
    messages = [Message(role="user", content=prompt)]
    if options.system:
        messages.insert(0, Message(role="system", content=options.system))
    return Chat(
        messages=tuple(messages),
        max_tokens=options.max_tokens,
        stop=options.stop,
        sampling=options.sampling,
        schema=options.schema,
        grammar=options.grammar,
        stream=True,
    )


async def _ask(
    place: Place, request: Chat, wanted: str, priority: str | None, stats: bool, json: bool
) -> int:
    from penstock.app.asking import answer_of, chosen

    async with AsyncExitStack() as opened:
        patience = opened.enter_context(_Patience())
        client, is_own = await _engine(place, wanted, opened)
        # One of our own serves what is wanted and nothing else; a file has another name there.
        model = chosen(await client.atopics(), "" if is_own else wanted)
        patience.say(f"{'loading' if is_own else 'waiting for'} {model}")
        began = time.monotonic()
        handle = await client.asubmit(
            topic_of(model), msgspec.to_builtins(request), priority=priority or "interactive"
        )
        with _Paper(patience, silent=json) as paper:
            async with interruptible(handle) as interrupted:
                async for update in handle.afollow():
                    paper.add(update)
                await handle.await_end()
            if interrupted:
                return Exit.INTERRUPTED
            returned = await handle.aresult()
            result = msgspec.convert(returned, LlmResult)
            paper.finish(result.choices[0].text)
        if json:
            print_json(msgspec.to_builtins(answer_of(handle.job_id, returned)))
        if stats:
            click.echo(_stats(result, time.monotonic() - began), err=True)
    return Exit.OK


async def _engine(place: Place, wanted: str, opened: AsyncExitStack) -> tuple[Client, bool]:
    """The engine that runs and serves a model, or else one in this process (True)."""
    from penstock.app.application import App
    from penstock.app.models import ALL
    from penstock.workloads.spool.llama.trial import engine_version

    client = await _running(place, opened)
    if client is not None and (place.connect or _serves(await client.atopics())):
        return client, False
    engine_version()
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
    return any(topic.startswith(TOPICS) for topic in topics)


class _Patience:
    """A sign of life on standard error until there is something to read; on a terminal only."""

    def __init__(self) -> None:
        self._status = console(err=True).status("") if sys.stderr.isatty() else None

    def __enter__(self) -> _Patience:
        self.say("looking for a model")
        return self

    def say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
            self._status.start()

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()

    def __exit__(self, *error: object) -> None:
        self.end()


class _Paper:
    """The answer on standard output, as it comes."""

    def __init__(self, patience: _Patience, *, silent: bool) -> None:
        self._patience, self._silent = patience, silent
        self._attempt = 0
        self._text = ""

    def add(self, update: JobUpdate) -> None:
        from penstock.app.asking import piece_of

        if not isinstance(update, Streamed) or (piece := piece_of(update)) is None:
            return
        if update.attempt != self._attempt:
            self._begin_again(update.attempt)
        self._write(piece.text)

    def finish(self, text: str) -> None:
        """Print what of the answer was not told while it was made."""
        if not text.startswith(self._text):
            self._begin_again(self._attempt)
        self._write(text[len(self._text) :])

    def __enter__(self) -> _Paper:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the line."""
        self._patience.end()
        if self._text and not self._text.endswith("\n"):
            self._put("\n")

    def _begin_again(self, attempt: int) -> None:
        if self._text:
            self._put("\n")
        self._attempt, self._text = attempt, ""

    def _write(self, text: str) -> None:
        if text:
            self._patience.end()
            self._text += text
            self._put(harmless(text) if sys.stdout.isatty() else text)

    def _put(self, text: str) -> None:
        if not self._silent:
            click.echo(text, nl=False)
            sys.stdout.flush()


def _stats(result: LlmResult, seconds: float) -> str:
    usage, timings = result.usage, result.timings
    cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
    said = [
        f"{result.model}: {plural(usage.prompt_tokens, 'token')} read{cached}",
        f"{plural(usage.completion_tokens, 'token')} said",
        span(seconds),
    ]
    if timings.predicted_ms:
        said.insert(2, f"{usage.completion_tokens * 1000 / timings.predicted_ms:.0f} tokens/s")
    return ", ".join(said) + f"; ended by {result.choices[0].finish_reason}"
