"""The commands as such: light, complete, documented."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from tests.support.rows import every
from tools.cli_reference import leaves

from penstock.cli.exits import EXITS, Exit, exit_of
from penstock.cli.program import (
    COMMANDS,
    RENAMED,
    RENAMED_OPTIONS,
    current_names,
    penstock,
    run,
)
from penstock.core import errors
from penstock.lifecycles.canonical import JobState

NAMES = [name for section in COMMANDS.values() for name in section]
ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.PenstockError)
]


def command(name: str) -> click.Command:
    found = penstock.get_command(click.Context(penstock), name)
    assert found is not None
    return found


def commands() -> dict[str, click.Command]:
    """Every command that does something, also those that are below others."""
    return {path: leaf for name in NAMES for path, leaf in leaves(name, command(name))}


LEAVES = sorted(commands())


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from penstock.cli.program import run; assert run(['--help']) == 0;"
        "print({'rich', 'asyncio', 'apsw', 'msgspec', 'fsspec', 'penstock.app'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"


@every("name", ["", *(name for name in NAMES if isinstance(command(name), click.Group))])
def test_no_sentence_is_cut_short_on_a_terminal_of_eighty_columns(name: str) -> None:
    with click.Context(penstock, info_name="penstock", terminal_width=80) as outer:
        shown = command(name) if name else penstock
        with click.Context(shown, outer, name, terminal_width=80) as ctx:
            told = shown.get_help(ctx)
    lines = told.splitlines()[1:]
    assert [line for line in lines if line.endswith("...")] == []
    assert max(map(len, lines)) <= 80


@every("name", NAMES)
def test_the_sentence_in_the_list_is_the_commands_own(name: str) -> None:
    sentences = {n: said for section in COMMANDS.values() for n, (_, said) in section.items()}
    assert (command(name).help or "").splitlines()[0] == sentences[name]


@every("name", LEAVES)
def test_every_option_is_explained(name: str) -> None:
    for option in commands()[name].params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, option.name


@every("name", sorted({*LEAVES} - {"up", "worker start", "container serve", "batch result", "mcp"}))
def test_every_command_that_tells_something_has_json(name: str) -> None:
    assert "--json" in {name for option in commands()[name].params for name in option.opts}


@every(
    "name",
    # A spool has no engine: its folder is the first argument.
    [one for one in LEAVES if one not in ("version", "policy check") and "spool " not in one],
)
def test_every_command_can_be_told_which_engine_after_its_name(name: str) -> None:
    assert {"data", "connect", "token"} <= {option.name for option in commands()[name].params}


@every("old", RENAMED)
def test_an_old_name_still_works_and_says_the_new_one(
    old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = RENAMED[old]
    assert run([*old.split(), "--help"]) == Exit.OK
    told = capsys.readouterr()
    assert told.err == f"penstock: 'penstock {old}' is now 'penstock {new}'\n"
    assert f"Usage: penstock {new.partition(' --')[0]} " in told.out


@every("name", [one for one in RENAMED_OPTIONS if one not in RENAMED])
def test_an_old_option_stands_for_one_that_exists(name: str) -> None:
    known = {name for option in commands()[name].params for name in option.opts}
    for old, new in RENAMED_OPTIONS[name].items():
        assert new in known
        words, notes = current_names([*name.split(), f"{old}=x", "--", old])
        assert words == [*name.split(), f"{new}=x", "--", old]
        assert notes == [f"'{old}' of 'penstock {name}' is now '{new}'"]


def test_no_old_name_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == Exit.OK
    told = capsys.readouterr().out
    assert [old for old in RENAMED if f"\n  {old} " in told] == []


@pytest.mark.parametrize("name", [one for one in LEAVES if one.startswith("spool ")])
def test_the_first_argument_of_every_spool_command_is_the_folder(name: str) -> None:
    arguments = [one for one in commands()[name].params if isinstance(one, click.Argument)]
    assert arguments[0].name == "workspace"


@every("name", LEAVES)
def test_every_command_says_in_a_sentence_what_it_does(name: str) -> None:
    assert (commands()[name].help or "").splitlines()[0].endswith(".")


@every("kind", ERRORS)
def test_every_error_ends_with_a_code_that_is_not_success(
    kind: type[errors.PenstockError],
) -> None:
    assert exit_of(kind.__new__(kind)) not in (Exit.OK, Exit.INTERRUPTED)


def test_the_ends_of_a_job_have_codes_of_their_own() -> None:
    codes = [EXITS[kind] for kind in ERRORS if kind.__base__ is errors.JobEnded]
    assert sorted(codes) == [Exit.FAILED, Exit.CANCELLED, Exit.DENIED, Exit.TIMEOUT]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("penstock ps --state ", {state.value.lower() for state in JobState}),
        ("penstock submit t --priority ", {"critical", "interactive", "batch"}),
        ("penstock ver", {"verify", "version"}),
    ],
)
def test_the_shell_completes_from_the_tables(words: str, expected: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from penstock.cli import main; main()"],
        env={
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
            "_PENSTOCK_COMPLETE": "bash_complete",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert {line.split(",")[1].lower() for line in done.stdout.split()} == expected


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            ["key", "create", "k"],
            "Missing option '--role'. Choose from: submit, operate, approve, admin",
            "see 'penstock key create --help'",
        ),
        (
            ["up", "--app", "nowhere.jobs:app"],
            "can't import nowhere.jobs: No module named 'nowhere'",
            "run this where nowhere is, or install it",
        ),
    ],
)
def test_a_mistake_is_one_line_and_what_to_do(
    words: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == Exit.USAGE
    assert capsys.readouterr().err == f"penstock: {message}\n  {hint}\n"
