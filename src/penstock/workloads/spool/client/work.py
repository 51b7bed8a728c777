"""Work: submitting jobs to a workspace."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct, structs

from penstock.core.errors import Conflict, InvalidRequest, StoreFailed, TooLarge
from penstock.lifecycles.spool import Status
from penstock.ports.clock import Clock, SystemClock
from penstock.ports.process import failpoint
from penstock.workloads.spool.config import JobKind, SpoolOptions, Sync
from penstock.workloads.spool.disk.files import (
    can_flush_file_systems,
    flush_all,
    flush_move,
    fsync_dir,
    make_folder,
    move,
    remove_tree,
    write_files,
)
from penstock.workloads.spool.disk.job import (
    KIND,
    META,
    OPTIONS,
    Meta,
    encode_meta,
    encode_options,
    stamp,
)
from penstock.workloads.spool.disk.job import checked as checked_options
from penstock.workloads.spool.disk.workspace import (
    FORWARD,
    JobId,
    SpoolIds,
    Workspace,
    check_job_id,
)

MAX_PROMPT = 10_000_000
MAX_TAGS = 1000
MAX_IMAGES = 1000
_TAG = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


# -- images -------------------------------------------------------------------------

MAX_IMAGE = 50 << 20
FIELD = "images"
_ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".webp")
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def media_type(data: bytes) -> str | None:
    """What the picture is, whatever its name says; None if it is none of those known."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def check_image(path: Path) -> None:
    """InvalidRequest if this file of the client's is no picture that a job can have."""
    _read(path, 16)


def read_image(path: Path) -> bytes:
    return _read(path, MAX_IMAGE + 1)


def image_name(number: int, path: Path) -> str:
    return f"image_{number:06}{path.suffix}"


def _read(path: Path, most: int) -> bytes:
    if path.suffix.lower() not in _ENDINGS:
        raise InvalidRequest(FIELD, f"{path} does not end in one of {', '.join(_ENDINGS)}")
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, _READ)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise InvalidRequest(FIELD, f"{path} is not a file")
            data = file.read(most)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest(FIELD, f"{path} can't be read: {reason.lower()}") from error
    if max(found.st_size, len(data)) > MAX_IMAGE:
        raise TooLarge(FIELD, f"{path} has {found.st_size} bytes; {MAX_IMAGE} is the most")
    if media_type(data) is None:
        raise InvalidRequest(FIELD, f"{path} is not a JPEG, PNG, GIF or WebP image")
    return data


# -- checks -------------------------------------------------------------------------


class Submission(Struct, frozen=True, kw_only=True):
    prompt: str | bytes
    kind: JobKind = JobKind.TEXT
    options: SpoolOptions = SpoolOptions()
    images: tuple[Path, ...] = ()
    parent: str | None = None
    """The job that this one goes on from."""
    tags: tuple[str, ...] = ()
    retry_of: str | None = None


def checked(job: Submission) -> Submission:
    """With its prompt as bytes. InvalidRequest names what is wrong; TooLarge if it is too large."""
    for name in ("parent", "retry_of"):
        if given := getattr(job, name):
            check_job_id(given, name)
    return structs.replace(
        job,
        prompt=_prompt(job),
        kind=_kind(job),
        options=checked_options(job.options),
        images=_images(job),
        tags=_tags(job),
    )


def _prompt(job: Submission) -> bytes:
    prompt = job.prompt
    try:
        data = prompt.encode() if isinstance(prompt, str) else bytes(prompt)
        data.decode()
    except UnicodeError:
        raise InvalidRequest("prompt", "is not UTF-8") from None
    if len(data) > MAX_PROMPT:
        raise TooLarge("prompt", f"has {len(data)} bytes; {MAX_PROMPT} is the most")
    if not data and not (job.kind is JobKind.EMBED and job.images):
        raise InvalidRequest("prompt", "is empty")
    return data


def _kind(job: Submission) -> JobKind:
    if job.kind is JobKind.TEXT and job.images:
        return JobKind.VISION
    if job.kind is JobKind.VISION and not job.images:
        raise InvalidRequest("images", "a job of kind vision has at least one")
    if job.kind is JobKind.TTS and job.images:
        raise InvalidRequest("images", "a job of kind tts has none")
    return job.kind


def _images(job: Submission) -> tuple[Path, ...]:
    if len(job.images) > MAX_IMAGES:
        raise TooLarge("images", f"are {len(job.images)}; {MAX_IMAGES} is the most")
    images = tuple(map(Path, job.images))
    for image in images:
        check_image(image)
    return images


def _tags(job: Submission) -> tuple[str, ...]:
    if len(job.tags) > MAX_TAGS:
        raise TooLarge("tags", f"are {len(job.tags)}; {MAX_TAGS} is the most")
    for tag in job.tags:
        if not _TAG.fullmatch(tag):
            raise InvalidRequest(
                "tags", f"{tag[:80]!a} can't be one", hint="1 to 64 letters, digits, - and _"
            )
    return tuple(job.tags)


PROMPT, IMAGES = "prompt.txt", "images"
_GROUP = 100
_NO_OPTIONS = SpoolOptions()


