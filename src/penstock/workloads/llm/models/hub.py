"""Models of the Hugging Face hub, or of whatever `HF_ENDPOINT` names."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from penstock.core.errors import (
    InvalidRequest,
    Misconfigured,
    NotFound,
    NotPermitted,
    PenstockError,
    Unavailable,
)
from penstock.workloads.llm.models.choosing import Remote, choose, projector_among
from penstock.workloads.llm.models.gguf import SUFFIX, GgufFacts, name_for, read_facts
from penstock.workloads.llm.models.shelf import ModelShelf
from penstock.workloads.llm.models.staging import (
    FULL,
    Told,
    copy,
    only_here,
    room,
    staging,
    writing,
)
from penstock.workloads.llm.values import LlmCode, LlmFailure

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_TIMEOUT = 30.0
_PATIENCE = (1.0, 2.0, 4.0)
"""Seconds between tries when nothing comes."""
_PARTIAL = 206


def pull_from_hub(
    repository: str, wanted: str, shelf: ModelShelf, told: Told | None = None, name: str = ""
) -> GgufFacts:
    """See `pulling.pull`."""
    hub = _Hub(repository)
    files = hub.files()
    model, eyes = choose(repository, wanted, files), projector_among(files)
    name = shelf.free_name(name or name_for(Path(model.path)))
    if model.sha256 and shelf.has(name, model.sha256):
        return shelf.find(name)
    with writing(shelf.folder), staging(shelf.folder) as new:
        place = shelf.unfinished
        target = hub.fetch(model, place, new / f"{name}{SUFFIX}", told)
        if read_facts(target).projector:
            raise InvalidRequest("model", f"{model.path} of {repository} is a projector")
        seen = hub.fetch(eyes, place, new / "projector", told) if eyes else None
        return shelf.place(
            new,
            target,
            seen,
            source=f"hf:{repository}:{model.path}@{hub.revision}",
            sha256=model.sha256,
            told=told,
        )


class _Hub:
    """One repository of it."""

    def __init__(self, repository: str) -> None:
        self._repository = repository
        self._library = _library()
        # Asked for here, as the library looks once only, when it is imported.
        self._endpoint = os.environ.get("HF_ENDPOINT") or None
        self.revision = ""

    def files(self) -> list[Remote]:
        """As they are at this moment: `revision` is noted, and what is fetched is of it."""
        with self._explained():
            api = self._library.HfApi(endpoint=self._endpoint)
            info = api.model_info(self._repository, files_metadata=True, timeout=_TIMEOUT)
        self.revision = str(info.sha or "main")
        return _files(info)

    def fetch(self, file: Remote, place: Path, target: Path, told: Told | None) -> Path:
        """The whole file, checked; what is there of it already is not fetched again."""
        place.mkdir(exist_ok=True, mode=0o700)
        part = place / f"{file.sha256 or file.git}.part"
        with only_here(part) as written:
            have = os.fstat(written.fileno()).st_size
            if have > file.size:
                written.truncate(have := 0)
            room(place, file.size - have)
            try:
                if have < file.size:
                    written.seek(have)
                    with self._explained(part, file):
                        self._get(file, written, told)
                written.flush()
                _check(part, file, told)
            except LlmFailure:
                part.unlink()
                raise
            return part.rename(target)

    def _get(self, file: Remote, written: BinaryIO, told: Told | None) -> None:
        """Go on from where the file is at; as long as something comes, so do we."""
        patience = list(_PATIENCE)
        while True:
            before = written.tell()
            try:
                return self._stream(file, written, told)
            except (LlmFailure, self._library.errors.HfHubHTTPError):
                raise
            except Exception as error:  # its transport is another one in each of its versions
                if _is_full(error):
                    raise
                if written.tell() > before:
                    patience = list(_PATIENCE)
                elif not patience:
                    raise
                else:
                    time.sleep(patience.pop(0))

    def _stream(self, file: Remote, written: BinaryIO, told: Told | None) -> None:
        utils, have = self._library.utils, written.tell()
        url = self._library.hf_hub_url(
            self._repository, file.path, revision=self.revision, endpoint=self._endpoint
        )
        headers = {**utils.build_hf_headers(), "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        getting = utils.get_session().stream(
            "GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True
        )
        with getting as response:
            utils.hf_raise_for_status(response)
            if response.status_code != _PARTIAL:
                have = written.seek(0)
                written.truncate()
            for part in response.iter_bytes():
                have += written.write(part)
                if have > file.size:
                    raise _damaged(file)
                if told:
                    told("fetching", have, file.size)

    @contextlib.contextmanager
    def _explained(self, part: Path | None = None, file: Remote | None = None) -> Iterator[None]:
        """What the library raises, in our words."""
        errors = self._library.errors
        try:
            yield
        except (PenstockError, LlmFailure):
            raise
        except errors.GatedRepoError as error:
            raise NotPermitted(
                f"{self._repository} is only for those who agreed to its conditions",
                hint="agree to them on its page, then set HF_TOKEN to a token of yours",
            ) from error
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            raise NotFound(
                f"there is no repository {self._repository} on the hub",
                hint="if it is a private one, set HF_TOKEN to a token that may read it",
            ) from error
        except errors.EntryNotFoundError as error:
            raise NotFound(f"{self._repository} has no {file.path if file else 'file'}") from error
        except errors.HFValidationError as error:
            raise InvalidRequest("model", str(error).splitlines()[0]) from error
        except Exception as error:
            if _is_full(error):
                raise
            raise _unreachable(error, part, file) from error


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise Misconfigured(
            "huggingface_hub, which speaks with the hub, is not installed",
            hint="pip install 'penstock[hub]'; 'penstock models add FILE' does without",
        ) from error
    library: Any = huggingface_hub
    return library


def _files(info: ModelInfo) -> list[Remote]:
    return [
        Remote(
            path=one.rfilename,
            size=(one.lfs.size if one.lfs else one.size) or 0,
            sha256=one.lfs.sha256 if one.lfs else "",
            git=one.blob_id or "",
        )
        for one in info.siblings or ()
    ]


def _check(part: Path, file: Remote, told: Told | None) -> None:
    """Raises LlmFailure if it is not what was announced."""
    size = part.stat().st_size
    # Git's checksum is of the file with its length in front.
    summed = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size)
    with part.open("rb") as read:
        copy(read, summed.update, "checking", size, told)
    if size != file.size or summed.hexdigest() != (file.sha256 or file.git):
        raise _damaged(file)


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def _damaged(file: Remote) -> LlmFailure:
    problem = f"{file.path} came damaged: it is not what was announced; nothing was kept"
    return LlmFailure(LlmCode.MODEL_INVALID, problem)


def _unreachable(error: Exception, part: Path | None, file: Remote | None) -> Unavailable:
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    have = part.stat().st_size if part and part.exists() else 0
    if have and file:
        return Unavailable(
            f"{file.path} broke off after {have:,} of {file.size:,} bytes: {why}",
            hint="the same command goes on from there",
        )
    return Unavailable(f"the hub can't be reached: {why}", hint="is there a network?")
