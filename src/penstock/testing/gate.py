"""What every `Ledger` must do for the gate: verdicts, unique keys, counts, facts, audit."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.control.ledger import Ledger
from penstock.core.job import Unique, UniqueScope
from penstock.core.ledger import ChangeOutcome
from penstock.core.verdict import (
    ApprovalTerms,
    Constraints,
    Decision,
    Hold,
    Rate,
    SafetyVerdict,
    Vote,
)
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.store import AuditEntry, AuditQuery, JobQuery
from penstock.testing.aio import run_async
from penstock.testing.samples import T0, accept, found, move, names, one, succeeded, verdicts

_S, _E = JobState, JobEvent

VERDICT = SafetyVerdict(
    Decision.REQUIRE_APPROVAL,
    "big-spender",
    "snap1",
    "costs too much",
    constraints=Constraints(max_runtime=2.5, max_retries=0, network=(), read_only=True),
    approval=ApprovalTerms(needed=2, approvers=("ops-*",)),
    rate=Rate(3, 60.0),
)
HOLD = Hold("big-spender", "snap1", "hash", T0, T0 + 60, ApprovalTerms(needed=2))
ONE_VOTE = Hold(
    "big-spender",
    "snap1",
    "hash",
    T0,
    T0 + 60,
    ApprovalTerms(needed=2),
    (Vote("bob", T0 + 1, "fine"),),
)
APPROVED = Hold(
    "big-spender", "snap1", "hash", T0, T0 + 60, ApprovalTerms(), (Vote("bob", T0 + 1),)
)


def unique(key: str = "k", **terms: Any) -> dict[str, Any]:
    return {"unique": Unique(key, **terms)}


class GateContract:
    """The promises of `penstock.ports.store.Ledger` about all that."""

    # -- verdicts and holds -------------------------------------------------------

    @run_async
    async def test_a_verdict_and_a_hold_are_kept_with_the_move_that_brings_them(
        self, store: Ledger
    ) -> None:
        await store.apply([accept("a"), accept("b")])
        await store.apply([move("a", _E.SCHEDULE, _E.PARK, verdict=VERDICT, hold=HOLD)])
        for job in (await one(store, "a"), *await store.fetch([1]), (await found(store))[-1]):
            assert (job.verdict, job.hold) == (VERDICT, HOLD)
        assert (await one(store, "b")).verdict is None
        assert (await one(store, "b")).hold is None

    @run_async
    async def test_a_verdict_stays_through_what_follows(self, store: Ledger) -> None:
        held = move("a", _E.SCHEDULE, _E.PARK, verdict=VERDICT, hold=HOLD)
        await store.apply([accept("a"), held])
        await store.apply([move("a", _E.APPROVE, hold=ONE_VOTE)])
        assert (await one(store, "a")).hold == ONE_VOTE
        await store.apply([move("a", _E.APPROVE, hold=APPROVED)])
        await store.apply([move("a", _E.DISPATCH)])
        await store.apply([move("a", _E.SUCCEED, result=succeeded("a"))])
        (job,) = await found(store)
        assert (job.state, job.verdict, job.hold) == (_S.SUCCEEDED, VERDICT, APPROVED)
        events = [entry.event for entry in await store.history("a")]
        assert events[1:5] == [_E.SCHEDULE, _E.PARK, _E.APPROVE, _E.APPROVE]
        assert (await store.verify()).mismatches == ()

    @run_async
    async def test_a_job_awaits_approval_until_it_has_enough(self, store: Ledger) -> None:
        await store.apply([accept(name, tenant=f"t{i % 2}") for i, name in enumerate("abcde")])
        held = [move(n, _E.SCHEDULE, _E.PARK, verdict=VERDICT, hold=HOLD) for n in "abcd"]
        await store.apply(held)
        await store.apply(
            [
                move("b", _E.APPROVE, hold=APPROVED),
                move("c", _E.DENY),
                move("d", _E.APPROVE, hold=ONE_VOTE),
            ]
        )
        assert await names(store, awaiting_approval=True) == "da"
        assert await names(store, awaiting_approval=True, tenant="t1") == "d"
        assert await names(store, awaiting_approval=True, states=(_S.DENIED,)) == ""
        assert await names(store, awaiting_approval=False) == "ecb"

    # -- unique keys --------------------------------------------------------------

    @run_async
    async def test_a_unique_key_is_taken_until_its_job_has_ended(self, store: Ledger) -> None:
        await store.apply([accept("a", **unique())])
        for events in ((), (_E.SCHEDULE, _E.DISPATCH), (_E.START,)):
            if events:
                await store.apply([move("a", *events)])
            (answer,) = await store.apply([accept("b", **unique())])
            assert answer.verdict is ChangeOutcome.REPEATED
            assert answer.job == await one(store, "a")
        await store.apply([move("a", _E.SUCCEED, result=succeeded("a"))])
        assert verdicts(await store.apply([accept("b", **unique())])) == "M"
        assert verdicts(await store.apply([accept("c", **unique())])) == "R"

    @run_async
    async def test_a_unique_key_is_of_its_tenant_and_no_other_key(self, store: Ledger) -> None:
        answers = await store.apply(
            [
                accept("a", tenant="t1", **unique()),
                accept("b", tenant="t2", **unique()),
                accept("c", tenant="t1", **unique("other")),
                accept("d", tenant="t1", idempotency_key="k"),
                accept("e", tenant="t1", **unique()),
            ]
        )
        assert verdicts(answers) == "MMMMR"

    @run_async
    async def test_a_unique_key_is_judged_as_the_same_commit_leaves_it(self, store: Ledger) -> None:
        answers = await store.apply(
            [
                accept("a", **unique()),
                accept("b", **unique()),
                move("a", _E.CANCEL),
                accept("c", **unique()),
                accept("d", **unique()),
            ]
        )
        assert verdicts(answers) == "MRMMR"
        again = await store.apply([move("c", _E.CANCEL), accept("e", **unique())])
        assert verdicts(again) == "MM"

    @run_async
    async def test_a_key_for_the_waiting_is_free_once_its_job_is_with_a_worker(
        self, store: Ledger
    ) -> None:
        waiting = unique(scope=UniqueScope.WAITING)
        assert verdicts(await store.apply([accept("a", **waiting), accept("b", **waiting)])) == "MR"
        await store.apply([move("a", _E.SCHEDULE, _E.DISPATCH)])
        assert verdicts(await store.apply([accept("c", **waiting), accept("d", **waiting)])) == "MR"

    @run_async
    async def test_a_key_for_a_time_is_taken_whatever_became_of_its_job(
        self, store: Ledger
    ) -> None:
        hourly = unique(period=3600.0)
        await store.apply([accept("a", **hourly), move("a", _E.CANCEL)])
        assert verdicts(await store.apply([accept("b", at=T0 + 3599, **hourly)])) == "R"
        assert verdicts(await store.apply([accept("c", at=T0 + 3600, **hourly)])) == "M"

    @pytest.mark.parametrize("terms", [{}, {"scope": UniqueScope.WAITING}, {"period": 3600.0}])
    @run_async
    async def test_a_retry_has_the_unique_key_of_the_job_that_it_follows(
        self, store: Ledger, terms: dict[str, Any]
    ) -> None:
        await store.apply([accept("a", **unique(**terms)), move("a", _E.SCHEDULE, _E.DISPATCH)])
        again = accept("b", parent_job_id="a", retry_number=1, **unique(**terms))
        (answer,) = await store.apply([move("a", _E.FAIL, attempt=1, then=(again,))])
        assert answer.moved
        assert (await one(store, "b")).state is _S.PENDING
        (third,) = await store.apply([accept("c", **unique(**terms))])
        assert third.verdict is ChangeOutcome.REPEATED
        assert third.job == await one(store, "b")

    @run_async
    async def test_a_waiting_job_keeps_others_out_though_a_newer_one_no_longer_does(
        self, store: Ledger
    ) -> None:
        waiting = unique(scope=UniqueScope.WAITING)
        await store.apply([accept("a", **waiting), move("a", _E.SCHEDULE, _E.DISPATCH)])
        await store.apply([accept("b", **waiting)])
        retry = accept("a2", parent_job_id="a", retry_number=1, **waiting)
        await store.apply([move("a", _E.FAIL, attempt=1, then=(retry,))])
        await store.apply([move("a2", _E.SCHEDULE, _E.DISPATCH)])
        (answer,) = await store.apply([accept("c", **waiting)])
        assert answer.verdict is ChangeOutcome.REPEATED
        assert answer.job == await one(store, "b")

    @run_async
    async def test_a_late_retry_is_refused_if_another_job_has_the_key_now(
        self, store: Ledger
    ) -> None:
        await store.apply([accept("a", **unique()), move("a", _E.CANCEL)])
        await store.apply([accept("b", **unique())])
        before = await one(store, "a")
        retry = move("a", _E.NOTE, then=(accept("c", parent_job_id="a", **unique()),))
        (answer,) = await store.apply([retry])
        assert answer.verdict is ChangeOutcome.REFUSED
        assert "job b has its unique key" in answer.why
        assert await one(store, "a") == before
        assert await store.get("c") is None
        _, answer = await store.apply([move("b", _E.CANCEL), retry])
        assert answer.moved
        assert (await one(store, "a")).successor == "c"

    @run_async
    async def test_a_late_retry_is_not_kept_out_by_the_job_that_it_retries(
        self, store: Ledger
    ) -> None:
        daily = unique(period=86_400.0)
        await store.apply([accept("a", **daily), move("a", _E.CANCEL)])
        retry = move("a", _E.NOTE, then=(accept("b", parent_job_id="a", **daily),))
        assert verdicts(await store.apply([retry])) == "M"
        assert (await one(store, "b")).state is _S.PENDING

    @run_async
    async def test_what_was_pruned_frees_its_unique_key(self, store: Ledger) -> None:
        forever = unique(period=1e9)
        await store.apply([accept("a", **forever), move("a", _E.CANCEL)])
        await store.prune(T0 + 1, limit=10)
        assert verdicts(await store.apply([accept("b", at=T0 + 2, **forever)])) == "M"

    # -- counting -----------------------------------------------------------------

    @run_async
    async def test_the_tally_counts_each_tenant_and_all(self, store: Ledger) -> None:
        await store.apply([accept(name, tenant="t1") for name in "abc"])
        await store.apply([accept("x", tenant="t2"), move("x", _E.CANCEL)])
        await store.apply([move("a", _E.SCHEDULE, _E.DISPATCH), move("b", _E.CANCEL)])
        retry = accept("a2", tenant="t1")
        await store.apply([move("a", _E.FAIL, attempt=1, then=(retry,)), move("c", _E.NOTE)])
        mine = {_S.PENDING: 2, _S.CANCELLED: 1}
        assert await store.tally("t1") == mine
        assert await store.tally("t2") == {_S.CANCELLED: 1}
        assert await store.tally("t3") == {}
        assert await store.tally() == {**mine, _S.CANCELLED: 2}
        assert (await store.verify()).mismatches == ()

    @run_async
    async def test_a_job_and_its_retries_are_counted_once_and_tries_apart(
        self, store: Ledger
    ) -> None:
        await store.apply([accept(name, tenant="t1") for name in "ab"])
        await store.apply([move(name, _E.SCHEDULE, _E.DISPATCH) for name in "ab"])
        again = accept("a2", tenant="t1", first_try="a", parent_job_id="a")
        end = move("a", _E.FAIL, attempt=1, then=(again,))
        await store.apply([end, move("b", _E.FAIL, attempt=1)])
        assert await store.tally("t1") == {_S.PENDING: 1, _S.FAILED: 1}
        by_hand = accept("b2", tenant="t1", first_try="b", parent_job_id="b")
        await store.apply([move("b", _E.NOTE, then=(by_hand,)), move("a2", _E.CANCEL)])
        assert await store.tally() == {_S.PENDING: 1, _S.CANCELLED: 1}
        assert [await store.retried(tenant) for tenant in (None, "t1", "t2")] == [2, 2, 0]
        assert (await store.verify()).mismatches == ()
        await store.prune(T0 + 1, limit=1)
        assert await store.tally() == {_S.PENDING: 1, _S.CANCELLED: 1}
        assert await store.retried() == 1
        assert (await store.verify()).mismatches == ()

    @run_async
    async def test_what_was_pruned_counts_no_more(self, store: Ledger) -> None:
        await store.apply([accept(name, tenant="t1") for name in "abc"])
        await store.apply([move("a", _E.CANCEL), move("b", _E.CANCEL)])
        await store.prune(T0 + 1, limit=1)
        assert await store.tally("t1") == {_S.PENDING: 1, _S.CANCELLED: 1}
        await store.prune(T0 + 1, limit=10)
        assert await store.tally() == {_S.PENDING: 1}
        assert (await store.verify()).mismatches == ()

    # -- what a tenant may see ----------------------------------------------------

    @run_async
    async def test_a_tenant_refers_to_the_blobs_of_its_own_jobs(self, store: Ledger) -> None:
        given, made = "blob:sha256-" + "a" * 64, "blob:sha256-" + "b" * 64
        await store.apply(
            [
                accept("a", tenant="t1", context_ptr=given),
                accept("b", tenant="t2", context_ptr="data:,x"),
                move("b", _E.SCHEDULE, _E.DISPATCH),
                move("b", _E.SUCCEED, result=succeeded("b", result_ptr=f"{made};type=text/plain")),
            ]
        )
        assert await store.refers("t1", given)
        assert not await store.refers("t2", given)
        assert await store.refers("t2", f"{made};type=text/plain")
        assert await store.refers("t2", made), "it is the same blob under any media type"
        assert not await store.refers("t1", made)
        assert not await store.refers("t1", "blob:sha256-" + "c" * 64)
        assert not await store.refers("t2", "data:,x")
        assert not await store.refers("t1", "blob:sha256-")

    # -- facts --------------------------------------------------------------------

    @run_async
    async def test_facts_are_found_by_how_their_names_begin(self, store: Ledger) -> None:
        for name in ("limit/b", "limit/a", "limits", "key/x", "limit/\u00fc", "LIMIT/c", "limit"):
            await store.remember(name, name.encode())
        assert list(await store.recall_all("limit/")) == ["limit/a", "limit/b", "limit/\u00fc"]
        assert (await store.recall_all("key/")) == {"key/x": b"key/x"}
        assert await store.recall_all("nothing") == {}
        assert len(await store.recall_all("")) == 7
        assert await store.recall_all("limit/%") == {}

    @run_async
    async def test_a_forgotten_fact_is_gone(self, store: Ledger) -> None:
        await store.remember("x", b"1")
        assert await store.forget("x") is True
        assert await store.forget("x") is False
        assert await store.recall("x") is None

    # -- the audit log ------------------------------------------------------------

    @run_async
    async def test_audit_entries_are_numbered_and_come_newest_first(self, store: Ledger) -> None:
        full = AuditEntry(T0, "alice", "job.cancel", "a", "t1", "why \u00fc", "refused")
        store.write_audit([full, AuditEntry(T0 + 1, "bob", "key.create")])
        store.write_audit([AuditEntry(T0 + 2, "bob", "key.revoke", "k1")])
        await store.apply([])
        entries = await store.read_audit(AuditQuery())
        assert [entry.action for entry in entries] == ["key.revoke", "key.create", "job.cancel"]
        assert [entry.n for entry in entries] == [3, 2, 1]
        assert entries[-1] == AuditEntry(
            T0, "alice", "job.cancel", "a", "t1", "why \u00fc", "refused", 1
        )

    @run_async
    async def test_audit_entries_are_found_by_every_condition(self, store: Ledger) -> None:
        store.write_audit(
            [
                AuditEntry(T0, "alice", "job.cancel", "a", "t1"),
                AuditEntry(T0, "bob", "key.create", "k", None),
                AuditEntry(T0, "bob", "key.revoke", "k", "t2"),
                AuditEntry(T0, "bob", "pool.pause", "default", "t2"),
            ]
        )
        await store.apply([])

        async def numbers(**conditions: Any) -> list[int]:
            return [entry.n for entry in await store.read_audit(AuditQuery(**conditions))]

        assert await numbers(principal="bob") == [4, 3, 2]
        assert await numbers(action="key.*") == [3, 2]
        assert await numbers(action="key.create") == [2]
        assert await numbers(subject="k", tenant="t2") == [3]
        assert await numbers(tenant="t1") == [1]
        assert await numbers(limit=2) == [4, 3]
        assert await numbers(before=3) == [2, 1]
        assert await numbers(principal="bob", before=4, limit=1) == [3]

    # -- finding ------------------------------------------------------------------

    @run_async
    async def test_find_knows_who_asked_and_which_schedule(self, store: Ledger) -> None:
        await store.apply(
            [
                accept("a", principal="alice", tenant="t1"),
                accept("b", principal="alice", schedule="nightly", tenant="t1"),
                accept("c", schedule="nightly", tenant="t2"),
                accept("d"),
            ]
        )
        assert await names(store, principal="alice") == "ba"
        assert await names(store, principal="alice", schedule="nightly") == "b"
        assert await names(store, schedule="nightly") == "cb"
        assert await names(store, schedule="nightly", tenant="t2") == "c"
        assert await names(store, schedule="daily") == ""
        assert await names(store, principal="") == "dc"

    @pytest.mark.seed("001", "6.4")
    @run_async
    async def test_dead_letters_are_failures_that_nobody_retried(self, store: Ledger) -> None:
        await store.apply([accept(n, tenant="t2" if n == "e" else "t1") for n in "abcdef"])
        await store.apply([move(n, _E.SCHEDULE, _E.DISPATCH) for n in "abcde"])
        await store.apply(
            [
                move("a", _E.FAIL, attempt=1),
                move("b", _E.EXPIRE, attempt=1),
                move("c", _E.FAIL, attempt=1, then=(accept("c2", tenant="t1"),)),
                move("d", _E.SUCCEED, result=succeeded("d")),
                move("e", _E.FAIL, attempt=1),
                move("f", _E.CANCEL),
            ]
        )
        assert await names(store, dead=True) == "eba"
        assert await names(store, dead=True, tenant="t1") == "ba"
        assert await names(store, dead=True, states=(_S.TIMEOUT,)) == "b"
        assert await names(store, dead=True, oldest_first=True, limit=2) == "ab"
        await store.apply([move("a", _E.NOTE, then=(accept("a2", tenant="t1"),))])
        assert await names(store, dead=True) == "eb"

    @run_async
    async def test_find_by_the_time_of_acceptance(self, store: Ledger) -> None:
        times = {"a": 5, "b": 1, "c": 3, "d": 9}
        await store.apply([accept(name, at=T0 + at) for name, at in times.items()])
        assert await names(store, accepted_from=T0 + 3) == "dca"
        assert await names(store, accepted_to=T0 + 5) == "cb", "the end itself is excluded"
        assert await names(store, accepted_from=T0 + 3, accepted_to=T0 + 9) == "ca"

    @run_async
    async def test_pages_go_on_from_where_the_last_one_ended(self, store: Ledger) -> None:
        for i in range(12):
            await store.apply([accept(f"{i:02}", tenant=f"t{i % 3}")])
            if i % 2:
                await store.apply([move(f"{i:02}", _E.CANCEL)])
        newest = await self._pages(store, False)
        oldest = await self._pages(store, True)
        assert newest == [f"{i:02}" for i in reversed(range(12))]
        assert oldest[:12] == [f"{i:02}" for i in range(12)]
        assert oldest[12:], "what came meanwhile is at the end"

    async def _pages(self, store: Ledger, oldest_first: bool) -> list[str]:
        """All of three tenants' jobs in two states, while more are added."""
        seen: list[str] = []
        place: dict[str, Any] = {}
        states = (_S.PENDING, _S.CANCELLED)
        while len(seen) < 20:
            query = JobQuery(states=states, limit=5, oldest_first=oldest_first, **place)
            if not (page := await store.find(query)):
                break
            seen.extend(job.job_id for job in page)
            place = {"since" if oldest_first else "before": page[-1].seq}
            await store.apply([accept(f"new-{oldest_first}-{len(seen)}", tenant="t1")])
        return seen

    @run_async
    async def test_a_page_of_nothing_is_empty(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        assert await names(store, limit=0) == ""
