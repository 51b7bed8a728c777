"""Which job is meant: a whole id, or the beginning or the end of one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from penstock.core.errors import NotFound
from penstock.core.job import Job, chain_of
from penstock.ports.engine_api import EngineApi
from penstock.ports.store import JobQuery

_ENOUGH = 5
_SHORTEST = 3


def job_ids(given: Sequence[str]) -> list[str]:
    """The ids on the command line; `-` stands for those on standard input."""
    ids: list[str] = []
    for text in given:
        ids += sys.stdin.read().split() if text == "-" else [text]
    return ids


async def meant(api: EngineApi, text: str) -> Job:
    """The job with this id. Raises NotFound, or BadParameter if it could be several."""
    try:
        return await api.get(text)
    except NotFound:
        found = await _alike(api, text) if len(text) >= _SHORTEST else []
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(f"no job {text!r}", hint="'penstock ps' lists the jobs there are")
    some = ", ".join(job.job_id for job in found[:3]) + (", …" if len(found) > 3 else "")
    raise click.BadParameter(f"{text!r} could be several jobs: {some}")


async def meant_or_given(api: EngineApi, text: str) -> str:
    """The id that is meant; what was given, if no job has it: it may have been pruned."""
    try:
        return (await meant(api, text)).job_id
    except NotFound:
        return text


async def chain_or_given(api: EngineApi, text: str) -> str:
    """The first try of the job that is meant; what was given, if no job has it: it may have been
    pruned."""
    try:
        return chain_of((await meant(api, text)).request)
    except NotFound:
        return text


async def _alike(api: EngineApi, text: str) -> list[Job]:
    """Jobs whose id begins or ends so; a few are enough to say that it could be several."""
    plain = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)
    found = {
        job.job_id: job
        for glob in (f"{plain}*", f"*{plain}")
        for job in await api.find(JobQuery(job_id=glob, limit=_ENOUGH))
    }
    return list(found.values())
