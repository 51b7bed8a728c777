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

from penstock import __version__
from penstock.cli.engine import engine_options
from penstock.cli.exits import Exit, exit_of
from penstock.cli.formats import span
from penstock.cli.groups import Commands
from penstock.cli.output import warn
from penstock.core.errors import DEBUG, PenstockError, TooMany

COMMANDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Everyday": {
        "up": ("up", "Start an engine, with workers for an application."),
        "down": ("up", "Stop the engine of this data directory."),
        "status": (
            "status",
            "Show whether the engine runs, its jobs and workers, and what needs a person.",
        ),
        "submit": ("job", "Submit a job; prints its id."),
        "run": ("container", "Run a command in a container, as a job."),
        "ps": ("job_list", "List jobs, newest first."),
        "show": ("job_show", "Show a job: its state, the reason, and its history."),
        "watch": ("job_watch", "Watch a job until it ends."),
        "logs": ("job_watch", "Print what a job wrote, and after it what its retries wrote."),
        "result": ("job_result", "Print what a job returned."),
        "cancel": ("job", "Cancel jobs."),
        "retry": ("job", "Retry jobs that failed or timed out."),
        "approve": ("job", "Approve jobs that are awaiting approval."),
        "reject": ("job", "Reject jobs that are awaiting approval: they end DENIED."),
        "ask": ("ask", "Ask a language model; prints its answer as it comes."),
        "chat": ("chat", "Chat with a language model."),
        "top": ("status", "Watch the engine: what needs a person, jobs, rates, failures, workers."),
        "events": ("job_watch", "Print everything that happens to any job, from now on."),
        "dashboard": ("key", "Print a link that signs a browser in."),
    },
    "By noun": {
        "job": ("job", "Submit, list, show, watch, cancel and retry jobs."),
        "worker": ("worker", "Start, list, show and drain workers."),
        "pool": ("worker", "List, show, pause, resume and drain pools."),
        "topic": ("worker", "List the topics that workers serve."),
        "schedule": ("schedule", "Create, list, show, change and delete schedules (cron)."),
        "limit": ("limit", "Create, list, show and delete limits."),
        "key": ("key", "Create, list, show and delete API keys."),
        "policy": ("policy", "Check, show, explain and simulate safety rules."),
        "pipeline": ("pipeline", "Start, watch and inspect staged pipelines."),
        "container": ("container", "Run and serve container jobs; engines and images."),
        "model": ("model", "Download, list, show and delete language models."),
        "node": ("node", "Split a language model over several machines."),
        "batch": ("batch", "Submit, list and read batches of requests to language models."),
        "spool": ("spool", "Queue prompts in a folder for a local model."),
    },
    "Engine": {
        "mcp": ("mcp", "Serve topics as tools of an AI agent (MCP)."),
        "db": ("data", "Show, migrate, verify and fill the engine's PostgreSQL database."),
        "config": ("doctor", "Show the settings in effect, and where each comes from."),
        "audit": ("data", "Show the audit log: who did what, newest first."),
        "verify": ("data", "Check every job's record against its log."),
        "prune": ("data", "Delete jobs that ended long ago."),
        "backup": ("data", "Copy the data directory to a new folder."),
        "restore": ("data", "Restore a backup to the data directory."),
        "doctor": ("doctor", "Check this installation and its data directory."),
        "version": ("doctor", "Print the version of Penstock and of what it uses."),
    },
}
"""By section: each command's module and sentence. A test compares these with the commands."""

RENAMED: Mapping[str, str] = {
    "workers": "worker list",
    "pools": "pool list",
    "keys": "key",
    "keys revoke": "key delete",
    "models": "model",
    "models rm": "model delete",
    "pipe": "node",
    "pipe node": "node start",
    "steps": "job steps",
    "artifacts": "job artifacts",
    "approvals": "job list --awaiting-approval",
    "dead": "job list --dead",
    "dead retry": "job retry",
    "schedule put": "schedule create",
    "limit put": "limit create",
    "pipeline retry-failed": "pipeline retry",
    "pipeline breakers": "pipeline breaker list",
    "pipeline breakers reset": "pipeline breaker reset",
    "container image ls": "container image list",
    "container image rm": "container image delete",
    "batch output": "batch result",
    "spool ls": "spool list",
    "spool clean": "spool prune",
}
"""Commands that had another name in version 0.1, and the new one. They go with the next version."""

