"""Fixtures for pytest, which loads this module by its entry point `pytest11`.

In every test run of every project, so nothing is imported here that a run does not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from penstock import App
    from penstock.testing import InMemoryEngine

_OPTION = "penstock_app"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(_OPTION, "the application of the fixture penstock_engine, as module:app")


def pytest_configure(config: pytest.Config) -> None:
    # The suites for authors of plug-ins have this mark, and a project may allow only known ones.
    config.addinivalue_line("markers", "seed(seed, *numbers): a sentence of Penstock's own design")


@pytest.fixture
def penstock_app(pytestconfig: pytest.Config) -> App:
    """The application under test: the one that the option `penstock_app` names.

    Override this fixture to choose it otherwise.
    """
    from penstock.app.application import load_app
    from penstock.core.errors import Misconfigured

    reference = pytestconfig.getini(_OPTION)
    if not reference:
        raise pytest.UsageError(
            'penstock_engine needs an application: set penstock_app = "module:app" in the'
            " configuration of pytest, or define a fixture penstock_app that returns one"
        )
    try:
        return load_app(reference)
    except Misconfigured as wrong:
        raise pytest.UsageError(f"penstock_app: {wrong}") from wrong


@pytest.fixture
def penstock_settings() -> dict[str, Any]:
    """What penstock_engine is given besides its application. Override it to change that."""
    return {}


@pytest.fixture
def penstock_engine(
    penstock_app: App, penstock_settings: dict[str, Any]
) -> Iterator[InMemoryEngine]:
    """An engine in memory that serves the application, for the time of one test."""
    from penstock.testing import InMemoryEngine

    with InMemoryEngine(penstock_app, **penstock_settings) as engine:
        yield engine
