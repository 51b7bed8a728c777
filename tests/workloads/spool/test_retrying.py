"""A retried job is a new one of the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.spool.spooled import files_of, new_workspace, put, queued

from penstock.core.errors import Conflict, InvalidRequest, NotFound
from penstock.lifecycles.spool import Status
from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.client.changes import cancel, retry
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import SpoolOptions
from penstock.workloads.spool.disk.files import Unfit
from penstock.workloads.spool.disk.job import read_meta, read_options
from penstock.workloads.spool.disk.workspace import Workspace

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return new_workspace(tmp_path)


def test_everything_that_was_asked_is_asked_again(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    options = SpoolOptions(sampling=Sampling(seed=3), deadline=5.0)
    old = Work(workspace).submit(
        "look", options=options, images=[tmp_path / "a.png"], parent="1_2_3", tags=["t"]
    )
    cancel(workspace, old)
    new = retry(workspace, old)
    folder = workspace.of(Status.QUEUED, new)
    assert new != old
    assert sorted(files_of(folder)) == ["meta.json", "options.json", "prompt.txt", "type.txt"]
    assert files_of(folder / "images") == {"image_000000.png": PNG}
    meta = read_meta(folder)
    assert (meta.retry_of, meta.parent, meta.tags, meta.status) == (old, "1_2_3", ("t",), "")
    assert read_options(folder) == SpoolOptions(sampling=Sampling(seed=3))
    assert workspace.find(old) is Status.FAILED


def test_only_what_has_ended_is_retried(workspace: Workspace) -> None:
    with pytest.raises(Conflict, match="QUEUED"):
        retry(workspace, queued(workspace))
    with pytest.raises(NotFound):
        retry(workspace, "1_2_3")


def test_what_was_unfit_is_still(workspace: Workspace, tmp_path: Path) -> None:
    put(workspace, Status.FAILED, "1", {"prompt.txt": b"\xff"})
    put(workspace, Status.FAILED, "2", {"prompt.txt": "p", "options.json": "{"})
    put(workspace, Status.FAILED, "3", {"meta.json": "{}"})
    (tmp_path / "a.png").write_bytes(PNG)
    images = put(workspace, Status.FAILED, "4") / "images"
    images.mkdir()
    (images / "image_000000.png").symlink_to(tmp_path / "a.png")
    for job_id, error in (("1", InvalidRequest), ("2", Unfit), ("3", NotFound), ("4", Unfit)):
        with pytest.raises(error):
            retry(workspace, job_id)
    assert not list(workspace.ids(Status.QUEUED))
