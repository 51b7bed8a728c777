"""What users write against the Python API is checked by mypy and pyright as it should be."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import penstock
from penstock.config.loading import SECTIONS, TYPES
from penstock.config.options import SettingOptions
from penstock.ports.engine_api import PARTS, EngineApi
from penstock.ports.store import JobConditions, JobQuery
from penstock.workloads.llm.batches import Batches
from penstock.workloads.pipeline.interface import Pipelines

USES = Path(__file__).with_name("uses.py")
SOURCE = Path(penstock.__file__).parents[1]
Found = tuple[set[int], dict[int, str]]
"""Lines with an error, and by line the type that was revealed."""


def wanted() -> Found:
    errors, revealed = set(), {}
    for number, line in enumerate(USES.read_text().splitlines(), 1):
        if line.endswith("# error"):
            errors.add(number)
        elif found := re.search(r"reveal_type\(.*# is (.+)$", line):
            revealed[number] = found[1]
    assert errors
    assert revealed
    return errors, revealed


def plain(kind: str) -> str:
    """A type as its short name, which both checkers can be brought to."""
    kind = re.sub(r"\b[a-z_]\w*\.(?=\w)", "", kind.strip("\"'").replace("builtins.", ""))
    kind = kind.replace("CoroutineType[", "Coroutine[")
    return re.sub(r"Union\[(.*)\]$", lambda found: found[1].replace(", ", " | "), kind)


def checker(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(f"in CI {name} must be installed")
        pytest.skip(f"{name} is not installed")
    return found


def by_mypy(folder: Path) -> Found:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-version=3.11"),
            *("--no-error-summary", "--hide-error-context", "--output=json"),
            *("--follow-imports=silent", f"--cache-dir={folder}", str(USES)),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        check=False,
    )
    assert not done.stderr
    errors, revealed = set(), {}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        if found := re.match(r"Revealed type is \"(.*)\"", said["message"]):
            revealed[said["line"]] = plain(found[1])
        elif said["severity"] == "error":
            errors.add(said["line"])
    return errors, revealed


def by_pyright(folder: Path) -> Found:
    config = {
        "include": [str(USES)],
        "extraPaths": [str(SOURCE)],
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
        "reportUnusedExpression": False,
        "reportUnusedCoroutine": False,
        "reportUnusedCallResult": False,
    }
    settings = folder / "pyrightconfig.json"
    settings.write_text(json.dumps(config))
    done = subprocess.run(
        [
            *(checker("basedpyright"), "--outputjson"),
            *("--pythonpath", sys.executable, "--project", str(settings)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    errors, revealed = set(), {}
    for said in json.loads(done.stdout)["generalDiagnostics"]:
        line = said["range"]["start"]["line"] + 1
        if found := re.match(r"Type of \".*\" is \"(.*)\"", said["message"]):
            revealed[line] = plain(found[1])
        elif said["severity"] == "error":
            errors.add(line)
    return errors, revealed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [by_mypy, by_pyright])
def test_each_wrong_use_is_refused_and_each_right_one_has_its_type(check, tmp_path: Path) -> None:
    errors, revealed = wanted()
    found_errors, found = check(tmp_path)
    lines = USES.read_text().splitlines()
    assert {n: lines[n - 1] for n in found_errors - errors} == {}, "refused, but right"
    assert {n: lines[n - 1] for n in errors - found_errors} == {}, "accepted, but wrong"
    assert found == revealed


def test_the_conditions_of_a_call_are_the_fields_of_a_query() -> None:
    fields = {name: str(kind) for name, kind in JobQuery.__annotations__.items()}
    said = {name: kind.__forward_arg__ for name, kind in JobConditions.__annotations__.items()}
    assert said == fields


def test_the_settings_of_a_call_are_those_there_are() -> None:
    names = {name.replace(".", "__") for name in TYPES} | set(SECTIONS)
    assert set(SettingOptions.__annotations__) == names


def test_every_public_name_can_be_imported() -> None:
    missing = [name for name in penstock.__all__ if not hasattr(penstock, name)]
    assert missing == []


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_client_has_every_method_of_the_engine(part: str, tmp_path: Path) -> None:
    with penstock.App().run(tmp_path) as client:
        interface = typing.get_type_hints(
            getattr(EngineApi, part).fget, None, {"Batches": Batches, "Pipelines": Pipelines}
        )["return"]
        names = {name for name in vars(interface) if not name.startswith("_")}
        assert names
        offered = {name for name in dir(getattr(client, part)) if not name.startswith("_")}
        assert offered == names | {f"a{name}" for name in names}
