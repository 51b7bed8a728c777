"""What holds for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from tests.support.container_engines import private_docker, private_podman
from tests.support.network import leaving_is_permitted

from penstock.testing.images import EngineMissing, busybox_tree

# A shared machine is slow now and then, and that says nothing about the code.
settings.register_profile(
    "penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("penstock")

# A shell that starts the suite in the background ignores SIGINT, and every child would inherit
# that. Tests send SIGINT to processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Programs that tests start may use tests.support.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
)

T = TypeVar("T")


@pytest.fixture(scope="session")
def docker_socket() -> Iterator[Path]:
    """Where a Docker engine of this run's own listens."""
    yield from _engine(private_docker)


@pytest.fixture(scope="session")
def podman_socket() -> Iterator[Path]:
    """Where Podman's API listens, started for this run."""
    yield from _engine(private_podman)


@pytest.fixture(scope="session")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system of an image, for engines without a daemon."""
    return _there(lambda: busybox_tree(tmp_path_factory.mktemp("image") / "tree"))


@pytest.fixture(scope="session")
def llama_cpp() -> None:
    """Language models can be run; without llama.cpp the test is skipped, and in CI it fails."""
    if why := _no_llama_cpp():
        if os.environ.get("CI"):
            pytest.fail(f"in CI llama.cpp must be there: {why}")
        pytest.skip(why)


@cache
def _no_llama_cpp() -> str:
    from penstock.adapters.llama.process import check_engine
    from penstock.workloads.llm.values import LlmFailure

    try:
        check_engine()
    except LlmFailure as failure:
        return failure.message
    return ""


@pytest.fixture(scope="session")
def model_file(llama_cpp: None) -> Path:
    """A real language model, small, and what runs it: SmolLM2-135M-Instruct."""
    from tests.support.models import smollm2

    return smollm2()


@pytest.fixture(scope="session")
def pipe_nursery() -> Iterator[str]:
    """Where processes of nodes come from (`tests.support.chaos.pipes_network`)."""
    from tests.support.chaos.pipes_network import nursery

    with nursery() as path:
        yield path


def needs_runtime(name: str) -> str:
    """The path of an OCI runtime; without it the test is skipped, and in CI it fails."""
    found = shutil.which(name)
    if found is None or os.geteuid() != 0:
        _missing(f"there is no {name} here, or no root to run it")
    assert found is not None
    if name == "runsc" and not leaving_is_permitted():
        _missing("gVisor needs user namespaces, which are forbidden here, as in a chroot")
    return found


def needs_namespaces() -> None:
    """Hosts with networks of their own; without them the test is skipped, and in CI it fails."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        _missing("there is no root here, or no /dev/net/tun")


def _engine(start: Callable[[Path], AbstractContextManager[Path]]) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pe-"))  # a socket's path must be short
    running = start(folder)
    socket = _there(running.__enter__)
    try:
        yield socket
    finally:
        running.__exit__(None, None, None)
        shutil.rmtree(folder, ignore_errors=True)


def _there(make: Callable[[], T]) -> T:
    try:
        return make()
    except EngineMissing as missing:
        _missing(str(missing))
        raise


def _missing(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"in CI every engine must be there: {why}")
    pytest.skip(f"{why}; sh tests/support/install.sh installs engines on Debian")
