"""`penstock pipeline`: staged pipelines, their runs and what those share."""

from __future__ import annotations

import click
import msgspec

from penstock.cli.groups import Commands
from penstock.cli.paper import print_json
from penstock.cli.parameters import as_json
from penstock.cli.pipeline_breakers import breakers
from penstock.cli.pipeline_declared import print_pipeline, print_pipelines
from penstock.cli.pipeline_runs import cancel, items, runs
from penstock.cli.pipeline_start import retry_failed, start, watch
from penstock.cli.pipeline_status import status
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.terminal import echo
from penstock.core.errors import NotRunning
from penstock.workloads.pipeline.records import PipelineInfo


@click.group(cls=Commands)
def pipeline() -> None:
    """Start, watch and look into staged pipelines."""


@pipeline.command("list")
@as_json
@placed
@click.pass_obj
def list_pipelines(place: Place, json: bool) -> None:
    """List the pipelines that can be started."""
    found = run(_declared(place))
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        echo("no pipelines; 'penstock up --app MODULE:APP' serves those of an app", err=True)
    else:
        print_pipelines(found)


@pipeline.command()
@click.argument("name")
@as_json
@placed
@click.pass_obj
def show(place: Place, name: str, json: bool) -> None:
    """Draw a pipeline: its stages, its config, its alerts.

    If no engine is running, NAME is MODULE:PIPELINE.
    """
    found = run(_shown(place, name))
    print_json(msgspec.to_builtins(found)) if json else print_pipeline(found)


async def _declared(place: Place) -> list[PipelineInfo]:
    async with api_at(place) as api:
        return await api.pipelines.list()


async def _shown(place: Place, name: str) -> PipelineInfo:
    """What the running engine says; if none runs, what is installed here."""
    try:
        async with api_at(place) as api:
            return await api.pipelines.show(name)
    except NotRunning:
        if place.connect:
            raise
    echo("penstock: no engine is running; this is what is installed here", err=True)
    from penstock.workloads.pipeline.definition import load_pipeline

    return load_pipeline(name).info()


for command in (start, runs, status, items, watch, cancel, retry_failed, breakers):
    pipeline.add_command(command)
