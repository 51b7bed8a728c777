"""Conversations: a job with a parent goes on from what was said before it."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from penstock.lifecycles.spool import Status
from penstock.workloads.llm.values import Message
from penstock.workloads.spool.disk import Unfit, read_text
from penstock.workloads.spool.ending import RESULT
from penstock.workloads.spool.ids import is_job_id
from penstock.workloads.spool.meta import read_meta, read_options
from penstock.workloads.spool.serving.reading import Gone, Spooled, is_folder, read_prompt
from penstock.workloads.spool.submission import MAX_PROMPT
from penstock.workloads.spool.workspace import Workspace

MAX_DEPTH = 256
_PARENT = "parent"
_LOOKS = 10
"""How often the parents are read, while somebody moves them."""


class ParentFailed(Exception):
    """A job can't go on from its parent; says why."""


class NotYet(Exception):
    """The parent has not ended: the job waits for it."""


class History(Struct, frozen=True, kw_only=True):
    """What was said before a job, from the first job of its conversation on."""

    system: str = ""
    messages: tuple[Message, ...] = ()
    text: str = ""
    """The same as plain text, for a raw prompt."""


class Parents:
    """Reads the jobs that a job goes on from."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def history(self, job: Spooled) -> History:
        """Raises ParentFailed, NotYet, or Unfit if a parent's files are."""
        for _ in range(_LOOKS):
            try:
                return self._read(job)
            except Gone:  # a parent was cleaned or queued again while it was read: look again
                continue
        raise ParentFailed(f"a parent of this job, as {job.meta.parent}, is moved all the time")

    def _read(self, job: Spooled) -> History:
        """Gone if a parent's folder was taken away meanwhile."""
        system, turns, text, size = "", list[Message](), "", 0
        for folder in reversed(self._chain(job)):
            options = read_options(folder)
            prompt, answer = _said(folder)
            is_folder(folder)  # else what was read of it may be nothing
            size += len(prompt) + len(answer)
            if size > MAX_PROMPT:
                raise Unfit(_PARENT, f"the conversation so far is over {MAX_PROMPT} characters")
            system = options.system or system
            turns += options.messages
            if prompt:
                turns.append(Message(role="user", content=prompt))
            turns.append(Message(role="assistant", content=answer))
            text += prompt + answer
        return History(system=system, messages=tuple(turns), text=text)

    def _chain(self, job: Spooled) -> list[Path]:
        """The folders of its parents, the nearest first."""
        chain: list[Path] = []
        seen = {job.job_id}
        waiting, parent = False, job.meta.parent
        while parent:
            if not is_job_id(parent):
                raise Unfit(_PARENT, f"{parent[:40]!a} is no job id")
            if parent in seen:
                raise ParentFailed(f"the parents of this job go in a circle, by {parent}")
            if len(seen) > MAX_DEPTH:
                raise ParentFailed(f"this job has more than {MAX_DEPTH} parents")
            seen.add(parent)
            status = self._workspace.find(parent)
            waiting = waiting or status in (Status.QUEUED, Status.RUNNING)
            folder = self._ended(parent, status)
            chain.append(folder)
            parent = read_meta(folder).parent
            is_folder(folder)
        if waiting:
            raise NotYet(job.meta.parent)
        return chain

    def _ended(self, parent: str, status: Status) -> Path:
        if status is Status.FAILED:
            raise ParentFailed(f"its parent {parent} failed")
        if status is Status.MISSING:
            raise ParentFailed(f"its parent {parent} is missing")
        return self._workspace.of(status, parent)


def _said(folder: Path) -> tuple[str, str]:
    try:
        return read_prompt(folder, needed=False), read_text(folder / RESULT, MAX_PROMPT)
    except FileNotFoundError:
        is_folder(folder)
        raise ParentFailed(f"its parent {folder.name} has no text to go on from") from None
