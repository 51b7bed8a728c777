"""The Desk's smaller counters, over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from penstock.adapters.http.line import Line, segment
from penstock.core.caller import KeyRole
from penstock.core.job import Job
from penstock.ports.keys import KeyView, NewKey
from penstock.ports.limits import Limit, LimitView
from penstock.ports.policy import Explanation, PolicyView, Simulation
from penstock.ports.schedules import Schedule, ScheduleView
from penstock.ports.store import AuditEntry, AuditQuery

_PAGE = 1000
_NOT_SAID = ("job_id", "tenant", "principal", "schedule", "retry_number")
"""What a schedule's job has that its submitter does not say."""
_LONG = 300.0
"""Seconds for rules that are tried on many jobs."""


class HttpApprovals:
    """See `penstock.ports.approvals.Approvals`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def approve(self, job_id: str, *, reason: str = "", snapshot: str = "") -> Job:
        body = {"reason": reason, "snapshot": snapshot}
        return await self._line.send("POST", f"/v1/jobs/{segment(job_id)}/approve", Job, body)

    async def reject(self, job_id: str, *, reason: str = "") -> Job:
        path = f"/v1/jobs/{segment(job_id)}/reject"
        return await self._line.send("POST", path, Job, {"reason": reason})


class HttpPolicy:
    """See `penstock.ports.policy.Policy`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def current(self) -> PolicyView:
        return await self._line.get("/v1/policy", PolicyView)

    async def explain(self, job_id: str) -> Explanation:
        return await self._line.get(f"/v1/jobs/{segment(job_id)}/policy", Explanation)

    async def simulate(self, text: str, limit: int = 10_000) -> Simulation:
        body = {"text": text, "limit": limit}
        path = "/v1/policy/simulate"
        return await self._line.send("POST", path, Simulation, body, again=True, wait=_LONG)

    async def reload(self) -> PolicyView:
        return await self._line.send("POST", "/v1/policy/reload", PolicyView, again=True)


class ScheduleList(Struct, frozen=True):
    schedules: list[ScheduleView]


class HttpSchedules:
    """See `penstock.ports.schedules.Schedules`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def put(self, schedule: Schedule) -> ScheduleView:
        job = msgspec.to_builtins(schedule.request)
        for field in _NOT_SAID:
            job.pop(field, None)
        body = {
            "cron": schedule.cron,
            "job": job,
            "timezone": schedule.timezone,
            "catch_up": schedule.catch_up,
            "overlap": schedule.overlap,
            "paused": schedule.paused,
        }
        path = _schedule(schedule.name, schedule.tenant)
        return await self._line.send("PUT", path, ScheduleView, body, again=True)

    async def list(self) -> list[ScheduleView]:
        return (await self._line.get("/v1/schedules", ScheduleList)).schedules

    async def get(self, name: str, tenant: str = "default") -> ScheduleView:
        return await self._line.get(_schedule(name, tenant), ScheduleView)

    async def pause(
        self, name: str, tenant: str = "default", *, paused: bool = True
    ) -> ScheduleView:
        path = _schedule(name, tenant, "/pause" if paused else "/resume")
        return await self._line.send("POST", path, ScheduleView, again=True)

    async def fire(self, name: str, tenant: str = "default") -> Job:
        return await self._line.send("POST", _schedule(name, tenant, "/fire"), Job)

    async def delete(self, name: str, tenant: str = "default") -> None:
        await self._line.call("DELETE", _schedule(name, tenant))


def _schedule(name: str, tenant: str, action: str = "") -> str:
    # The tenant that keys without one mean by themselves needs no mention.
    whose = "" if tenant == "default" else f"?tenant={segment(tenant)}"
    return f"/v1/schedules/{segment(name)}{action}{whose}"


class LimitList(Struct, frozen=True):
    limits: list[LimitView]


class HttpLimits:
    """See `penstock.ports.limits.LimitBook`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def put(self, limit: Limit) -> LimitView:
        body: dict[str, Any] = msgspec.to_builtins(limit)
        del body["name"]
        path = f"/v1/limits/{segment(limit.name)}"
        return await self._line.send("PUT", path, LimitView, body, again=True)

    async def list(self) -> list[LimitView]:
        return (await self._line.get("/v1/limits", LimitList)).limits

    async def delete(self, name: str) -> None:
        await self._line.call("DELETE", f"/v1/limits/{segment(name)}")


class KeyList(Struct, frozen=True):
    keys: list[KeyView]


class HttpKeys:
    """See `penstock.ports.keys.Keys`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def create(
        self,
        name: str,
        roles: tuple[KeyRole, ...],
        *,
        tenant: str | None = None,
        expires_in: float | None = None,
    ) -> NewKey:
        body = {"name": name, "roles": roles, "tenant": tenant, "expires_in": expires_in}
        return await self._line.send("POST", "/v1/keys", NewKey, body)

    async def list(self) -> list[KeyView]:
        return (await self._line.get("/v1/keys", KeyList)).keys

    async def revoke(self, key_id: str) -> KeyView:
        return await self._line.send("DELETE", f"/v1/keys/{segment(key_id)}", KeyView)


class AuditPage(Struct, frozen=True):
    entries: list[AuditEntry]
    next: str | None


class HttpAudit:
    """See `penstock.ports.audit.Audit`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def read(self, query: AuditQuery) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        wanted = {
            "principal": query.principal,
            "action": query.action,
            "subject": query.subject,
            "tenant": query.tenant,
            "before": query.before,
        }
        cursor: str | None = None
        while (left := query.limit - len(found)) > 0:
            page = {**wanted, "limit": min(left, _PAGE), "cursor": cursor}
            entries = await self._line.get("/v1/audit", AuditPage, page)
            found += entries.entries
            cursor = entries.next
            if cursor is None:
                break
        return found
