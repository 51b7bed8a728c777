"""`penstock artifacts`: the files that a job left."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.ids import meant
from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.place import Place, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.core.artifact import Artifact
from penstock.core.errors import WaitTimedOut
from penstock.ports.engine_api import newest_try


@click.command()
@click.argument("job")
@click.argument("name", required=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to save it; '-' is standard output. Without a NAME: the folder for all of them.",
)
@click.option("--wait", is_flag=True, help="Wait for the end.")
@click.option("--timeout", type=DURATION, help="Wait no longer than this; the job goes on.")
@as_json
@placed
@click.pass_obj
def artifacts(
    place: Place,
    job: str,
    name: str | None,
    output: str | None,
    wait: bool,
    timeout: float | None,
    json: bool,
) -> int:
    """List the files that a job left, or save them.

    With a NAME that file is saved, by default under the last part of its name in this folder.
    With --output alone all are saved below that folder. Retries are followed. The SHA-256 of
    what is saved is checked.
    """
    if output == "-" and name is None:
        raise click.UsageError("'-o -' needs a NAME: one file fits into standard output")
    return run(_artifacts(place, job, name, output, wait or timeout is not None, timeout, json))


async def _artifacts(
    place: Place,
    text: str,
    name: str | None,
    output: str | None,
    wait: bool,
    timeout: float | None,
    json: bool,
) -> int:
    from penstock.app.artifacts import (
        artifact_of,
        pieces_of,
        save,
        target_of,
        targets,
    )

    async with reading_at(place) as api:
        job = await meant(api, text)
        job = await api.wait(job.job_id, timeout) if wait else await newest_try(api, job)
        if not job.is_final:
            raise WaitTimedOut(
                f"job {job.job_id} is {job.state}: it has left nothing yet",
                hint="--wait waits for its end",
            )
        left = job.result.artifacts if job.result is not None else ()
        try:
            if name is not None and output == "-":
                artifact = artifact_of(job, name)
                async for piece in pieces_of(api, artifact):
                    await asyncio.to_thread(sys.stdout.buffer.write, piece)
                sys.stdout.buffer.flush()
                return Exit.OK
            if name is not None:
                artifact = artifact_of(job, name)
                left = (artifact,)
                await save(pieces_of(api, artifact), target_of(artifact, output or "."))
            elif output is not None:
                for artifact, path in targets(left, Path(output)).items():
                    await save(pieces_of(api, artifact), path)
        except BrokenPipeError:
            raise
        except OSError as error:
            where = error.filename or output
            raise click.BadParameter(
                f"can't write {where}: {error.strerror}", param_hint="--output"
            ) from error
    if json:
        print_json(msgspec.to_builtins(left))
    elif name is None and output is None:
        _print(left)
    return Exit.OK


def _print(left: tuple[Artifact, ...]) -> None:
    if not left:
        echo("the job left no artifacts", err=True)
        return
    table = Listing("NAME", "SIZE", "TYPE", "SHA-256", flexible=("NAME",), right=("SIZE",))
    for one in left:
        table.add(one.name, f"{one.size:,}", one.media_type, one.sha256[:12])
    emit(table)
