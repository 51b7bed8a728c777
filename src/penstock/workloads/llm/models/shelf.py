"""The folder in which models are kept.

    <folder>/NAME.gguf            the model
    <folder>/mmproj-NAME.gguf     its projector, if it can see
    <folder>/NAME.json            where it came from, and its checksum

A file that was put there by hand counts as well. A model appears last of its files and goes first
of them, each by one step, so none is ever half there; one program at a time changes the folder.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.core.errors import Conflict, InvalidRequest, NotFound
from penstock.ports.failpoint import failpoint
from penstock.workloads.llm.models.gguf import SUFFIX, GgufFacts, is_projector, read_facts
from penstock.workloads.llm.models.staging import (
    Told,
    bring,
    cleared,
    digest,
    flush,
    locked,
    only_here,
    staging,
    writing,
)
from penstock.workloads.llm.values import LlmFailure, is_model_name

_HINT = "'penstock models list' shows them, 'penstock models pull smollm2' fetches a small one"


class Record(Struct, frozen=True, kw_only=True):
    """What is kept of where a model came from."""

    source: str
    sha256: str
    size: int
    added_at: float
    projector_sha256: str = ""


class Unfit(Struct, frozen=True):
    """A file in the folder that can't be used, and why."""

    file: str
    problem: str


