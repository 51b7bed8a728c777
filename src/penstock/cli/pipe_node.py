"""`penstock pipe node`: some layers of a model on this machine, or its text."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.llm import told
from penstock.cli.pipe_options import check_key, end_model, layers, node_options, settings_of
from penstock.cli.place import Place, placed
from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from penstock.config import Settings

log = logging.getLogger("penstock.cli")


@click.command()
@node_options(layers, end_model)
@placed
@click.option(
    "--with-parent", is_flag=True, help="End at once when standard input ends: with who started it."
)
@click.pass_obj
def node(place: Place, /, with_parent: bool, **said: Any) -> int:
    """Hold layers of a model, for all nodes of a network.

    A node finds the others through --join and the network's key, and says what it holds. With
    --end-model it is where text comes in and goes out: it starts an engine, as 'penstock up' does,
    so that 'penstock chat', jobs (job.chat.MODEL) and the OpenAI API work with it; the other nodes
    see no text. With --connect it becomes a worker of an engine that runs.

    SIGTERM or SIGINT let it finish the jobs it has; a second one stops it at once.
    """
    if with_parent:
        stay_with_parent()
    return run_node(place, said)


def run_node(place: Place, said: dict[str, Any]) -> int:
    from penstock.cli.pipe_serve import serve
    from penstock.cli.service import run_service

    settings = node_settings(place, said)
    if not settings.pipe_end_model and (said["http"] or said["no_http"]):
        raise click.UsageError("a node without --end-model has no HTTP: leave --http out")
    with told():
        return run_service(serve(place, settings, said))


def node_settings(place: Place, said: dict[str, Any]) -> Settings:
    settings = place.settings(
        http="" if said["no_http"] else said["http"],
        **settings_of(said),
    )
    if not settings.pipe_model:
        raise click.UsageError("say which model to hold layers of, with --model")
    if settings.pipe_join:
        check_key(settings)
    return settings


def stay_with_parent() -> None:
    """End with whoever started this process, however that ends: its pipe to us is then closed."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if os.isatty(0):
        raise PenstockError("--with-parent is for processes that are started by another")
    threading.Thread(target=watch, daemon=True).start()
