"""A worker for tests that try what it bears, and the look at what they left."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from tests.support.container.leftovers import cgroups_of, leftovers, settled
from tests.support.container.serving import Served, new_id, serve_on

MIB = 1 << 20
GRACE = 0.3
INPUTS = {"max_files": 50, "max_file_bytes": 4 * MIB, "max_bytes": 8 * MIB}


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A worker's process on crun; when it is stopped no cgroup of its jobs is left."""
    served = serve_on(
        "crun",
        tmp_path_factory.mktemp("crun"),
        request,
        cpus=64,
        stop_grace=GRACE,
        inputs=INPUTS,
        images={"pull": "never"},
    )
    served.start()
    try:
        yield served
        names = served.containers()
    finally:
        ended = served.stop()
    assert (ended, cgroups_of(names)) == (0, [])


@pytest.fixture
def mark(served: Served) -> Iterator[str]:
    """To be part of a job's command. Afterwards nothing that has it is left, and the next job
    runs."""
    mark = f"9{secrets.randbelow(10**12):012}"
    yield mark
    assert settled(lambda: leftovers(mark, served.jobs_dir)) == []
    assert served.run(new_id(), "echo", "well")["stdout"] == "well\n"
