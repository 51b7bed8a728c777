"""Jobs whose files are made to break a server: each ends, and the server goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.fake_llm import FakeRunner

from penstock.lifecycles.spool import Status
from penstock.testing.aio import run_async
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import MAX_IMAGES
from penstock.workloads.spool.config import ServerConfig, Sync
from penstock.workloads.spool.disk.files import Unfit
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.requests import read_images
from penstock.workloads.spool.server.server import Server


def _spool(workspace: Workspace, job_id: str, meta: bytes) -> None:
    folder = workspace.of(Status.STAGING, job_id)
    folder.mkdir()
    (folder / "prompt.txt").write_text("hello")
    (folder / "meta.json").write_bytes(meta)
    os.rename(folder, workspace.of(Status.QUEUED, job_id))


@run_async
async def test_metadata_of_any_depth_does_not_keep_a_job_from_ending(tmp_path: Path) -> None:
    """Some could be read, and not written again from where the stack was deeper."""
    workspace = Workspace(tmp_path / "work", Sync.NONE)
    workspace.create()
    depths = [60, *range(960, 1010, 3)]
    for depth in depths:
        _spool(workspace, f"17_{depth}", b'{"x":%b%b}' % (b"[" * depth, b"]" * depth))
    config = ServerConfig(workspace=workspace.path, sync=Sync.NONE, scan=0.1)
    server = Server(config, FakeRunner())
    await server.start()
    try:
        flow = Flow(workspace)
        for depth in depths:
            await flow.await_end(f"17_{depth}", 20)
        assert flow.status("17_60") is Status.DONE
        assert "meta.json" in flow.get("17_1008").error
    finally:
        await server.stop()


def test_thousands_of_images_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(MAX_IMAGES + 1):
        (tmp_path / "images" / f"{number}.png").touch()
    with pytest.raises(Unfit, match=str(MAX_IMAGES)):
        read_images(tmp_path)
