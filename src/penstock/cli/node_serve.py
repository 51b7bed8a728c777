"""`penstock node start` and `node up`: nodes from their start to their end."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.app.service import Stop, leave_at_once, log_to_stderr, run_service
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import plural, size
from penstock.cli.groups import command
from penstock.cli.live import LiveScreen, Spinner
from penstock.cli.node_screen import change_line, node_status
from penstock.cli.options import SHARED, Parsed, as_lines, options, together
from penstock.cli.output import banner
from penstock.core.errors import Misconfigured
from penstock.workloads.llm.values import PIPE_TOPICS
from penstock.workloads.pipes.status import held
from penstock.workloads.pipes.views import view_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.app.nodes import Children, NodeRunner
    from penstock.config import Settings
    from penstock.workloads.pipes.node import Node

log = logging.getLogger("penstock.cli")

_NET = "penstock.workloads.pipes.net"
_LOOPBACK = ("127.", "[::1]", "localhost")


# -- options, as settings ------------------------------------------------------------


def _layers(text: str) -> str:
    from penstock.workloads.pipes.config import parse_layers

    parse_layers(text)
    return text


def _address(text: str) -> str:
    """Where to connect to."""
    if not _parsed(text)[1]:
        raise ValueError(f"{text!r} names no port to connect to")
    return text


def _own_address(text: str) -> str:
    """Where to listen; the port may be left open."""
    _parsed(text)
    return text


def _parsed(text: str) -> tuple[str, int]:
    from penstock.ports.address import parse_address

    return parse_address(text)


_ADDRESS = Parsed("address", _address)
joined = options(
    "--join HOST:PORT...  A node that runs already; may be repeated, one that answers is enough.",
    join=_ADDRESS,
)
keyed = options(
    "--network-key KEY|@FILE as key  The network's key; better @FILE, or PENSTOCK_NODE__KEY."
    " By default the one that 'penstock node key' prints."
)
_model = options(
    """
    --model NAME|PATH  The model: a name in 'penstock model list', a GGUF file, or a folder of
            safetensors.
    --source PATH      Where its weights are, if --model is only its name.
    """,
    source=click.Path(path_type=Path),
)
_own = options(
    """
    --listen HOST:PORT     Where other nodes reach this one; by default 127.0.0.1 and a free port.
    --advertise HOST:PORT  The address that other nodes use, if it differs from --listen.
    --node-id NAME         Its name in the network; else made of host and process.
    --device DEVICE        What to compute on: cpu, cuda:N or mps; else the fastest one, by
            measuring.
    --dtype DTYPE          Data type of the computation; auto is the faster of float32 and bfloat16
            here.
    --threads 1..          Threads that compute; else measured.
    --memory SIZE          Memory for weights and caches; by default three quarters of the
            machine's.
    --cache SIZE           Part of --memory that caches may use.
    --context TOKENS       Context of one job, prompt and answer; by default 4096.
    --prefill-chunk-size TOKENS  Tokens of a prompt that go through the nodes at once; by default
            256.
    --local-layers 0..     With --end-model: how many of the first layers it holds itself; by
            default 1.
    --keep DURATION        How long the cache of an ended job is kept for a next turn; by default
            5m.
    --print-times          Log the timing statistics of every job.
    --drain-timeout DURATION as drain  How long running jobs may take to finish when it is stopped;
            by default 30s.
    --http HOST:PORT       Where HTTP listens; by default 127.0.0.1:7470.
    --no-http              Open no HTTP port.
    """,
    listen=Parsed("address", _own_address),
    advertise=_ADDRESS,
    dtype=click.Choice(["auto", "float32", "bfloat16", "float16", "int8"]),
    context=click.IntRange(min=16),
    prefill_chunk_size=click.IntRange(min=1),
)
node_options = together(_model, joined, keyed, _own, as_lines, SHARED["verbose"])
"""The options of a node; `settings_of` makes sense of them."""
of_one = options(
    """
    --layers RANGES  The layers it holds, as 0-14 or 0-4,20-29; none; or auto (the default): the
            network decides.
    --end-model      Handle the text here, in an engine that this command starts.
    """,
    layers=Parsed("layers", _layers),
)
"""And those of one that is started alone."""


def settings_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a node, under the names of the settings."""
    from penstock.config.settings import NodeSettings

    renamed = {"keep_cache" if name == "keep" else name: value for name, value in said.items()}
    return {
        f"node__{name}": value
        for name, value in renamed.items()
        if name in NodeSettings.__struct_fields__
        and not (value is None or value is False or value == ())
    }


