"""What a container worker tells of its machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.workloads.container.machine import Disk, Machine, Memory, disk_of


def a_machine(root: Path, **files: str) -> Machine:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


def cpu(package: int, core: int) -> str:
    return f"model name\t: A Fast One\nphysical id\t: {package}\ncore id\t\t: {core}\n"


def test_threads_of_one_core_are_one_physical_core(tmp_path: Path) -> None:
    told = "\n".join(cpu(package, core) for package in (0, 1) for core in (0, 1, 1, 0))
    machine = a_machine(tmp_path, proc__cpuinfo=told)
    assert machine.cpu_model == "A Fast One"
    assert machine.cpu_cores == 4
    assert machine.threads == os.cpu_count()


def test_a_machine_that_tells_nothing_of_its_processors_has_none_to_tell(tmp_path: Path) -> None:
    machine = a_machine(tmp_path, proc__cpuinfo="processor\t: 0\nBogoMIPS\t: 48.00\n\n")
    assert machine.cpu_model is None
    assert machine.cpu_cores is None
    assert Machine(tmp_path / "nowhere").cpu_model is None


def test_memory_is_what_the_kernel_says_is_available(tmp_path: Path) -> None:
    told = "MemTotal:  2048000 kB\nMemFree:  10240 kB\nMemAvailable:  1024000 kB\nHugePages: 0\n"
    assert a_machine(tmp_path, proc__meminfo=told).memory() == Memory(2000, 1000)


def test_memory_of_an_old_kernel_is_what_is_free(tmp_path: Path) -> None:
    told = "MemTotal:  2048000 kB\nMemFree:  10240 kB\n"
    assert a_machine(tmp_path, proc__meminfo=told).memory() == Memory(2000, 10)


def test_memory_is_known_without_the_kernels_files(tmp_path: Path) -> None:
    memory = Machine(tmp_path).memory()
    assert memory.total_mb > 0
    assert 0 <= memory.available_mb <= memory.total_mb


def test_a_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    here = disk_of(tmp_path)
    assert here.total_mb is not None
    assert here.available_mb is not None
    assert disk_of(tmp_path / "not" / "yet").total_mb == here.total_mb


def test_a_disk_that_cannot_be_read_is_told_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "statvfs", refuse)
    assert disk_of("/somewhere") == Disk(None, None)
    assert disk_of("") == Disk(None, None)


def test_this_machine_tells_a_load_and_names() -> None:
    machine = Machine()
    assert all(load >= 0 for load in machine.load_average())
    assert machine.hostname
    assert machine.os
    assert machine.architecture
