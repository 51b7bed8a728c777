"""What is sent to Docker and Podman: the whole fence, and nothing that was not decided."""

from __future__ import annotations

import asyncio
import io
import os
import random
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.testing.aio import run_async
from penstock.workloads.container.engine import (
    BuildRequest,
    Chunk,
    ContainerSpec,
    ContainerState,
    Gpus,
    Mount,
)
from penstock.workloads.container.engines.cgroups import Cgroups
from penstock.workloads.container.engines.docker import podman
from penstock.workloads.container.engines.docker import spec as docker_spec
from penstock.workloads.container.engines.docker.answers import (
    ImageAnswer,
    ImageConfig,
    condition,
)
from penstock.workloads.container.engines.docker.attach import Frames, NoFrame
from penstock.workloads.container.engines.docker.build import PodmanBuild, build_query, packed
from penstock.workloads.container.engines.docker.spec import create_body
from penstock.workloads.container.engines.docker.usage import Meter, cgroup_of
from penstock.workloads.container.job import Stream

PLAN = ContainerSpec(
    name="penstock-x",
    image="sha256:1",
    cmd=("--privileged", "-v", "/:/host"),
    env={"A": "1"},
    user=(1000, 50),
    memory=64 << 20,
    cpus=1.5,
    pids=64,
    tmp=8 << 20,
    labels={"penstock.job": "j"},
)


def test_everything_is_locked_down() -> None:
    body = create_body(PLAN)
    host = body["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] == []
    assert host["Privileged"] is False
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["ReadonlyRootfs"] is True
    assert host["NetworkMode"] == "none"
    assert body["NetworkDisabled"] is True
    assert host["IpcMode"] == "private"
    assert not {"PidMode", "UTSMode", "UsernsMode", "Binds", "VolumesFrom"} & host.keys()
    assert host["Init"] is True
    assert host["Devices"] == []
    assert host["LogConfig"]["Type"] == "local"
    assert host["AutoRemove"] is False
    assert body["Healthcheck"] == {"Test": ["NONE"]}
    assert body["User"] == "1000:50"


def test_limits_are_the_plans() -> None:
    host = create_body(PLAN)["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 64 << 20
    assert host["NanoCpus"] == 1_500_000_000
    assert host["PidsLimit"] == 64
    assert host["OomKillDisable"] is False
    limits = {limit["Name"]: (limit["Soft"], limit["Hard"]) for limit in host["Ulimits"]}
    assert limits == {"core": (0, 0), "nofile": (1024, 1024)}


def test_a_file_has_a_limit_only_if_asked_for() -> None:
    [*_, size] = create_body(_changed(file_size=4096))["HostConfig"]["Ulimits"]
    assert size == {"Name": "fsize", "Soft": 4096, "Hard": 4096}


def test_tmp_is_small_and_belongs_to_the_user() -> None:
    [(path, options)] = create_body(PLAN)["HostConfig"]["Tmpfs"].items()
    assert path == "/tmp"
    assert set(options.split(",")) >= {
        "nosuid",
        "nodev",
        "noexec",
        f"size={8 << 20}",
        "uid=1000",
        "gid=50",
    }


def test_a_folder_that_the_image_declares_is_never_on_the_disk() -> None:
    mounts = (Mount(Path("/made/out"), "/output", read_only=False),)
    body = create_body(_changed(mounts=mounts), volumes=("/data", "/output/"))
    assert body["HostConfig"]["Tmpfs"].keys() == {"/tmp", "/data"}


def test_mounts_are_private_and_read_only_unless_decided() -> None:
    mounts = (Mount(Path("/made/in"), "/input"), Mount(Path("/made/out"), "/output", False))
    given, taken = create_body(_changed(mounts=mounts))["HostConfig"]["Mounts"]
    assert (given["Source"], given["Target"], given["ReadOnly"]) == ("/made/in", "/input", True)
    assert taken["ReadOnly"] is False
    assert {mount["BindOptions"]["Propagation"] for mount in (given, taken)} == {"rprivate"}


@pytest.mark.seed("003", "10.1")
def test_arguments_are_arguments_and_nothing_else() -> None:
    body = create_body(PLAN)
    assert body["Cmd"] == ["--privileged", "-v", "/:/host"]
    assert body["Image"] == "sha256:1"
    assert body["Env"] == ["HOME=/tmp", "A=1"]
    assert body["Labels"] == {"penstock.job": "j"}


def test_what_is_not_said_is_the_images_or_the_engines() -> None:
    body = create_body(_changed(cmd=()))
    assert not {"Cmd", "Entrypoint", "WorkingDir"} & body.keys()
    assert "Runtime" not in body["HostConfig"]


def test_a_network_a_runtime_and_a_profile_can_be_asked_for() -> None:
    host = create_body(_changed(network="lan", runtime="runsc"), seccomp="{}")["HostConfig"]
    assert host["NetworkMode"] == "lan"
    assert host["Runtime"] == "runsc"
    assert host["SecurityOpt"] == ["no-new-privileges", "seccomp={}"]


def test_podman_gets_a_profile_an_owner_and_no_writable_folders_of_its_own() -> None:
    body = create_body(PLAN)
    podman.adapt(body, "/profile")
    host = body["HostConfig"]
    assert "seccomp=/profile" in host["SecurityOpt"]
    assert host["Tmpfs"]["/tmp"].endswith(",U")
    assert "uid=" not in host["Tmpfs"]["/tmp"]
    assert all("ro" in host["Tmpfs"][path].split(",") for path in ("/run", "/var/tmp"))
    assert "nproc" in {limit["Name"] for limit in host["Ulimits"]}


def _changed(**changes: object) -> ContainerSpec:
    fields = {name: getattr(PLAN, name) for name in PLAN.__struct_fields__}
    return ContainerSpec(**{**fields, **changes})


# -- answers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("created", ContainerState.CREATED),
        ("configured", ContainerState.CREATED),
        ("running", ContainerState.RUNNING),
        ("paused", ContainerState.RUNNING),
        ("exited", ContainerState.EXITED),
        ("dead", ContainerState.EXITED),
        ("a word of tomorrow", ContainerState.EXITED),
    ],
)
def test_both_engines_words_for_a_state_are_known(word: str, state: ContainerState) -> None:
    assert condition(word) is state