def check_key(settings: Settings) -> None:
    """Require a given key to join an existing network. Raises Misconfigured."""
    if not settings.node.key and not settings.pipe_key_file.is_file():
        raise Misconfigured(
            f"the network's key is not known in {settings.data_dir}",
            hint="give it with --network-key @FILE; 'penstock node key' prints it at a node",
        )


# -- commands -------------------------------------------------------------------------


@command()
@node_options
@of_one
@options("--with-parent  End when standard input ends: with the parent.")
def start(engine: EngineRef, /, with_parent: bool, **said: Any) -> int:
    """Start a node, which holds layers of a model for a network.

    A node finds the others through --join and the network's key, and says what it holds. With
    --end-model it handles the text: it starts an engine, as 'penstock up' does,
    so that 'penstock chat', jobs (job.chat.MODEL) and the OpenAI API work with it; the other nodes
    see no text. With --connect it becomes a worker of an engine that runs.

    SIGTERM or SIGINT let it finish the jobs it has; a second one stops it at once.
    """
    if with_parent:
        from penstock.app.nodes import stay_with_parent

        stay_with_parent()
    settings = node_settings(engine, said)
    if not settings.node.end_model and (said["http"] or said["no_http"]):
        raise click.UsageError("a node without --end-model has no HTTP: leave --http out")
    return run_service(serve(engine, settings, said))


def node_settings(engine: EngineRef, said: dict[str, Any]) -> Settings:
    settings = engine.settings(
        http__listen="" if said["no_http"] else said["http"],
        **settings_of(said),
    )
    if not settings.node.model:
        raise click.UsageError("no model: give --model")
    if settings.node.join:
        check_key(settings)
    return settings


@command()
@node_options
@options("--nodes 1..64=2  How many processes share the layers.")
def up(engine: EngineRef, /, **said: Any) -> int:
    """Start a whole network on this machine.

    This process handles the text and holds its share of the layers, as 'penstock node start
    --end-model' does; the other nodes are its children, which end with it. One that dies is
    started again. --memory and --threads are what each node has; else they share what is there.
    """
    from penstock.app import nodes as app

    if engine.connect:
        raise click.UsageError("--connect can't be used here: an engine is started")
    count: int = said["nodes"]
    said |= {"end_model": True, "node_id": said["node_id"] or app.node_name()}
    settings = app.shared(node_settings(engine, said), count)
    with Spinner("looking at the model"):
        source = app.open_model(settings)
        ranges = app.cut(source, settings, count)
    with Spinner("measuring"):
        settings = app.measured_once(source, settings)
    own = settings.changed(node__layers=ranges.pop(settings.node.node_id, "none"))
    return run_service(serve(engine, own, said, app.children_of(own, ranges)))


async def serve(
    engine: EngineRef,
    settings: Settings,
    said: Mapping[str, Any],
    children: Children | None = None,
) -> int:
    """Run until a signal; `children` are node processes that end with it."""
    stop = Stop()
    stop.listen()
    with LiveScreen(change_line, json=said["json"]) as screen:
        # Only now, so that what is logged is drawn above the last line.
        log_to_stderr(verbose=said["verbose"])
        if not said["verbose"]:
            logging.getLogger(f"{_NET}.assigning").setLevel(logging.WARNING)
            logging.getLogger(f"{_NET}.membership").addFilter(_is_no_loss)
        screen.load(0.0, "starting")
        runner = _runner(engine, settings, screen, no_http=said["no_http"])
        if children is not None:
            children.start()
        try:
            if await stop.first_of(runner.start()):
                await _live(engine, settings, runner, screen, stop, children)
        finally:
            if not await stop.unless_urgent(_end(runner, children)):
                leave_at_once("stopped at once; jobs on this node are routed over others")
    log.info("stopped")
    return Exit.OK


def _is_no_loss(record: logging.LogRecord) -> bool:
    """Losses are reported as changes, with what is missing then."""
    return not getattr(record, "is_loss", False)


async def _end(runner: NodeRunner, children: Children | None) -> None:
    """Drain, then stop: running jobs also use the children."""
    await runner.stop()
    if children is not None:
        await children.stop()


