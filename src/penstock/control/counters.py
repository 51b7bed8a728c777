"""The parts of the engine's Desk beside jobs, each served within a caller's rights.

The keepers behind them do the work and know nothing of callers.
"""

from __future__ import annotations

import builtins

from msgspec.structs import replace

from penstock.control.approvals import ApprovalBox
from penstock.control.guard import Guard
from penstock.control.keys import PREFIX, KeyRing
from penstock.control.limit_book import LimitKeeper
from penstock.control.policy_desk import PolicyDesk
from penstock.control.schedules import ScheduleKeeper
from penstock.control.uploads import Uploads
from penstock.core.caller import KeyRole
from penstock.core.errors import NotFound
from penstock.core.job import Job
from penstock.ports.keys import KeyView, NewKey
from penstock.ports.limits import Limit, LimitUse, LimitView
from penstock.ports.policy import Explanation, PolicyView, Simulation
from penstock.ports.schedules import Schedule, ScheduleView
from penstock.ports.store import AuditEntry, AuditQuery, Store


class ApprovalsCounter:
    """See `penstock.ports.approvals.Approvals`."""

    def __init__(self, box: ApprovalBox, guard: Guard, store: Store) -> None:
        self._box, self._guard, self._store = box, guard, store

    async def approve(self, job_id: str, *, reason: str = "", snapshot: str = "") -> Job:
        self._guard.shown(await self._store.get(job_id), job_id)
        with self._guard.doing("job.approve", job_id, role=KeyRole.APPROVE, detail=reason):
            return await self._box.approve(
                job_id, by=self._guard.by, reason=reason, snapshot=snapshot
            )

    async def reject(self, job_id: str, *, reason: str = "") -> Job:
        self._guard.shown(await self._store.get(job_id), job_id)
        with self._guard.doing("job.reject", job_id, role=KeyRole.APPROVE, detail=reason):
            return await self._box.reject(job_id, by=self._guard.by, reason=reason)


class PolicyCounter:
    """See `penstock.ports.policy.Policy`."""

    def __init__(self, desk: PolicyDesk, guard: Guard, store: Store) -> None:
        self._desk, self._guard, self._store = desk, guard, store

    async def current(self) -> PolicyView:
        self._guard.require_everywhere(KeyRole.OPERATE, "policy.show")
        return await self._desk.current()

    async def explain(self, job_id: str) -> Explanation:
        self._guard.shown(await self._store.get(job_id), job_id)
        return await self._desk.explain(job_id)

    async def simulate(self, text: str, limit: int = 10_000) -> Simulation:
        self._guard.require_everywhere(KeyRole.OPERATE, "policy.simulate")
        return await self._desk.simulate(text, limit)

    async def reload(self) -> PolicyView:
        with self._guard.doing("policy.reload", role=None):
            self._guard.require_everywhere(KeyRole.ADMIN, "policy.reload")
            return await self._desk.reload()


class SchedulesCounter:
    """See `penstock.ports.schedules.Schedules`."""

    def __init__(self, keeper: ScheduleKeeper, guard: Guard, uploads: Uploads) -> None:
        self._keeper, self._guard, self._uploads = keeper, guard, uploads

    async def put(self, schedule: Schedule) -> ScheduleView:
        with self._guard.doing("schedule.put", schedule.name, role=KeyRole.OPERATE):
            self._guard.require(KeyRole.SUBMIT, "schedule.put")  # it submits in their name
            schedule = self._stamped(schedule)
            await self._uploads.check(schedule.request.context_ptr)
            return await self._keeper.put(schedule, by=self._guard.by)

    def _stamped(self, schedule: Schedule) -> Schedule:
        tenant = self._guard.tenant(schedule.tenant)
        request = self._guard.stamped(replace(schedule.request, tenant=tenant))
        return replace(schedule, tenant=tenant, request=request)

    async def list(self) -> builtins.list[ScheduleView]:
        return [
            view
            for view in await self._keeper.list()
            if self._guard.caller.sees(view.schedule.tenant)
        ]

    async def get(self, name: str, tenant: str = "default") -> ScheduleView:
        return await self._keeper.get(name, self._mine(name, tenant))

    async def pause(
        self, name: str, tenant: str = "default", *, paused: bool = True
    ) -> ScheduleView:
        action = "schedule.pause" if paused else "schedule.resume"
        with self._guard.doing(action, name, role=KeyRole.OPERATE):
            return await self._keeper.pause(name, self._mine(name, tenant), paused=paused)

    async def fire(self, name: str, tenant: str = "default") -> Job:
        with self._guard.doing("schedule.fire", name, role=KeyRole.OPERATE):
            self._guard.require(KeyRole.SUBMIT, "schedule.fire")
            return await self._keeper.fire(name, self._mine(name, tenant), by=self._guard.by)

    async def delete(self, name: str, tenant: str = "default") -> None:
        with self._guard.doing("schedule.delete", name, role=KeyRole.OPERATE):
            await self._keeper.delete(name, self._mine(name, tenant))

    def _mine(self, name: str, tenant: str) -> str:
        meant = self._guard.tenant(tenant)
        if not self._guard.caller.sees(meant):
            raise NotFound(f"no schedule {name!r}", hint="'penstock schedule list' shows them")
        return meant


