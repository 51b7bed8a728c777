"""Docker, Podman, runc, crun and gVisor keep the promises of every container engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import needs_runtime

from penstock.testing.container_engine import EngineContract, MakeEngine
from penstock.testing.images import IMAGE
from penstock.workloads.container.engines.docker.engine import DockerEngine
from penstock.workloads.container.engines.oci.engine import OciEngine
from penstock.workloads.container.engines.oci.images import ImageStore


class TestDocker(EngineContract):
    @pytest.fixture
    def make(self, docker_socket: Path) -> MakeEngine:
        return lambda: DockerEngine(docker_socket)


class TestPodman(EngineContract):
    @pytest.fixture
    def make(self, podman_socket: Path) -> MakeEngine:
        return lambda: DockerEngine(podman_socket)


class TestDockerWithGVisor(TestDocker):
    runtime = "runsc"
    own_kernel = True

    @pytest.fixture
    def make(self, docker_socket: Path) -> MakeEngine:
        needs_runtime(self.runtime)
        return lambda: DockerEngine(docker_socket)


@pytest.fixture(scope="session")
def oci_root(busybox: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the image; the runtimes share it."""
    root = tmp_path_factory.mktemp("oci")
    ImageStore(root / "images").import_tree(busybox, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
    return root


class TestRunc(EngineContract):
    program = "runc"

    @pytest.fixture
    def make(self, oci_root: Path) -> MakeEngine:
        needs_runtime(self.program)
        return lambda: OciEngine(oci_root, runtime=self.program)


class TestCrun(TestRunc):
    program = "crun"


class TestGVisor(TestRunc):
    program = "runsc"
    runtime = "runsc"
    own_kernel = True
