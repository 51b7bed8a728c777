"""The pages that are made from the code describe every command, setting, route and exit code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import click
from tests.docs.conftest import GENERATED
from tools import reference_pages

from penstock.api.container.facade import ContainerFacade
from penstock.api.container.server import operations
from penstock.api.operations import OPERATIONS
from penstock.cli.exits import Exit
from penstock.cli.program import penstock as program
from penstock.config.loading import TYPES


def page(name: str) -> str:
    return reference_pages.PAGES[f"reference/{name}.md"]()


def headings(text: str) -> set[str]:
    return set(re.findall(r"^### `(.+)`$", text, re.M))


def test_no_page_that_is_made_is_in_the_repository(root: Path) -> None:
    assert [name for name in GENERATED if (root / "docs" / name).exists()] == []


def test_all_of_them_can_be_written_to_a_folder(tmp_path: Path) -> None:
    reference_pages.main(str(tmp_path))
    written = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.md")}
    assert set(written) == GENERATED
    assert [name for name, path in written.items() if not path.read_text().startswith("# ")] == []


def test_every_command_and_every_option_is_described() -> None:
    text = page("cli")
    context = click.Context(program, info_name="penstock")
    missing = []
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None
        entries = re.findall(rf"^### `penstock {name}\b.*?(?=^###? |\Z)", text, re.M | re.S)
        if not entries:
            missing.append(name)
        if not isinstance(command, click.Group):
            shown = "\n".join(entries)
            missing += [
                f"{name} {option.opts[0]}"
                for option in command.params
                if isinstance(option, click.Option)
                and not option.hidden
                and option.name not in ("data", "connect", "token")
                and option.opts[0] not in shown
            ]
    assert missing == []


def test_every_exit_code_is_described() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page("exit-codes"), re.M)
    assert [int(code) for code, _ in rows] == [int(code) for code in Exit]


def test_every_setting_is_described() -> None:
    assert set(TYPES) - headings(page("settings")) == set()


def test_every_operation_over_http_is_described() -> None:
    ours = {f"{one.method} {one.path}".replace("...}", "}") for one in OPERATIONS}
    assert ours - headings(page("http-api")) == set()


def test_every_operation_of_a_container_worker_is_described() -> None:
    table = operations(cast("ContainerFacade", None))
    ours = {f"{one.method} {one.path}".replace("...}", "}") for one in table}
    assert ours - headings(page("container-http")) == set()
