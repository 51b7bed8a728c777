"""`penstock spool`: a folder is the queue, a local model does the work."""

from __future__ import annotations

import click

from penstock.cli.groups import Commands
from penstock.cli.spool_change import cancel, clean, retry
from penstock.cli.spool_list import list_jobs, status, watch
from penstock.cli.spool_results import get, wait
from penstock.cli.spool_serve import serve
from penstock.cli.spool_submit import submit


@click.group(cls=Commands)
def spool() -> None:
    """Queue prompts in a folder, and let a local model work on them."""


for command in (serve, submit, get, status, list_jobs, wait, watch, cancel, retry, clean):
    spool.add_command(command)