RENAMED_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "artifacts": {"-o": "--output"},
    "job artifacts": {"--timeout": "--wait-timeout"},
    "result": {"--timeout": "--wait-timeout"},
    "cancel": {"--timeout": "--wait-timeout"},
    "limit create": {"--key": "--per"},
    "pool drain": {"--timeout": "--wait-timeout"},
    "pipeline start": {"--config": "--input", "--follow": "--wait"},
    "pipeline retry": {"--follow": "--wait"},
    "pipeline cancel": {"--timeout": "--wait-timeout"},
    "pipeline runs": {"--status": "--state"},
    "container serve": {"--config": "--worker-config"},
    "node start": {"--key": "--network-key", "--drain": "--drain-timeout"},
    "node up": {"--key": "--network-key", "--drain": "--drain-timeout"},
    "node status": {"--key": "--network-key"},
    "spool list": {"--status": "--state"},
    "spool serve": {"--drain": "--drain-timeout"},
    "spool cancel": {"--timeout": "--wait-timeout"},
    "spool wait": {"--timeout": "--wait-timeout"},
}
"""The same for options, by command."""

_MODULES = {name: entry for section in COMMANDS.values() for name, entry in section.items()}
_LONGEST = max(len(name.split()) for name in RENAMED)


def current_names(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line with today's names, and what to say about the old ones in it."""
    words, notes = list(args), []
    before = ""
    for count in range(_LONGEST, 0, -1):
        if new := RENAMED.get(old := " ".join(words[:count])):
            words[:count], before = new.split(), old
            notes.append(f"'penstock {old}' is now 'penstock {new}'")
            break
    for path in (before, words[0], " ".join(words[:2])):
        for number, word in enumerate(words):
            if word == "--":
                break
            option, equals, value = word.partition("=")
            if new := RENAMED_OPTIONS.get(path, {}).get(option):
                words[number] = f"{new}{equals}{value}"
                notes.append(f"'{option}' of 'penstock {path}' is now '{new}'")
    return words, notes


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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        words, notes = current_names(args)
        if notes and not ctx.resilient_parsing:
            warn("; ".join(notes))
        return super().resolve_command(ctx, words)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in COMMANDS.items():
            with formatter.section(section):
                formatter.write_dl([(name, sentence) for name, (_, sentence) in commands.items()])


def _use_config(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        # As if the caller had said it there, so that child processes hear of it too.
        os.environ["PENSTOCK_CONFIG"] = value


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes, --json and shell completion: docs/reference/cli.md.",
)
@engine_options
@click.option(
    "--config",
    metavar="FILE",
    callback=_use_config,
    expose_value=False,
    help="The settings file; else PENSTOCK_CONFIG or ./penstock.toml.",
)
@click.version_option(__version__, message="%(prog)s %(version)s", help="Print the version.")
def penstock() -> None:
    """A durable job engine: no accepted job is lost, none is silently run twice."""


def run(args: Sequence[str], **extra: Any) -> int:
    """Run one command and return its exit code."""
    try:
        done = penstock.main(list(args), "penstock", standalone_mode=False, **extra)
        sys.stdout.flush()
        return done if isinstance(done, int) else Exit.OK
    except BrokenPipeError:
        # Whoever read our output has had enough; what is left has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        return _explain(_known(error))
    except KeyboardInterrupt:
        warn("interrupted")
        return Exit.INTERRUPTED


def _known(error: Exception) -> Exception:
    """The same; the failure of a model as an error that says what to do."""
    from penstock.models.values import LlmFailure

    if not isinstance(error, LlmFailure):
        return error
    from penstock.cli.generation import model_error

    return model_error(error)


def _explain(error: Exception) -> int:
    match error:
        case click.Abort():
            warn("interrupted")
            return Exit.INTERRUPTED
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "penstock"
            message = " ".join(error.format_message().split()).rstrip(".")
            warn(message, f"see '{path} --help'")
            return Exit.USAGE
        case click.ClickException():
            warn(error.format_message())
            return Exit.USAGE
        case PenstockError():
            hint = error.hint
            if isinstance(error, TooMany) and not hint:
                hint = f"try again in {span(error.retry_after)}"
            warn(error.message, hint)
            return exit_of(error)
        case _:
            warn(
                f"unexpected {type(error).__name__}: {error}",
                f"{DEBUG}=1 shows where; please report it",
            )
            return Exit.FAILED
