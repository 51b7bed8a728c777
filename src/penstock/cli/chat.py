"""`penstock chat`: a conversation with a language model, in the terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.app.llm import unless_paused
from penstock.cli.ask import Answer, ask_once, chat_of, engine_for, piped_text, stats_of
from penstock.cli.engine import EngineRef
from penstock.cli.engine import run as run_async
from penstock.cli.exits import Exit
from penstock.cli.generation import generation_options, is_piped, options_of, read_given
from penstock.cli.groups import command, nearest
from penstock.cli.live import Spinner
from penstock.cli.options import options
from penstock.cli.output import echo, warn
from penstock.core.errors import JobCancelled, JobEnded, PenstockError
from penstock.workloads.llm.values import LlmCode, LlmResult, Message, model_of
from penstock.workloads.spool.config import SpoolOptions

if TYPE_CHECKING:
    from penstock.app.client import Client, JobHandle


@command()
@generation_options
@options("--stats  Print how many tokens each answer took, and how fast.")
def chat(engine: EngineRef, /, stats: bool, json: bool, **said: Any) -> int:
    """Chat with a language model.

    Each answer is a job of the running engine; if none runs that serves a model, it runs in this
    process. Ctrl-C ends an answer, not the conversation; Ctrl-D or /exit ends that, and /help
    lists the rest. Text that is piped in is one turn: its answer is printed.
    """
    options = options_of(read_given(said))
    if is_piped():
        text = piped_text()
        if not text.strip():
            raise click.UsageError("there is nothing to answer: standard input is empty")
        request = chat_of([Message(role="user", content=text)], options)
        return run_async(ask_once(engine, request, options.model, None, stats, json))
    if json or not sys.stdin.isatty():
        raise click.UsageError("there is nothing to answer: give a text on standard input")
    return _talk(engine, options, stats)


def _talk(engine: EngineRef, options: SpoolOptions, stats: bool) -> int:
    from penstock.app.portal import LoopThread

    # The engine's loop has a thread of its own, so that it goes on while somebody types.
    portal, opened = LoopThread("penstock"), AsyncExitStack()
    try:
        with Spinner("looking for a model"):
            found = opened.enter_async_context(engine_for(engine, options.model))
            client, topic, _ = portal.run(found)
        return Talk(client, topic, portal.loop, options, stats=stats).run()
    finally:
        with suppress(KeyboardInterrupt):
            portal.run(opened.aclose())
            portal.close()


# -- the turns of a conversation ---------------------------------------------------

_PROMPT = "> "
_ENDS = (signal.SIGTERM, signal.SIGHUP)
_HELP = """\
  /clear      start a new conversation
  /save FILE  write the conversation to a file, as the input of a job
  /exit       end the chat, as Ctrl-D does
  Ctrl-C      stop an answer; the part so far is kept
A line that begins with // is sent with a single /."""


