"""The pages reference/cli.md and reference/exit-codes.md, made from the commands and from the table
of exit codes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from penstock.cli.exits import EXITS, Exit
from penstock.cli.groups import Commands
from penstock.cli.program import COMMANDS, RENAMED, RENAMED_OPTIONS, penstock

INTRODUCTION = """\
# The command line

A command is a noun and a verb, as in `penstock schedule create`. The verbs mean the same for
every noun: `list`, `show`, `create`, `delete`, `start`, `submit`, `status`, `watch`, `result`,
`cancel`, `retry`, `pause`, `resume`, `drain`, `prune`. What people do every day also has a short
form: `ps` is `job list`, `run` is `container run`, and so on. `penstock --help` lists all
commands, `penstock COMMAND --help` says what one takes.

## Which engine

A command finds its engine by the data directory: `--data`, else the setting `data_dir`
(`PENSTOCK_DATA_DIR`, `penstock.toml`), else the one in your data folder. `--connect` names
an address instead; one over TCP also wants the token, which is read from the data directory
unless `--token` gives it (`--token @FILE` keeps it out of the list of processes). With an API key
as the token, the command has the rights of that key, on this machine as well. These
options, and `--config`, may stand before the command; all but `--config` also after it.

If no engine is running, `ps`, `show`, `logs`, `result`, `job artifacts`, `job steps` and
`verify`, and `pipeline runs`, `status`, `items`, `watch` and `breaker list`, read the data
directory itself and say so on standard error; `doctor` and `status` work too. `run`, `ask`,
`chat` and `pipeline start` then do their work in an engine of their own process, and `pipeline
show` shows what is installed. The other commands need an engine, except `model` and `spool`,
which are about folders, and `node`, which is about nodes: `node start --end-model` and `node up`
start an engine, and `node status` asks a node, or else the engine.

## Waiting, and Ctrl-C

`submit`, `run`, `pipeline start`, `pipeline retry`, `batch submit` and `spool submit` start
something. With `--wait` they wait for its end; with `--detach` (`-d`) they print its id and leave
it to the engine. `run` waits by default, the others detach. `--wait-timeout` ends the waiting,
and what runs goes on; `--timeout` is the maximum run time of the job itself.

Ctrl-C in a command that waits for what it started cancels that; once more leaves at once. Ctrl-C
in a command that only watches (`watch`, `logs -f`, `result --wait`, `events`, `top`) leaves the job
alone. The exit code is 130 in every case; a server that could finish first ends with 0.

## Which job

Where a command wants a JOB, the whole id will do, or its beginning or end if that is enough to
tell it from others (three characters at least; the newest 10,000 jobs are searched). `cancel`,
`retry`, `approve` and `reject` take several, and `-` for ids on standard input; or they take the
filters of `ps`, or `--all`, and ask for confirmation unless `--yes` is given:

```sh
penstock ps -q --state failed --topic 'job.text.*' | penstock retry -
penstock retry --topic 'job.text.*' --newer-than 1h --yes
```

A job of a spool has an id of another form, as `1736700000_12345_0`, which is given whole. `spool
result`, `wait`, `cancel` and `retry` read ids from standard input if none is given:

```sh
penstock spool submit ws --jsonl questions.jsonl | penstock spool wait ws \\
  | penstock spool result ws --jsonl > answers.jsonl
```

## What is printed

Results, ids and listings go to standard output, everything else to standard error. In a
terminal, a table fits its width; in a pipe nothing is cut short. `NO_COLOR` turns colours
off, and so does a pipe.

Every list and every `show` has `-o table|wide|name|json`: `wide` shows all columns and whole ids,
`name` prints one name on each line (so does `-q`), and `--json` is `-o json`. A table leaves out
columns that would be empty, and tenants if all are the default one. With `--json`, a
list is one JSON document; `logs`, `steps`, `watch` and `pipeline watch` print JSON lines. A job
is its record: `job_id`, `state`, `request` (as it was submitted; what it left at its default is
left out), `attempt`, `worker_id`, `result`, `successor` (the job that retries it) and the times,
which are seconds since the epoch, UTC. A run of a pipeline is the same object as over HTTP.

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

EXIT_CODES = """\
# Exit codes

| code | meaning | errors |
|---|---|---|
"""

EXIT_NOTES = """
Codes 5, 6 and 7, and 1 for a job that FAILED, are those of `submit --wait`, `result` and
`watch`, which follow a job to its end. `cancel`, `retry`, `approve` and `reject` go through all
the jobs they are given and end with the code of the first that did not work out; in bulk, with
4 if some were refused. `up` and `worker` end with 0 after a signal let them finish, with 130
when a second one hurried them, and with the code of the error when a part of them failed.

`pipeline start` and `retry` (both with `--wait`) and `pipeline watch` end with 0 for a run that
ended COMPLETED, 1 for FAILED (6 or 7 if its job was DENIED or ended TIMEOUT) and 5 for
CANCELLED. PARTIAL is 0 with a warning on standard error, and 1 with `--strict`.

`spool submit --wait`, `result`, `wait` and `watch` end with 1 for a job that FAILED, 5 if it was
cancelled, 7 if its timeout or deadline was over. `spool serve` ends with 0 after a signal let it
finish, and with 130 when a second one hurried it."""


def cli_page() -> str:
    sections, told = [INTRODUCTION], dict[int, str]()
    for section, commands in COMMANDS.items():
        sections.append(f"## {section}\n")
        for name in commands:
            command = penstock.get_command(click.Context(penstock), name)
            assert command is not None
            sections += [_entry(path, one, told) for path, one in leaves(name, command)]
    return "\n".join([*sections, renamed_section()])


def leaves(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """The commands that do something: itself, or those that it has."""
    if not isinstance(command, Commands):
        yield path, command
        return
    for name, one in command.commands.items():
        if not one.hidden:
            yield from leaves(f"{path} {name}", one)


def exits_page() -> str:
    rows = (f"| {code:d} | {code.meaning} | {_errors(code)} |" for code in Exit)
    return EXIT_CODES + "\n".join(rows) + "\n" + EXIT_NOTES


_PLACE = ("data", "connect", "token")


def _errors(code: Exit) -> str:
    return ", ".join(f"`{kind.__name__}`" for kind, its in EXITS.items() if its is code)


def renamed_section() -> str:
    """Names of the version before, which still work."""
    rows = [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    for command, options in RENAMED_OPTIONS.items():
        rows += [f"| `{command} {old}` | `{command} {new}` |" for old, new in options.items()]
    table = "\n".join(rows)
    return f"""\
## Old names

These names of the version before still work in this one. They print one line on standard error with
the new name.

| old | new |
|---|---|
{table}
"""


def _entry(name: str, command: click.Command, told: dict[int, str]) -> str:
    """A short form and the whole command are the same, and are described once."""
    if short := told.get(id(command)):
        return f"### `penstock {name}`\n\nThe long form of `penstock {short}`.\n"
    told[id(command)] = name
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
