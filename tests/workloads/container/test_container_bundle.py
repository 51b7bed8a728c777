"""A plan becomes a bundle: everything about the options, and nothing else."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tests.support.rows import every

from penstock.workloads.container.engine import (
    ContainerSpec,
    EngineUnavailable,
    Image,
    Mount,
    Unsupported,
)
from penstock.workloads.container.engines import seccomp
from penstock.workloads.container.engines.cgroups import Cgroups
from penstock.workloads.container.engines.oci.bundle import (
    INIT,
    MOUNT_POINTS,
    SandboxOptions,
    bundle,
    process_of,
)
from penstock.workloads.container.engines.oci.machine import Runtime
from penstock.workloads.container.engines.oci.rootfs import resolve

IMAGE = Image(
    id="sha256:" + "a" * 64,
    entrypoint=("/bin/tool",),
    cmd=("--help",),
    env=("PATH=/bin", "COLOUR=red", "EMPTY="),
    workdir="/home",
)
OPTIONS = SandboxOptions(init=Path("/usr/bin/tini-static"), seccomp=seccomp.profile("x86_64"))


def planned(**others: Any) -> ContainerSpec:
    usual: dict[str, Any] = {
        "name": "penstock-a1",
        "image": IMAGE.id,
        "memory": 64 << 20,
        "cpus": 1.5,
        "pids": 32,
        "tmp": 1 << 20,
    }
    return ContainerSpec(**{**usual, **others})


def made(options: SandboxOptions = OPTIONS, **others: Any) -> dict[str, Any]:
    plan = planned(**others)
    return bundle(plan, process_of(plan, IMAGE), Path("/images/x/rootfs"), options)


def mount(config: dict[str, Any], target: str) -> dict[str, Any]:
    [found] = [each for each in config["mounts"] if each["destination"] == target]
    return dict(found)


def test_a_container_can_do_nothing_that_was_not_given() -> None:
    config = made()
    process, linux = config["process"], config["linux"]
    assert config["root"] == {"path": "/images/x/rootfs", "readonly": True}
    assert set(map(tuple, process["capabilities"].values())) == {()}
    assert process["noNewPrivileges"] is True
    assert process["user"] == {"uid": 65534, "gid": 65534}
    assert process["oomScoreAdj"] > 0
    kinds = {each["type"] for each in linux["namespaces"]}
    assert kinds == {"pid", "network", "ipc", "uts", "mount", "cgroup"}
    assert not any("path" in each for each in linux["namespaces"])
    assert "/proc/kcore" in linux["maskedPaths"]
    assert "/proc/sys" in linux["readonlyPaths"]
    assert linux["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
    assert linux["resources"]["devices"] == [{"allow": False, "access": "rwm"}]


def test_the_limits_are_the_plans_and_swap_adds_nothing() -> None:
    resources = made()["linux"]["resources"]
    assert resources["memory"] == {"limit": 64 << 20, "swap": 64 << 20}
    assert resources["cpu"] == {"quota": 150_000, "period": 100_000}
    assert resources["pids"] == {"limit": 32}
    assert made()["linux"]["cgroupsPath"] == "/penstock-a1"


def test_resource_limits_are_core_files_and_file_size() -> None:
    limits = {each["type"]: each["hard"] for each in made(file_size=99)["process"]["rlimits"]}
    assert limits == {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 1024, "RLIMIT_FSIZE": 99}
    assert "RLIMIT_FSIZE" not in {each["type"] for each in made()["process"]["rlimits"]}


def test_tmp_is_sized_the_users_and_not_executable() -> None:
    options = mount(made(user=(7, 8)), "/tmp")["options"]
    assert {"nosuid", "nodev", "noexec", "uid=7", "gid=8", f"size={1 << 20}"} <= set(options)


def test_binds_are_private_and_read_only_unless_said() -> None:
    mounts = (Mount(Path("/a"), "/input"), Mount(Path("/b"), "/output", read_only=False))
    config = made(mounts=mounts)
    assert {"ro", "nosuid", "nodev", "rprivate"} <= set(mount(config, "/input")["options"])
    assert "rw" in mount(config, "/output")["options"]
    assert mount(config, "/input")["source"] == "/a"


def test_the_init_is_in_front_where_there_is_one() -> None:
    assert made(cmd=("-x",))["process"]["args"] == [INIT, "--", "/bin/tool", "-x"]
    assert made(SandboxOptions(seccomp={}))["process"]["args"] == ["/bin/tool", "--help"]


def test_the_environment_is_the_images_then_the_plans_and_none_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", "x")
    env = made(env={"COLOUR": "blue=1"})["process"]["env"]
    assert env == ["PATH=/bin", "COLOUR=blue=1", "EMPTY=", "HOME=/tmp"]


def test_an_entrypoint_of_the_plan_replaces_the_images_entrypoint_and_command() -> None:
    image = Image(id="x", entrypoint=("/bin/tool",), cmd=("--help",))
    assert planned(cmd=()).args(image) == ("/bin/tool", "--help")
    assert planned(cmd=("a",)).args(image) == ("/bin/tool", "a")
    assert planned(cmd=(), entrypoint=("sh",)).args(image) == ("sh",)
    assert planned(cmd=("a",), entrypoint=()).args(image) == ("a",)


def test_the_folder_is_the_plans_or_the_images() -> None:
    assert made()["process"]["cwd"] == "/home"
    assert made(workdir="/w")["process"]["cwd"] == "/w"
    assert process_of(planned(), Image(id="x")).cwd == "/"


def test_a_network_is_refused() -> None:
    with pytest.raises(Unsupported, match="network"):
        made(network="bridge")


def test_every_mount_has_a_place_that_each_image_is_given() -> None:
    inner = {"/" + each for each in MOUNT_POINTS}
    for each in made(mounts=(Mount(Path("/a"), "/input"),))["mounts"]:
        assert each["destination"] in inner or each["destination"].startswith("/dev/")


def test_gvisor_gets_room_for_itself() -> None:
    runsc = Runtime("runsc", "/usr/bin/runsc")
    assert runsc.fit(planned(pids=8, memory=6 << 20)).pids >= 512
    assert runsc.fit(planned(memory=6 << 20)).memory > 6 << 20
    assert runsc.fit(planned(memory=1 << 30)).memory == 1 << 30
    assert Runtime("runc", "/usr/bin/runc").fit(planned(pids=8)).pids == 8


# -- system calls ---------------------------------------------------------------


def rules(machine: str = "x86_64") -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for rule in seccomp.profile(machine)["syscalls"]:
        for name in rule["names"]:
            found.setdefault(name, []).append(rule)
    return found


@every(
    "name",
    [
        "mount",
        "umount2",
        "ptrace",
        "process_vm_readv",
        "keyctl",
        "add_key",
        "bpf",
        "perf_event_open",
        "init_module",
        "finit_module",
        "delete_module",
        "kexec_load",
        "io_uring_setup",
        "userfaultfd",
        "open_by_handle_at",
        "setns",
        "pivot_root",
        "reboot",
        "swapon",
        "settimeofday",
        "move_mount",
        "fsopen",
        "pidfd_getfd",
    ],
)
def test_what_reaches_the_kernel_or_others_is_refused(name: str) -> None:
    [rule] = rules()[name]
    assert rule["action"] == "SCMP_ACT_ERRNO"
    assert rule["errnoRet"] == errno.EPERM


def test_no_call_is_both_allowed_and_refused() -> None:
    for name, found in rules().items():
        assert len({rule["action"] for rule in found}) == 1, name


def test_what_is_not_listed_does_not_exist() -> None:
    profile = seccomp.profile("aarch64")
    assert profile["architectures"] == ["SCMP_ARCH_AARCH64"]
    assert profile["defaultErrnoRet"] == errno.ENOSYS
    assert "clone3" not in rules()


def test_new_namespaces_are_refused_and_new_threads_are_not() -> None:
    for name in ("clone", "unshare"):
        [rule] = rules()[name]
        [argument] = rule["args"]
        assert argument["op"] == "SCMP_CMP_MASKED_EQ"
        assert argument["valueTwo"] == 0
        for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
            assert argument["value"] & flag
        assert not argument["value"] & 0x00010F00


def test_only_known_kinds_of_sockets() -> None:
    families = {rule["args"][0]["value"] for rule in rules()["socket"]}
    assert families == {1, 2, 10, 16}


def test_a_profile_can_be_compiled() -> None:
    filters = seccomp.compiled(seccomp.profile())
    assert filters == "" or len(filters) > 1000


# -- cgroups --------------------------------------------------------------------


def test_what_the_machine_must_offer_is_looked_for(tmp_path: Path) -> None:
    cgroups = Cgroups(f"cgroup2 {tmp_path} cgroup2 rw 0 0")
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids io")
    cgroups.check()
    assert (cgroups.is_v2, cgroups.is_hybrid) == (True, False)
    (tmp_path / "cgroup.controllers").write_text("cpu io")
    with pytest.raises(EngineUnavailable, match="memory, pids"):
        cgroups.check()


def test_what_was_used_is_read_the_way_of_version_2(tmp_path: Path) -> None:
    place = tmp_path / "penstock-a1"
    place.mkdir()
    (place / "memory.peak").write_text("4096\n")
    (place / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (place / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    cgroups = Cgroups(f"cgroup2 {tmp_path} cgroup2 rw 0 0")
    assert cgroups.usage("penstock-a1").peak_memory_bytes == 4096
    assert cgroups.usage("penstock-a1").cpu_seconds == 2.5
    assert cgroups.oom_kills("penstock-a1") == 2
    assert cgroups.usage("penstock-none").peak_memory_bytes is None
    assert cgroups.oom_kills("penstock-none") == 0


def test_version_1_counts_where_both_are() -> None:
    cgroups = Cgroups(
        "cgroup /c/memory cgroup rw,memory 0 0\n"
        "cgroup /c/cpu cgroup rw,cpu,cpuacct 0 0\n"
        "cgroup2 /c/unified cgroup2 rw 0 0\n"
    )
    assert cgroups.is_hybrid
    assert not cgroups.is_v2
    assert cgroups.controllers["cpuacct"] == "/c/cpu"


# -- paths -----------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tree = tmp_path / "rootfs"
    (tree / "usr" / "bin").mkdir(parents=True)
    (tree / "bin").symlink_to("usr/bin")
    (tree / "tmp").mkdir()
    (tree / "input").mkdir()
    return tree


def test_links_never_lead_out_of_a_root(tmp_path: Path, root: Path) -> None:
    (root / "up").symlink_to("../../../../etc")
    (root / "etc").symlink_to("/")
    assert resolve(root, "up/passwd") == root / "passwd"
    assert resolve(root, "/../../x") == root / "x"
    assert resolve(root, "etc/etc/etc/usr") == root / "usr"
    assert resolve(root, "bin/tool") == root / "usr/bin/tool"
    (root / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        resolve(root, "loop/x")
