"""What each write does to the file. Every method runs within a transaction of its caller."""

from __future__ import annotations

from collections.abc import Mapping

import apsw

from penstock.workloads.container import store_rules
from penstock.workloads.container.job import ContainerRecord
from penstock.workloads.container.storage.sqlite import rows
from penstock.workloads.container.storage.sqlite.schema import FINAL
from penstock.workloads.container.store import Change

_BITE = 16 << 20
"""Bytes of bodies after which a pruning stops, until it is asked again."""


class Writing:
    """The writes of `ContainerStore`."""

    def __init__(self, writer: apsw.Connection, sql: Mapping[str, str]) -> None:
        self._writer = writer
        self._cursor = writer.cursor()
        self._sql = sql

    def add(self, record: ContainerRecord, most_waiting: int) -> int:
        """Its `seq`."""
        self._refuse_taken(record)
        if most_waiting and self._rows("queued")[0][0] >= most_waiting:
            raise store_rules.queue_full(most_waiting)
        self._cursor.execute(self._sql["insert"], rows.new_row(record))
        seq = self._writer.last_insert_rowid()
        self._cursor.execute(self._sql["insert_body"], (seq, record.body))
        for name, value in record.labels.items():
            self._cursor.execute(self._sql["insert_label"], (seq, name, value))
        return seq

    def _refuse_taken(self, record: ContainerRecord) -> None:
        if self._rows("taken", record.job_id):
            raise store_rules.id_taken(record.job_id)
        if record.key and (held := self._rows("key_taken", record.key)):
            raise store_rules.key_taken(record.key, held[0][0])

    def change(self, change: Change) -> ContainerRecord:
        found = self._rows("by_id", change.job_id)
        if not found:
            raise store_rules.missing(change.job_id)
        before = rows.read(found[0])
        after = store_rules.advance(before, change)
        if after.state is not before.state:
            self._cursor.execute(self._sql["move"], rows.moved_row(after))
        elif after is not before:
            values = (after.container, after.engine, after.seq)
            self._cursor.execute(self._sql["set_place"], values)
        return after

    def prune(self, finished_before: float, keep: int, limit: int) -> list[str]:
        beyond = self._final_count() - keep if keep else 0
        gone: list[str] = []
        size = 0
        for seq, job_id, finished_at, bytes_ in self._rows("oldest", max(limit, 0)):
            is_old = finished_at < finished_before or len(gone) < beyond
            if not is_old or size > _BITE:
                break
            self._cursor.execute(self._sql["forget"], (seq,))
            gone.append(job_id)
            size += bytes_
        return gone

    def _final_count(self) -> int:
        counts: dict[str, int] = dict(self._rows("tally"))
        return sum(counts[state] for state in FINAL)

    def _rows(self, query: str, *values: object) -> list[rows.Row]:
        # To its end, or the file would stay as it is now for what is read next.
        return self._cursor.execute(self._sql[query], values).fetchall()
