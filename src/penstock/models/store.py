"""The model store: the folder in which models are kept.

    <folder>/NAME.gguf                  the model,
    <folder>/NAME-00001-of-00003.gguf   or its parts
    <folder>/mmproj-NAME.gguf           its projector, if it has vision
    <folder>/NAME.json                  where it came from, and its checksum

A file that was put there by hand counts as well. The (first) file of a model appears last of its
files and goes first of them, so none is ever half there; one program at a time changes the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from penstock.core.errors import Conflict, InvalidRequest, Misconfigured, StoreFailed, StoreFull
from penstock.models.facts import GgufFacts, is_projector, read_facts
from penstock.models.gguf import SUFFIX, is_later_part, part_name, part_paths, stem_of
from penstock.models.values import LlmFailure, is_model_name, no_such_model, resolve_name
from penstock.ports.process import failpoint

_HINT = "'penstock model list' shows them, 'penstock model pull smollm2' fetches a small one"


class ModelRecord(Struct, frozen=True, kw_only=True):
    """Where a model came from."""

    source: str
    sha256: str
    """Of its file; of a split model, of the checksums of its parts in a row."""
    size: int
    added_at: float
    projector_sha256: str = ""


class UnusableFile(Struct, frozen=True):
    """A file in the folder that can't be used, and why."""

    file: str
    problem: str


