"""Reading the whole store for what should not be there, and forgetting what is old."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import apsw

from penstock.adapters.sqlite import rows
from penstock.core.transition import BrokenLog, Folded, fold
from penstock.ports.store import Mismatch, Pruned, Verified

Read = Callable[..., Iterable[rows.Row]]


def verify(read: Read, sql: Mapping[str, str], codec: rows.JournalCodec) -> Verified:
    """Fold each job's log and compare it with the record, walking both in step.

    The reading must be of one state of the file.
    """
    jobs = transitions = 0
    counted: Counter[tuple[str, int]] = Counter()
    mismatches: list[Mismatch] = []
    logs = groupby(read(sql["whole_journal"]), key=itemgetter(0))
    pending = next(logs, None)
    for row in read(sql["all_jobs"]):
        jobs += 1
        job = rows.read_job(row)
        counted[job.request.tenant, row[2]] += 1
        while pending is not None and pending[0] < job.seq:
            mismatches.append(Mismatch(f"seq {pending[0]}", "has a log but no record"))
            pending = next(logs, None)
        entries = []
        if pending is not None and pending[0] == job.seq:
            entries = [step for row in pending[1] for step in codec.read(job.job_id, row[1:])]
            pending = next(logs, None)
        transitions += len(entries)
        try:
            folded = fold(entries)
        except BrokenLog as error:
            mismatches.append(Mismatch(job.job_id, str(error)))
            continue
        if folded != (recorded := Folded.of(job)):
            mismatches.append(Mismatch(job.job_id, _difference(folded, recorded)))
    for seq, _ in _rest(pending, logs):
        mismatches.append(Mismatch(f"seq {seq}", "has a log but no record"))
    mismatches.extend(_miscounted(counted, read(sql["tally"])))
    return Verified(jobs, transitions, tuple(mismatches))


def _miscounted(counted: Counter[tuple[str, int]], tally: Iterable[rows.Row]) -> Iterator[Mismatch]:
    told = {(tenant, state): count for tenant, state, count in tally if count}
    for tenant, state in sorted(told.keys() | counted.keys()):
        have, say = counted[tenant, state], told.get((tenant, state), 0)
        if have != say:
            problem = (
                f"tenant {tenant} has {have} jobs that are {rows.STATES[state]}, it says {say}"
            )
            yield Mismatch("the tally", problem)


def _rest(pending: object, logs: Iterator[object]) -> Iterator[tuple[int, object]]:
    while pending is not None:
        yield pending  # type: ignore[misc]
        pending = next(logs, None)


def _difference(folded: Folded, recorded: Folded) -> str:
    parts = [
        f"{name} is {getattr(recorded, name)!r}, its log says {getattr(folded, name)!r}"
        for name in Folded.__struct_fields__
        if getattr(folded, name) != getattr(recorded, name)
    ]
    return "; ".join(parts)


def prunable(
    read: Read,
    sql: Mapping[str, str],
    finished_before: float,
    limit: int,
    awaited: Container[str],
) -> dict[str, int]:
    """The oldest jobs that ended before a time, and that no other job waits for.

    Jobs come in the order of acceptance, so the walk ends at the first that was accepted
    too late to qualify, and costs nothing when there is nothing to do.
    """
    found: dict[str, int] = {}
    retries: set[str | None] = set()
    for seq, job_id, successor, finished_at, accepted_at in read(sql["prunable"]):
        if accepted_at >= finished_before or len(found) >= limit:
            break
        if job_id in awaited or job_id in retries:
            retries.add(successor)
        elif finished_at is not None and finished_at < finished_before:
            found[job_id] = seq
    return found


def delete(
    writer: apsw.Connection, sql: Mapping[str, str], seqs: Sequence[int]
) -> tuple[Pruned, dict[tuple[str, int], int]]:
    """Remove these jobs with their history and output. Runs inside a transaction.

    Answers also what that does to the tally.
    """
    for mark, last in (("seq", "last_seq"), ("journal", "last_row")):
        writer.execute(sql["raise_mark"], (mark, writer.execute(sql[last]).get))
    gone: list[rows.Row] = writer.execute(sql["prune_count"], (json.dumps(list(seqs)),)).fetchall()
    writer.executemany(sql["count_up"], [(state, tenant, -n) for state, tenant, n in gone])
    writer.execute(sql["tidy_tally"])
    counts = []
    for name in ("prune_job", "prune_journal", "prune_log"):
        before = writer.total_changes()
        writer.executemany(sql[name], [(seq,) for seq in seqs])
        counts.append(writer.total_changes() - before)
    return Pruned(*counts), {(tenant, state): -n for state, tenant, n in gone}