class LimitsCounter:
    """See `penstock.ports.limits.LimitBook`."""

    def __init__(self, keeper: LimitKeeper, guard: Guard) -> None:
        self._keeper, self._guard = keeper, guard

    async def put(self, limit: Limit) -> LimitView:
        with self._guard.doing("limit.put", limit.name, role=None):
            self._guard.require_everywhere(KeyRole.OPERATE, "limit.put")
            return await self._keeper.put(limit)

    async def list(self) -> builtins.list[LimitView]:
        """Of a limit that tenants have each for themselves, a tenant sees its own use."""
        views = await self._keeper.list()
        if (mine := self._guard.caller.tenant) is None:
            return views
        return [
            LimitView(view.limit, _uses_of(view, mine))
            for view in views
            if view.limit.tenants in ((), (mine,)) or "tenant" in view.limit.key
        ]

    async def delete(self, name: str) -> None:
        with self._guard.doing("limit.delete", name, role=None):
            self._guard.require_everywhere(KeyRole.OPERATE, "limit.delete")
            await self._keeper.delete(name)


def _uses_of(view: LimitView, tenant: str) -> tuple[LimitUse, ...]:
    if "tenant" not in view.limit.key:
        return view.uses if view.limit.tenants == (tenant,) else ()
    at = view.limit.key.index("tenant")
    return tuple(use for use in view.uses if use.key[at] == tenant)


class KeysCounter:
    """See `penstock.ports.keys.Keys`."""

    def __init__(self, ring: KeyRing, guard: Guard) -> None:
        self._ring, self._guard = ring, guard

    async def create(
        self,
        name: str,
        roles: tuple[KeyRole, ...],
        *,
        tenant: str | None = None,
        expires_in: float | None = None,
    ) -> NewKey:
        detail = f"roles {', '.join(roles)}" + (f", tenant {tenant}" if tenant else "")
        with self._guard.doing("key.create", _safe(name), role=None, detail=detail):
            self._guard.require_everywhere(KeyRole.ADMIN, "key.create")
            return await self._ring.create(
                name, roles, tenant=tenant, expires_in=expires_in, by=self._guard.by
            )

    async def list(self) -> builtins.list[KeyView]:
        self._guard.require_everywhere(KeyRole.ADMIN, "key.list")
        return await self._ring.list()

    async def revoke(self, key_id: str) -> KeyView:
        with self._guard.doing("key.revoke", _safe(key_id), role=None):
            self._guard.require_everywhere(KeyRole.ADMIN, "key.revoke")
            return await self._ring.revoke(key_id, by=self._guard.by)


def _safe(named: str) -> str:
    """For the audit log: somebody may have pasted a token where a name belongs."""
    return "(a token)" if named.startswith(f"{PREFIX}_") else named[:128]


class AuditCounter:
    """See `penstock.ports.audit.Audit`."""

    def __init__(self, guard: Guard, store: Store) -> None:
        self._guard, self._store = guard, store

    async def read(self, query: AuditQuery) -> builtins.list[AuditEntry]:
        self._guard.require_everywhere(KeyRole.ADMIN, "audit.read")
        await self._store.apply([])  # entries ride with a commit: see this one through
        return await self._store.read_audit(query)