async def _live(
    engine: EngineRef,
    settings: Settings,
    runner: NodeRunner,
    screen: LiveScreen,
    stop: Stop,
    children: Children | None,
) -> None:
    from penstock.app.nodes import NodeFile, announced, first_failure, watching

    node = runner.node
    where = NodeFile(
        node_id=node.node_id, address=node.address, pid=os.getpid(), model=node.config.model
    )
    pids = children.pids if children is not None else {}
    text = node_banner(engine, settings, runner.url, node, pids)
    screen.say(text, what="here", **facts_of(node, runner.url, pids))
    if children is not None:
        children.attach(node.mesh.join)
    with announced(settings.data_dir / "pipes", where):
        screen.show_status(partial(_status, node))
        async with watching(node, screen.tell):
            await stop.first_of(first_failure(runner.wait(), children))


def _status(node: Node, seconds: float) -> RenderableType | None:
    from penstock.app.nodes import seen_by

    own = next((one for one in seen_by(node).nodes if one.node_id == node.node_id), None)
    return node_status(own, seconds) if own is not None else None


def _runner(
    engine: EngineRef, settings: Settings, screen: LiveScreen, *, no_http: bool
) -> NodeRunner:
    from penstock.app.application import engine_address
    from penstock.app.nodes import node_runner
    from penstock.app.worker_process import reach, wait_for_engine

    if not engine.connect:
        return node_runner(settings, screen.load, no_http=no_http)
    join = engine_address(engine.connect, engine.data, engine.secret)
    probe = partial(reach, engine.connect, engine.data, engine.secret)
    there = partial(wait_for_engine, probe, str(join[0]))
    return node_runner(settings, screen.load, no_http=no_http, join=join, engine_there=there)


# -- what it says of itself --------------------------------------------------------


def facts_of(node: Node, url: str, children: Mapping[str, int]) -> dict[str, Any]:
    """For programs: who and where it is."""
    return {
        "node_id": node.node_id,
        "address": node.address,
        "model": node.config.model,
        "end_model": node.config.end_model,
        "url": url,
        "pid": os.getpid(),
        "children": dict(children),
    }


def node_banner(
    engine: EngineRef, settings: Settings, url: str, node: Node, children: Mapping[str, int]
) -> str:
    """`children` are nodes that are processes of this one, by name."""
    what = "origin" if node.config.end_model else "layer node"
    facts = _facts(engine, settings, url, node)
    if children:
        facts.append(("children", ", ".join(f"{name} ({pid})" for name, pid in children.items())))
    return banner(f"{what} {node.node_id}, process {os.getpid()}", facts)


def _facts(engine: EngineRef, settings: Settings, url: str, node: Node) -> list[tuple[str, str]]:
    record = node.record
    model, here = node.config.model, view_of([record]).nodes[0]
    layers = held(here, model) if record.segments else ""
    auto = "as the network decides" if record.auto else ""
    dtype = f"in {here.segments[0].dtype}, " if here.segments and here.segments[0].dtype else ""
    is_local = node.address.startswith(_LOOPBACK)
    facts = [
        ("model", f"{model}, {record.num_layers} layers, {node.config.source}"),
        ("layers", ", ".join(filter(None, (layers, auto))) or "none"),
        ("computes", f"{dtype}{plural(record.threads, 'thread')}"),
        ("memory", f"{size(record.weights)} of weights, {size(record.cache_total)} for caches"),
        ("listening", node.address + " (for this machine only; see --listen)" * is_local),
    ]
    if url:
        facts += [("data", str(settings.data_dir)), ("http", f"{url} (OpenAI API: {url}/v1)")]
    if node.config.end_model:
        facts += [
            ("talk", engine.command("chat")),
            ("submit", engine.command(f"submit {PIPE_TOPICS}{model} --input '{{…}}'")),
        ]
    model = shlex.quote(model)
    joining = f"penstock node start --model {model} --join {node.address} --network-key @FILE"
    return [*facts, ("to join it", joining), ("key", _key_source(engine, settings))]


def _key_source(engine: EngineRef, settings: Settings) -> str:
    """Where FILE is made from; the key itself is never shown unasked."""
    if settings.node.key.startswith("@"):
        return f"FILE is a copy of {settings.node.key[1:]}"
    if settings.node.key:
        return "FILE has the key that this node was given"
    return f"FILE has what '{engine.command('node key')}' prints here"
