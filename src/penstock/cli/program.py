"""The `penstock` command itself: finds its commands when they are called, says what went
wrong in one line, and ends with the code of `penstock.cli.exits`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import click

from penstock.cli.exits import Exit, exit_of
from penstock.cli.groups import Commands
from penstock.cli.place import placed
from penstock.cli.terminal import echo
from penstock.core.errors import PenstockError, TooMany

DEBUG = "PENSTOCK_X_DEBUG"
"""The variable that asks for stack traces."""

COMMANDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Run": {
        "up": ("up", "Start an engine, with workers for an application."),
        "worker": ("worker", "Join an engine with a worker process."),
    },
    "Containers": {
        "run": ("run", "Run a command in a container, as a job."),
        "container": ("container", "Serve container jobs over HTTP; engines and images."),
    },
    "Language models": {
        "ask": ("ask", "Ask a language model; its answer is shown as it comes."),
        "chat": ("chat", "Talk with a language model."),
        "pipe": ("pipe", "Split a language model over several machines."),
        "spool": ("spool", "Queue prompts in a folder, and let a local model work on them."),
        "models": ("models", "Download, list, show and remove language models."),
        "batch": ("batch", "Submit, list and read batches of requests to language models."),
    },
    "Jobs": {
        "submit": ("submit", "Submit a job; prints its id."),
        "ps": ("ps", "List jobs, newest first."),
        "show": ("show", "Tell where a job is, why, and how it came there."),
        "watch": ("watch", "Watch a job until it ends."),
        "logs": ("logs", "Print what a job wrote, and after it what its retries wrote."),
        "steps": ("steps", "List the rows that a job checkpointed, by name and number."),
        "result": ("result", "Print what a job returned."),
        "artifacts": ("artifacts", "List the files that a job left, or save them."),
        "cancel": ("cancel", "End jobs."),
        "retry": ("retry", "Submit jobs that ended badly once more."),
        "dead": ("dead", "List jobs that ended FAILED or TIMEOUT and were not retried."),
    },
    "Pipelines": {
        "pipeline": ("pipeline", "Start, watch and look into staged pipelines."),
    },
    "Approvals": {
        "approvals": ("approvals", "List jobs that are awaiting approval."),
        "approve": ("approvals", "Approve jobs that are awaiting approval."),
        "reject": ("approvals", "Reject jobs that are awaiting approval: they end DENIED."),
    },
    "Control": {
        "policy": ("policy", "Check, show, explain and simulate safety rules."),
        "schedule": ("schedules", "Create, list and change schedules (cron)."),
        "limit": ("limits", "Create, list and delete limits."),
        "pool": ("pools", "List, pause, resume and drain pools."),
        "keys": ("keys", "Create, list and revoke API keys."),
        "audit": ("audit", "Show the audit log: who did what, newest first."),
    },
    "Engine": {
        "top": ("top", "Watch the engine: jobs, rates, workers."),
        "workers": ("fleet", "List the workers."),
        "pools": ("fleet", "List the pools."),
        "verify": ("upkeep", "Check every job's record against its log."),
        "prune": ("upkeep", "Forget jobs that ended long ago."),
        "backup": ("backup", "Copy the data directory to a new folder."),
        "restore": ("backup", "Restore a backup to the data directory."),
        "doctor": ("doctor", "Check this installation and its data directory."),
        "version": ("version", "Print the version, and those of what matters."),
    },
}
"""By section: each command's module and sentence. A test compares these with the commands."""

_MODULES = {name: entry for section in COMMANDS.values() for name, entry in section.items()}


class Program(Commands):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = import_module(f"penstock.cli.{_MODULES[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in COMMANDS.items():
            with formatter.section(section):
                formatter.write_dl([(name, sentence) for name, (_, sentence) in commands.items()])


def _use_config(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        # As if the caller had said it there, so that child processes hear of it too.
        os.environ["PENSTOCK_CONFIG"] = value


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from penstock import __version__

        echo(f"penstock {__version__}")
        ctx.exit()


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes, --json and shell completion: docs/reference/cli.md.",
)
@placed
@click.option(
    "--config",
    metavar="FILE",
    callback=_use_config,
    expose_value=False,
    help="The settings file; else PENSTOCK_CONFIG or ./penstock.toml.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
def penstock() -> None:
    """A durable job engine: no accepted job is lost, none is silently run twice."""


def run(args: Sequence[str], **extra: Any) -> int:
    """Run one command and return its exit code."""
    try:
        done = penstock.main(list(args), "penstock", standalone_mode=False, **extra)
        _flush()
        return done if isinstance(done, int) else Exit.OK
    except BrokenPipeError:
        # Whoever read our output has had enough; what is left has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        return _explain(error)
    except KeyboardInterrupt:
        _say("interrupted")
        return Exit.INTERRUPTED


def _flush() -> None:
    sys.stdout.flush()


def _explain(error: Exception) -> int:
    match error:
        case click.Abort():
            _say("interrupted")
            return Exit.INTERRUPTED
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "penstock"
            _say(error.format_message().rstrip("."), f"see '{path} --help'")
            return Exit.USAGE
        case click.ClickException():
            _say(error.format_message())
            return Exit.USAGE
        case PenstockError():
            _say(error.message, error.hint or _when(error))
            return exit_of(error)
        case _:
            _say(
                f"unexpected {type(error).__name__}: {error}",
                f"{DEBUG}=1 shows where; please report it",
            )
            return Exit.FAILED


def _when(error: PenstockError) -> str:
    """What to do about an error that passes by itself."""
    if not isinstance(error, TooMany):
        return ""
    from penstock.cli.words import span

    return f"try again in {span(error.retry_after)}"


def _say(message: str, hint: str = "") -> None:
    echo(f"penstock: {message}", err=True)
    if hint:
        echo(f"  {hint}", err=True)
