"""`penstock backup` and `penstock restore`."""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.paper import print_json
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, placed
from penstock.cli.terminal import echo
from penstock.cli.upkeep import report
from penstock.cli.words import moment, plural, size, span

_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@as_json
@placed
@click.pass_obj
def backup(place: Place, folder: Path, json: bool) -> None:
    """Copy the data directory to a new folder.

    The engine may be running, and goes on meanwhile. The copy holds its secrets too (token,
    pipe.key), and only its owner can read it. Not copied are container images, models, and the
    settings and rules, which are kept elsewhere.
    """
    from penstock.app.backup import back_up

    _refuse_address(place)
    start = time.monotonic()
    done = back_up(place.settings(), folder)
    if json:
        print_json(msgspec.to_builtins(done))
        return
    echo(
        f"backed up {plural(done.files, 'file')}, {size(done.bytes)}, to {done.path}"
        f" ({span(time.monotonic() - start)})"
    )
    if done.left_out:
        echo(f"penstock: not backed up: {', '.join(done.left_out)}", err=True)
    if done.missing:
        echo(
            f"penstock: {plural(len(done.missing), 'payload')} that jobs point to are not in the"
            f" data directory: {', '.join(done.missing[:3])} …",
            err=True,
        )


@click.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.option(
    "--replace", is_flag=True, help="Move what the data directory has now to a folder inside it."
)
@as_json
@placed
@click.pass_obj
def restore(place: Place, folder: Path, replace: bool, json: bool) -> int:
    """Restore a backup to the data directory.

    No engine may be running there, and the directory must be empty unless --replace is given.
    Every file is checked before anything changes; then every job's record is compared with its
    log, as 'penstock verify' does. Jobs that a worker held at the backup are treated as after a
    crash of the machine.
    """
    from penstock.app import backup

    _refuse_address(place)
    start = time.monotonic()
    done = backup.restore(place.settings(), folder, replace=replace)
    took = time.monotonic() - start
    verified = done.verified
    if json:
        print_json(msgspec.to_builtins(done))
    else:
        echo(
            f"restored {plural(done.files, 'file')}, {size(done.bytes)}, of"
            f" {moment(done.written_at, time.time())} to {done.path} ({span(took)})"
        )
        if done.replaced:
            echo(f"what was there is in {done.replaced}")
        for line in report(verified) if verified else ():
            echo(line)
    return Exit.MISMATCH if verified and verified.mismatches else Exit.OK


def _refuse_address(place: Place) -> None:
    if place.connect:
        raise click.UsageError(
            "--connect can't be used here: run it where the data directory is, with --data"
        )