def test_an_image_is_understood_however_little_is_said_of_it() -> None:
    config = ImageConfig(entrypoint="/run", cmd=("a",), volumes={"/data": {}})
    full = ImageAnswer(id="ab", created="2026-01-02T03:04:05.678901234Z", config=config)
    assert full.value().id == "sha256:ab"
    assert full.value().entrypoint == ("/run",)
    assert full.value().created == pytest.approx(1767323045.678901)
    assert full.volumes == ("/data",)
    assert ImageAnswer(id="sha256:ab", created="yesterday").value().created == 0
    assert ImageAnswer(id="sha256:ab", created="0001-01-01T00:00:00Z").value().created == 0


# -- frames ---------------------------------------------------------------------------


def _frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40))),
    st.lists(st.integers(1, 30), min_size=1),
)
def test_frames_are_told_apart_however_they_arrive(
    pieces: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    wire = b"".join(_frame(stream, data) for stream, data in pieces)
    frames, heard = Frames(), {Stream.STDOUT: b"", Stream.STDERR: b""}
    turns = random.Random(0)
    while wire:
        size = turns.choice(cuts)
        for chunk in frames.feed(wire[:size]):
            heard[chunk.stream] += chunk.data
        wire = wire[size:]
    assert heard[Stream.STDOUT] == b"".join(data for stream, data in pieces if stream == 1)
    assert heard[Stream.STDERR] == b"".join(data for stream, data in pieces if stream == 2)


def test_neighbours_of_one_stream_are_one_chunk() -> None:
    wire = _frame(1, b"a") + _frame(1, b"b") + _frame(2, b"c") + _frame(1, b"d")
    assert Frames().feed(wire) == [
        Chunk(Stream.STDOUT, b"ab"),
        Chunk(Stream.STDERR, b"c"),
        Chunk(Stream.STDOUT, b"d"),
    ]


@pytest.mark.parametrize("head", [b"\x03\0\0\0\0\0\0\1", b"\1\0\7\0\0\0\0\1", b"HTTP/1.1"])
def test_what_is_no_frame_is_refused(head: bytes) -> None:
    with pytest.raises(NoFrame):
        Frames().feed(head)


# -- builds ---------------------------------------------------------------------------


@pytest.mark.seed("003", "10.7")
def test_a_build_has_no_network_no_cache_and_limits() -> None:
    plan = BuildRequest(tag="t:1", context=Path(), memory=1 << 27, cpus=0.5, labels={"a": "b"})
    query = build_query(plan)
    assert query["networkmode"] == "none"
    assert query["memory"] == query["memswap"] == 1 << 27
    assert query["cpuquota"] == query["cpuperiod"] // 2  # type: ignore[operator]
    assert query["labels"] == '{"a":"b"}'
    assert (query["nocache"], query["forcerm"]) == (1, 1)
    own = PodmanBuild("/profile", rootless=False).query()
    assert (own["pullpolicy"], own["seccomp"]) == ("never", "/profile")
    assert "cgroupparent" not in PodmanBuild("/profile", rootless=True).query()


@run_async
async def test_a_folder_is_sent_as_it_is_and_belongs_to_root(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "deep" / ("long" * 40)).mkdir(parents=True)
    big = os.urandom(3 << 20)
    (tmp_path / "deep" / ("long" * 40) / "größe").write_bytes(big)
    (tmp_path / "run").write_text("#!")
    (tmp_path / "run").chmod(0o700)
    (tmp_path / "link").symlink_to("run")
    os.mkfifo(tmp_path / "pipe")
    wire = b"".join([piece async for piece in packed(tmp_path)])
    with tarfile.open(fileobj=io.BytesIO(wire)) as archive:
        entries = {entry.name: entry for entry in archive}
        name = f"deep/{'long' * 40}/größe"
        content = archive.extractfile(name)
        assert content is not None
        assert content.read() == big
    assert "pipe" not in entries
    assert entries["link"].linkname == "run"
    assert entries["run"].mode == 0o744
    assert {(entry.uid, entry.gid) for entry in entries.values()} == {(0, 0)}


# -- the meter ------------------------------------------------------------------------


def test_a_process_that_is_not_the_containers_is_not_measured() -> None:
    assert cgroup_of(os.getpid(), "f" * 64) == ""
    assert cgroup_of(1 << 30, "f" * 64) == ""


def _machine(tmp_path: Path, files: dict[str, str]) -> Cgroups:
    """One whose cgroups are of the version that has these files, with one container `c`."""
    kind = "cgroup rw,memory,cpuacct" if "cpuacct.usage" in files else "cgroup2 rw"
    (tmp_path / "c").mkdir()
    for name, text in files.items():
        (tmp_path / "c" / name).write_text(text)
    return Cgroups(f"none {tmp_path} {kind} 0 0\n")


@pytest.mark.parametrize(
    ("files", "memory", "seconds", "oom"),
    [
        (
            {
                "memory.max_usage_in_bytes": "4096\n",
                "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
                "cpuacct.usage": "1500000000\n",
            },
            4096,
            1.5,
            True,
        ),
        (
            {
                "memory.peak": "8192\n",
                "memory.events": "max 3\noom_kill 0\n",
                "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
            },
            8192,
            2.5,
            False,
        ),
        ({"memory.current": "77\n"}, 77, None, False),
        ({}, None, None, False),
    ],
)
def test_both_versions_of_cgroups_are_read(
    tmp_path: Path, files: dict[str, str], memory: int | None, seconds: float | None, oom: bool
) -> None:
    cgroups, meter = _machine(tmp_path, files), Meter("c")
    meter.read(cgroups)
    assert (meter.used.peak_memory_bytes, meter.used.cpu_seconds, meter.oom) == (
        *(memory, seconds),
        oom,
    )
    used = meter.used
    shutil.rmtree(tmp_path / "c")
    meter.read(cgroups)
    assert meter.used == used, "what was read last stays known"


@run_async
async def test_a_meter_is_read_when_its_process_ends(tmp_path: Path) -> None:
    cgroups, peak = _machine(tmp_path, {"memory.peak": "1\n"}), tmp_path / "c" / "memory.peak"
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    meter = Meter("c")
    following = asyncio.create_task(meter.follow(cgroups, process.pid))
    await asyncio.sleep(0)
    peak.write_text("4096\n")
    assert process.stdin is not None
    process.stdin.close()
    async with asyncio.timeout(10):
        await following
        await process.wait()
    assert meter.used.peak_memory_bytes == 4096


# -- GPUs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("all", Gpus(-1)),
        ("2", Gpus(2)),
        ("0,1", Gpus(ids=("0", "1"))),
        ("device=GPU-3a2b,MIG-7", Gpus(ids=("GPU-3a2b", "MIG-7"))),
        ("", Gpus()),
        ("0", Gpus()),
    ],
)
def test_gpus_are_all_a_number_or_ids(text: str, gpus: Gpus) -> None:
    assert Gpus.parse(text) == gpus
    assert bool(gpus) is (text not in ("", "0"))


