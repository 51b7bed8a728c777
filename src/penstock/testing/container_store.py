"""What every `ContainerStore` must do, as tests. Subclass, make the store, and run pytest:

class TestMyStore(ContainerStoreContract):
    def make(self, folder):
        return MyContainerStore(folder / "jobs")
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.errors import (
    Conflict,
    IllegalMove,
    NotFound,
    StoreFailed,
    TooMany,
    Unavailable,
)
from penstock.core.machine import Step
from penstock.lifecycles.container import (
    CONTAINER,
    STORED,
    ContainerJobEvent,
    ContainerJobState,
)
from penstock.testing.aio import run_async
from penstock.testing.container_samples import FULL_END, a_record, an_end, bring_to, happen
from penstock.testing.samples import T0
from penstock.workloads.container.job import (
    Code,
    ContainerRecord,
    End,
    JobError,
    Priority,
)
from penstock.workloads.container.store import Change, ContainerStore, RecordQuery

_S, _E = ContainerJobState, ContainerJobEvent


async def names(store: ContainerStore, **conditions: Any) -> str:
    found = await store.find(RecordQuery(**conditions))
    return "".join(record.job_id for record in found)


class ContainerStoreContract(ABC):
    """The promises of `penstock.workloads.container.store.ContainerStore`."""

    @abstractmethod
    def make(self, folder: Path) -> ContainerStore:
        """A new, empty store; `folder` is a place of its own to keep it in."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ContainerStore]:
        store = self.make(tmp_path)
        yield store
        asyncio.run(store.close())

    # -- adding -------------------------------------------------------------------

    @run_async
    async def test_every_field_of_a_new_job_is_kept(self, store: ContainerStore) -> None:
        full = a_record(
            "full",
            priority=Priority.HIGH,
            body=b'{"job_id":"full","\xc3\xbc":[1.5,null]}',
            image="name:tag",
            memory_mb=64.5,
            cpus=0.25,
            labels={"team": "ü", "": "empty", "x" * 300: "long"},
            key="once",
        )
        added = await store.add(full)
        assert added == replace(full, seq=added.seq)
        assert added.seq > 0
        assert await store.get("full") == await store.by_key("once") == added
        without_body = replace(added, body=b"")
        assert await store.get("full", body=False) == without_body
        assert await store.find(RecordQuery()) == await store.unfinished() == [without_body]

    @pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 3 << 20])
    @run_async
    async def test_a_body_is_kept_byte_by_byte(self, store: ContainerStore, size: int) -> None:
        body = (bytes(range(256)) * (size // 256 + 1))[:size]
        await store.add(a_record("a", body=body, key="k"))
        await store.add(a_record("b", body=b"another"))
        for record in (await store.get("a"), await store.by_key("k")):
            assert record is not None
            assert record.body == body
        started = await store.change(Change(job_id="a", event=_E.START, at=T0))
        assert started.body == b"", "whoever wants it asks for it"
        record = await store.get("a")
        assert record is not None
        assert record.body == body, "a change leaves it as it is"

    @pytest.mark.parametrize("state", sorted(STORED))
    @run_async
    async def test_an_id_is_never_taken_twice(
        self, store: ContainerStore, state: ContainerJobState
    ) -> None:
        first = await bring_to(store, "a", state, body=b"first")
        with pytest.raises(Conflict, match="a already"):
            await store.add(a_record("a", body=b"second"))
        assert await store.get("a") == first
        assert sum((await store.tally()).values()) == 1

    @run_async
    async def test_a_key_brings_one_job_and_no_key_any_number(self, store: ContainerStore) -> None:
        await store.add(a_record("a", key="k"))
        with pytest.raises(Conflict, match="job a"):
            await store.add(a_record("b", key="k"))
        await store.add(a_record("c"))
        await store.add(a_record("d"))
        assert await store.by_key("") is None
        assert await store.by_key("K") is None
        assert await names(store) == "dca"

    @run_async
    async def test_a_queue_takes_so_many_and_no_more(self, store: ContainerStore) -> None:
        for name in "ab":
            await store.add(a_record(name), most_waiting=2)
        with pytest.raises(TooMany) as refused:
            await store.add(a_record("c"), most_waiting=2)
        assert refused.value.retry_after > 0
        assert await store.get("c") is None
        with pytest.raises(Conflict):
            await store.add(a_record("a"), most_waiting=2)
        await store.add(a_record("d"))
        await happen(store, "a", _E.START)
        await happen(store, "b", _E.CANCEL)
        await store.add(a_record("e"), most_waiting=2)
        with pytest.raises(TooMany):
            await store.add(a_record("f"), most_waiting=2)

    @run_async
    async def test_of_many_that_come_at_once_so_many_get_in(self, store: ContainerStore) -> None:
        adds = [store.add(a_record(f"j{n}"), most_waiting=7) for n in range(30)]
        ends = await asyncio.gather(*adds, return_exceptions=True)
        seqs = [end.seq for end in ends if isinstance(end, ContainerRecord)]
        assert len(seqs) == 7
        assert seqs == sorted(set(seqs))
        assert sum(isinstance(end, TooMany) for end in ends) == 23
        assert (await store.tally())[_S.QUEUED] == 7

    @run_async
    async def test_of_many_with_one_id_one_gets_in(self, store: ContainerStore) -> None:
        adds = [store.add(a_record("a", body=b"%d" % n)) for n in range(20)]
        ends = await asyncio.gather(*adds, return_exceptions=True)
        (added,) = [end for end in ends if isinstance(end, ContainerRecord)]
        assert sum(isinstance(end, Conflict) for end in ends) == 19
        assert await store.get("a") == added

    @run_async
    async def test_of_many_with_one_key_one_gets_in(self, store: ContainerStore) -> None:
        adds = [store.add(a_record(f"j{n}", key="k")) for n in range(20)]
        ends = await asyncio.gather(*adds, return_exceptions=True)
        (added,) = [end for end in ends if isinstance(end, ContainerRecord)]
        assert sum(isinstance(end, Conflict) for end in ends) == 19
        assert await store.by_key("k") == added

    @pytest.mark.parametrize(
        "fields", [{"state": _S.RUNNING}, {"state": _S.FAILED}, {"started_at": T0}]
    )
    @run_async
    async def test_what_is_not_new_is_not_added(
        self, store: ContainerStore, fields: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError, match="a new record is queued"):
            await store.add(a_record("a", **fields))
        assert await store.get("a") is None

    # -- changing -----------------------------------------------------------------

    @pytest.mark.parametrize(("state", "event"), list(product(sorted(STORED), _E)))
    @run_async
    async def test_the_table_says_what_may_happen(
        self, store: ContainerStore, state: ContainerJobState, event: ContainerJobEvent
    ) -> None:
        before = await bring_to(store, "a", state)
        change = Change(job_id="a", event=event, at=T0 + 9, end=an_end(event), container="late")
        step = CONTAINER.judge(state, event)
        if step is Step.ILLEGAL:
            with pytest.raises(IllegalMove):
                await store.change(change)
        else:
            await store.change(change)
        after = await store.get("a")
        assert after is not None
        if step is Step.MOVE:
            assert after.state is CONTAINER.after(state, event)
            assert after.container == "late"
            assert T0 + 9 in (after.started_at, after.finished_at)
        else:
            assert after == before
        tally = dict.fromkeys(STORED, 0) | {after.state: 1}
        assert await store.tally() == tally

    @run_async
    async def test_a_change_sets_what_it_names_and_nothing_else(
        self, store: ContainerStore
    ) -> None:
        added = replace(await store.add(a_record("a", labels={"x": "y"})), body=b"")
        named = await store.change(Change(job_id="a", at=T0 + 1, container="penstock-1"))
        assert named == replace(added, container="penstock-1")
        started = await store.change(Change(job_id="a", event=_E.START, at=T0 + 2, engine="docker"))
        assert started == replace(named, state=_S.RUNNING, started_at=T0 + 2, engine="docker")
        assert await store.get("a") == started
        same = await store.change(Change(job_id="a", at=T0 + 3))
        assert same == started

    @run_async
    async def test_every_field_of_an_end_is_kept(self, store: ContainerStore) -> None:
        await bring_to(store, "a", _S.RUNNING)
        change = Change(job_id="a", event=_E.FAIL, at=T0 + 5, end=FULL_END)
        ended = await store.change(change)
        assert ended == await store.get("a")
        assert ended.is_final
        assert (ended.state, ended.started_at, ended.finished_at) == (_S.FAILED, T0 + 1, T0 + 5)
        for name in set(End.__struct_fields__) - {"state"}:
            assert getattr(ended, name) == getattr(FULL_END, name), name

    @run_async
    async def test_a_cancelled_job_that_never_started_has_no_start(
        self, store: ContainerStore
    ) -> None:
        await store.add(a_record("a"))
        ended = await happen(store, "a", _E.CANCEL, at=T0 + 2, code=Code.CANCELLED)
        assert (ended.state, ended.started_at, ended.finished_at) == (_S.FAILED, None, T0 + 2)
        assert ended.error == JobError(Code.CANCELLED, "it failed")

    @run_async
    async def test_an_end_comes_only_with_the_event_that_ends(self, store: ContainerStore) -> None:
        before = await bring_to(store, "a", _S.QUEUED)
        for event in (None, _E.START):
            with pytest.raises(ValueError, match="ended comes with"):
                await store.change(Change(job_id="a", event=event, at=T0, end=FULL_END))
        assert await store.get("a") == before

    @run_async
    async def test_of_many_ends_the_first_is_kept(self, store: ContainerStore) -> None:
        await bring_to(store, "a", _S.RUNNING)
        events = [_E.FINISH, _E.FAIL, _E.CANCEL, _E.FAIL, _E.FINISH]
        changes = [
            store.change(Change(job_id="a", event=event, at=T0 + n, end=an_end(event)))
            for n, event in enumerate(events, start=10)
        ]
        ends = await asyncio.gather(*changes, return_exceptions=True)
        record = await store.get("a")
        assert record is not None
        (first,) = {end for end in map(_finish_of, ends) if end is not None}
        assert (record.state, record.finished_at) == first
        assert (await store.tally()) == dict.fromkeys(STORED, 0) | {record.state: 1}

    @run_async
    async def test_what_is_not_there_is_none_or_not_found(self, store: ContainerStore) -> None:
        assert await store.get("nobody") is None
        assert await store.get("nobody", body=False) is None
        assert await store.by_key("none") is None
        assert await store.find(RecordQuery()) == await store.unfinished() == []
        assert await store.tally() == dict.fromkeys(STORED, 0)
        assert await store.prune(T0) == []
        with pytest.raises(NotFound, match="nobody"):
            await store.change(Change(job_id="nobody", event=_E.START, at=T0))

    # -- finding ------------------------------------------------------------------

    @run_async
    async def test_jobs_are_found_by_any_of_their_marks_newest_first(
        self, store: ContainerStore
    ) -> None:
        blue, red = {"team": "blue"}, {"team": "red", "x": "y"}
        await bring_to(store, "a", _S.FINISHED, image="i1", labels=blue)
        await bring_to(store, "b", _S.FAILED, image="i2", labels=red, code=Code.TIMEOUT)
        await bring_to(store, "c", _S.RUNNING, image="i1", labels=red)
        await bring_to(store, "d", _S.FAILED, image="i1", code=Code.OOM_KILLED)
        await bring_to(store, "e", _S.QUEUED, image="i2", labels=blue)
        await bring_to(store, "f", _S.FAILED, image="i1", labels=blue, code=Code.TIMEOUT)
        assert await names(store) == "fedcba"
        assert await names(store, states=(_S.FAILED,)) == "fdb"
        assert await names(store, states=(_S.QUEUED, _S.RUNNING)) == "ec"
        assert await names(store, states=(_S.FAILED, _S.FINISHED, _S.FAILED)) == "fdba"
        assert await names(store, states=tuple(_S)) == "fedcba"
        assert await names(store, states=(_S.REJECTED, _S.NOT_FOUND)) == ""
        assert await names(store, image="i1") == "fdca"
        assert await names(store, image="i1", states=(_S.RUNNING, _S.FAILED)) == "fdc"
        assert await names(store, image="i") == ""
        assert await names(store, code=Code.TIMEOUT) == "fb"
        assert await names(store, code=Code.TIMEOUT, image="i2") == "b"
        assert await names(store, code=Code.TIMEOUT, states=(_S.RUNNING,)) == ""
        assert await names(store, label=("team", "blue")) == "fea"
        assert await names(store, label=("team", "red"), states=(_S.RUNNING,)) == "c"
        assert await names(store, label=("team", "blue"), image="i1") == "fa"
        assert await names(store, label=("team", "")) == ""
        assert await names(store, label=("blue", "team")) == ""
        assert await names(store, limit=2) == "fe"
        assert await names(store, limit=0) == await names(store, limit=-1) == ""
        assert await names(store, states=(_S.FAILED, _S.QUEUED), limit=2) == "fe"

    @pytest.mark.parametrize(
        "conditions",
        [
            {},
            {"states": (_S.FAILED, _S.RUNNING)},
            {"states": (_S.FAILED,), "code": Code.TIMEOUT},
            {"label": ("n", "1")},
            {"image": "i1"},
            {"image": "i1", "states": (_S.QUEUED, _S.RUNNING)},
        ],
    )
    @run_async
    async def test_pages_together_are_everything(
        self, store: ContainerStore, conditions: dict[str, Any]
    ) -> None:
        states = sorted(STORED)
        for n in range(24):
            marks: dict[str, Any] = {"image": f"i{n % 3}", "labels": {"n": str(n % 2)}}
            await bring_to(store, f"{n:02}", states[n // 3 % 4], code=Code.TIMEOUT, **marks)
        everything = await store.find(RecordQuery(**conditions, limit=1000))
        found: list[ContainerRecord] = []
        while page := await store.find(
            RecordQuery(**conditions, limit=3, before=found[-1].seq if found else None)
        ):
            assert len(page) <= 3
            found.extend(page)
        assert found == everything
        assert len(found) >= 4
        assert [record.seq for record in found] == sorted(
            (record.seq for record in found), reverse=True
        )

    @run_async
    async def test_unfinished_jobs_come_as_they_are_to_start(self, store: ContainerStore) -> None:
        await bring_to(store, "a", _S.QUEUED, priority=Priority.LOW)
        await bring_to(store, "b", _S.QUEUED, created_at=T0 + 9)
        await bring_to(store, "c", _S.RUNNING, priority=Priority.LOW)
        await bring_to(store, "d", _S.FINISHED)
        await bring_to(store, "e", _S.QUEUED, priority=Priority.HIGH)
        await bring_to(store, "f", _S.QUEUED, created_at=T0)
        await bring_to(store, "g", _S.FAILED)
        await bring_to(store, "h", _S.RUNNING, priority=Priority.HIGH)
        await bring_to(store, "i", _S.QUEUED, priority=Priority.HIGH)
        found = await store.unfinished()
        assert "".join(record.job_id for record in found) == "cheibfa"

    # -- forgetting ---------------------------------------------------------------

    @run_async
    async def test_old_ends_are_forgotten_and_nothing_else(self, store: ContainerStore) -> None:
        for n, name in enumerate("abcde"):
            marks: dict[str, Any] = {"labels": {"x": "y"}, "key": name, "body": b"body"}
            await bring_to(store, name, _S.FINISHED, at=T0 + 9 - n, **marks)
        await bring_to(store, "r", _S.RUNNING, at=T0)
        await bring_to(store, "q", _S.QUEUED)
        assert await store.prune(T0 + 5) == []
        assert await store.prune(T0 + 8) == ["e", "d", "c"]
        assert await store.prune(T0 + 8) == []
        assert await names(store) == "qrba"
        assert await names(store, label=("x", "y")) == "ba"
        assert await store.get("e") is None
        assert await store.by_key("e") is None
        assert (await store.tally())[_S.FINISHED] == 2
        again = await store.add(a_record("e", key="e"))
        assert again.seq == 8, "no number is given twice"

    @run_async
    async def test_what_ended_first_goes_when_there_are_too_many(
        self, store: ContainerStore
    ) -> None:
        ends = [_S.FINISHED, _S.FAILED]
        for n, name in enumerate("abcdef"):
            await bring_to(store, name, ends[n % 2], at=T0 + 9 - n)
        await bring_to(store, "q", _S.QUEUED)
        assert await store.prune(T0, keep=6) == []
        assert await store.prune(T0, keep=4) == ["f", "e"]
        assert await store.prune(T0 + 8, keep=3) == ["d", "c"]
        assert await store.prune(T0, keep=1) == ["b"]
        assert await store.prune(T0, keep=1) == []
        assert await names(store) == "qa"

    @run_async
    async def test_forgetting_takes_no_more_at_a_time_than_it_is_told(
        self, store: ContainerStore
    ) -> None:
        for n in range(7):
            await bring_to(store, str(n), _S.FAILED, at=T0 + n)
        gone = [await store.prune(T0 + 99, keep=1, limit=3) for _ in range(4)]
        assert gone == [["0", "1", "2"], ["3", "4", "5"], ["6"], []]
        assert await store.prune(T0 + 99, limit=0) == []

    @run_async
    async def test_a_number_is_not_given_twice_though_the_newest_is_forgotten(
        self, store: ContainerStore
    ) -> None:
        last = await bring_to(store, "a", _S.FINISHED)
        assert await store.prune(T0 + 99) == ["a"]
        assert (await store.add(a_record("b"))).seq > last.seq

    # -- its end ------------------------------------------------------------------

    @run_async
    async def test_a_closed_store_takes_nothing_more(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        await store.add(a_record("a"))
        await store.close()
        await store.close()
        with pytest.raises(Unavailable):
            await store.add(a_record("b"))
        with pytest.raises(Unavailable):
            await store.change(Change(job_id="a", event=_E.START, at=T0))
        with pytest.raises(Unavailable):
            await store.prune(T0)

    @run_async
    async def test_closing_waits_for_what_is_under_way(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        under_way = asyncio.ensure_future(store.add(a_record("a")))
        await asyncio.sleep(0)
        await store.close()
        (end,) = await asyncio.gather(under_way, return_exceptions=True)
        assert isinstance(end, Unavailable | ContainerRecord)

    @run_async
    async def test_many_jobs_live_their_lives_at_once(self, store: ContainerStore) -> None:
        async def live(n: int) -> None:
            name, event = str(n), (_E.FINISH, _E.FAIL, _E.CANCEL)[n % 3]
            await store.add(a_record(name, body=b"%d" % n, labels={"n": name}))
            await happen(store, name, _E.START)
            assert (await happen(store, name, event)).body == b"%d" % n

        await asyncio.gather(*map(live, range(60)))
        assert await store.unfinished() == []
        assert await store.tally() == dict.fromkeys(STORED, 0) | {_S.FINISHED: 20, _S.FAILED: 40}
        assert len({record.seq for record in await store.find(RecordQuery(limit=100))}) == 60


def _finish_of(end: object) -> tuple[ContainerJobState, float | None] | None:
    return (end.state, end.finished_at) if isinstance(end, ContainerRecord) else None


class FallibleContainerStoreContract(ContainerStoreContract):
    """The same, for a store that can be made to fail."""

    @abstractmethod
    def failing(self, store: ContainerStore) -> AbstractContextManager[None]:
        """Within this context, commits that add something fail."""

    @run_async
    async def test_a_failed_commit_leaves_nothing_and_the_store_goes_on(
        self, store: ContainerStore
    ) -> None:
        before = await bring_to(store, "a", _S.RUNNING)
        with self.failing(store):
            adds = [store.add(a_record(f"j{n}", body=bytes(90_000))) for n in range(3)]
            ends = await asyncio.gather(*adds, return_exceptions=True)
            assert [type(end) for end in ends if not isinstance(end, StoreFailed)] == []
            assert await store.find(RecordQuery()) == [replace(before, body=b"")]
            assert (await store.tally())[_S.QUEUED] == 0
        ended = await happen(store, "a", _E.FINISH)
        assert ended.state is _S.FINISHED
        assert (await store.add(a_record("j0", body=bytes(90_000)))).seq > before.seq
