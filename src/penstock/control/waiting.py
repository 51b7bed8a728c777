"""What waits for something other than a worker: for people, for its parents, to be read again."""

from __future__ import annotations

from itertools import islice

from penstock.control.board import Board
from penstock.control.endings import cancellation
from penstock.control.holds import expiry
from penstock.control.judge import Judged
from penstock.control.store_retry import RetryingStore
from penstock.core.transition import Change
from penstock.lifecycles.canonical import WAITING

_READ = 2000
"""Records read again in one turn at most."""
_ENDED = 500
"""Jobs that waited in vain and are ended in one commit, at most."""
_LOOKED_UP = 500
"""Parents looked up in one turn at most."""


class WaitingRoom:
    """Looks after the board's waiting jobs; each call does a bounded part of what is due."""

    def __init__(self, board: Board, store: RetryingStore) -> None:
        self._board, self._store = board, store

    @property
    def is_not_done(self) -> bool:
        """Whether there is more to do at once."""
        board, parents = self._board, self._board.dependencies
        return bool(
            parents.unknown
            or parents.doomed
            or board.unread
            or len(board.unjudged) > len(board.doubtful)
        )

    async def call_up(self, now: float) -> list[Change]:
        """Read again what must be judged again; end what waited in vain."""
        board = self._board
        if board.unread:
            asked = list(islice(board.unread, _READ))
            board.read_again(asked, await self._store.fetch(asked))
        ended: list[Change] = [expiry(job, now) for job in board.take_expired(now, _ENDED)]
        if board.dependencies.doomed:
            ended.extend(await self._end_orphans(now))
        return ended

    async def _end_orphans(self, now: float) -> list[Change]:
        parents = self._board.dependencies
        reasons = dict(islice(parents.doomed.items(), _ENDED))
        jobs = {job.seq: job for job in await self._store.fetch(list(reasons))}
        ended: list[Change] = []
        for seq, why in reasons.items():
            if (job := jobs.get(seq)) is not None and job.state in WAITING:
                ended.append(cancellation(job, "PARENT_FAILED", why, now))
            else:
                parents.forget(seq)
        return ended

    async def ask_for_parents(self, judged: Judged) -> None:
        """Look up the parents that nobody knows of; queue the jobs that need not wait."""
        board, parents = self._board, self._board.dependencies
        for parent_id in list(islice(parents.unknown, _LOOKED_UP)):
            parents.look_up(parent_id, await self._store.get(parent_id))
        if parents.released:
            released = parents.take_released()
            for seq in released:
                if (child := judged.children.get(seq)) is not None:
                    board.queue(*child)
            board.release(released)
