"""Work: a job is queued whole and in the original's form, or nothing is left of it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    Misconfigured,
    PenstockError,
    StoreFailed,
    StoreFull,
    TooLarge,
)
from penstock.lifecycles.spool import FOLDERS, Status
from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.client.work import MAX_IMAGE, Submission, Work
from penstock.workloads.spool.config import JobKind, SpoolOptions, Sync
from penstock.workloads.spool.disk import files
from penstock.workloads.spool.disk.job import read_meta, read_options
from penstock.workloads.spool.disk.workspace import SpoolIds, Workspace, order_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(Workspace(tmp_path / "w", Sync.NONE))


def _left(work: Work) -> list[str]:
    """Everything below the five folders."""
    folders = (work.workspace.path / name for name in FOLDERS.values())
    return [str(path) for folder in folders for path in folder.rglob("*")]


def _queued(work: Work, job_id: str) -> dict[str, bytes]:
    folder = work.workspace.of(Status.QUEUED, job_id)
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# -- what is written ----------------------------------------------------------------


@pytest.mark.seed("004", "2.5", "12.5")
def test_a_prompt_is_a_folder_with_two_files(work: Work) -> None:
    job_id = work.submit("what is it?\n")
    files = _queued(work, job_id)
    assert sorted(files) == ["meta.json", "prompt.txt"]
    assert files["prompt.txt"] == b"what is it?\n"
    lines = files["meta.json"].decode().splitlines()
    assert lines[0] == "{"
    assert lines[1].startswith('  "submitted_at": "20')
    assert lines[2:] == ['  "mode": "text"', "}"]
    assert not list(work.workspace.folder(Status.STAGING).iterdir())


def test_the_id_is_the_document_s(work: Work) -> None:
    second, pid, counter = work.submit("x").split("_")
    assert len(second) == 10
    assert int(pid) == os.getpid()
    assert counter.isdigit()


def test_parent_and_tags_are_in_the_metadata(work: Work) -> None:
    job_id = work.submit("x", parent="1_2_3", tags=["a", "b-2"])
    meta = read_meta(work.workspace.of(Status.QUEUED, job_id))
    assert (meta.parent, meta.tags) == ("1_2_3", ("a", "b-2"))
    assert b'"tags": ["a", "b-2"]' in _queued(work, job_id)["meta.json"]


def test_options_have_a_file_only_if_there_are_any(work: Work) -> None:
    options = SpoolOptions(model="m", sampling=Sampling(temperature=0.0))
    job_id = work.submit("x", options=options)
    assert read_options(work.workspace.of(Status.QUEUED, job_id)) == options
    assert json.loads(_queued(work, job_id)["options.json"])["model"] == "m"


def test_the_kind_has_a_file_unless_it_is_text(work: Work) -> None:
    files = _queued(work, work.submit("x", kind=JobKind.EMBED))
    assert files["type.txt"] == b"embed"
    assert b'"mode": "embed"' in files["meta.json"]


def test_images_are_copied_in_their_order_with_their_endings(work: Work, tmp_path: Path) -> None:
    first, second = tmp_path / "b.PNG", tmp_path / "a.jpeg"
    first.write_bytes(PNG)
    second.write_bytes(b"\xff\xd8\xff" + bytes(20))
    files = _queued(work, work.submit("look", images=[first, second]))
    assert files["images/image_000000.PNG"] == PNG
    assert files["images/image_000001.jpeg"][:3] == b"\xff\xd8\xff"
    assert files["type.txt"] == b"vision"


def test_a_picture_alone_can_be_embedded(work: Work, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    job_id = work.submit("", kind=JobKind.EMBED, images=[tmp_path / "a.png"])
    assert _queued(work, job_id)["prompt.txt"] == b""


# -- what is refused ----------------------------------------------------------------

_REFUSED: dict[str, Callable[[Work, Path], object]] = {
    "an empty prompt": lambda work, at: work.submit(""),
    "a prompt that is not UTF-8": lambda work, at: work.submit(b"caf\xe9"),
    "a prompt that no UTF-8 can hold": lambda work, at: work.submit("\udc80"),
    "an endless prompt": lambda work, at: work.submit(b"x" * 10_000_001),
    "a parent that is no id": lambda work, at: work.submit("x", parent="../x"),
    "a retried job that is no id": lambda work, at: work.submit("x", retry_of="1__2"),
    "an empty tag": lambda work, at: work.submit("x", tags=[""]),
    "a long tag": lambda work, at: work.submit("x", tags=["t" * 65]),
    "a tag with a line end": lambda work, at: work.submit("x", tags=["a\n"]),
    "a thousand and one tags": lambda work, at: work.submit("x", tags=["t"] * 1001),
    "impossible options": lambda work, at: work.submit("x", options=SpoolOptions(max_tokens=0)),
    "vision without a picture": lambda work, at: work.submit("x", kind=JobKind.VISION),
    "a voice with a picture": lambda work, at: work.submit(
        "x", kind=JobKind.TTS, images=[at / "good.png"]
    ),
    "a picture that is not there": lambda work, at: work.submit("x", images=[at / "none.png"]),
    "a picture by a wrong name": lambda work, at: work.submit("x", images=[at / "good.txt"]),
    "a picture that is none": lambda work, at: work.submit("x", images=[at / "bad.png"]),
    "a picture that is a folder": lambda work, at: work.submit("x", images=[at / "dir.png"]),
    "a picture that is a pipe": lambda work, at: work.submit("x", images=[at / "pipe.png"]),
    "a picture with a null byte": lambda work, at: work.submit("x", images=[at / "\0.png"]),
    "an endless picture": lambda work, at: work.submit("x", images=[at / "huge.png"]),
    "a thousand and one pictures": lambda work, at: work.submit(
        "x", images=[at / "good.png"] * 1001
    ),
}


@pytest.mark.parametrize("act", _REFUSED.values(), ids=_REFUSED)
def test_what_can_t_be_spooled_is_refused_and_leaves_nothing(
    work: Work, tmp_path: Path, act: Callable[[Work, Path], object]
) -> None:
    for name in ("good.png", "good.txt", "huge.png"):
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "bad.png").write_bytes(b"not a picture")
    (tmp_path / "dir.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    os.truncate(tmp_path / "huge.png", MAX_IMAGE + 1)
    with pytest.raises(InvalidRequest) as refused:
        act(work, tmp_path)
    assert refused.value.problem
    assert _left(work) == []


def test_the_largest_prompt_is_taken(work: Work) -> None:
    job_id = work.submit(b"x" * 10_000_000)
    assert work.workspace.of(Status.QUEUED, job_id).joinpath("prompt.txt").stat().st_size == 10**7
    with pytest.raises(TooLarge):
        work.submit(b"x" * (10**7 + 1))


def test_a_workspace_is_made_only_if_it_is_to_be(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured):
        Work(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    assert Work(tmp_path / "made").submit("x")


def test_a_workspace_that_was_taken_away_is_said_to_be(work: Work) -> None:
    work.workspace.folder(Status.STAGING).rmdir()
    with pytest.raises(Misconfigured, match="input/writing"):
        work.submit("x")


# -- ids that are taken -------------------------------------------------------------


@pytest.mark.parametrize("status", FOLDERS)
def test_an_id_that_is_taken_in_any_state_is_skipped(tmp_path: Path, status: Status) -> None:
    workspace = Workspace(tmp_path / "w", Sync.NONE)
    work = Work(workspace, ids=SpoolIds(lambda: 7, count()))
    now = 1736700000.0
    work._clock = type("Stopped", (), {"now": lambda self: now})()  # type: ignore[assignment]
    workspace.of(status, "1736700000_7_0").mkdir()
    assert work.submit("x") == "1736700000_7_1"
    assert workspace.of(status, "1736700000_7_0").is_dir()


@pytest.mark.seed("004", "9.2")
def test_many_clients_that_share_a_pid_never_share_a_job(tmp_path: Path) -> None:
    """As processes do that run in containers of their own."""
    workspace = Workspace(tmp_path / "w", Sync.NONE)
    workspace.create()
    works = [Work(workspace, ids=SpoolIds(lambda: 1, count())) for _ in range(8)]

    def submit(number: int) -> tuple[str, bytes]:
        prompt = b"prompt %d" % number
        return works[number % 8].submit(prompt), prompt

    with ThreadPoolExecutor(8) as threads:
        jobs = dict(threads.map(submit, range(400)))
    assert len(jobs) == 400
    for job_id, prompt in jobs.items():
        assert workspace.of(Status.QUEUED, job_id).joinpath("prompt.txt").read_bytes() == prompt


# -- the order of things ------------------------------------------------------------


@pytest.mark.seed("004", "13.4", "14.6")
def test_everything_is_flushed_in_the_order_that_survives_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(Workspace(tmp_path / "w", Sync.FULL))
    (tmp_path / "a.png").write_bytes(PNG)
    steps: list[str] = []
    fsync, rename = os.fsync, files.rename_exclusively  # type: ignore[attr-defined]

    def flushed(handle: int) -> None:
        steps.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def renamed(source: str, target: str) -> None:
        steps.append(f"{Path(source).parent.name} -> {Path(target).parent.name}")
        rename(source, target)

    monkeypatch.setattr(files, "_file_system", lambda device: "ext4")
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(files, "rename_exclusively", renamed)
    job_id = work.submit("x", options=SpoolOptions(raw=True), images=[tmp_path / "a.png"])
    assert steps == [
        "image_000000.png",
        "images",
        "prompt.txt",
        "type.txt",
        "options.json",
        "meta.json",
        job_id,
        "writing -> ready",
        "ready",
    ]


def _failing(monkeypatch: pytest.MonkeyPatch, name: str, at: int, code: int) -> list[int]:
    """The `at`-th call of this function of `os` fails; returns how many calls there were."""
    real, calls = getattr(os, name), [0]

    def act(*args: object, **more: object) -> object:
        calls[0] += 1
        if calls[0] == at:
            raise OSError(code, os.strerror(code))
        return real(*args, **more)

    monkeypatch.setattr(os, name, act)
    return calls


@pytest.mark.seed("004", "13.4")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=["full", "io", "ro"])
@pytest.mark.parametrize(
    ("name", "calls"), [("fsync", 6), ("write", 4), ("mkdir", 2)], ids=["fsync", "write", "mkdir"]
)
def test_wherever_the_disk_refuses_nothing_is_left_and_nothing_is_tried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, calls: int, code: int
) -> None:
    work = Work(Workspace(tmp_path / "w", Sync.FULL))
    (tmp_path / "a.png").write_bytes(PNG)
    for at in range(1, calls + 1):
        with monkeypatch.context() as patched:
            counted = _failing(patched, name, at, code)
            with pytest.raises(StoreFull if code == errno.ENOSPC else StoreFailed):
                work.submit("x", images=[tmp_path / "a.png"])
        assert counted == [at]
        assert _left(work) == [], f"call {at} of {name}"
    assert work.submit("x")


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EROFS, errno.EXDEV], ids=["full", "ro", "xdev"]
)
def test_a_rename_that_is_refused_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    work = Work(Workspace(tmp_path / "w", Sync.FULL))

    def refuse(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "rename_exclusively", refuse)
    with pytest.raises(StoreFailed):
        work.submit("x")
    assert _left(work) == []


def test_a_job_put_under_its_id_in_the_queue_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(Workspace(tmp_path / "w", Sync.NONE))

    def taken(source: Path, target: Path) -> None:
        raise FileExistsError(errno.EEXIST, "there", str(target))

    monkeypatch.setattr(files, "rename_exclusively", taken)
    with pytest.raises(Conflict, match="queued already"):
        work.submit("x")
    assert _left(work) == []


def test_an_interrupted_submit_leaves_nothing(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.workloads.spool.client.work.encode_meta", interrupt)
    with pytest.raises(KeyboardInterrupt):
        work.submit("x")
    assert _left(work) == []


# -- many at once -------------------------------------------------------------------


def test_many_jobs_come_in_their_order_with_one_flush_for_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(Workspace(tmp_path / "w", Sync.FULL))
    flushed: list[str] = []
    monkeypatch.setattr(files, "_file_system", lambda device: "ext4")
    monkeypatch.setattr(
        "penstock.workloads.spool.client.work.flush_all", lambda path: flushed.append("all")
    )
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append("folder"))
    jobs = [Submission(prompt=f"prompt {n}") for n in range(25)]
    ids = list(work.submit_many(jobs, group=10))
    assert flushed == ["all", "folder"] * 3
    assert sorted(ids, key=order_of) == ids
    prompts = [_queued(work, job_id)["prompt.txt"].decode() for job_id in ids]
    assert prompts == [job.prompt for job in jobs]


def test_a_group_with_a_bad_job_is_refused_as_a_whole_and_those_before_stay(work: Work) -> None:
    jobs = [Submission(prompt=text) for text in ("a", "b", "c", "")]
    told: list[str] = []
    with pytest.raises(InvalidRequest):
        told.extend(work.submit_many(jobs[:2], group=2))
        told.extend(work.submit_many(jobs[2:], group=2))
    assert len(told) == 2
    assert set(work.workspace.ids(Status.QUEUED)) == set(told)
    assert not list(work.workspace.folder(Status.STAGING).iterdir())


@pytest.mark.parametrize("at", range(1, 7))
def test_a_group_that_the_disk_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    work = Work(Workspace(tmp_path / "w", Sync.NONE))
    with monkeypatch.context() as patched:
        _failing(patched, "write", at, errno.ENOSPC)
        with pytest.raises(StoreFull):
            list(work.submit_many([Submission(prompt="x")] * 3))
    assert _left(work) == []


def test_a_group_whose_last_flush_fails_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(Workspace(tmp_path / "w", Sync.FULL))
    with monkeypatch.context() as patched:
        _failing(patched, "fsync", 1, errno.EIO)
        with pytest.raises(StoreFailed):
            list(work.submit_many([Submission(prompt="x")] * 3))
    assert _left(work) == []


def test_a_submitted_job_that_a_server_took_at_once_is_not_taken_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(Workspace(tmp_path / "w", Sync.FULL))
    workspace = work.workspace
    real = os.fsync

    def claimed_and_failed(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("/ready"):
            for job_id in list(workspace.ids(Status.QUEUED)):
                workspace.of(Status.QUEUED, job_id).rename(workspace.of(Status.RUNNING, job_id))
            raise OSError(errno.EIO, "broken")
        real(handle)

    monkeypatch.setattr(os, "fsync", claimed_and_failed)
    with pytest.raises(PenstockError):
        work.submit("x")
    (job_id,) = workspace.ids(Status.RUNNING)
    assert workspace.of(Status.RUNNING, job_id).joinpath("prompt.txt").exists()
