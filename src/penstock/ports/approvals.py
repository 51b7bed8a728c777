"""Approving what the safety rules parked."""

from __future__ import annotations

from typing import Protocol

from penstock.core.job import Job


class Approvals(Protocol):
    async def approve(self, job_id: str, *, reason: str = "", snapshot: str = "") -> Job:
        """Say yes to a parked job.

        `snapshot` is that of the hold the caller looked at; if the job waits under another
        one meanwhile, StaleApproval. NotPermitted for who submitted it or is not asked;
        Conflict if it is not parked, or the caller has said yes already.
        """

    async def reject(self, job_id: str, *, reason: str = "") -> Job:
        """Say no: the job ends DENIED."""
