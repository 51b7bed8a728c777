"""`penstock chat`: a conversation with a language model, in the terminal."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.answers import Patience, chat_of, engine_for, piped_text
from penstock.cli.llm import told
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, placed
from penstock.cli.place import run as run_async
from penstock.cli.spool_options import asked, is_piped, options_of, read_asked
from penstock.workloads.llm.values import Message
from penstock.workloads.spool.config import SpoolOptions

if TYPE_CHECKING:
    from penstock.app.client import Client


@click.command()
@asked
@click.option("--stats", is_flag=True, help="Tell how many tokens each answer took, and how fast.")
@as_json
@placed
@click.pass_obj
def chat(place: Place, /, stats: bool, json: bool, **said: Any) -> int:
    """Talk with a language model.

    Each answer is a job of the engine that runs; if none does that serves a model, it runs in
    this process. Ctrl-C ends an answer, and not the conversation; Ctrl-D or /exit ends that, and
    /help tells the rest. Text that is piped in is one turn: its answer is printed.
    """
    options = options_of(read_asked(said))
    with told():
        if is_piped():
            return _once(place, options, stats, json)
        if json or not sys.stdin.isatty():
            raise click.UsageError("there is nothing to answer: give a text on standard input")
        return _talk(place, options, stats)


def _once(place: Place, options: SpoolOptions, stats: bool, json: bool) -> int:
    from penstock.cli.ask import ask_once

    text = piped_text()
    if not text.strip():
        raise click.UsageError("there is nothing to answer: standard input is empty")
    request = chat_of([Message(role="user", content=text)], options)
    return run_async(ask_once(place, request, options.model, None, stats, json))


def _talk(place: Place, options: SpoolOptions, stats: bool) -> int:
    from penstock.cli.chat_talk import Talk

    with Partner(place, options.model) as partner:
        return Talk(partner, options, stats=stats).run()


class Partner:
    """The engine that answers. Its loop has a thread of its own, so that it goes on while
    somebody types."""

    def __init__(self, place: Place, wanted: str) -> None:
        from penstock.app.portal import LoopThread

        self._place, self._wanted = place, wanted
        self._opened = AsyncExitStack()
        self._client: Client | None = None
        self.portal = LoopThread("penstock")
        self.topic = ""

    def __enter__(self) -> Partner:
        try:
            with Patience("looking for a model"):
                self.client()
        except BaseException:
            self.__exit__()
            raise
        return self

    def client(self) -> Client:
        if self._client is None:
            self._client = self.portal.run(self._open())
        return self._client

    async def _open(self) -> Client:
        from penstock.workloads.llm.answers import topic_for

        client, is_own = await engine_for(self._place, self._wanted, self._opened)
        self.topic = topic_for(await client.atopics(), "" if is_own else self._wanted)
        return client

    def __exit__(self, *error: object) -> None:
        with suppress(KeyboardInterrupt):
            self.portal.run(self._opened.aclose())
            self.portal.close()
