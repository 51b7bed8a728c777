"""The pages docs/reference/cli.md and docs/reference/exit-codes.md, made from the commands
and from the table of exit codes.

python -m penstock.cli.reference docs/reference
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from penstock.cli.exits import EXITS, Exit
from penstock.cli.groups import Commands
from penstock.cli.program import COMMANDS, penstock

MADE = "<!-- Made by `python -m penstock.cli.reference docs/reference`; a test holds it. -->"

INTRODUCTION = f"""\
# The command line

{MADE}

`penstock --help` lists the commands, `penstock COMMAND --help` says what one takes.

## Which engine

A command finds its engine by the data directory: `--data`, else the setting `data_dir`
(`PENSTOCK_DATA_DIR`, `penstock.toml`), else the one in your data folder. `--connect` names
an address instead; one over TCP also wants the token, which is read from the data directory
unless `--token` gives it (`--token @FILE` keeps it out of the list of processes). These
options, and `--config`, may stand before the command; all but `--config` also after it.

If no engine is running, `ps`, `show`, `logs`, `steps`, `result`, `approvals`, `dead` and
`verify`, and `pipeline runs`, `status`, `items`, `watch` and `breakers`, read the data directory
itself and say so on standard error; `doctor` works too. `pipeline start` then runs the pipeline
in its own process, and `pipeline list` and `show` tell what is installed. `ask` and `chat` ask a
model in their own process unless an engine runs that serves one. The other commands need an
engine, but for `models` and `spool`, which are about folders, and `pipe`, which is about nodes:
of its commands `node --end-model` and `up` start an engine, and `status` asks a node, or else the
engine.

## Which job

Where a command wants a JOB, the whole id will do, or its beginning or end if that is enough
to tell it from others (three characters at least; the newest 10,000 jobs are searched).
`cancel`, `retry`, `approve` and `reject` take several, and `-` for ids on standard input:

```sh
penstock ps -q --state failed --topic 'job.text.*' | penstock retry -
```

A job of a spool has an id of another form, as `1736700000_12345_0`, which is given whole. `spool
get`, `wait`, `cancel` and `retry` read ids from standard input if none is given:

```sh
penstock spool submit ws --jsonl questions.jsonl | penstock spool wait ws \\
  | penstock spool get ws --jsonl > answers.jsonl
```

## What is printed

Results, ids and listings go to standard output, everything else to standard error. In a
terminal, a table fits its width; in a pipe nothing is cut short. `NO_COLOR` turns colours
off, and so does a pipe.

With `--json`, a listing is one JSON document; `logs`, `steps`, `watch` and `pipeline watch` print
JSON lines. A job is its record: `job_id`, `state`, `request` (as it was submitted; what it left at
its default is left out), `attempt`, `worker_id`, `result`, `successor` (the job that retries
it) and the times, which are seconds since the epoch, UTC. A run of a pipeline is the same
object as over HTTP.

An error is one line, `penstock: ...`, and a second with what to do. `PENSTOCK_X_DEBUG=1` shows
the stack trace. [Exit codes](exit-codes.md) tell a script what happened.

## Durations and times

A duration is a number of seconds, or has a unit: `500ms`, `30s`, `5m`, `2h`, `7d`, `1w`. A time
is `+DURATION` from now or in ISO 8601; without a zone it is your local time.

## Completion

```sh
eval "$(_PENSTOCK_COMPLETE=bash_source penstock)"               # in ~/.bashrc
eval "$(_PENSTOCK_COMPLETE=zsh_source penstock)"                # in ~/.zshrc
_PENSTOCK_COMPLETE=fish_source penstock | source                # in config.fish
```

Commands, options, states and priorities complete.
"""

EXIT_CODES = f"""\
# Exit codes

{MADE}

| code | meaning | errors |
|---|---|---|
"""

EXIT_NOTES = """
Codes 5, 6 and 7, and 1 for a job that FAILED, are those of `submit --wait`, `result` and
`watch`, which follow a job to its end. `cancel`, `retry`, `approve` and `reject` go through all
the jobs they are given and end with the code of the first that did not work out; in bulk, with
4 if some were refused. `up` and `worker` end with 0 after a signal let them finish, with 130
when a second one hurried them, and with the code of the error when a part of them failed.

`pipeline start`, `retry-failed` (both with `--follow`) and `watch` end with 0 for a run that
ended COMPLETED, 1 for FAILED (6 or 7 if its job was DENIED or ended TIMEOUT) and 5 for
CANCELLED. PARTIAL is 0 with a warning on standard error, and 1 with `--strict`.

`spool get` has the codes of the tool whose folders it shares: 0 with the result, 1 for a job that
FAILED or an id that can't be one, 2 for one that is not ready or not there. `spool submit --wait`,
`wait` and `watch` end with 1 for a job that FAILED, 5 if it was cancelled, 7 if its timeout or
deadline was over. `spool serve` ends with 0 after a signal let it finish, and with 130 when a
second one hurried it.
"""


def cli_page() -> str:
    sections = [INTRODUCTION]
    for section, commands in COMMANDS.items():
        sections.append(f"## {section}\n")
        for name in commands:
            command = penstock.get_command(click.Context(penstock), name)
            assert command is not None
            sections += [_entry(path, one) for path, one in leaves(name, command)]
    return "\n".join(sections)


def leaves(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """The commands that do something: itself, those that it has, or both."""
    if not isinstance(command, Commands) or command.acts:
        yield path, command
    if isinstance(command, Commands):
        for name, one in command.commands.items():
            yield from leaves(f"{path} {name}", one)


def exits_page() -> str:
    rows = (f"| {code:d} | {code.meaning} | {_errors(code)} |" for code in Exit)
    return EXIT_CODES + "\n".join(rows) + "\n" + EXIT_NOTES


_PLACE = ("data", "connect", "token")


def _errors(code: Exit) -> str:
    return ", ".join(f"`{kind.__name__}`" for kind, its in EXITS.items() if its is code)


def _entry(name: str, command: click.Command) -> str:
    arguments = [_argument(p) for p in command.params if isinstance(p, click.Argument)]
    usage = " ".join(["penstock", name, "[OPTIONS]", *arguments])
    help_text = inspect.cleandoc(command.help or "")
    rows = "\n".join(_rows(command))
    table = f"\n| option | what it does |\n|---|---|\n{rows}\n" if rows else ""
    return f"### `{usage}`\n\n{help_text}\n{table}"


def _argument(argument: click.Argument) -> str:
    return argument.metavar or (argument.name or "").upper()


def _rows(command: click.Command) -> Iterator[str]:
    for option in command.params:
        if not isinstance(option, click.Option) or option.hidden or option.name in _PLACE:
            continue
        names = ", ".join([*option.opts, *option.secondary_opts])
        said = option.help or ""
        if option.show_default:
            said += f" Default: {option.default}."
        yield f"| `{' '.join(filter(None, (names, _metavar(option))))}` | {said} |"


def _metavar(option: click.Option) -> str:
    if option.is_flag:
        return ""
    if option.metavar:
        return option.metavar.replace("|", " or ")
    if isinstance(option.type, click.Choice):
        return "/".join(map(str, option.type.choices))
    return {"duration": "DURATION", "integer range": "N", "integer": "N", "filename": "FILE"}.get(
        option.type.name, (option.name or "").upper()
    )


def main(folder: Path) -> None:
    (folder / "cli.md").write_text(cli_page(), "utf-8")
    (folder / "exit-codes.md").write_text(exits_page(), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
