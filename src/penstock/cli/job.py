"""`penstock job`: the commands about jobs, most of which have a short form of their own."""

from __future__ import annotations

import click

from penstock.cli.groups import Commands
from penstock.cli.job_act import approve, cancel, reject, retry
from penstock.cli.job_list import ps
from penstock.cli.job_result import artifacts, result, steps
from penstock.cli.job_show import show
from penstock.cli.job_submit import submit
from penstock.cli.job_watch import logs, watch


@click.group(cls=Commands)
def job() -> None:
    """Submit, list, show, watch, cancel and retry jobs.

    `penstock submit`, `ps` (list), `show`, `watch`, `logs`, `result`, `cancel`, `retry`,
    `approve` and `reject` are short forms.
    """


job.add_command(submit)
job.add_command(ps, "list")
for command in (show, watch, logs, result, artifacts, steps, cancel, retry, approve, reject):
    job.add_command(command)
