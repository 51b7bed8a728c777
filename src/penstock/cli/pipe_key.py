"""`penstock pipe key`: what lets nodes into a network."""

from __future__ import annotations

import click

from penstock.cli.paper import print_json
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, placed
from penstock.cli.terminal import echo
from penstock.core.errors import Misconfigured


@click.command()
@click.option("--new", is_flag=True, help="Make another: who has the old one is let in no more.")
@as_json
@placed
@click.pass_obj
def key(place: Place, new: bool, json: bool) -> None:
    """Print the network's key, which is made if there is none.

    It lies in the data folder, readable for its owner only. Whoever has it belongs to the
    network: hand it to other machines as one hands on a password. Nodes that run keep theirs
    until they are started again.
    """
    from penstock.workloads.pipes.setup import network_key

    settings = place.settings()
    if new and settings.pipe_key:
        raise Misconfigured(
            "the key is not kept in the data folder: the setting pipe_key has it",
            hint="change it there, or leave it out",
        )
    if new:
        settings.pipe_key_file.unlink(missing_ok=True)
    found = network_key(settings)
    if json:
        print_json({"key": found, "file": "" if settings.pipe_key else str(settings.pipe_key_file)})
    else:
        echo(found)
