"""Which jobs: the conditions that listings and bulk commands share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from penstock.cli.ids import chain_or_given
from penstock.cli.parameters import DURATION, several
from penstock.ports.engine_api import EngineApi
from penstock.ports.store import JobQuery

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--topic", metavar="GLOB", help="With a topic like job.text.*."),
    click.option("--tenant", help="Of this tenant."),
    several("--label", "With this label; may be repeated."),
    click.option("--workflow", metavar="ID", help="Of this workflow."),
    click.option("--parent", metavar="JOB", help="Submitted inside this job."),
    click.option("--principal", metavar="NAME", help="Submitted by this principal."),
    click.option("--schedule", metavar="NAME", help="Submitted by this schedule."),
    click.option("--newer-than", type=DURATION, help="Accepted no longer ago than this."),
    click.option("--older-than", type=DURATION, help="Accepted longer ago than this."),
)


def filtered(command: F) -> F:
    """Give a command these options; `query_of` makes a query of what it is called with."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def is_narrowed(said: dict[str, Any]) -> bool:
    """Whether any condition was given."""
    return any(value not in (None, ()) for value in said.values())


async def query_of(api: EngineApi, said: dict[str, Any], **more: Any) -> JobQuery:
    now = time.time()
    newer, older, parent = said["newer_than"], said["older_than"], said["parent"]
    return JobQuery(
        topic=said["topic"],
        tenant=said["tenant"],
        labels=dict(said["label"]),
        workflow_id=said["workflow"],
        child_of=None if parent is None else await chain_or_given(api, parent),
        principal=said["principal"],
        schedule=said["schedule"],
        accepted_from=None if newer is None else now - newer,
        accepted_to=None if older is None else now - older,
        **more,
    )
