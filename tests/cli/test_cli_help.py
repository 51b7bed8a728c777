"""The commands as such: light, complete, documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.support.rows import every

from penstock.cli.exits import EXITS, Exit, exit_of
from penstock.cli.program import COMMANDS, penstock
from penstock.cli.reference import cli_page, exits_page, leaves
from penstock.core import errors
from penstock.lifecycles.canonical import JobState

DOCS = Path(__file__).parents[2] / "docs" / "reference"
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


@every("name", NAMES)
def test_the_sentence_in_the_list_is_the_commands_own(name: str) -> None:
    sentences = {n: said for section in COMMANDS.values() for n, (_, said) in section.items()}
    assert (command(name).help or "").splitlines()[0] == sentences[name]


@every("name", LEAVES)
def test_every_option_is_explained(name: str) -> None:
    for option in commands()[name].params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, option.name


@every("name", sorted({*LEAVES} - {"up", "worker", "container serve", "batch output"}))
def test_every_command_that_tells_something_has_json(name: str) -> None:
    assert "json" in {option.name for option in commands()[name].params}


@every(
    "name",
    # A spool has no engine: its folder is the first argument.
    [one for one in LEAVES if one not in ("version", "policy check") and "spool " not in one],
)
def test_every_command_can_be_told_which_engine_after_its_name(name: str) -> None:
    assert {"data", "connect", "token"} <= {option.name for option in commands()[name].params}


@pytest.mark.parametrize("name", [one for one in LEAVES if one.startswith("spool ")])
def test_the_first_argument_of_every_spool_command_is_the_folder(name: str) -> None:
    arguments = [one for one in commands()[name].params if isinstance(one, click.Argument)]
    assert arguments[0].name == "workspace"


@every("name", LEAVES)
def test_every_command_says_in_a_sentence_what_it_does(name: str) -> None:
    assert (commands()[name].help or "").splitlines()[0].endswith(".")


def test_the_page_of_commands_is_in_step_with_them() -> None:
    assert (DOCS / "cli.md").read_text() == cli_page()


def test_the_page_of_exit_codes_is_in_step_with_the_table() -> None:
    assert (DOCS / "exit-codes.md").read_text() == exits_page()


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
