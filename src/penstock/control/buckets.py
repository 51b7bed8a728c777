"""Which limits a job counts against.

A job falls into one *bucket* for each limit that matches it, by the values of the limit's
key, and into one more if the safety rule that let it pass slows it down.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from penstock.core.job import Job, JobRequest
from penstock.core.verdict import Rate, SafetyVerdict
from penstock.ports.limits import Limit

_KINDS = 10_000
"""Kinds of jobs whose buckets are known by heart."""
_LABEL = "label:"
_RULE = "rule:"
"""How the names of limits begin that a safety rule sets."""


class Bucket(NamedTuple):
    """One key's share of one limit."""

    limit: str
    key: tuple[str, ...]

    def __str__(self) -> str:
        values = ", ".join(self.key)
        return f"{self.limit} for {values}" if values else self.limit


Buckets = tuple[Bucket, ...]


class Terms(NamedTuple):
    """What holds for each bucket of one limit."""

    concurrency: int | None
    rate: Rate | None
    max_waiting: int | None = None


def rule_bucket(job: Job, verdict: SafetyVerdict) -> Bucket | None:
    """What a job counts against by the rule that let it pass: one bucket a tenant."""
    constraints = verdict.constraints
    if verdict.rate is None and (constraints is None or constraints.max_concurrent is None):
        return None
    return Bucket(_RULE + verdict.rule_id, (job.request.tenant,))


def rule_terms(verdict: SafetyVerdict) -> Terms:
    constraints = verdict.constraints
    return Terms(None if constraints is None else constraints.max_concurrent, verdict.rate)


class Sorter:
    """Sorts jobs by the limits that were set."""

    def __init__(self, limits: Iterable[Limit] = ()) -> None:
        self.limits = {limit.name: limit for limit in limits}
        looked_at = {name for limit in self.limits.values() for name in _labels_of(limit)}
        self._labels = sorted(looked_at)
        self._kinds: dict[tuple[str | None, ...], Buckets] = {}

    def sort(self, request: JobRequest) -> Buckets:
        """The buckets of a job; jobs of one kind have the same ones."""
        if not self.limits:
            return ()
        labels = request.labels
        kind = (request.topic, request.tenant, *[labels.get(name) for name in self._labels])
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            known = self._kinds[kind] = tuple(
                Bucket(limit.name, tuple(_value(part, request) for part in limit.key))
                for limit in self.limits.values()
                if matches(limit, request)
            )
        return known

    def terms(self) -> dict[str, Terms]:
        return {
            limit.name: Terms(limit.concurrency, limit.rate, limit.max_waiting)
            for limit in self.limits.values()
        }


def matches(limit: Limit, request: JobRequest) -> bool:
    """Whether a limit holds for a job."""
    return (
        _any(request.topic, limit.topics)
        and _any(request.tenant, limit.tenants)
        and all(
            name in request.labels and fnmatchcase(request.labels[name], glob)
            for name, glob in limit.labels.items()
        )
    )


def _any(value: str, globs: tuple[str, ...]) -> bool:
    return not globs or any(fnmatchcase(value, glob) for glob in globs)


def _labels_of(limit: Limit) -> list[str]:
    keys = [part.removeprefix(_LABEL) for part in limit.key if part.startswith(_LABEL)]
    return [*keys, *limit.labels]


def _value(part: str, request: JobRequest) -> str:
    """Jobs without a label share one key: leaving it out is no way around a limit."""
    if part.startswith(_LABEL):
        return request.labels.get(part.removeprefix(_LABEL), "")
    return request.tenant if part == "tenant" else request.topic
