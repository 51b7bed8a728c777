"""A workspace: five folders, each of them a state, and one of our own beside them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.core.job import HEAD_START, Priority
from penstock.lifecycles.spool import FOLDERS, Status
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.files import exists, fsync_dir, store_errors

FORWARD = (Status.QUEUED, Status.RUNNING, Status.FAILED, Status.DONE)
"""The way a job goes: who looks in this order meets one that moves, unless it is moved back."""

_PRIVATE = ".penstock"
_LOOKS = 12
_OURS = ("servers", "cancel", "trash")


class Workspace:
    """Where each job lies. Paths are only made of ids that follow the rule."""

    def __init__(self, path: Path | str, sync: Sync = Sync.FULL) -> None:
        if "\0" in str(path):
            raise Misconfigured("the path of a workspace can't have a null byte in it")
        self.path = Path(path).absolute()
        self.sync = sync
        self.private = self.path / _PRIVATE
        """Ours alone: `servers`, `cancel` and `trash`; the original's tools don't look at it."""
        self._folders = {status: self.path / name for status, name in FOLDERS.items()}
        self._names = {status: str(folder) for status, folder in self._folders.items()}

    def folder(self, status: Status) -> Path:
        return self._folders[status]

    def of(self, status: Status, job_id: JobId) -> Path:
        """Where this job lies while it is in this state."""
        return self._folders[status] / check_job_id(job_id)

    def name(self, status: Status, job_id: JobId) -> str:
        """The same as a string, of an id that was checked."""
        return f"{self._names[status]}/{job_id}"

    def create(self) -> None:
        """Make whatever is missing, and see that it can be used."""
        for folder in self._folders.values():
            self._make(folder)
        self.adopt()

    def adopt(self) -> None:
        """See that it can be used, and make our own folders in one that the original made."""
        self.check()
        for name in _OURS:
            self._make(self.private / name)

    def check(self) -> None:
        """Real folders, of one file system, that may be written to; else Misconfigured."""
        for folder in self._folders.values():
            self._check_folder(folder)
        devices = {folder: os.lstat(folder).st_dev for folder in self._folders.values()}
        home = self.folder(Status.STAGING)
        for folder, device in devices.items():
            if device != devices[home]:
                raise Misconfigured(
                    f"{folder} is on another file system than {home}",
                    hint="a job is moved by one rename, so all folders have to be on the same",
                )

    def ids(self, status: Status) -> Iterator[JobId]:
        """Of all jobs in this state, in no order. What has no job id for its name is no job."""
        try:
            entries = os.scandir(self._folders[status])
        except FileNotFoundError:
            return
        with entries:
            yield from (entry.name for entry in entries if is_job_id(entry.name))

    def counts(self) -> dict[Status, int]:
        return {status: sum(1 for _ in self.ids(status)) for status in FORWARD}

    def find(self, job_id: JobId) -> Status:
        """The state of a job: `output` first, then `failed`, `processing`, `input/ready`.

        One that moves is never MISSING. It can slip past a look in that order, but past one in
        the order in which jobs go only if it is put back to the queue just then; so that look
        is repeated, more often than a job can be put back in the time.
        """
        check_job_id(job_id)
        for status in reversed(FORWARD):
            if self.holds(status, job_id):
                return status
        for _ in range(_LOOKS):
            for status in FORWARD:
                if self.holds(status, job_id):
                    return status
        return Status.MISSING

    def holds(self, status: Status, job_id: JobId) -> bool:
        """Whether anything lies there under this id, a folder or not."""
        return exists(self.name(status, job_id))

    def _make(self, folder: Path) -> None:
        missing = []
        while not os.path.lexists(folder):
            missing.append(folder)
            folder = folder.parent
        for one in reversed(missing):
            with store_errors("make", one):
                try:
                    os.mkdir(one)
                except FileExistsError:
                    continue  # somebody else was quicker
            fsync_dir(one.parent, self.sync)

    def _check_folder(self, folder: Path) -> None:
        try:
            mode = os.lstat(folder).st_mode
        except FileNotFoundError:
            raise Misconfigured(
                f"{self.path} is not a workspace: it has no folder {folder.relative_to(self.path)}",
                hint="penstock spool submit and penstock spool serve make one",
            ) from None
        except (NotADirectoryError, PermissionError) as error:
            raise Misconfigured(f"{folder}: {(error.strerror or '').lower()}") from error
        if not stat.S_ISDIR(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "no folder"
            raise Misconfigured(f"{folder} is {kind}", hint="each state is a folder of its own")
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise Misconfigured(
                f"{folder} may not be written to by this user",
                hint="give this user the right, or mount the file system for writing",
            )


JobId = str
Order = tuple[int, tuple[int, ...], str]

MAX_LENGTH = 128
_RULE = re.compile(r"[0-9]+(?:_[0-9]+)*", re.ASCII)
_MICROSECONDS = 10**11
"""From here on a number counts microseconds: as seconds it would be the year 5138."""
_PADDED = 20
"""Digits of a number that counts microseconds whatever it is."""
_SHOWN = 40
_OF_THIS_PROCESS = count()
"""One for all sources: an id whose job was cleaned away is not given again."""


def is_job_id(text: str) -> bool:
    """1 to 128 digits and single underscores, none at either end."""
    return 0 < len(text) <= MAX_LENGTH and _RULE.fullmatch(text) is not None


def check_job_id(text: str, field: str = "job id") -> JobId:
    if not is_job_id(text):
        raise InvalidRequest(
            field,
            f"{_shown(text)} can't be one",
            hint="1 to 128 digits and single underscores, as 1736700000_12345_0",
        )
    return text


def is_original(job_id: JobId) -> bool:
    """Whether the original's `wrk` made it: microseconds, with leading zeros."""
    return len(job_id.partition("_")[0]) == _PADDED


def order_of(job_id: JobId) -> Order:
    """A key that sorts ids by the time in them, then by the numbers after it.

    Ids of both forms compare; a second counts as its first microsecond. No two ids are equal.
    """
    first, *others = job_id.split("_")
    time = int(first)
    if len(first) != _PADDED and time < _MICROSECONDS:
        time *= 1_000_000
    return time, tuple(map(int, others)), job_id


def submitted_near(job_id: JobId) -> float:
    """The time in an id, in seconds since the epoch."""
    return order_of(job_id)[0] / 1_000_000


class SpoolIds:
    """Ids that no other id of this process equals, in any thread, and after a fork.

    That another machine or container has the same pid is for the one who makes the folder to
    notice: a taken id is skipped.
    """

    def __init__(
        self, pid: Callable[[], int] = os.getpid, counter: Iterator[int] | None = None
    ) -> None:
        self._pid = pid
        self._counter = counter or _OF_THIS_PROCESS

    def next(self, now: float) -> JobId:
        return f"{int(now)}_{self._pid()}_{next(self._counter)}"


def _shown(text: str) -> str:
    """Enough of it to recognise, with nothing in it that a terminal would act on."""
    return ascii(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


_DAY = 86_400
_MICRO = 1_000_000

Turn = tuple[int, Order]
"""The lowest goes first."""


def turn_of(job_id: str, priority: Priority, now: float) -> Turn:
    """By the time that its id tells, less the head start of its priority.

    All waiting jobs age alike, so an urgent job overtakes those that came less than its head
    start before it, and nobody starves. Within a priority the order is that of the ids. One
    that claims to come from the future is not put off for longer than until tomorrow.
    """
    order = order_of(job_id)
    tomorrow = (int(now) // _DAY + 2) * _DAY * _MICRO
    came = min(order[0], tomorrow)
    return came - int(HEAD_START[priority] * _MICRO), order
