"""Many callers, one commit: what they want gathers while the commit before is under way.

Each caller's work runs in the transaction that all of them share, behind a savepoint, so
that one which is refused takes nothing of the others with it. Another process may be
writing the same file; then this one waits for its turn in a thread.

Statements run in the event loop, and so does the flush of a small commit, because that is
soonest done; the flush of a large one, or any on a slow disk, is waited for in a thread.

Each kind of record has its own file and its own `GroupCommit`, which carries the kind's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import apsw

from penstock.adapters.sqlite.database import storage_errors
from penstock.core.errors import StoreFailed, Unavailable
from penstock.ports.failpoint import failpoint
from penstock.ports.store import Durability

T = TypeVar("T")
Work = Callable[[list[str]], T]
"""Writes, and adds the ids of the jobs whose change listeners hear of to a list."""

_FEW = 8
"""Callers up to which a commit does not look whether more are coming."""
_SHORT = {Durability.DISK: 64}
"""Rows up to which a commit is waited for in the event loop."""
_SHORT_UNFLUSHED = 512
"""The same where a commit need not reach the disk."""
_TURN = 15_000
"""Milliseconds to wait, in a thread, for another process to finish its writing."""
_READING = 5_000
"""Milliseconds to wait for a file that is just being opened or closed by another."""


class _Caller:
    """One who waits for a commit."""

    __slots__ = ("answer", "error", "future", "is_large", "work")

    def __init__(self, work: Work[Any], future: asyncio.Future[Any], is_large: bool) -> None:
        self.work = work
        self.future = future
        self.is_large = is_large
        self.answer: Any = None
        self.error: Exception | None = None


class GroupCommit:
    """Runs callers' work in transactions; tells of the jobs that changed after each."""

    def __init__(
        self,
        name: str,
        writer: apsw.Connection,
        path: Path,
        *,
        told: Callable[[Sequence[str]], None] | None = None,
        durability: Durability,
        slow_disk: bool = False,
    ) -> None:
        self._name, self._writer, self._path, self._told = name, writer, path, told
        self._cursor = writer.cursor()
        self._short = -1 if slow_disk else _SHORT.get(durability, _SHORT_UNFLUSHED)
        self._thread = ThreadPoolExecutor(1, f"penstock-{name}s")
        self._waiting: list[_Caller] = []
        self._committing: asyncio.Handle | asyncio.Task[None] | None = None
        self._crowd = 0
        """How many waited when a commit was last put off for more."""
        self._closed = False

    @property
    def is_in_thread(self) -> bool:
        """Whether a thread has the connection, so that nobody else may use it."""
        return isinstance(self._committing, asyncio.Task)

    async def run(self, work: Work[T], *, is_large: bool = False) -> T:
        """The answer of `work`, once what it wrote is durable; or what it raised.

        `is_large` says that it writes much in few rows.
        """
        if self._closed:
            raise Unavailable(f"the {self._name} store is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Caller(work, future, is_large))
        self._commit_soon()
        return await future

    def _commit_soon(self) -> None:
        if self._committing is None:
            self._committing = asyncio.get_running_loop().call_soon(self._commit)

    def _commit(self) -> None:
        self._committing = None
        if _FEW < len(self._waiting) > self._crowd:
            # Many come at once, and some are still on their way through this very loop.
            self._crowd = len(self._waiting)
            self._commit_soon()
            return
        self._crowd = 0
        callers = self._gather()
        try:
            with storage_errors(self._path):
                if self._begin():
                    self._write(callers)
                else:
                    self._go_on_in_task(self._begin_in_thread(callers), callers)
        except Exception as error:
            self._give_up(callers, error)

    def _gather(self) -> list[_Caller]:
        """Who is still there: one who was cancelled meanwhile wants nothing."""
        callers, self._waiting = self._waiting, []
        return [caller for caller in callers if not caller.future.done()]

    def _begin(self, patience: int = 0) -> bool:
        """Open a transaction; False if another process is in the middle of one."""
        self._writer.set_busy_timeout(patience)
        try:
            self._cursor.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            if patience:
                raise
            return False
        finally:
            self._writer.set_busy_timeout(_READING)
        return True

    def _write(self, callers: list[_Caller]) -> None:
        """Do what everybody wants, then flush it here if that is short, else in a thread.

        Only what the disk refuses is raised.
        """
        changed: list[str] = []
        before = self._writer.total_changes()
        for caller in callers:
            self._try(caller, changed, alone=len(callers) == 1)
        rows = self._writer.total_changes() - before
        if not self._writer.in_transaction or rows == 0:
            self._undo()
            self._answer(callers, changed)
        elif rows > self._short or any(caller.is_large for caller in callers):
            self._go_on_in_task(self._commit_in_thread(callers, changed), callers)
        else:
            self._flush()
            self._publish(callers, changed)

    def _try(self, caller: _Caller, changed: list[str], *, alone: bool) -> None:
        """Run one caller's work. Of work that raises nothing stays.

        Only what the disk refuses is everybody's trouble, and goes up.
        """
        told = len(changed)
        if not alone:
            self._cursor.execute("SAVEPOINT caller")
        try:
            caller.answer = caller.work(changed)
        except Exception as error:
            if isinstance(error, apsw.Error) and not isinstance(error, apsw.ConstraintError):
                raise
            caller.error = _translated(error, self._path)
            del changed[told:]
            self._cursor.execute("ROLLBACK" if alone else "ROLLBACK TO caller")
        if not alone:
            self._cursor.execute("RELEASE caller")

    def _flush(self) -> None:
        failpoint(f"before-{self._name}-commit")
        self._cursor.execute("COMMIT")

    async def _commit_in_thread(self, callers: list[_Caller], changed: list[str]) -> None:
        try:
            with storage_errors(self._path):
                await self._in_thread(self._flush)
        except Exception as error:
            self._committing = None
            self._give_up(callers, error)
        else:
            self._committing = None
            self._publish(callers, changed)

    async def _begin_in_thread(self, callers: list[_Caller]) -> None:
        try:
            with storage_errors(self._path):
                await self._in_thread(partial(self._begin, _TURN))
                self._committing = None
                self._write(callers)
        except Exception as error:
            self._committing = None
            self._give_up(callers, error)

    async def _in_thread(self, work: Callable[[], Any]) -> None:
        await to_the_end(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def _go_on_in_task(self, work: Coroutine[Any, Any, None], callers: list[_Caller]) -> None:
        self._committing = task = asyncio.get_running_loop().create_task(work)

        def finish(task: asyncio.Task[None]) -> None:
            if self._committing is task:  # it was cancelled before it began
                self._committing = None
                self._give_up(callers, Unavailable(f"the {self._name} store is going down"))

        task.add_done_callback(finish)

    def _undo(self) -> None:
        if self._writer.in_transaction:
            self._cursor.execute("ROLLBACK")

    def _give_up(self, callers: list[_Caller], error: Exception) -> None:
        """Nothing was written; everybody hears why."""
        self._undo()
        for caller in callers:
            caller.error = caller.error or error
        self._answer(callers, [])

    def _publish(self, callers: list[_Caller], changed: list[str]) -> None:
        failpoint(f"after-{self._name}-commit")
        self._answer(callers, changed)

    def _answer(self, callers: list[_Caller], changed: list[str]) -> None:
        """What was committed is now true: tell the listeners, then the callers."""
        if changed and self._told is not None:
            self._told(changed if len(changed) == 1 else list(dict.fromkeys(changed)))
        for caller in callers:
            if caller.future.done():
                continue
            if caller.error is not None:
                caller.future.set_exception(caller.error)
            else:
                caller.future.set_result(caller.answer)
        if self._waiting:
            self._commit_soon()

    async def close(self) -> None:
        """Finish what is under way and what waits."""
        self._closed = True
        while self._committing is not None:
            if isinstance(self._committing, asyncio.Task):
                await asyncio.wait((self._committing,))
            else:
                self._committing.cancel()
                self._commit()
        self._thread.shutdown()


async def to_the_end(future: asyncio.Future[T]) -> T:
    """Wait for a thread even if the loop is shut down meanwhile: it can't be stopped."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((future,))
    return future.result()


def _translated(error: Exception, path: Path) -> Exception:
    if not isinstance(error, apsw.Error):
        return error
    refused = StoreFailed(f"the database {path} refused: {error}")
    refused.__cause__ = error
    return refused
