"""Files that would do harm, on their way into a container and out of it."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import secrets
import tarfile
import zipfile
from typing import Any

import pytest
from tests.support.container.leftovers import settled
from tests.support.container.serving import Served, code_of, new_id
from tests.workloads.container.live.conftest import MIB


def packed(kind: str, members: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return data.getvalue()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def archived(kind: str, data: bytes) -> list[dict[str, Any]]:
    return [{"path": "a", "archive": kind, "base64": base64.b64encode(data).decode()}]


def bomb(kind: str) -> bytes:
    """100 MiB in a few hundred thousand bytes."""
    return packed(kind, {"zeros": bytes(100 * MIB)})


def endless_bomb() -> bytes:
    """A tar whose one member says that it is 8 GiB long, and goes on as long as it can."""
    entry = tarfile.TarInfo("zeros")
    entry.size = 8 << 30
    data = io.BytesIO()
    with gzip.open(data, "wb", compresslevel=9) as file:
        file.write(entry.tobuf(tarfile.GNU_FORMAT))
        for _ in range(100):
            file.write(bytes(MIB))
    return data.getvalue()


@pytest.mark.seed("003", "10.8")
@pytest.mark.parametrize("make", ["tar", "zip", "endless"])
def test_an_archive_bomb_fails_its_job_and_fills_neither_disk_nor_memory(
    served: Served, mark: str, make: str
) -> None:
    data = endless_bomb() if make == "endless" else bomb(make)
    assert len(data) < MIB
    kind = "zip" if make == "zip" else "tar"
    before, peak = served.disk_use(), served.peak_memory()
    record = served.run(new_id(), "echo", mark, inputs=archived(kind, data), stdin="none")
    assert (code_of(record), record["exit_code"]) == ("INVALID_FIELD", None), record["error"]
    assert record["error"]["field"].startswith("inputs[0]")
    assert record["stdout"] == ""
    assert served.peak_memory() - peak < 48 * MIB
    assert not settled(lambda: served.disk_use() > before + 4 * MIB)


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\..\\evil"])
def test_an_archive_that_leads_elsewhere_fails_its_job(
    served: Served, mark: str, kind: str, name: str
) -> None:
    inputs = archived(kind, packed(kind, {"good": b"x", name: b"x"}))
    record = served.run(new_id(), "echo", mark, inputs=inputs)
    assert (code_of(record), record["stdout"]) == ("INVALID_FIELD", "")
    names = [name for _, folders, files in os.walk(served.jobs_dir) for name in folders + files]
    assert not [name for name in names if "evil" in name]


def test_an_archive_with_a_link_or_a_device_fails_its_job(served: Served, mark: str) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        entry = tarfile.TarInfo("link")
        entry.type, entry.linkname = kind, "/etc/passwd"
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            archive.addfile(entry)
        inputs = archived("tar", data.getvalue())
        record = served.run(new_id(), "cat", "/input/a/link", mark, inputs=inputs)
        assert (code_of(record), record["stdout"]) == ("INVALID_FIELD", "")


def test_what_is_no_archive_fails_its_job(served: Served, mark: str) -> None:
    for kind in ("tar", "zip"):
        for data in (b"", b"no archive", b"PK\x03\x04" + secrets.token_bytes(500), b"\x1f\x8b\x08"):
            record = served.run(new_id(), "echo", mark, inputs=archived(kind, data))
            assert (code_of(record), record["stdout"]) == ("INVALID_FIELD", ""), (kind, data)


@pytest.mark.seed("003", "10.8")
def test_only_what_was_collected_can_be_downloaded(served: Served, mark: str) -> None:
    record = served.shell(
        f"cd /output; echo {mark} > good; ln -s /etc/passwd link; ln good hard; mkfifo pipe;"
        " mkdir -p d/e; echo deep > d/e/f; ln -s / root; ln -s good inner",
        outputs=True,
    )
    name = record["job_id"]
    assert code_of(record) == "finished", record["error"]
    assert [one["path"] for one in record["artifacts"]] == ["d/e/f"]
    assert len(record["skipped"]) >= 5, record["skipped"]
    assert served.send("GET", f"/jobs/{name}/artifacts/d/e/f") == (200, b"deep\n")
    for path in (
        *("link", "hard", "pipe", "root/etc/passwd", "inner", "d", "d/e", "d/e/../e/f", "."),
        *("..", "../logs/stdout.0", "%2e%2e/logs/stdout.0", "..%2flogs%2fstdout.0"),
        *("/etc/passwd", "%2fetc%2fpasswd", "d/e/f%00", "d\\e\\f", "d//e/f", "x" * 3000, "%ff"),
        *("../../../../../../etc/passwd", "..%5c..%5cetc", "....//....//etc/passwd"),
        "d%2fe%2f..%2ff",
    ):
        status, answer = served.send("GET", f"/jobs/{name}/artifacts/{path}")
        assert status in (400, 404), (path, answer)
        assert json.loads(answer)