class Work:
    """Submits jobs to a workspace. May be used by several threads at once."""

    def __init__(
        self,
        workspace: Workspace | Path | str,
        create: bool = True,
        *,
        clock: Clock | None = None,
        ids: SpoolIds | None = None,
    ) -> None:
        """Misconfigured if the workspace can't be used, or is missing and not to be made."""
        self.workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._clock = clock or SystemClock()
        self._ids = ids or SpoolIds()
        if create:
            self.workspace.create()
        else:
            self.workspace.check()

    def submit(
        self,
        prompt: str | bytes,
        *,
        kind: JobKind = JobKind.TEXT,
        options: SpoolOptions = _NO_OPTIONS,
        images: Sequence[Path] = (),
        parent: str | None = None,
        tags: Sequence[str] = (),
        retry_of: str | None = None,
    ) -> JobId:
        """The new job's id, once it is queued and on the disk.

        InvalidRequest, TooLarge, StoreFull or StoreFailed; then nothing is left of it.
        """
        job = Submission(
            prompt=prompt,
            kind=kind,
            options=options,
            images=tuple(images),
            parent=parent,
            tags=tuple(tags),
            retry_of=retry_of,
        )
        job_id = self._stage(checked(job), self.workspace.sync)
        self._publish([job_id])
        return job_id

    def submit_many(self, jobs: Iterable[Submission], group: int = _GROUP) -> Iterator[JobId]:
        """The ids of many jobs, in their order, each once it is on the disk.

        As many as `group` are flushed together. If one can't be submitted, none of its group is;
        those whose ids were told are there.
        """
        waiting = iter(jobs)
        while batch := [checked(job) for job in islice(waiting, group)]:
            yield from self._submit_group(batch)

    def _submit_group(self, jobs: Sequence[Submission]) -> list[JobId]:
        staged: list[JobId] = []
        together = self.workspace.sync is Sync.FULL and can_flush_file_systems()
        each = Sync.NONE if together else self.workspace.sync
        try:
            for job in jobs:
                staged.append(self._stage(job, each))
            if together:
                flush_all(self.workspace.folder(Status.STAGING))
        except BaseException:
            self._forget(staged)
            raise
        self._publish(staged)
        return staged

    # -- one job ----------------------------------------------------------------------

    def _stage(self, job: Submission, sync: Sync) -> JobId:
        """A folder with everything in it, on the disk, that nobody sees."""
        job_id = self._reserve()
        try:
            self._fill(self.workspace.name(Status.STAGING, job_id), job, sync)
        except FileExistsError as error:
            self._forget([job_id])
            raise Conflict(f"another process writes to {error.filename}") from error
        except BaseException:
            self._forget([job_id])
            raise
        return job_id

    def _reserve(self) -> JobId:
        """An id that no job has, by the folder that is ours to make."""
        while True:
            job_id = self._ids.next(self._clock.now())
            folder = self.workspace.name(Status.STAGING, job_id)
            try:
                make_folder(folder)
            except FileExistsError:
                continue
            except FileNotFoundError:
                self.workspace.check()
                raise StoreFailed(f"can't make {folder}") from None
            if not any(self.workspace.holds(status, job_id) for status in FORWARD):
                return job_id
            self._forget([job_id])

    def _fill(self, folder: str, job: Submission, sync: Sync) -> None:
        assert isinstance(job.prompt, bytes)
        files = {PROMPT: job.prompt}
        if job.images:
            self._copy_images(Path(folder, IMAGES), job.images, sync)
        if job.kind is not JobKind.TEXT:
            files[KIND] = job.kind.encode()
        if job.options != _NO_OPTIONS:
            files[OPTIONS] = encode_options(job.options)
        meta = Meta(
            submitted_at=stamp(self._clock.now()),
            mode=job.kind,
            parent=job.parent or "",
            tags=job.tags,
            retry_of=job.retry_of or "",
        )
        files[META] = encode_meta(meta)
        write_files(folder, files, sync)
        fsync_dir(folder, sync)

    def _copy_images(self, folder: Path, images: Sequence[Path], sync: Sync) -> None:
        make_folder(folder)
        for number, image in enumerate(images):
            write_files(folder, {image_name(number, image): read_image(image)}, sync)
        fsync_dir(folder, sync)

    # -- making them visible ----------------------------------------------------------

    def _publish(self, staged: Sequence[JobId]) -> None:
        moved: list[JobId] = []
        try:
            for job_id in staged:
                self._queue(job_id)
                moved.append(job_id)
            if self.workspace.sync is Sync.FULL:
                flush_move(*map(self.workspace.folder, (Status.STAGING, Status.QUEUED)))
            failpoint("spool-submitted")
        except BaseException:
            for job_id in moved:
                self._take_back(job_id)
            self._forget(staged)
            raise

    def _queue(self, job_id: JobId) -> None:
        staged = self.workspace.name(Status.STAGING, job_id)
        try:
            move(staged, self.workspace.name(Status.QUEUED, job_id), sync=Sync.NONE)
        except FileExistsError:
            raise Conflict(f"a job {job_id} is queued already") from None
        except FileNotFoundError:
            raise Conflict(f"another process took {staged} away") from None

    def _take_back(self, job_id: JobId) -> None:
        """A job that is visible, but perhaps not to stay. A server may have been quicker."""
        staged = self.workspace.of(Status.STAGING, job_id)
        with suppress(OSError, StoreFailed):
            move(self.workspace.of(Status.QUEUED, job_id), staged, sync=Sync.NONE)

    def _forget(self, staged: Iterable[JobId]) -> None:
        for job_id in staged:
            with suppress(OSError):
                remove_tree(self.workspace.of(Status.STAGING, job_id))
