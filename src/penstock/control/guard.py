"""Authorization: what one caller may do and see, and the audit log of what they did."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from msgspec.structs import replace

from penstock.control.ledger import Ledger
from penstock.core.errors import NotFound, NotPermitted, PenstockError, UnreadablePointer
from penstock.core.job import Job, JobRequest
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Caller, KeyRole
from penstock.ports.store import AuditEntry, AuditQuery, JobQuery


class Guard:
    """Checks the rights of one caller, for the EngineApi that is bound to them."""

    def __init__(self, caller: Caller, store: Ledger, clock: Clock) -> None:
        self.caller = caller
        self.may_submit_anything = caller.may(KeyRole.SUBMIT) and caller.tenant is None
        self._store, self._clock = store, clock

    @property
    def by(self) -> str:
        return self.caller.principal

    # -- rights -------------------------------------------------------------------

    @contextmanager
    def doing(
        self,
        action: str,
        subject: str = "",
        *,
        role: KeyRole | None,
        everywhere: bool = False,
        detail: str = "",
    ) -> Generator[None]:
        """Check the role, run the body, and write to the audit log what was done or refused.

        `everywhere`: it concerns all tenants, so a key that is bound to one is refused.
        """
        try:
            if role is not None:
                (self.require_everywhere if everywhere else self.require)(role, action)
            yield
        except PenstockError as error:
            if isinstance(error, NotPermitted):
                self._write(action, subject, f"{error.code}: {error.message}", "refused")
            raise
        self._write(action, subject, detail, "done")

    def require(self, role: KeyRole, action: str) -> None:
        if not self.caller.may(role):
            raise NotPermitted(
                f"{self.by} is not permitted to do this ({action})",
                hint=f"requires a key with the role {role}",
            )

    def admit(self, role: KeyRole, action: str, subject: str = "") -> None:
        """Like `require`, but a refusal is written to the audit log."""
        try:
            self.require(role, action)
        except NotPermitted as error:
            self._write(action, subject, f"{error.code}: {error.message}", "refused")
            raise

    def require_everywhere(self, role: KeyRole, action: str) -> None:
        """For operations on all tenants: a key that is bound to one tenant is refused."""
        self.require(role, action)
        if self.caller.tenant is not None:
            raise NotPermitted(
                f"{self.by} is not permitted to do this ({action})",
                hint="it affects all tenants, and the key is bound to one",
            )

    def _write(self, action: str, subject: str, detail: str, outcome: str) -> None:
        entry = AuditEntry(
            at=self._clock.now(),
            principal=self.by,
            action=action,
            subject=subject,
            tenant=self.caller.tenant,
            detail=detail[:500],
            outcome=outcome,
        )
        self._store.write_audit([entry])

    # -- visibility --------------------------------------------------------------------

    def shown(self, job: Job | None, job_id: str) -> Job:
        """The job. NotFound if it does not exist or belongs to another tenant."""
        if job is None or not self.caller.sees(job.request.tenant):
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        return job

    def narrowed(self, query: JobQuery) -> JobQuery | None:
        """The query limited to the caller's tenant; None if it excludes it."""
        mine = self.caller.tenant
        if mine is None or query.tenant == mine:
            return query
        return replace(query, tenant=mine) if query.tenant is None else None

    def stamped(self, request: JobRequest) -> JobRequest:
        """The request with the caller's tenant, which they may omit."""
        mine = self.caller.tenant
        if mine is None or request.tenant == mine:
            return request
        if request.tenant != _UNNAMED:
            raise NotPermitted(
                f"tenant: {self.by} may not submit for {request.tenant!r}",
                hint=f"leave it out, or use {mine!r}",
            )
        return replace(request, tenant=mine)

    def tenant(self, named: str) -> str:
        """The tenant that is meant: the caller's own if none was named."""
        mine = self.caller.tenant
        if mine is None:
            return named
        return mine if named in (mine, _UNNAMED) else named


_UNNAMED = "default"


class AuditService:
    """See `penstock.ports.engine_api.Audit`."""

    def __init__(self, store: Ledger, guard: Guard) -> None:
        self._guard, self._store = guard, store

    async def read(self, query: AuditQuery) -> list[AuditEntry]:
        self._guard.require_everywhere(KeyRole.ADMIN, "audit.read")
        await self._store.apply([])  # entries ride with a commit: see this one through
        return await self._store.read_audit(query)


# -- blobs ------------------------------------------------------------------------

UPLOADS = "blob/"
_BLOB = "blob:"


class Uploads:
    """Which blobs a caller may read and point to; a caller without a tenant may use all.

    Blobs are named by their content, so two tenants may have the same one. A tenant may use what
    it uploaded, what its jobs took or gave, and what the items of its pipelines did.
    """

    def __init__(self, store: Ledger, clock: Clock, tenant: str | None) -> None:
        self._store, self._clock, self._tenant = store, clock, tenant

    async def note(self, uri: str) -> None:
        """Record the uploader until a job refers to the blob."""
        if self._tenant is not None and uri.startswith(_BLOB):
            at = repr(self._clock.now()).encode()
            await self._store.remember(f"{UPLOADS}{self._tenant}/{uri}", at)

    async def check(self, uri: str) -> None:
        """Raises UnreadablePointer, as for one that does not exist."""
        if self._tenant is None or not uri or uri.startswith("data:"):
            return
        if uri.startswith(_BLOB):
            if await self._store.refers(self._tenant, uri):
                return
            if await self._store.recall(f"{UPLOADS}{self._tenant}/{uri}") is not None:
                return
        raise UnreadablePointer("pointer", f"there is no {uri!r}")