class ModelStore:
    """Models below a folder. Its methods block while they read and write files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.partial = folder / ".pulling"
        """Downloads that were interrupted, by the checksum of the whole file."""

    # -- queries --------------------------------------------------------------

    def list(self) -> Sequence[GgufFacts]:
        """All that can be used, by name."""
        return [one for one in self._scan() if isinstance(one, GgufFacts)]

    def unusable(self) -> Sequence[UnusableFile]:
        """Files that are no models, or damaged ones."""
        return [one for one in self._scan() if isinstance(one, UnusableFile)]

    def find(self, name: str) -> GgufFacts:
        """By its exact name, by a path to a file, or by a part of its name that no other has.

        Raises NotFound, InvalidRequest if several have it, and LlmFailure if its file is no good.
        """
        if is_model_name(name) and (file := self._first_file(name)) is not None:
            return read_facts(file)
        if os.path.isfile(name):
            return read_facts(Path(name))
        models = {one.name: one for one in self.list()}
        return models[resolve_name(name, models, hint=_HINT)]

    def served(self, names: Sequence[str]) -> Sequence[GgufFacts]:
        """The models with these names or paths, in order, each once; all without names.

        Raises NotFound, InvalidRequest, and Misconfigured if a file is no good or two files are
        the same model.
        """
        if not names:
            return self.list()
        models: dict[str, GgufFacts] = {}
        for one in names:
            try:
                facts = self.find(one)
            except LlmFailure as failure:
                raise Misconfigured(failure.message) from failure
            known = models.setdefault(facts.name, facts)
            if not os.path.samefile(known.path, facts.path):
                raise Misconfigured(
                    f"two files are the model {facts.name!r}: {known.path} and {facts.path}",
                    hint="jobs name a model by its file's name: rename one of the files",
                )
        return list(models.values())

    def has(self, name: str, sha256: str) -> bool:
        """Whether it is there already. Raises Conflict if the name is another model's."""
        if self._first_file(name) is None:
            return False
        self._compare(name, sha256)
        return True

    def record(self, name: str) -> ModelRecord | None:
        """Where it came from; None if it was put there by hand."""
        try:
            return msgspec.json.decode(self._record_file(name).read_bytes(), type=ModelRecord)
        except (OSError, msgspec.DecodeError):
            return None

    # -- changes --------------------------------------------------------------

    def add(
        self,
        path: Path,
        name: str = "",
        *,
        projector: Path | None = None,
        source: str = "",
        progress: Progress | None = None,
    ) -> GgufFacts:
        """Add a file of this machine, with all its parts, by hard links if possible, else copied.

        Raises LlmFailure if it is no model or not whole, Conflict if the name is taken by another,
        StoreFailed and StoreFull; then nothing has changed.
        """
        name = self._checked(path, name, projector)
        parts = part_paths(path)
        with writing(self.folder), staging(self.folder) as new:
            for number, part in enumerate(parts, 1):
                link_or_copy(part, new / part_name(name, number, len(parts)), progress)
            files = part_paths(new / part_name(name, 1, len(parts)))
            eyes = link_or_copy(projector, new / "projector", progress) if projector else None
            read_facts(files[0])  # the source may have changed since
            source = source or str(path.absolute())
            return self.publish(new, files, eyes, source=source, progress=progress)

    def publish(
        self,
        new: Path,
        files: Sequence[Path],
        projector: Path | None,
        *,
        source: str,
        sha256: str = "",
        progress: Progress | None = None,
    ) -> GgufFacts:
        """Move what lies complete in a staging folder to its place, under the name of its file."""
        name = stem_of(files[0].name)
        record = ModelRecord(
            source=source,
            sha256=sha256 or joint_digest([digest(file, progress) for file in files]),
            size=sum(file.stat().st_size for file in files),
            added_at=time.time(),
            projector_sha256=digest(projector, progress) if projector else "",
        )
        with locked(self.folder):
            there = self._first_file(name) is not None
            if there:
                self._compare(name, record.sha256)
            else:
                self._clear(name)
            if projector or not there:
                self._write(name, record, new / "record")
            if projector:
                self._move(projector, self.folder / _projector_name(name))
            if not there:
                for file in reversed(files):
                    self._move(file, self.folder / file.name)
        return self.find(name)

    def remove(self, name: str) -> None:
        """By its exact name. Processes that have it in memory go on with it."""
        with writing(self.folder):
            file = self._first_file(name) if is_model_name(name) else None
            if file is None:
                raise no_such_model(name, self._names(), "'penstock model list' shows them")
            with locked(self.folder):
                file.unlink(missing_ok=True)
                failpoint("models.removed")
                self._clear(name)
                flush(self.folder)

    def remove_partial(self) -> int:
        """Remove interrupted downloads, but not those under way. How many bytes that was."""
        gone = 0
        with writing(self.folder):
            clear_staging(self.folder)
            for part in self.partial.glob("*.part"):
                with contextlib.suppress(Conflict), exclusive(part) as file:
                    gone += os.fstat(file.fileno()).st_size
                    part.unlink()
        return gone

    def check_name(self, name: str) -> str:
        """The name itself. Raises InvalidRequest if no model can have it."""
        if not is_model_name(name) or is_projector(name + SUFFIX) or stem_of(name + SUFFIX) != name:
            hint = "letters, digits, _ and -, in words with single dots between"
            raise InvalidRequest("name", f"a model can't be called {name[:150]!r}", hint=hint)
        return name

    # -- within ---------------------------------------------------------------

    def _checked(self, path: Path, name: str, projector: Path | None) -> str:
        facts = read_facts(path)
        if facts.projector:
            problem = "is a projector, which belongs to a model"
            raise InvalidRequest(path.name, problem, hint="add the model with --projector FILE")
        if projector and not read_facts(projector).projector:
            raise InvalidRequest(projector.name, "is not a projector")
        return self.check_name(name or facts.name)

    def _compare(self, name: str, sha256: str) -> None:
        """The same file once more is no conflict."""
        kept = self.record(name)
        if kept is None:
            first = self._first_file(name)
            assert first is not None
            there = joint_digest([digest(file) for file in part_paths(first)])
        else:
            there = kept.sha256
        if there != sha256:
            raise Conflict(
                f"there is another model {name!r} already",
                hint=f"delete it with 'penstock model delete {name}', or use --name",
            )

    def _write(self, name: str, record: ModelRecord, new: Path) -> None:
        new.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        self._move(new, self._record_file(name))

    def _move(self, new: Path, place: Path) -> None:
        """Durable: once this is there it stays, as does what was moved before it."""
        flush(new)
        failpoint("models.move")
        new.rename(place)
        failpoint("models.moved")
        flush(self.folder)

    def _clear(self, name: str) -> None:
        """Remove all files of a model but its first."""
        self._record_file(name).unlink(missing_ok=True)
        (self.folder / _projector_name(name)).unlink(missing_ok=True)
        for file in self._files():
            if is_later_part(file) and stem_of(file) == name:
                (self.folder / file).unlink(missing_ok=True)

    def _scan(self) -> Iterator[GgufFacts | UnusableFile]:
        seen: dict[str, str] = {}
        for file in self._files():
            if is_later_part(file):
                continue
            name = stem_of(file)
            if not is_model_name(name):
                yield UnusableFile(file, f"{file}: no model can have this name")
                continue
            if (other := seen.setdefault(name, file)) != file:
                yield UnusableFile(file, f"{file} is not used: {other} is the model {name!r}")
                continue
            try:
                facts = read_facts(self.folder / file)
            except LlmFailure as failure:
                yield UnusableFile(file, failure.message)
            else:
                yield UnusableFile(file, f"{file} is a projector") if facts.projector else facts

    def _names(self) -> Sequence[str]:
        return sorted({stem_of(file) for file in self._files() if not is_later_part(file)})

    def _first_file(self, name: str) -> Path | None:
        """The file of a model, or the first of its parts. A whole file comes before parts."""
        if (whole := self.folder / f"{name}{SUFFIX}").is_file():
            return whole
        for file in self._files():
            if stem_of(file) == name and not is_later_part(file):
                return self.folder / file
        return None

    def _files(self) -> Sequence[str]:
        """Model files, ordered by name: a whole one before parts."""
        try:
            files = os.listdir(self.folder)
        except OSError:
            return []
        models = [
            file
            for file in files
            if file.endswith(SUFFIX) and not file.startswith(".") and not is_projector(file)
        ]
        return sorted(models, key=lambda file: (stem_of(file).lower(), stem_of(file), len(file)))

    def _record_file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def joint_digest(digests: Sequence[str]) -> str:
    """The checksum of a model: its file's, or that of the checksums of its parts in a row."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _projector_name(name: str) -> str:
    return f"mmproj-{name}{SUFFIX}"


Progress = Callable[[str, int, int], None]
"""Called with the step, and how many bytes of how many are done; 0 of 0 while unknown."""

_NEW = ".new-"
_CHUNK = 4 << 20
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The errors that mean that there is no space."""


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A folder of our own below it, gone afterwards. What dead programs left there goes too."""
    with locked(root):
        _clear(root)
        folder = root / f"{_NEW}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_EX)  # the kernel lets go of it when we die
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Nobody else changes what is in the folder meanwhile."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def clear_staging(root: Path) -> None:
    """Remove the staging folders of programs that died."""
    if root.is_dir():
        with locked(root):
            _clear(root)


@contextlib.contextmanager
def writing(root: Path) -> Iterator[None]:
    """Say what is wrong with a folder that can't be written to."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full(root) from error
        why = error.strerror or str(error)
        raise StoreFailed(f"can't write to {root}: {why}") from error


