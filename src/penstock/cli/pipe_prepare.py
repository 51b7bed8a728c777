"""`penstock pipe prepare`: a model as files of single layers, so that a node needs its own only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from penstock.cli.llm import told
from penstock.cli.paper import console, print_json
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, placed
from penstock.cli.terminal import echo
from penstock.cli.words import plural, size
from penstock.core.errors import InvalidRequest


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("folder", type=click.Path(path_type=Path))
@as_json
@placed
@click.pass_obj
def prepare(place: Place, model: str, folder: Path, json: bool) -> None:
    """Write a model's layers to files of their own.

    MODEL is as for 'penstock pipe node'. FOLDER is made, and has a file for each layer: a machine
    that holds layers 0-14 needs config.json, manifest.json and those files of layers/, and never
    the folder ends/, which has all that turns text into numbers and back.
    """
    from penstock.workloads.pipes.setup import pipe_source

    if folder.exists():
        raise InvalidRequest("FOLDER", f"{folder} is there already: name a new one")
    name, path = pipe_source(place.settings(pipe_model=model))
    with told(), _progress(name) as progress:
        # Only now: these take a second to import.
        from penstock.workloads.pipes.weights.prepared import prepare as write
        from penstock.workloads.pipes.weights.source import open_source

        manifest = write(open_source(path), folder, progress, model=name)
    if json:
        print_json(msgspec.to_builtins(manifest))
    else:
        layers = sum(part.bytes for part in manifest.layers)
        echo(
            f"{folder}: {plural(manifest.num_layers, 'layer')}, {size(layers)}, and"
            f" {size(manifest.ends.bytes)} of ends"
        )


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    page = console(err=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        console=page,
        transient=True,
        disable=not page.is_terminal,
    )
    with bar:
        task = bar.add_task(name[:40], total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
