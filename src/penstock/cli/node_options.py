"""The command-line options of a node, as settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import Parsed, as_lines, options, together, verbose
from penstock.core.errors import Misconfigured

if TYPE_CHECKING:
    from penstock.config import Settings


def _layers(text: str) -> str:
    from penstock.workloads.pipes.ranges import parse_layers

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
    from penstock.config.loading import parse_host_port

    return parse_host_port(text)


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
    --spot-check P         Probability, 0 to 1, that a node's computation is checked before a job.
    --keep DURATION        How long the cache of an ended job is kept for a next turn; by default
            5m.
    --print-times          Log the timing statistics of every job.
    --drain DURATION       Time for running jobs to finish when it stops; by default 30s.
    --http HOST:PORT       Where HTTP listens; by default 127.0.0.1:7470.
    --no-http              Open no HTTP port.
    """,
    listen=Parsed("address", _own_address),
    advertise=_ADDRESS,
    dtype=click.Choice(["auto", "float32", "bfloat16", "int8"]),
    context=click.IntRange(min=16),
    prefill_chunk_size=click.IntRange(min=1),
    spot_check=click.FloatRange(0, 1),
)
node_options = together(_model, joined, keyed, _own, as_lines, verbose)
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