@pytest.mark.parametrize("text", ["-1", "0,", "a b", "device=", "1;rm", "$x"])
def test_anything_else_names_no_gpus(text: str) -> None:
    with pytest.raises(ValueError, match="invalid GPUs"):
        Gpus.parse(text)


def test_docker_is_asked_for_gpus_as_its_own_command_asks() -> None:
    [request] = create_body(_changed(gpus=Gpus(-1)))["HostConfig"]["DeviceRequests"]
    assert (request["Count"], request["DeviceIDs"]) == (-1, [])
    assert request["Capabilities"] == [["gpu"]]
    [request] = create_body(_changed(gpus=Gpus(ids=("0", "1"))))["HostConfig"]["DeviceRequests"]
    assert (request["Count"], request["DeviceIDs"]) == (0, ["0", "1"])
    assert "DeviceRequests" not in create_body(PLAN)["HostConfig"]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [(Gpus(-1), ["all"]), (Gpus(2), ["0", "1"]), (Gpus(ids=("GPU-3a",)), ["GPU-3a"])],
)
def test_podman_is_asked_for_gpus_by_their_cdi_names(
    wanted: Gpus, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_spec, "_CDI_FOLDERS", (str(tmp_path),))
    assert "nvidia-ctk" in podman.gpus_problem("5.1.0")
    (tmp_path / "net.yaml").write_text("cdiVersion: 0.6.0\nkind: vendor.test/net\n")
    (tmp_path / "broken.json").write_text("{")
    assert podman.gpus_problem("5.1.0") != ""
    (tmp_path / "nvidia.yaml").write_text("cdiVersion: 0.6.0\nkind: nvidia.com/gpu\n")
    assert podman.gpus_problem("5.1.0") == ""
    assert "Podman 4.3.1" in podman.gpus_problem("4.3.1")
    body = create_body(_changed(gpus=wanted))
    podman.adapt(body, "/profile")
    [request] = body["HostConfig"]["DeviceRequests"]
    assert request["Driver"] == "cdi"
    assert request["DeviceIDs"] == [f"nvidia.com/gpu={name}" for name in names]
