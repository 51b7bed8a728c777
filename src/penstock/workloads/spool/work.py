"""Work: a client's side of the queue. When it tells an id, the job is there to stay.

A job is made where nobody looks, flushed, and made visible by one rename; the id is told after
the rename is on the disk too. Who is killed before leaves at most a folder in `input/writing`,
which `clean` takes away after a day.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from penstock.core.errors import Conflict, StoreFailed
from penstock.lifecycles.spool import Status
from penstock.ports.clock import Clock, SystemClock
from penstock.ports.failpoint import failpoint
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk import (
    flush_all,
    flush_move,
    fsync_dir,
    make_folder,
    move,
    write_file,
)
from penstock.workloads.spool.ids import IdSource, JobId
from penstock.workloads.spool.images import image_name, read_image
from penstock.workloads.spool.kernel import can_flush_file_systems
from penstock.workloads.spool.meta import (
    KIND,
    META,
    OPTIONS,
    Meta,
    encode_meta,
    encode_options,
    stamp,
)
from penstock.workloads.spool.options import JobKind, SpoolOptions
from penstock.workloads.spool.removing import remove_tree
from penstock.workloads.spool.submission import Checked, Submission, checked
from penstock.workloads.spool.workspace import FORWARD, Workspace

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
        ids: IdSource | None = None,
    ) -> None:
        """Misconfigured if the workspace can't be used, or is missing and not to be made."""
        self.workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._clock = clock or SystemClock()
        self._ids = ids or IdSource()
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

    def _submit_group(self, jobs: Sequence[Checked]) -> list[JobId]:
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

    def _stage(self, job: Checked, sync: Sync) -> JobId:
        """A folder with everything in it, on the disk, that nobody sees."""
        job_id = self._reserve()
        try:
            self._fill(self.workspace.of(Status.STAGING, job_id), job, sync)
        except FileExistsError as error:
            self._forget([job_id])
            raise Conflict(f"somebody else writes to {error.filename}") from error
        except BaseException:
            self._forget([job_id])
            raise
        return job_id

    def _reserve(self) -> JobId:
        """An id that no job has, by the folder that is ours to make."""
        while True:
            job_id = self._ids.next(self._clock.now())
            folder = self.workspace.of(Status.STAGING, job_id)
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

    def _fill(self, folder: Path, job: Checked, sync: Sync) -> None:
        write_file(folder, PROMPT, job.prompt, sync)
        if job.images:
            self._copy_images(folder / IMAGES, job.images, sync)
        if job.kind is not JobKind.TEXT:
            write_file(folder, KIND, job.kind.encode(), sync)
        if job.options != _NO_OPTIONS:
            write_file(folder, OPTIONS, encode_options(job.options), sync)
        meta = Meta(
            submitted_at=stamp(self._clock.now()),
            mode=job.kind,
            parent=job.parent,
            tags=job.tags,
            retry_of=job.retry_of,
        )
        write_file(folder, META, encode_meta(meta), sync)
        fsync_dir(folder, sync)

    def _copy_images(self, folder: Path, images: Sequence[Path], sync: Sync) -> None:
        make_folder(folder)
        for number, image in enumerate(images):
            write_file(folder, image_name(number, image), read_image(image), sync)
        fsync_dir(folder, sync)

    # -- making them visible ----------------------------------------------------------

    def _publish(self, staged: Sequence[JobId]) -> None:
        moved: list[JobId] = []
        try:
            for job_id in staged:
                self._queue(job_id)
                moved.append(job_id)
            staging, ready = map(self.workspace.folder, (Status.STAGING, Status.QUEUED))
            flush_move(staging, ready, self.workspace.sync)
            failpoint("spool-submitted")
        except BaseException:
            for job_id in moved:
                self._take_back(job_id)
            self._forget(staged)
            raise

    def _queue(self, job_id: JobId) -> None:
        staged = self.workspace.of(Status.STAGING, job_id)
        try:
            move(staged, self.workspace.of(Status.QUEUED, job_id), sync=Sync.NONE)
        except FileExistsError:
            raise Conflict(f"a job {job_id} is queued already") from None
        except FileNotFoundError:
            raise Conflict(f"somebody took {staged} away") from None

    def _take_back(self, job_id: JobId) -> None:
        """A job that is visible, but perhaps not to stay. A server may have been quicker."""
        staged = self.workspace.of(Status.STAGING, job_id)
        with suppress(OSError, StoreFailed):
            move(self.workspace.of(Status.QUEUED, job_id), staged, sync=Sync.NONE)

    def _forget(self, staged: Iterable[JobId]) -> None:
        for job_id in staged:
            with suppress(OSError):
                remove_tree(self.workspace.of(Status.STAGING, job_id))
