"""The parts of a Desk beside jobs, for an engine at the other end of a link."""

from __future__ import annotations

import builtins

from penstock.adapters.link.client import Link
from penstock.core.caller import KeyRole
from penstock.core.job import Job
from penstock.ports.keys import KeyView, NewKey
from penstock.ports.limits import Limit, LimitView
from penstock.ports.policy import Explanation, PolicyView, Simulation
from penstock.ports.schedules import Schedule, ScheduleView
from penstock.ports.store import AuditEntry, AuditQuery


class RemoteApprovals:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def approve(self, job_id: str, *, reason: str = "", snapshot: str = "") -> Job:
        return await self._link.call(
            "approvals.approve", Job, job_id=job_id, reason=reason, snapshot=snapshot
        )

    async def reject(self, job_id: str, *, reason: str = "") -> Job:
        return await self._link.call("approvals.reject", Job, job_id=job_id, reason=reason)


class RemotePolicy:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def current(self) -> PolicyView:
        return await self._link.call("policy.current", PolicyView)

    async def explain(self, job_id: str) -> Explanation:
        return await self._link.call("policy.explain", Explanation, job_id=job_id)

    async def simulate(self, text: str, limit: int = 10_000) -> Simulation:
        return await self._link.call("policy.simulate", Simulation, text=text, limit=limit)

    async def reload(self) -> PolicyView:
        return await self._link.call("policy.reload", PolicyView)


class RemoteSchedules:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def put(self, schedule: Schedule) -> ScheduleView:
        return await self._link.call("schedules.put", ScheduleView, schedule=schedule)

    async def list(self) -> builtins.list[ScheduleView]:
        return await self._link.call("schedules.list", builtins.list[ScheduleView])

    async def get(self, name: str, tenant: str = "default") -> ScheduleView:
        return await self._link.call("schedules.get", ScheduleView, name=name, tenant=tenant)

    async def pause(
        self, name: str, tenant: str = "default", *, paused: bool = True
    ) -> ScheduleView:
        return await self._link.call(
            "schedules.pause", ScheduleView, name=name, tenant=tenant, paused=paused
        )

    async def fire(self, name: str, tenant: str = "default") -> Job:
        return await self._link.call("schedules.fire", Job, name=name, tenant=tenant)

    async def delete(self, name: str, tenant: str = "default") -> None:
        await self._link.call("schedules.delete", type(None), name=name, tenant=tenant)


class RemoteLimits:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def put(self, limit: Limit) -> LimitView:
        return await self._link.call("limits.put", LimitView, limit=limit)

    async def list(self) -> builtins.list[LimitView]:
        return await self._link.call("limits.list", builtins.list[LimitView])

    async def delete(self, name: str) -> None:
        await self._link.call("limits.delete", type(None), name=name)


class RemoteKeys:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def create(
        self,
        name: str,
        roles: tuple[KeyRole, ...],
        *,
        tenant: str | None = None,
        expires_in: float | None = None,
    ) -> NewKey:
        return await self._link.call(
            "keys.create", NewKey, name=name, roles=roles, tenant=tenant, expires_in=expires_in
        )

    async def list(self) -> builtins.list[KeyView]:
        return await self._link.call("keys.list", builtins.list[KeyView])

    async def revoke(self, key_id: str) -> KeyView:
        return await self._link.call("keys.revoke", KeyView, key_id=key_id)


class RemoteAudit:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def read(self, query: AuditQuery) -> builtins.list[AuditEntry]:
        return await self._link.call("audit.read", builtins.list[AuditEntry], query=query)
