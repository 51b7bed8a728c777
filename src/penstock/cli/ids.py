"""Which job is meant: a whole id, or the beginning or the end of one."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence

import click

from penstock.cli.words import plural
from penstock.core.errors import NotFound
from penstock.core.job import Job
from penstock.ports.desk import Desk
from penstock.ports.store import JobQuery

_PAGE = 1000
_SEARCHED = 10_000
"""How many of the newest jobs are searched for an abbreviated id."""
_SHORTEST = 3


def job_ids(given: Sequence[str]) -> list[str]:
    """The ids on the command line; `-` stands for those on standard input."""
    ids: list[str] = []
    for text in given:
        ids += sys.stdin.read().split() if text == "-" else [text]
    return ids


async def meant(desk: Desk, text: str) -> Job:
    """The job with this id. Raises NotFound, or BadParameter if it could be several."""
    try:
        return await desk.get(text)
    except NotFound:
        found = [job async for job in _alike(desk, text)] if len(text) >= _SHORTEST else []
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"no job {text!r}", hint="'penstock ps' lists the jobs there are")
    some = ", ".join(job.job_id for job in found[:3]) + (", …" if len(found) > 3 else "")
    raise click.BadParameter(f"{text!r} could be {plural(len(found), 'job')}: {some}")


async def meant_or_given(desk: Desk, text: str) -> str:
    """The id that is meant; what was given, if no job has it: it may have been pruned."""
    try:
        return (await meant(desk, text)).job_id
    except NotFound:
        return text


async def _alike(desk: Desk, text: str) -> AsyncIterator[Job]:
    before: int | None = None
    for _ in range(_SEARCHED // _PAGE):
        page = await desk.find(JobQuery(before=before, limit=_PAGE))
        for job in page:
            if job.job_id.startswith(text) or job.job_id.endswith(text):
                yield job
        if len(page) < _PAGE:
            return
        before = page[-1].seq