class ModelShelf:
    """Models below a folder. Its methods block while they read and write files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unfinished = folder / ".pulling"
        """What came before a download broke off, by the checksum of the whole."""

    # -- asking ---------------------------------------------------------------

    def list(self) -> Sequence[GgufFacts]:
        """All that can be used, by name."""
        return [one for one in self._looked() if isinstance(one, GgufFacts)]

    def unfit(self) -> Sequence[Unfit]:
        """Files that are no models, or damaged ones."""
        return [one for one in self._looked() if isinstance(one, Unfit)]

    def find(self, name: str) -> GgufFacts:
        """By its exact name, by a path to a file, or by a part of its name that no other has.

        Raises NotFound, InvalidRequest if several have it, and LlmFailure if its file is no good.
        """
        if is_model_name(name) and self._place(name).is_file():
            return read_facts(self._place(name))
        if os.path.isfile(name):
            return read_facts(Path(name))
        part = name.lower().removesuffix(SUFFIX)
        names = {one.name: one for one in self.list()}
        found = [one for one in names if part and part in one.lower()]
        if len(found) == 1:
            return names[found[0]]
        if found:
            raise InvalidRequest("model", f"{name[:150]!r} may be {_either(found)}")
        near = difflib.get_close_matches(part, names, n=3, cutoff=0.4)
        raise NotFound(
            f"there is no model {name[:150]!r}", hint=f"is it {_either(near)}?" if near else _HINT
        )

    def has(self, name: str, sha256: str) -> bool:
        """Whether it is there already. Raises Conflict if the name is another model's."""
        if not self._place(name).is_file():
            return False
        self._compare(name, sha256)
        return True

    def record(self, name: str) -> Record | None:
        """Where it came from; None if it was put there by hand."""
        try:
            return msgspec.json.decode(self._sidecar(name).read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return None

    # -- bringing in, taking out ----------------------------------------------

    def add(
        self,
        path: Path,
        name: str = "",
        *,
        projector: Path | None = None,
        source: str = "",
        told: Told | None = None,
    ) -> GgufFacts:
        """A file of this machine, by a hard link if that can be, else by a copy.

        Raises LlmFailure if it is no model or not whole, Conflict if the name is taken by another,
        StoreFailed and StoreFull; then nothing has changed.
        """
        name = self._checked(path, name, projector)
        with writing(self.folder), staging(self.folder) as new:
            model = bring(path, new / f"{name}{SUFFIX}", told)
            eyes = bring(projector, new / _eyes(name), told) if projector else None
            read_facts(model)  # the source may have changed since
            return self.place(new, model, eyes, source=source or str(path.absolute()), told=told)

    def place(
        self,
        new: Path,
        model: Path,
        projector: Path | None,
        *,
        source: str,
        sha256: str = "",
        told: Told | None = None,
    ) -> GgufFacts:
        """Take over what lies complete in a staging folder, under the name that its file has."""
        name = model.name.removesuffix(SUFFIX)
        record = Record(
            source=source,
            sha256=sha256 or digest(model, told),
            size=model.stat().st_size,
            added_at=time.time(),
            projector_sha256=digest(projector, told) if projector else "",
        )
        with locked(self.folder):
            there = self._place(name).exists()
            if there:
                self._compare(name, record.sha256)
            else:
                self._clear(name)
            if projector or not there:
                self._write(name, record, new / "record")
            if projector:
                self._move(projector, self.folder / _eyes(name))
            if not there:
                self._move(model, self._place(name))
        return read_facts(self._place(name))

    def remove(self, name: str) -> None:
        """By its exact name. What has it in memory goes on with it."""
        with writing(self.folder):
            if not is_model_name(name) or not self._place(name).is_file():
                near = difflib.get_close_matches(name, self._names(), n=3, cutoff=0.4)
                hint = f"is it {_either(near)}?" if near else "'penstock models list' shows them"
                raise NotFound(f"there is no model {name[:150]!r}", hint=hint)
            with locked(self.folder):
                self._place(name).unlink(missing_ok=True)
                failpoint("shelf.removed")
                self._clear(name)
                flush(self.folder)

    def forget_unfinished(self) -> int:
        """Remove what broke off, but not what is under way. How many bytes it was."""
        gone = 0
        with writing(self.folder):
            cleared(self.folder)
            for part in self.unfinished.glob("*.part"):
                with contextlib.suppress(Conflict), only_here(part) as file:
                    gone += os.fstat(file.fileno()).st_size
                    part.unlink()
        return gone

    # -- within ---------------------------------------------------------------

    def _checked(self, path: Path, name: str, projector: Path | None) -> str:
        facts = read_facts(path)
        if facts.projector:
            problem = "is a projector, which belongs to a model"
            raise InvalidRequest(path.name, problem, hint="add the model with --projector FILE")
        if projector and not read_facts(projector).projector:
            raise InvalidRequest(projector.name, "is no projector")
        return self.free_name(name or facts.name)

    def free_name(self, name: str) -> str:
        """The name itself. Raises InvalidRequest if no model can be called so."""
        if not is_model_name(name) or is_projector(name + SUFFIX):
            hint = "letters, digits, _ and -, in words with single dots between"
            raise InvalidRequest("name", f"a model can't be called {name[:150]!r}", hint=hint)
        return name

    def _compare(self, name: str, sha256: str) -> None:
        """The same file once more is no conflict."""
        kept = self.record(name)
        if (kept.sha256 if kept else digest(self._place(name))) != sha256:
            raise Conflict(
                f"there is another model {name!r} already",
                hint=f"'penstock models rm {name}' removes it, --name gives this one another name",
            )

    def _write(self, name: str, record: Record, new: Path) -> None:
        new.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        self._move(new, self._sidecar(name))

    def _move(self, new: Path, place: Path) -> None:
        """Once this is there it stays, and what was moved before it is there as well."""
        flush(new)
        failpoint("shelf.move")
        new.rename(place)
        failpoint("shelf.moved")
        flush(self.folder)

    def _clear(self, name: str) -> None:
        self._sidecar(name).unlink(missing_ok=True)
        (self.folder / _eyes(name)).unlink(missing_ok=True)

    def _looked(self) -> Iterator[GgufFacts | Unfit]:
        for name in self._names():
            if not is_model_name(name):
                yield Unfit(f"{name}{SUFFIX}", "its name is not one that a model can have")
                continue
            try:
                facts = read_facts(self._place(name))
                yield Unfit(f"{name}{SUFFIX}", "is a projector") if facts.projector else facts
            except LlmFailure as failure:
                yield Unfit(f"{name}{SUFFIX}", failure.message)

    def _names(self) -> Sequence[str]:
        try:
            files = os.listdir(self.folder)
        except OSError:
            return []
        names = [
            file.removesuffix(SUFFIX)
            for file in files
            if file.endswith(SUFFIX) and not file.startswith(".") and not is_projector(file)
        ]
        return sorted(names, key=lambda name: (name.lower(), name))

    def _place(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def _sidecar(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _eyes(name: str) -> str:
    return f"mmproj-{name}{SUFFIX}"


def _either(names: Sequence[str]) -> str:
    *others, last = sorted(names)[:8]
    return f"{', '.join(others)} or {last}" if others else last
