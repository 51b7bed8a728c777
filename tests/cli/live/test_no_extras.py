"""What `pip install .` gives without extras: an engine, workers, and errors that name the extra."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.cli.commands import Penstock, said, stop

_HIDE = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in {absent!r} else find_spec(name, *rest)
"""
"""Run at the start of Python: these modules can't be found."""


def _needed() -> set[str]:
    """The packages that an installation without extras brings."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    found: set[str] = set()
    waiting = list(project["dependencies"])
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            waiting += requires(name) or []
        except PackageNotFoundError:  # for another platform
            continue
    return found


@pytest.fixture
def bare(tmp_path: Path) -> Penstock:
    needed = _needed()
    absent = {
        module
        for module, packages in packages_distributions().items()
        if not needed & {canonicalize_name(package) for package in packages}
    } - {"penstock", "tests"}
    assert {"asyncpg", "mcp", "nats"} <= absent
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text(_HIDE.format(absent=absent))
    bare = Penstock(tmp_path)
    bare.env["PYTHONPATH"] = ":".join([str(tmp_path / "hidden"), *sys.path])
    return bare


def test_an_engine_and_a_worker_run_jobs_without_extras(bare: Penstock) -> None:
    with bare.up("--no-worker") as engine:
        worker = bare.start("worker", "start", "--app", "jobs:app")
        try:
            said(worker, "serves")
            shout = ("submit", "job.text.shout", "--input", '{"text": "hello"}', "--wait")
            assert bare.out(*shout) == '"HELLO!"'
        finally:
            stop(worker)
        stop(engine)
        assert engine.returncode == 0


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("up --store postgresql://localhost/jobs", "postgres"),
        ("up --bus nats://127.0.0.1:1", "nats"),
        ("mcp", "mcp"),
        ("db status postgresql://localhost/jobs", "postgres"),
        ("db migrate postgresql://localhost/jobs", "postgres"),
    ],
)
def test_what_needs_an_extra_says_which(bare: Penstock, command: str, extra: str) -> None:
    process = bare.start(*command.split())
    _, err = process.communicate(timeout=60)
    assert process.returncode in (2, 8)
    assert f"pip install 'penstock[{extra}]'" in err
    assert "unexpected" not in err
