"""The fixtures that pytest loads from `penstock.testing.plugin`, used as a project uses them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PLUGIN = "penstock.testing.plugin"
SHOP = """
import penstock
app = penstock.App()

@app.job("job.shop.report")
def report(name: str) -> str:
    return f"report on {name}"
"""
TEST = """
from shop import report

def test_report(penstock_engine):
    handle = report.options(delay=3600).submit("x")
    penstock_engine.step(hours=1)
    assert handle.result() == "report on x"

def test_each_test_has_its_own(penstock_engine):
    assert penstock_engine.jobs() == []
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "test_shop.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\npenstock_app = shop:app\n")
    return tmp_path


def pytest_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN]
    return subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)


def test_an_ini_option_names_the_application(project: Path) -> None:
    ran = pytest_in(project)
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr


def test_fixtures_of_the_project_come_first(project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (project / "conftest.py").write_text(
        "import pytest, shop\n"
        "@pytest.fixture\n"
        "def penstock_app(): return shop.app\n"
        "@pytest.fixture\n"
        "def penstock_settings(): return {'concurrency': 3}\n"
    )
    (project / "test_settings.py").write_text(
        "def test_it(penstock_engine): assert penstock_engine.workers()[0].slots == 3\n"
    )
    ran = pytest_in(project)
    assert "3 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("ini", "said"),
    [
        ("", 'set penstock_app = "module:app"'),
        ("penstock_app = shop:ap", "did you mean shop:app?"),
        ("penstock_app = nothing:app", "can't import nothing"),
    ],
)
def test_a_missing_or_wrong_application_is_named(project: Path, ini: str, said: str) -> None:
    (project / "pytest.ini").write_text(f"[pytest]\npythonpath = .\n{ini}\n")
    ran = pytest_in(project)
    assert "2 errors" in ran.stdout
    assert said in ran.stdout


def test_it_costs_a_run_that_does_not_use_it_next_to_nothing() -> None:
    program = f"import {PLUGIN}, sys; print('msgspec' in sys.modules, 'asyncio' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split()[0] == "False", ran


def test_it_may_be_named_although_it_is_loaded_by_itself() -> None:
    for entry in entry_points(group="pytest11"):
        if entry.value == PLUGIN:
            assert entry.name == PLUGIN
