"""Whatever is put into a workspace, the job says why it failed, and the server goes on.

A real server with a real model; after each bad job a good one is DONE.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.support.spool.spool_server import (
    GREEDY,
    LONG,
    PATIENCE,
    PENSTOCK,
    Spool,
    needs_mounts,
    new_id,
    served,
    spool_command,
)
from tests.support.waiting import eventually

from penstock.core.errors import InvalidRequest, Misconfigured, StoreFull, TooLarge
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.client.changes import cancel
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import JobKind, SpoolOptions
from penstock.workloads.spool.disk.workspace import Workspace

GOOD = {"prompt.txt": b"Say yes.", "options.json": b'{"max_tokens": 1}'}
PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


@pytest.fixture(scope="module")
def spool(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spool]:
    with served(tmp_path_factory.mktemp("bad") / "work", model_file) as spool:
        yield spool


@pytest.fixture
def going_on(spool: Spool) -> Iterator[Spool]:
    """The server, which must be at work and hold nothing in the end."""
    yield spool
    spool.works()
    assert os.listdir(spool.workspace.folder(Status.STAGING)) == []


def failed(spool: Spool, job_id: str, *words: str) -> None:
    """It is FAILED, nowhere else, and its one line says all of these."""
    found = spool.ended(job_id)
    folder = spool.workspace.of(Status.FAILED, job_id)
    # What lay in the place of a folder goes after the failed job is there.
    eventually(lambda: spool.where(job_id) == [Status.FAILED], "it is nowhere else")
    reason = (folder / "error.txt").read_text()
    assert reason == found.error
    assert "\n" not in reason
    assert "Traceback" not in reason
    for word in words:
        assert word in reason, reason
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["status"] == "failed"
    assert meta["code"]
    assert [name for name in os.listdir(folder) if name.endswith(".tmp")] == []


def run(command: list[str | Path]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE)


def entries(workspace: Path) -> set[Path]:
    return set(workspace.rglob("*"))


# -- Ids ------------------------------------------------------------------------------------

BAD_IDS = {
    "a slash": "1/2",
    "a way out": "../../etc/passwd",
    "one dot": ".",
    "two dots": "..",
    "a dot inside": "1736700000.12345.0",
    "5,000 characters": "1" * 5000,
    "129 digits": "1" * 129,
    "a null byte": "1736700000\x0012345",
    "nothing": "",
    "letters": "job-1",
    "an underscore at its end": "1_",
    "two underscores": "1__2",
    "a line's end": "1_2\n",
    "digits of another script": "١٢٣",
}


@pytest.mark.seed("004", "7.2")
@pytest.mark.parametrize("what", BAD_IDS)
def test_an_id_that_is_none_is_refused_by_everything_that_takes_one(
    going_on: Spool, what: str
) -> None:
    bad = BAD_IDS[what]
    before = entries(going_on.path / "input")
    for ask in (going_on.flow.status, going_on.flow.get, going_on.flow.prompt, going_on.flow.wait):
        with pytest.raises(InvalidRequest, match="job id"):
            ask(bad)
    if bad:
        with pytest.raises(InvalidRequest, match="parent"):
            going_on.work.submit("x", parent=bad)
    assert entries(going_on.path / "input") == before


@pytest.mark.parametrize("what", ["a way out", "5,000 characters"])
@pytest.mark.parametrize("command", ["get", "status", "wait", "cancel", "retry"])
def test_a_command_refuses_an_id_that_is_none_in_a_line(
    spool: Spool, command: str, what: str
) -> None:
    done = spool_command(command, spool.path, BAD_IDS[what])
    assert done.returncode in (1, 2)
    assert done.stdout == b""
    said = done.stderr.decode()
    assert "Traceback" not in said
    assert len(said) < 1000
    assert "can't be one" in said


@pytest.mark.parametrize(
    "name",
    ["1.2.3", "job", "..1", "1_", "1" * 129, "a b", "\udcff"],
    ids=["dots", "a word", "two dots", "an underscore", "129 digits", "a blank", "no UTF-8"],
)
def test_what_is_no_job_is_left_alone(going_on: Spool, name: str) -> None:
    thing = going_on.workspace.folder(Status.QUEUED) / name
    thing.mkdir()
    (thing / "prompt.txt").write_text("Say yes.")
    going_on.works()
    assert (thing / "prompt.txt").read_text() == "Say yes."
    assert name not in [one.job_id for one in going_on.flow.list()]


@pytest.mark.parametrize("what", [what for what in BAD_IDS if what != "nothing"])
def test_a_parent_that_is_no_id_fails_its_child(going_on: Spool, what: str) -> None:
    meta = json.dumps({"parent": BAD_IDS[what]})
    failed(going_on, going_on.put({**GOOD, "meta.json": meta.encode()}), "parent")


# -- Files ----------------------------------------------------------------------------------

UNFIT = {
    "no prompt": ({"options.json": b"{}"}, ["prompt.txt", "missing"]),
    "an empty prompt": ({"prompt.txt": b"", "options.json": b"{}"}, ["prompt.txt", "empty"]),
    "a prompt that is not UTF-8": ({"prompt.txt": b"caf\xe9"}, ["prompt.txt", "UTF-8", "0xe9"]),
    "a prompt of 10 MB and a byte": (
        {"prompt.txt": b"a" * 10_000_001},
        ["prompt.txt", "10000000"],
    ),
    "a kind that nobody knows": ({**GOOD, "type.txt": b"video"}, ["type.txt", "video"]),
    "a kind that is not UTF-8": ({**GOOD, "type.txt": b"\xff\xfe"}, ["type.txt"]),
    "a voice": ({**GOOD, "type.txt": b"tts"}, ["tts"]),
    "vision without an image": ({**GOOD, "type.txt": b"vision"}, ["images"]),
    "an image that is none": (
        {**GOOD, "type.txt": b"vision", "images/image_000000.png": b"no picture"},
        ["images"],
    ),
    "an image for a model without eyes": (
        {**GOOD, "type.txt": b"vision", "images/image_000000.png": PNG},
        ["images"],
    ),
    "metadata that is not JSON": ({**GOOD, "meta.json": b'{"mode": '}, ["meta.json", "JSON"]),
    "metadata that is a list": ({**GOOD, "meta.json": b"[]"}, ["meta.json"]),
    "metadata of another type": ({**GOOD, "meta.json": b'{"tags": 5}'}, ["meta.json", "tags"]),
    "metadata of null bytes": ({**GOOD, "meta.json": bytes(100)}, ["meta.json"]),
    "metadata 100,000 deep": ({**GOOD, "meta.json": b"[" * 100_000}, ["meta.json"]),
    "metadata of 2 MB": ({**GOOD, "meta.json": b" " * 2_000_000 + b"{}"}, ["meta.json"]),
}


@pytest.mark.seed("004", "4.5", "6.10", "14.13")
@pytest.mark.parametrize("what", UNFIT)
def test_a_job_whose_files_are_unfit_fails_and_says_which(going_on: Spool, what: str) -> None:
    files, words = UNFIT[what]
    failed(going_on, going_on.put(files), *words)


@pytest.mark.seed("004", "14.6")
def test_a_folder_that_stays_empty_fails_after_a_moment(going_on: Spool) -> None:
    """Somebody might have been writing it where it lies."""
    failed(going_on, going_on.put({}), "prompt.txt", "missing")


def test_a_prompt_that_is_written_where_it_lies_has_a_moment(going_on: Spool) -> None:
    job_id = going_on.put({})
    time.sleep(0.3)  # the queue has seen it by now
    (going_on.workspace.of(Status.QUEUED, job_id) / "prompt.txt").write_text("Say yes.")
    assert going_on.ended(job_id).status is Status.DONE


OPTIONS = {
    "no JSON": (b"{max_tokens: 4}", []),
    "nothing": (b"", []),
    "not UTF-8": (b'{"system": "\xff"}', []),
    "a list": (b"[1]", ["object"]),
    "1,000,000 brackets": (b'{"schema": ' + b'{"a":' * 200_000, []),
    "an unknown field": (b'{"max_tokenz": 4}', ["max_tokenz"]),
    "a heat of 9": (b'{"sampling": {"temperature": 9}}', ["temperature"]),
    "a heat below zero": (b'{"sampling": {"temperature": -1}}', ["temperature"]),
    "a heat that is no number": (b'{"sampling": {"temperature": NaN}}', []),
    "a top-p of 2": (b'{"sampling": {"top_p": 2}}', ["top_p"]),
    "a seed below zero": (b'{"sampling": {"seed": -1}}', ["seed"]),
    "no tokens": (b'{"max_tokens": 0}', ["max_tokens"]),
    "tokens without end": (b'{"max_tokens": 1e400}', []),
    "a text for a number": (b'{"max_tokens": "many"}', ["max_tokens"]),
    "an empty stop": (b'{"stop": [""]}', ["stop"]),
    "a schema and a grammar": (b'{"schema": {}, "grammar": "root ::= \\"a\\""}', ["not both"]),
    "a schema that is none": (b'{"schema": {"type": "no-such-type"}}', ["schema"]),
    "a grammar that is none": (b'{"grammar": "root ::= ((("}', ["grammar"]),
    "a raw prompt with a system": (b'{"raw": true, "system": "s"}', ["raw"]),
    "a priority that nobody knows": (b'{"priority": "now"}', ["priority"]),
    "a deadline that is over": (b'{"deadline": 1}', ["deadline"]),
    "a timeout of nothing": (b'{"timeout": 0}', ["timeout"]),
    "a timeout too short": (b'{"timeout": 0.001}', ["0.001"]),
    "a model that is not there": (b'{"model": "gpt-9"}', ["gpt-9"]),
    "a message of a stranger": (b'{"messages": [{"role": "boss"}]}', ["role"]),
}


@pytest.mark.seed("004", "6.4")
@pytest.mark.parametrize("what", OPTIONS)
def test_options_that_ask_for_the_impossible_fail_their_job(going_on: Spool, what: str) -> None:
    options, words = OPTIONS[what]
    failed(going_on, going_on.put({"prompt.txt": b"Say yes.", "options.json": options}), *words)


REFUSED: dict[str, Callable[[Work, Path], object]] = {
    "an empty prompt": lambda work, _: work.submit(""),
    "a prompt that is not UTF-8": lambda work, _: work.submit(b"caf\xe9"),
    "half a character": lambda work, _: work.submit("\ud800"),
    "a prompt of 10 MB and a byte": lambda work, _: work.submit(b"a" * 10_000_001),
    "a tag with a blank": lambda work, _: work.submit("x", tags=["a b"]),
    "a tag of 65 letters": lambda work, _: work.submit("x", tags=["a" * 65]),
    "an image that is none": lambda work, path: work.submit("x", images=[path / "text.png"]),
    "an image by another name": lambda work, path: work.submit("x", images=[path / "image.bmp"]),
    "an image that is not there": lambda work, path: work.submit("x", images=[path / "no.png"]),
    "an image that is a folder": lambda work, path: work.submit("x", images=[path / "f.png"]),
    "an image that is a device": lambda work, path: work.submit("x", images=[path / "zero.png"]),
    "vision without an image": lambda work, _: work.submit("x", kind=JobKind.VISION),
    "no tokens": lambda work, _: work.submit("x", options=SpoolOptions(max_tokens=0)),
    "an empty stop": lambda work, _: work.submit("x", options=SpoolOptions(stop=("",))),
    "a schema and a grammar": lambda work, _: work.submit(
        "x", options=SpoolOptions(schema={}, grammar='root ::= "a"')
    ),
}


@pytest.mark.seed("004", "13.10")
@pytest.mark.parametrize("what", REFUSED)
def test_what_can_be_seen_to_be_wrong_is_refused_at_submit_with_nothing_left_behind(
    going_on: Spool, tmp_path: Path, what: str
) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "image.bmp").write_bytes(PNG)
    (tmp_path / "f.png").mkdir()
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    before = entries(going_on.path / "input")
    with pytest.raises((InvalidRequest, TooLarge)):
        REFUSED[what](going_on.work, tmp_path)
    assert entries(going_on.path / "input") == before


# -- What is no file, and no folder ---------------------------------------------------------


def make_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def make_pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path, _: Path) -> None:
    path.mkdir()


def make_socket(path: Path, _: Path) -> None:
    # By another name first: a socket's path must be short.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def make_device(path: Path, _: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero


ODD = {
    "a symbolic link": make_link,
    "a pipe": make_pipe,
    "a folder": make_folder,
    "a socket": make_socket,
    "a device": make_device,
}


def put_odd(spool: Spool, names: Sequence[str], kind: str, victim: Path, **files: bytes) -> str:
    """A job in which these are something else than files."""
    job_id = new_id()
    folder = spool.workspace.folder(Status.STAGING) / job_id
    folder.mkdir()
    for name, data in {**GOOD, **files}.items():
        if name not in names:
            (folder / name).write_bytes(data)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        ODD[kind](folder / name, victim)
    folder.rename(spool.workspace.folder(Status.QUEUED) / job_id)
    return job_id


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["prompt.txt", "options.json", "meta.json", "type.txt"])
def test_what_is_no_file_where_one_should_be_is_not_followed(
    going_on: Spool, tmp_path: Path, name: str, kind: str
) -> None:
    victim = tmp_path / "secret"
    victim.write_text('{"mode": "secret"}')
    failed(going_on, put_odd(going_on, [name], kind, victim), name, kind)
    assert victim.read_text() == '{"mode": "secret"}'


@pytest.mark.parametrize("kind", ["a symbolic link", "a pipe", "a device"])
def test_an_image_that_is_no_file_is_not_followed(
    going_on: Spool, tmp_path: Path, kind: str
) -> None:
    victim = tmp_path / "secret.png"
    victim.write_bytes(PNG)
    failed(going_on, put_odd(going_on, ["images/image_000000.png"], kind, victim), kind)


def test_images_behind_a_link_are_not_followed(going_on: Spool, tmp_path: Path) -> None:
    (tmp_path / "image_000000.png").write_bytes(PNG)
    failed(going_on, put_odd(going_on, ["images"], "a symbolic link", tmp_path), "images")


WRITTEN = [
    *("partial.txt", "progress.json", "progress.json.tmp", "attempts.txt"),
    *("result.txt", "result.txt.tmp", "meta.json.tmp", "error.txt", "error.txt.tmp"),
]


@pytest.mark.parametrize("kind", ODD)
def test_the_server_writes_through_nothing_that_lies_where_it_writes(
    going_on: Spool, tmp_path: Path, kind: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    files = {"prompt.txt": LONG.encode(), "options.json": b'{"max_tokens": 60}'}
    job_id = put_odd(going_on, WRITTEN, kind, victim, **files)
    if kind != "a folder":  # then nothing is known of it before its end
        going_on.running(job_id)
    found = going_on.ended(job_id)
    assert (found.status, found.error) == (Status.DONE, "")
    assert found.text
    assert victim.read_text() == "untouched"
    odd = [one.name for one in going_on.folder(job_id).iterdir() if not is_plain(one)]
    assert odd == ["attempts.txt"]  # which was never written


def is_plain(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "a folder"])
def test_what_is_no_folder_where_a_job_should_be_fails(
    going_on: Spool, tmp_path: Path, kind: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "prompt.txt").write_text("Say yes.")
    job_id = new_id()
    ODD[kind](going_on.workspace.folder(Status.STAGING) / job_id, elsewhere)
    os.rename(
        going_on.workspace.folder(Status.STAGING) / job_id,
        going_on.workspace.folder(Status.QUEUED) / job_id,
    )
    failed(going_on, job_id, "folder" if kind != "a symbolic link" else kind)
    assert os.listdir(elsewhere) == ["prompt.txt"]


def test_a_file_where_a_job_should_be_fails(going_on: Spool) -> None:
    job_id = new_id()
    (going_on.workspace.folder(Status.QUEUED) / job_id).write_text("Say yes.")
    failed(going_on, job_id, "folder")


@pytest.mark.parametrize("status", [Status.QUEUED, Status.RUNNING, Status.DONE])
def test_a_workspace_with_a_link_for_a_folder_is_refused(
    tmp_path: Path, model_file: Path, status: Status
) -> None:
    workspace = Workspace(tmp_path / "work")
    workspace.create()
    workspace.folder(status).rmdir()
    (tmp_path / "elsewhere").mkdir()
    workspace.folder(status).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Misconfigured, match="symbolic link"):
        Work(workspace).submit("x")
    done = spool_command("serve", workspace.path, "--model", model_file)
    assert done.returncode == 2
    assert b"symbolic link" in done.stderr
    assert b"Traceback" not in done.stderr
    assert os.listdir(tmp_path / "elsewhere") == []


# -- A folder that is moved by hand ---------------------------------------------------------


@pytest.mark.seed("004", "12.4")
@pytest.mark.parametrize("target", [Status.DONE, Status.FAILED])
def test_a_running_job_that_is_moved_by_hand_stays_where_it_was_put(
    going_on: Spool, target: Status
) -> None:
    job_id = going_on.submit(LONG, max_tokens=400, sampling=GREEDY)
    moved = going_on.workspace.of(target, job_id)
    going_on.running(job_id).rename(moved)
    eventually(lambda: bool(going_on.events("let go", job_id)), "the server lets go of it")
    assert going_on.where(job_id) == [target]
    assert not (moved / "result.txt").exists()


@pytest.mark.seed("004", "12.4")
def test_a_running_job_that_is_put_back_by_hand_runs_again(going_on: Spool) -> None:
    job_id = going_on.submit(LONG, max_tokens=60)
    running = going_on.running(job_id)
    running.rename(going_on.workspace.of(Status.QUEUED, job_id))
    found = going_on.ended(job_id)
    assert (found.status, found.error) == (Status.DONE, "")
    assert going_on.where(job_id) == [Status.DONE]
    assert found.meta.completion_tokens is not None


@pytest.mark.seed("004", "7.3")
def test_a_running_job_that_is_deleted_by_hand_is_missing_and_nothing_comes_back(
    going_on: Spool,
) -> None:
    job_id = going_on.submit(LONG, max_tokens=400, sampling=GREEDY)
    running = going_on.running(job_id)
    running.rename(going_on.path / "away")
    subprocess.run(["rm", "-r", going_on.path / "away"], check=True)
    eventually(lambda: bool(going_on.events("let go", job_id)), "the server lets go of it")
    assert going_on.where(job_id) == []
    assert going_on.flow.status(job_id) is Status.MISSING


@pytest.mark.seed("004", "12.4")
def test_a_queued_job_that_is_moved_away_by_hand_is_not_run(going_on: Spool) -> None:
    long = [going_on.submit(LONG, max_tokens=400, sampling=GREEDY) for _ in range(4)]
    for job_id in long:
        going_on.running(job_id)
    waiting = going_on.submit("Say yes.", max_tokens=4)
    going_on.workspace.of(Status.QUEUED, waiting).rename(going_on.path / waiting)
    for job_id in long:
        cancel(going_on.workspace, job_id)
        going_on.ended(job_id)
    going_on.works()
    assert going_on.where(waiting) == []


@pytest.mark.seed("004", "12.4")
def test_two_jobs_of_one_id_are_both_there_in_the_end(going_on: Spool) -> None:
    first = going_on.put(GOOD)
    assert going_on.ended(first).status is Status.DONE
    before = (going_on.folder(first) / "result.txt").read_bytes()
    going_on.put({"prompt.txt": b"Another one.", "options.json": b'{"max_tokens": 4}'}, first)
    eventually(lambda: first + "_1" in os.listdir(going_on.path / "failed"), "the second fails")
    assert (going_on.folder(first) / "result.txt").read_bytes() == before
    assert (going_on.path / "failed" / f"{first}_1" / "prompt.txt").read_bytes() == b"Another one."


# -- Disks ----------------------------------------------------------------------------------

MIB = 1 << 20


class Disk:
    """A server in a mount namespace of its own, in which a small file system is mounted."""

    def __init__(self, folder: Path, model: Path, mount: str, *options: str) -> None:
        needs_mounts()
        self._mounted = folder / "disk"
        self._mounted.mkdir()
        self.processing = self._mounted / "work" / "processing"
        script = f'cd "$0" && {mount} && exec "$@"'
        self.spool = Spool(
            self._mounted / "work",
            model,
            *options,
            before=["unshare", "--mount", "sh", "-c", script, str(folder)],
        )

    def start(self) -> Disk:
        spool = self.spool.start()
        # Seen through the process, whose namespace it is in.
        inside = Path(f"/proc/{spool.pid}/root{spool.path}")
        spool.look_at(inside)
        return self

    def mount(self, *args: str) -> None:
        subprocess.run(
            ["nsenter", "-t", str(self.spool.pid), "-m", "-r", "mount", *args], check=True, cwd="/"
        )


@pytest.fixture
def disk(tmp_path: Path, model_file: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path, model_file, "mount -t tmpfs -o size=8m none disk").start()
    yield disk
    disk.spool.kill()


def fill(folder: Path) -> Path:
    """Take all the room there is."""
    file = folder / "fill"
    with file.open("wb", buffering=0) as out:
        size = MIB
        while size >= 1:
            try:
                out.write(bytes(size))
            except OSError:
                size //= 2
    return file


def test_on_a_full_disk_a_submission_is_refused_and_a_job_ends_when_there_is_room(
    disk: Disk,
) -> None:
    spool = disk.spool
    job_id = spool.submit(LONG, max_tokens=60, logprobs=5)
    spool.running(job_id)
    file = fill(spool.path)
    before = entries(spool.path / "input")
    with pytest.raises(StoreFull, match="no space left"):
        spool.work.submit("x" * 100_000)
    assert entries(spool.path / "input") == before
    eventually(lambda: "no space left" in spool.log, "the server says that the disk is full")
    assert spool.where(job_id) == [Status.RUNNING]
    file.unlink()
    found = spool.ended(job_id)
    assert (found.status, found.meta.completion_tokens) == (Status.DONE, 60)
    spool.works()


@pytest.mark.parametrize("command", ["submit", "serve"])
def test_a_workspace_on_a_read_only_disk_is_refused(
    tmp_path: Path, model_file: Path, command: str
) -> None:
    needs_mounts()
    workspace = Workspace(tmp_path / "work")
    workspace.create()
    before = entries(workspace.path)
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", script, str(workspace.path)]
    asked = ["x"] if command == "submit" else ["--model", str(model_file)]
    done = run([*inside, PENSTOCK, "spool", command, workspace.path, *asked])
    assert done.returncode == 2
    assert b"may not be written" in done.stderr
    assert b"Traceback" not in done.stderr
    assert entries(workspace.path) == before


def test_a_workspace_on_two_file_systems_is_refused(tmp_path: Path, model_file: Path) -> None:
    needs_mounts()
    workspace = Workspace(tmp_path / "work")
    workspace.create()
    script = 'mount -t tmpfs none "$0" && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", script, str(workspace.folder(Status.RUNNING))]
    for command in (
        [PENSTOCK, "spool", "submit", workspace.path, "x"],
        [PENSTOCK, "spool", "serve", workspace.path, "--model", model_file],
    ):
        done = run([*inside, *command])
        assert done.returncode == 2
        assert done.stdout == b""
        assert b"another file system" in done.stderr
        assert b"Traceback" not in done.stderr
    assert workspace.counts() == dict.fromkeys(workspace.counts(), 0)
    assert os.listdir(workspace.folder(Status.STAGING)) == []


def test_a_file_system_that_is_mounted_later_holds_jobs_up_and_loses_none(disk: Disk) -> None:
    spool = disk.spool
    disk.mount("-t", "tmpfs", "none", str(disk.processing))
    job_id = spool.submit("Say yes.", max_tokens=4)
    eventually(lambda: "one file system" in spool.log, "the server says why it can't claim")
    assert spool.where(job_id) == [Status.QUEUED]
    subprocess.run(
        ["nsenter", "-t", str(spool.pid), "-m", "-r", "umount", str(disk.processing)],
        check=True,
    )
    assert spool.ended(job_id).status is Status.DONE


# -- Permissions ----------------------------------------------------------------------------

NO_OVERRIDE = [
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search,-fowner",
    "--inh-caps=-dac_override,-dac_read_search,-fowner",
]
"""For root, to whom permissions mean nothing."""


@pytest.fixture(scope="module")
def humble(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spool]:
    """A server that has to keep to permissions."""
    before = NO_OVERRIDE if os.geteuid() == 0 else []
    with served(tmp_path_factory.mktemp("humble") / "work", model_file, before=before) as spool:
        yield spool


@pytest.mark.parametrize("name", ["prompt.txt", "options.json", "meta.json"])
def test_a_file_that_may_not_be_read_fails_its_job(humble: Spool, name: str) -> None:
    job_id = new_id()
    folder = humble.workspace.folder(Status.STAGING) / job_id
    folder.mkdir()
    for one, data in {**GOOD, "meta.json": b"{}"}.items():
        (folder / one).write_bytes(data)
    (folder / name).chmod(0)
    folder.rename(humble.workspace.folder(Status.QUEUED) / job_id)
    failed(humble, job_id, name, "permission denied")
    humble.works()


@pytest.mark.parametrize("mode", ["000", "444", "555", "222", "333"])
def test_a_folder_that_may_not_be_used_ends_as_any_other(humble: Spool, mode: str) -> None:
    job_id = new_id()
    folder = humble.workspace.folder(Status.STAGING) / job_id
    folder.mkdir()
    for one, data in GOOD.items():
        (folder / one).write_bytes(data)
    folder.chmod(int(mode, 8))
    os.rename(folder, humble.workspace.folder(Status.QUEUED) / job_id)
    found = humble.ended(job_id)
    assert humble.where(job_id) == [found.status]
    assert found.status is Status.DONE or "permission denied" in found.error
    humble.works()


def test_a_folder_that_may_not_be_written_to_holds_an_end_up_and_loses_nothing(
    humble: Spool,
) -> None:
    job_id = humble.submit(LONG, max_tokens=40)
    humble.running(job_id)
    humble.workspace.folder(Status.DONE).chmod(0o555)
    eventually(lambda: "permission denied" in humble.log, "the server says that it can't write")
    assert humble.where(job_id) == [Status.RUNNING]
    humble.workspace.folder(Status.DONE).chmod(0o755)
    assert humble.ended(job_id).status is Status.DONE
    humble.works()


def test_a_workspace_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work")
    workspace.create()
    workspace.folder(Status.QUEUED).chmod(0o555)
    before = NO_OVERRIDE if os.geteuid() == 0 else []
    done = run([*before, PENSTOCK, "spool", "submit", workspace.path, "x"])
    assert done.returncode == 2
    assert b"may not be written" in done.stderr
    assert os.listdir(workspace.folder(Status.STAGING)) == []


# -- The model ------------------------------------------------------------------------------


@pytest.mark.seed("004", "6.11", "14.2")
def test_a_prompt_longer_than_the_context_fails_with_both_counts(going_on: Spool) -> None:
    job_id = going_on.put({"prompt.txt": b"word " * 2000})
    failed(going_on, job_id, "512", "tokens")
    reason = going_on.ended(job_id).error
    counts = [int(word) for word in reason.replace(",", " ").split() if word.isdigit()]
    assert max(counts) > 2000
    meta = going_on.ended(job_id).meta
    assert (meta.code, meta.prompt_tokens) == ("CONTEXT_EXCEEDED", max(counts))


class Killer:
    """Ends the engine with SIGSEGV each time that this job has begun to talk."""

    def __init__(self, spool: Spool, job_id: str) -> None:
        self._spool = spool
        self._partial = spool.workspace.of(Status.RUNNING, job_id) / "partial.txt"
        self._over = Event()
        self._thread = Thread(target=self._run)
        self.kills = 0

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.01):
            if self._partial.exists():
                self.kills += 1
                for pid in self._spool.engines():
                    os.kill(pid, signal.SIGSEGV)
                while self._partial.exists() and not self._over.wait(0.01):
                    pass


@pytest.mark.seed("004", "13.6", "14.2")
def test_a_job_that_crashes_the_engine_each_time_is_quarantined_and_the_others_go_on(
    going_on: Spool,
) -> None:
    poison = new_id()
    with Killer(going_on, poison) as killer:
        others = [going_on.submit("Count.", max_tokens=12) for _ in range(3)]
        going_on.put({"prompt.txt": LONG.encode(), "options.json": b'{"max_tokens": 400}'}, poison)
        others += [going_on.submit("Count.", max_tokens=12) for _ in range(3)]
        failed(going_on, poison, "crashed the engine", "3 times")
        assert [going_on.ended(job_id).status for job_id in others] == [Status.DONE] * 6
    meta = going_on.ended(poison).meta
    assert (meta.code, meta.attempts, killer.kills) == ("ENGINE_CRASHED", 3, 3)


def model_missing(good: Path, folder: Path) -> Path:
    return folder / "missing.gguf"


def model_truncated(good: Path, folder: Path) -> Path:
    with good.open("rb") as file:
        (folder / "truncated.gguf").write_bytes(file.read(20 * MIB))
    return folder / "truncated.gguf"


def model_cut_in_its_header(good: Path, folder: Path) -> Path:
    with good.open("rb") as file:
        (folder / "header.gguf").write_bytes(file.read(1000))
    return folder / "header.gguf"


def model_not_gguf(good: Path, folder: Path) -> Path:
    (folder / "text.gguf").write_text("I am no model.\n" * 100)
    return folder / "text.gguf"


def model_empty(good: Path, folder: Path) -> Path:
    (folder / "empty.gguf").touch()
    return folder / "empty.gguf"


def model_folder(good: Path, folder: Path) -> Path:
    (folder / "folder.gguf").mkdir()
    return folder / "folder.gguf"


BAD_MODELS = {
    "missing": model_missing,
    "truncated": model_truncated,
    "cut in its header": model_cut_in_its_header,
    "not GGUF": model_not_gguf,
    "empty": model_empty,
    "a folder": model_folder,
}


@pytest.mark.seed("004", "6.9")
@pytest.mark.parametrize("what", BAD_MODELS)
def test_a_server_is_not_started_with_a_model_that_is_none(
    tmp_path: Path, model_file: Path, what: str
) -> None:
    bad = BAD_MODELS[what](model_file, tmp_path)
    done = spool_command("serve", tmp_path / "work", "--model", bad)
    said = done.stderr.decode()
    assert done.returncode not in (0, 130), said
    assert bad.stem in said
    assert "Traceback" not in said
    assert not (tmp_path / "work" / ".nrvnad.pid").exists()


@pytest.mark.seed("004", "6.9")
def test_a_model_that_breaks_under_a_server_pauses_its_jobs_and_the_others_go_on(
    tmp_path: Path, model_file: Path
) -> None:
    second = tmp_path / "second.gguf"
    second.write_bytes(model_file.read_bytes())
    with served(tmp_path / "work", model_file, "--model", str(second)) as spool:
        os.truncate(second, 20 * MIB)
        jobs = [spool.submit("Say yes.", model="second", max_tokens=4) for _ in range(3)]
        eventually(lambda: "model second: MODEL_INVALID" in spool.log, "it says what is wrong")
        spool.works()
        second.unlink()
        jobs += [spool.submit("Say yes.", model="second", max_tokens=4)]
        spool.works()
        assert [spool.where(job_id) for job_id in jobs] == [[Status.QUEUED]] * len(jobs)
        second.write_bytes(model_file.read_bytes())
        for job_id in jobs:
            assert spool.ended(job_id).status is Status.DONE
