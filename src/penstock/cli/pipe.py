"""`penstock pipe`: one model over several machines, and the text stays home."""

from __future__ import annotations

import click

from penstock.cli.groups import Commands
from penstock.cli.pipe_key import key
from penstock.cli.pipe_node import node
from penstock.cli.pipe_prepare import prepare
from penstock.cli.pipe_status import status
from penstock.cli.pipe_up import up


@click.group(cls=Commands)
def pipe() -> None:
    """Split a language model over several machines."""


for command in (node, up, status, key, prepare):
    pipe.add_command(command)