class Talk:
    """The loop of a chat: reads a line, prints the answer."""

    def __init__(
        self,
        client: Client,
        topic: str,
        loop: asyncio.AbstractEventLoop,
        options: SpoolOptions,
        *,
        stats: bool,
    ) -> None:
        self._client, self._topic, self._loop = client, topic, loop
        self._options, self._stats = options, stats
        self._messages: list[Message] = []
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/help": self._help,
            "/save": self._save,
        }

    def run(self) -> int:
        _edit_lines()
        _say(f"{model_of(self._topic)}; /help lists the commands, Ctrl-D ends the chat")
        with suppress(_Ended), _ended_by_signals():
            while (text := _line()) is not None:
                try:
                    if not self._turn(text):
                        break
                except PenstockError as error:
                    warn(error.message, _hint(error))
            return Exit.OK
        return Exit.INTERRUPTED

    def _turn(self, text: str) -> bool:
        """Whether it goes on."""
        word, _, rest = text.strip().partition(" ")
        if word.startswith("//"):
            self._ask(text.replace("//", "/", 1))
        elif not word.startswith("/"):
            if word:
                self._ask(text)
        elif word in ("/exit", "/quit"):
            return False
        elif word in self._commands:
            self._commands[word](rest.strip())
        else:
            known = (*self._commands, "/exit")
            raise PenstockError(f"there is no {word}{nearest(word, known)}", hint=", ".join(known))
        return True

    # -- asking -------------------------------------------------------------------

    def _ask(self, text: str) -> None:
        """A turn that failed is dropped; of a stopped answer, the part so far is kept."""
        asked = Message(role="user", content=text)
        if answer := self._answer([*self._messages, asked]):
            self._messages += [asked, Message(role="assistant", content=answer)]

    def _answer(self, messages: Sequence[Message]) -> str:
        began = time.monotonic()
        request = msgspec.to_builtins(chat_of(messages, self._options))
        with (
            _Interruption(self._loop) as interruption,
            Answer("waiting for an answer") as answer_,
        ):
            handle = self._client.submit(self._topic, request, priority="interactive")
            interruption.concerns(handle)
            try:
                with unless_paused(self._client, handle):
                    for update in handle.follow():
                        answer_.add(update)
                    result = msgspec.convert(handle.result(), LlmResult)
            except JobCancelled:
                if not interruption.heard:
                    raise
                return answer_.text
            answer_.show(result.choices[0].text)
        if self._stats:
            _say(stats_of(result, time.monotonic() - began))
        return answer_.text

    # -- commands -----------------------------------------------------------------

    def _clear(self, rest: str) -> None:
        self._messages.clear()
        _say("a new conversation")

    def _help(self, rest: str) -> None:
        _say(_HELP)

    def _save(self, rest: str) -> None:
        if not rest:
            raise PenstockError("no file given: /save FILE")
        if not self._messages:
            raise PenstockError("the conversation is empty")
        path = Path(rest).expanduser()
        request = msgspec.json.encode(chat_of(self._messages, self._options))
        try:
            with path.open("xb") as file:
                file.write(msgspec.json.format(request) + b"\n")
        except OSError as error:
            raise PenstockError(f"can't write {path}: {error.strerror}") from error
        _say(f"saved {path}")


class _Ended(BaseException):
    """Somebody wants this process to end."""


class _Interruption:
    """Ctrl-C while a job is waited for: it cancels the job. A second one ends the conversation,
    and so does a signal that ends processes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: JobHandle[Any] | None = None
        self.heard: list[int] = []

    def concerns(self, handle: JobHandle[Any]) -> None:
        self._handle = handle
        if self.heard:
            self._cancel()

    def __enter__(self) -> _Interruption:
        self._before = {n: signal.signal(n, self._hear) for n in (signal.SIGINT, *_ENDS)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if any(number in _ENDS for number in self.heard):
            raise _Ended

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)
        if len(self.heard) > 1:
            raise _Ended
        self._cancel()

    def _cancel(self) -> None:
        if self._handle is not None:
            why = f"{signal.Signals(self.heard[0]).name} at the terminal"
            asyncio.run_coroutine_threadsafe(self._handle.acancel(why), self._loop)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    def hear(number: int, frame: FrameType | None) -> None:
        raise _Ended

    before = {number: signal.signal(number, hear) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line() -> str | None:
    """The next line typed; None at the end of input. Ctrl-C clears the line."""
    while True:
        try:
            return input(_PROMPT)
        except EOFError:
            _say("")
            return None
        except KeyboardInterrupt:
            _say("")
        except UnicodeDecodeError:
            warn("the line is not UTF-8")


def _edit_lines() -> None:
    """Arrow keys recall what was typed while the conversation lasts; nothing of it is kept."""
    with suppress(ImportError):
        import readline  # noqa: F401  `input` uses it where it is loaded


def _say(text: str) -> None:
    echo(text, err=True)


def _hint(error: PenstockError) -> str:
    if isinstance(error, JobEnded) and error.error_code == LlmCode.CONTEXT_EXCEEDED:
        return "the conversation has become too long: /clear begins a new one"
    return error.hint