def full(root: Path, needed: int = 0) -> StoreFull:
    more = f" for {needed:,} bytes more" if needed else ""
    return StoreFull(
        f"there is no space left in {root}{more}",
        hint="'penstock model delete NAME' makes some; --models-dir names another folder",
    )


def check_space(root: Path, needed: int) -> None:
    """Refuse at once what could only end badly. Raises StoreFull."""
    if needed > shutil.disk_usage(root).free:
        raise full(root, needed)


def link_or_copy(source: Path, target: Path, progress: Progress | None = None) -> Path:
    """The same file under another name, or a copy of it where that can't be."""
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        with real.open("rb") as read, target.open("xb") as written:
            size = os.fstat(read.fileno()).st_size
            check_space(target.parent, size)
            copy(read, written.write, "copying", size, progress)
    return target


def digest(path: Path, progress: Progress | None = None) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    summed = hashlib.sha256()
    with path.open("rb") as file:
        copy(file, summed.update, "checking", path.stat().st_size, progress)
    return summed.hexdigest()


def copy(
    source: BinaryIO,
    target: Callable[[bytes], object],
    doing: str,
    size: int,
    progress: Progress | None = None,
) -> None:
    done = 0
    while part := source.read(_CHUNK):
        target(part)
        done += len(part)
        if progress:
            progress(doing, done, size)


@contextlib.contextmanager
def exclusive(part: Path) -> Iterator[BinaryIO]:
    """A file that is written bit by bit, over several programs' lives. Raises Conflict if one
    of them is at it now."""
    with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it until now may have moved it to its place.
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(part)):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise Conflict("another program is fetching the same file just now") from None
        yield file


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, survive the loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(root: Path) -> None:
    for old in root.glob(f"{_NEW}*"):
        with contextlib.suppress(OSError):
            held = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old)
            finally:
                os.close(held)
