"""`penstock ask`: a question to a language model, as a job, and its answer as it comes."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

import click
import msgspec

from penstock.cli.answers import (
    Paper,
    Patience,
    chat_of,
    engine_for,
    piped_text,
    stats_of,
)
from penstock.cli.exits import Exit
from penstock.cli.interrupt import interruptible
from penstock.cli.llm import told
from penstock.cli.paper import print_json
from penstock.cli.parameters import PRIORITY, as_json
from penstock.cli.place import Place, placed
from penstock.cli.place import run as run_async
from penstock.cli.spool_options import asked, is_piped, options_of, read_asked
from penstock.cli.terminal import echo
from penstock.core.job import Priority
from penstock.workloads.llm.values import ChatRequest, LlmResult, Message, model_of


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
    request = chat_of([Message(role="user", content=_prompt(prompt))], options)
    with told():
        return run_async(ask_once(place, request, options.model, priority, stats, json))


def _prompt(words: tuple[str, ...]) -> str:
    given = [" ".join(words)] if words else []
    if is_piped():
        given += filter(None, [piped_text()])
    if not given or not "".join(given).strip():
        raise click.UsageError("there is no prompt: give it as words, or on standard input")
    return "\n\n".join(given)


async def ask_once(
    place: Place, request: ChatRequest, wanted: str, priority: str | None, stats: bool, json: bool
) -> int:
    from penstock.app.llm import unless_paused
    from penstock.workloads.llm.answers import answer_of, topic_for

    async with AsyncExitStack() as opened:
        patience = opened.enter_context(Patience("looking for a model"))
        client, is_own = await engine_for(place, wanted, opened)
        # One of our own serves what is wanted and nothing else; a file has another name there.
        topic = topic_for(await client.atopics(), "" if is_own else wanted)
        patience.say(f"{'loading' if is_own else 'waiting for'} {model_of(topic)}")
        began = time.monotonic()
        handle = await client.asubmit(
            topic, msgspec.to_builtins(request), priority=Priority(priority or "interactive")
        )
        with unless_paused(client, handle), Paper(patience, silent=json) as paper:
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
            echo(stats_of(result, time.monotonic() - began), err=True)
    return Exit.OK
