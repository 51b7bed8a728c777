"""What one caller may do and see, and the audit log of what they did."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from msgspec.structs import replace

from penstock.core.caller import Caller, KeyRole
from penstock.core.errors import NotFound, NotPermitted, PenstockError
from penstock.core.job import Job, JobRequest
from penstock.ports.clock import Clock
from penstock.ports.store import AuditEntry, JobQuery, Store


class Guard:
    """Stands beside a Desk that serves one caller."""

    def __init__(self, caller: Caller, store: Store, clock: Clock) -> None:
        self.caller = caller
        self._store, self._clock = store, clock

    @property
    def by(self) -> str:
        return self.caller.principal

    # -- rights -------------------------------------------------------------------

    @contextmanager
    def doing(
        self, action: str, subject: str = "", *, role: KeyRole | None, detail: str = ""
    ) -> Generator[None]:
        """Let it be done if the caller has the role; write down that it was, or was not."""
        try:
            if role is not None:
                self.require(role, action)
            yield
        except PenstockError as error:
            if isinstance(error, NotPermitted):
                self._write(action, subject, f"{error.code}: {error.message}", "refused")
            raise
        self._write(action, subject, detail, "done")

    def require(self, role: KeyRole, action: str) -> None:
        if not self.caller.may(role):
            raise NotPermitted(
                f"{self.by} may not do this ({action})", hint=f"it takes a key with the role {role}"
            )

    def admit(self, role: KeyRole, action: str, subject: str = "") -> None:
        """`require` for what has not begun yet: only a refusal is written down."""
        try:
            self.require(role, action)
        except NotPermitted as error:
            self._write(action, subject, f"{error.code}: {error.message}", "refused")
            raise

    def require_everywhere(self, role: KeyRole, action: str) -> None:
        """For what concerns all tenants: a key that is bound to one does not do."""
        self.require(role, action)
        if self.caller.tenant is not None:
            raise NotPermitted(
                f"{self.by} may not do this ({action})",
                hint="it concerns every tenant, and the key is bound to one",
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

    # -- sight --------------------------------------------------------------------

    def shown(self, job: Job | None, job_id: str) -> Job:
        """The job, or the same answer for what is not there and what is not theirs."""
        if job is None or not self.caller.sees(job.request.tenant):
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        return job

    def narrowed(self, query: JobQuery) -> JobQuery | None:
        """The same query within the caller's sight; None if nothing of it is."""
        mine = self.caller.tenant
        if mine is None or query.tenant == mine:
            return query
        return replace(query, tenant=mine) if query.tenant is None else None

    def stamped(self, request: JobRequest) -> JobRequest:
        """As theirs: within their tenant, which they need not name."""
        mine = self.caller.tenant
        if mine is None or request.tenant == mine:
            return request
        if request.tenant != _UNNAMED:
            raise NotPermitted(
                f"tenant: {self.by} may not submit for {request.tenant!r}",
                hint=f"leave it out, or say {mine!r}",
            )
        return replace(request, tenant=mine)

    def tenant(self, named: str) -> str:
        """The tenant that is meant where one was named, or left at the default."""
        mine = self.caller.tenant
        if mine is None:
            return named
        return mine if named in (mine, _UNNAMED) else named


_UNNAMED = "default"
