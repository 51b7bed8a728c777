"""What can be said of a node on the command line, as settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.parameters import DURATION, SIZE
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
        help="The model: a name of 'penstock models', a GGUF file, or a folder with safetensors.",
    ),
    click.option(
        "--source",
        metavar="PATH",
        type=click.Path(path_type=Path),
        help="Where its weights are, if --model is to be its name and nothing else.",
    ),
)
_NETWORK = (
    click.option(
        "--join",
        multiple=True,
        metavar="HOST:PORT",
        callback=_address,
        help="A node that is there already; may be repeated, one that answers is enough.",
    ),
    click.option(
        "--listen",
        metavar="HOST:PORT",
        callback=_address,
        help="Where other nodes reach this one; 127.0.0.1 and a free port if nothing is said.",
    ),
    click.option(
        "--advertise",
        metavar="HOST:PORT",
        callback=_address,
        help="Where they reach it, if that is not where it listens.",
    ),
    click.option(
        "--key",
        metavar="KEY|@FILE",
        help="The network's key; better @FILE, or PENSTOCK_PIPE_KEY. Else that of 'penstock pipe"
        " key', which is made if there is none.",
    ),
    click.option(
        "--node-id",
        metavar="NAME",
        help="Its name in the network; else made of host and process.",
    ),
)
_COMPUTING = (
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "int8"]),
        help="What it computes in; auto is the faster of float32 and bfloat16, as measured here.",
    ),
    click.option(
        "--threads", type=_COUNT, metavar="N", help="Threads that compute; else measured."
    ),
    click.option(
        "--memory",
        type=SIZE,
        help="What weights and caches may take; three quarters of the machine's if not said.",
    ),
    click.option("--cache", type=SIZE, help="What of it caches may take."),
    click.option(
        "--context",
        type=click.IntRange(min=16),
        metavar="TOKENS",
        help="What one job may have, prompt and answer; 4096 if nothing is said.",
    ),
    click.option(
        "--prefill-chunk-size",
        type=_COUNT,
        metavar="TOKENS",
        help="Of a prompt, what goes through the nodes at once; 256 if nothing is said.",
    ),
    click.option(
        "--local-layers",
        type=click.IntRange(min=0),
        metavar="N",
        help="With --end-model: how many of the first layers stay beside it; 1 if nothing is said.",
    ),
    click.option(
        "--spot-check",
        type=click.FloatRange(0, 1),
        metavar="P",
        help="How likely a job is to be preceded by a check of a node's computation, 0 to 1.",
    ),
    click.option(
        "--keep",
        type=DURATION,
        help="How long a finished job's cache is kept for a next turn; 5m if nothing is said.",
    ),
    click.option("--print-times", is_flag=True, help="Log the timing statistics of every job."),
    click.option("--drain", type=DURATION, help="What running jobs get when it is stopped; 30s."),
)
_SERVING = (
    click.option(
        "--http", metavar="HOST:PORT", help="Where HTTP listens; 127.0.0.1:7470 if not said."
    ),
    click.option("--no-http", is_flag=True, help="Open no HTTP port."),
    click.option("--json", "json", is_flag=True, help="Print JSON lines."),
    click.option("-v", "--verbose", is_flag=True, help="Log more."),
)

_SETTINGS = {
    "model": "pipe_model",
    "source": "pipe_source",
    "layers": "pipe_layers",
    "end_model": "pipe_end_model",
    "join": "pipe_join",
    "listen": "pipe_listen",
    "advertise": "pipe_advertise",
    "key": "pipe_key",
    "node_id": "pipe_node_id",
    "dtype": "pipe_dtype",
    "threads": "pipe_threads",
    "memory": "pipe_memory",
    "cache": "pipe_cache",
    "context": "pipe_context",
    "prefill_chunk_size": "pipe_chunk",
    "local_layers": "pipe_local_layers",
    "spot_check": "pipe_spot_check",
    "keep": "pipe_keep",
    "print_times": "pipe_print_times",
    "drain": "pipe_drain",
}
"""The setting that each option is."""

joined, keyed = _NETWORK[0], _NETWORK[3]
"""Those that say which network."""
layers = click.option(
    "--layers",
    metavar="RANGES",
    callback=_layers,
    help="Those it holds, as 0-14 or 0-4,20-29; auto (if nothing is said) lets the network decide,"
    " none holds none.",
)
end_model = click.option(
    "--end-model",
    is_flag=True,
    help="Handle the text here: an engine is started, which can be asked.",
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

    def add(command: F) -> F:
        for option in reversed((*_MODEL, *more, *_NETWORK, *_COMPUTING, *_SERVING)):
            command = option(command)
        return command

    return add


def settings_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of a node, under the settings' names."""
    return {
        _SETTINGS[name]: value
        for name, value in said.items()
        if name in _SETTINGS and value is not None and value is not False and value != ()
    }


def check_key(settings: Settings) -> None:
    """A key that is made now opens no network that is there already. Raises Misconfigured."""
    if not settings.pipe_key and not settings.pipe_key_file.is_file():
        raise Misconfigured(
            f"the network's key is not known in {settings.data_dir}",
            hint="give it with --key @FILE; 'penstock pipe key' prints it where a node runs",
        )
