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
from penstock.cli.place import Place, placed, reading_at, run
from penstock.core.stages import PipelineInfo


@click.group(cls=Commands)
def pipeline() -> None:
    """Start, watch and look into staged pipelines."""


@pipeline.command("list")
@as_json
@placed
@click.pass_obj
def list_pipelines(place: Place, json: bool) -> None:
    """List the pipelines that can be started."""

    async def find() -> list[PipelineInfo]:
        async with reading_at(place) as desk:
            return await desk.pipelines.list()

    found = run(find())
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        click.echo(
            "no pipelines: no worker that serves one has joined; see 'penstock up --app'", err=True
        )
    else:
        print_pipelines(found)


@pipeline.command()
@click.argument("name")
@as_json
@placed
@click.pass_obj
def show(place: Place, name: str, json: bool) -> None:
    """Draw a pipeline: its stages, its config, its alerts."""

    async def find() -> PipelineInfo:
        async with reading_at(place) as desk:
            return await desk.pipelines.show(name)

    found = run(find())
    print_json(msgspec.to_builtins(found)) if json else print_pipeline(found)


for command in (start, runs, status, items, watch, cancel, retry_failed, breakers):
    pipeline.add_command(command)
