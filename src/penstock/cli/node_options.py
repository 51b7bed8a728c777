"""The command-line options of a node, as settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.options import DURATION, SIZE, as_lines, together, verbose
from penstock.core.errors import Misconfigured

if TYPE_CHECKING:
    from penstock.config import Settings

F = TypeVar("F", bound=Callable[..., Any])


def _layers(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    from penstock.workloads.pipes.ranges import parse_layers

    try:
        if value is not None:
            parse_layers(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error
    return value


def _address(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """HOST:PORT, one or several; only who listens may leave the port open."""
    from penstock.config.loading import parse_host_port

    for one in value if isinstance(value, tuple) else (value or "",):
        try:
            if one and parse_host_port(one)[1] == 0 and param.name != "listen":
                raise ValueError(f"{one!r} names no port to connect to")
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return value


_COUNT = click.IntRange(min=1)
_MODEL = (
    click.option(
        "--model",
        metavar="NAME|PATH",
        help="The model: a name in 'penstock model list', a GGUF file, or a folder of safetensors.",
    ),
    click.option(
        "--source",
        metavar="PATH",
        type=click.Path(path_type=Path),
        help="Where its weights are, if --model is only its name.",
    ),
)
_NETWORK = (
    click.option(
        "--join",
        multiple=True,
        metavar="HOST:PORT",
        callback=_address,
        help="A node that runs already; may be repeated, one that answers is enough.",
    ),
    click.option(
        "--listen",
        metavar="HOST:PORT",
        callback=_address,
        help="Where other nodes reach this one; by default 127.0.0.1 and a free port.",
    ),
    click.option(
        "--advertise",
        metavar="HOST:PORT",
        callback=_address,
        help="The address that other nodes use, if it differs from --listen.",
    ),
    click.option(
        "--network-key",
        "key",
        metavar="KEY|@FILE",
        help="The network's key; better @FILE, or PENSTOCK_NODE__KEY. By default the one that"
        " 'penstock node key' prints.",
    ),
    click.option(
        "--node-id",
        metavar="NAME",
        help="Its name in the network; else made of host and process.",
    ),
)
_COMPUTING = (
    click.option(
        "--device",
        metavar="cpu|cuda:N|mps",
        help="What to compute on; else an accelerator if there is one.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16", "int8"]),
        help="Data type of the computation; auto is the faster of float32 and bfloat16 here.",
    ),
    click.option(
        "--threads", type=_COUNT, metavar="N", help="Threads that compute; else measured."
    ),
    click.option(
        "--memory",
        type=SIZE,
        help="Memory for weights and caches; by default three quarters of the machine's.",
    ),
    click.option("--cache", type=SIZE, help="Part of --memory that caches may use."),
    click.option(
        "--context",
        type=click.IntRange(min=16),
        metavar="TOKENS",
        help="Context of one job, prompt and answer; by default 4096.",
    ),
    click.option(
        "--prefill-chunk-size",
        type=_COUNT,
        metavar="TOKENS",
        help="Tokens of a prompt that go through the nodes at once; by default 256.",
    ),
    click.option(
        "--local-layers",
        type=click.IntRange(min=0),
        metavar="N",
        help="With --end-model: how many of the first layers it holds itself; by default 1.",
    ),
    click.option(
        "--spot-check",
        type=click.FloatRange(0, 1),
        metavar="P",
        help="Probability, 0 to 1, that a node's computation is checked before a job.",
    ),
    click.option(
        "--keep",
        type=DURATION,
        help="How long the cache of an ended job is kept for a next turn; by default 5m.",
    ),
    click.option("--print-times", is_flag=True, help="Log the timing statistics of every job."),
    click.option(
        "--drain",
        type=DURATION,
        help="Time for running jobs to finish when it stops; by default 30s.",
    ),
)
_SERVING = (
    click.option(
        "--http", metavar="HOST:PORT", help="Where HTTP listens; by default 127.0.0.1:7470."
    ),
    click.option("--no-http", is_flag=True, help="Open no HTTP port."),
    as_lines,
    verbose,
)

joined, keyed = _NETWORK[0], _NETWORK[3]
"""Those that say which network."""
layers = click.option(
    "--layers",
    metavar="RANGES",
    callback=_layers,
    help="The layers it holds, as 0-14 or 0-4,20-29; none; or auto (the default): the network"
    " decides.",
)
end_model = click.option(
    "--end-model",
    is_flag=True,
    help="Handle the text here, in an engine that this command starts.",
)
nodes = click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="How many processes share the layers.",
)


def node_options(*more: Callable[[Any], Any]) -> Callable[[F], F]:
    """Give a command the options of a node, and these; `settings_of` makes sense of them."""
    return together(*_MODEL, *more, *_NETWORK, *_COMPUTING, *_SERVING)


def settings_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of a node, under the settings' names."""
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
