"""Artifacts as a user of the Python API and the HTTP API sees them."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import penstock
from penstock import App, Client, Context, JobFailed, Retry, Step
from penstock.core.errors import InvalidRequest, TooLarge, UnreadablePointer
from penstock.ports.engine_api import KeyRole
from penstock.testing import RecordingContext

BIG = bytes(range(256)) * 20_000  # more than four parts
app = App()


@app.job("job.leave.async")
async def leave_async(ctx: Context) -> str:
    left = await ctx.artifact("plots/big.bin", BIG)
    return left.sha256


@app.job("job.leave.thread")
def leave_in_thread(ctx: Context, folder: str) -> str:
    path = Path(folder) / "big"
    path.write_bytes(BIG)
    left = ctx.artifact_sync("plots/big.bin", path)
    path.unlink()
    return left.sha256


@app.job("job.leave.process", mode="process")
def leave_in_process(ctx: Context) -> str:
    return ctx.artifact_sync("plots/big.bin", io.BytesIO(BIG)).sha256


@app.job("job.leave.some")
async def leave_some(ctx: Context, names: list[str], fail: bool = False) -> None:
    for name in names:
        await ctx.artifact(name, name.encode())
    if fail:
        raise ValueError("after all of them")


@app.job("job.leave.at_once")
async def leave_at_once(ctx: Context, count: int) -> int:
    left = (ctx.artifact(f"{n}", b"x") for n in range(count))
    ends = await asyncio.gather(*left, return_exceptions=True)
    return sum(isinstance(end, TooLarge) for end in ends)


@app.job("job.leave.again", ctx=True)
async def leave_again(ctx: Context) -> None:
    await ctx.artifact("note.txt", b"first")
    await ctx.artifact("note.txt", b"second", "text/markdown")


@app.job("job.leave.bad")
async def leave_badly(ctx: Context, name: str) -> str:
    try:
        await ctx.artifact(name, b"x")
    except InvalidRequest as error:
        return error.field
    return "kept"


@app.job("job.leave.source")
async def leave_what(ctx: Context, path: str) -> str:
    try:
        await ctx.artifact("x", path)
    except InvalidRequest as error:
        return error.problem
    return "kept"


@app.job("job.leave.blocking")
async def leave_blocking(ctx: Context) -> None:
    ctx.artifact_sync("x", b"x")


@app.job("job.leave.row")
async def leave_row(ctx: Context) -> str:
    try:
        await ctx.checkpoint([Step("artifact:x", 0)])
    except InvalidRequest as error:
        return error.field
    return "kept"


async def train(ctx: Context) -> int:
    await ctx.artifact("model.bin", b"weights")
    return 1


@app.job("job.leave.retried", retries=1)
async def leave_and_retry(ctx: Context, steps: bool) -> None:
    if steps:
        await ctx.step("train", train, ctx)
    elif ctx.request.try_number == 1:
        await train(ctx)
    if ctx.request.try_number == 1:
        raise Retry(after=0)
    await ctx.artifact("report.txt", b"done")


@pytest.fixture(scope="module")
def ps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with app.run(tmp_path_factory.mktemp("artifacts"), http__listen="127.0.0.1:0") as ps:
        yield ps


@pytest.mark.parametrize("mode", ["async", "thread", "process"])
def test_a_function_leaves_a_file_in_whatever_it_runs(
    ps: Client, mode: str, tmp_path: Path
) -> None:
    job = ps.submit(f"job.leave.{mode}", {"folder": str(tmp_path)} if mode == "thread" else {})
    (left,) = job.artifacts(timeout=30)
    digest = hashlib.sha256(BIG).hexdigest()
    assert (left.name, left.size, left.sha256) == ("plots/big.bin", len(BIG), digest)
    assert job.result() == digest
    assert left.media_type == "application/octet-stream"
    assert left.read() == BIG
    assert left.save(tmp_path) == tmp_path / "big.bin"
    assert (tmp_path / "big.bin").read_bytes() == BIG
    with left.open() as file:
        file.seek(-1000, io.SEEK_END)
        assert file.read() == BIG[-1000:]
        file.seek(5)
        assert file.read(300) == BIG[5:305]


def test_a_job_that_fails_keeps_what_it_left(ps: Client) -> None:
    job = ps.submit("job.leave.some", {"names": ["core.txt", "log.txt"], "fail": True})
    assert [(one.name, one.read()) for one in job.artifacts(timeout=30)] == [
        ("core.txt", b"core.txt"),
        ("log.txt", b"log.txt"),
    ]
    with pytest.raises(JobFailed):
        job.result()


def test_a_job_that_left_nothing_has_no_artifacts(ps: Client) -> None:
    assert ps.submit("job.leave.some", {"names": []}).artifacts(timeout=30) == []


def test_the_same_name_again_replaces_the_artifact(ps: Client) -> None:
    (left,) = ps.submit("job.leave.again").artifacts(timeout=30)
    assert (left.read(), left.media_type) == (b"second", "text/markdown")


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a\\b", "a\nb", "x" * 1025]
)
def test_a_name_that_is_no_relative_path_is_refused(ps: Client, name: str) -> None:
    assert ps.submit("job.leave.bad", {"name": name}).result(timeout=30) == "name"


def test_a_file_that_is_not_there_is_refused(ps: Client, tmp_path: Path) -> None:
    said = ps.submit("job.leave.source", {"path": str(tmp_path / "nothing")}).result(timeout=30)
    assert "No such file" in said


def test_a_row_under_the_name_of_an_artifact_is_refused(ps: Client) -> None:
    assert ps.submit("job.leave.row").result(timeout=30) == "rows[0].name"


def test_async_code_is_told_to_await(ps: Client) -> None:
    with pytest.raises(JobFailed, match=r"await ctx\.artifact"):
        ps.submit("job.leave.blocking").result(timeout=30)


def test_a_job_may_leave_a_thousand_files(ps: Client) -> None:
    names = [f"{n}" for n in range(1001)]
    job = ps.submit("job.leave.some", {"names": names})
    assert [one.name for one in job.artifacts(timeout=60)] == names[:1000]
    with pytest.raises(JobFailed, match="1,000 artifacts"):
        job.result()


def test_a_job_that_leaves_files_all_at_once_has_a_thousand_as_well(ps: Client) -> None:
    job = ps.submit("job.leave.at_once", {"count": 1003})
    assert job.result(timeout=60) == 3
    assert len(job.artifacts()) == 1000


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("a.png", "image/png"),
        ("a.json.gz", "application/gzip"),
        ("data:a b/c;d,e", "application/octet-stream"),
        ("図" * 85, "application/octet-stream"),
    ],
)
def test_any_name_of_a_file_can_be_left_and_saved(
    ps: Client, name: str, media_type: str, tmp_path: Path
) -> None:
    (left,) = ps.submit("job.leave.some", {"names": [name]}).artifacts(timeout=30)
    assert left.media_type == media_type
    assert left.save(tmp_path).read_bytes() == name.encode()


@pytest.mark.parametrize(("steps", "names"), [(True, ["model.bin", "report.txt"]), (False, [])])
def test_a_retry_has_the_files_of_the_steps_that_it_does_not_repeat(
    ps: Client, steps: bool, names: list[str]
) -> None:
    job = ps.submit("job.leave.retried", {"steps": steps})
    found = [one.name for one in job.artifacts(timeout=30)]
    assert found == (names or ["report.txt"])
    assert [len(one.result.artifacts) for one in job.tries() if one.result] == [1, len(found)]


def test_a_file_over_the_limit_fails_the_job_and_leaves_nothing(tmp_path: Path) -> None:
    with app.run(tmp_path, limits__max_artifact=1000) as ps:
        job = ps.submit("job.leave.async")
        with pytest.raises(JobFailed, match="at most 1,000"):
            job.result(timeout=30)
        assert job.artifacts() == []
        assert not [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]


def test_artifacts_outlive_a_restart_and_are_swept_with_their_job(tmp_path: Path) -> None:
    with app.run(tmp_path) as ps:
        job_id = ps.submit("job.leave.async").wait(30).job_id
    with app.run(tmp_path) as ps:
        (left,) = ps.get(job_id).artifacts()
        ps.prune(3600)
        assert left.read() == BIG
        (blob,) = (path for path in (tmp_path / "blobs").rglob("*") if path.name == left.sha256)
        os.utime(blob, (0, 0))
        ps.prune(3600)
        assert left.read() == BIG  # its job refers to it
        os.utime(blob, (0, 0))
        ps.prune(0)
        assert not blob.exists()


def test_no_artifact_is_kept_in_the_place_of_another(tmp_path: Path) -> None:
    long = "long" * 50
    names = [long, hashlib.sha256(long.encode()).hexdigest()]
    with app.run(tmp_path) as ps:
        left = ps.submit("job.leave.some", {"names": names}).artifacts(timeout=30)
        for blob in (tmp_path / "blobs").rglob("*"):
            os.utime(blob, (0, 0))
        ps.prune(3600)
        assert [one.read() for one in left] == [name.encode() for name in names]


def test_a_damaged_artifact_is_not_saved(tmp_path: Path) -> None:
    with app.run(tmp_path / "data") as ps:
        (left,) = ps.submit("job.leave.async").artifacts(timeout=30)
        blob = next((tmp_path / "data" / "blobs").rglob(left.sha256))
        blob.write_bytes(BIG[:-1] + b"x")
        with pytest.raises(UnreadablePointer, match="damaged"):
            left.save(tmp_path / "file")
        assert not (tmp_path / "file").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_test_of_a_function_sees_what_it_left() -> None:
    ctx = RecordingContext()
    ctx.run(leave_again)
    assert ctx.artifacts == {"note.txt": b"second"}
    with pytest.raises(InvalidRequest):
        ctx.artifact_sync("../x", b"")


# -- over HTTP ---------------------------------------------------------------------------------


def ask(
    ps: Client, token: str, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(urlsplit(ps.url).netloc, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers={"Authorization": f"Bearer {token}", **named})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_artifacts_are_listed_and_downloaded_in_parts(ps: Client) -> None:
    token = ps.keys.create("files", roles=[KeyRole.SUBMIT]).token
    job = ps.submit("job.leave.async")
    digest = job.result(timeout=30)
    at = f"/v1/jobs/{job.job_id}/artifacts"
    status, _, body = ask(ps, token, at)
    assert status == 200
    (listed,) = json.loads(body)["artifacts"]
    assert listed == {
        "name": "plots/big.bin",
        "size": len(BIG),
        "sha256": digest,
        "media_type": "application/octet-stream",
        "pointer": f"blob:sha256-{digest};type=application/octet-stream",
    }
    for name in ("plots/big.bin", "plots%2Fbig.bin"):
        status, headers, body = ask(ps, token, f"{at}/{name}")
        assert (status, body) == (200, BIG)
    assert headers["ETag"] == f'"{digest}"'
    assert headers["Content-Disposition"] == "attachment; filename*=UTF-8''big.bin"
    assert "sandbox" in headers["Content-Security-Policy"]
    status, headers, body = ask(ps, token, f"{at}/plots/big.bin", Range="bytes=100-199")
    assert (status, body) == (206, BIG[100:200])
    assert headers["Content-Range"] == f"bytes 100-199/{len(BIG)}"
    assert ask(ps, token, f"{at}/plots/big.bin", Range="bytes=-7")[2] == BIG[-7:]
    assert ask(ps, token, f"{at}/plots/big.bin", If_None_Match=f'"{digest}"')[0] == 304
    assert ask(ps, token, f"{at}/plots/big.bin", Range=f"bytes={len(BIG)}-")[0] == 416
    status, headers, body = ask(ps, token, f"{at}/plots/big.bin", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(BIG)), b"")
    for missing in ("nothing", "plots", "plots/big.bin/x", "../result"):
        assert ask(ps, token, f"{at}/{missing}")[0] == 404
    with penstock.connect(ps.url, token=token) as over_http:
        (left,) = over_http.get(job.job_id).artifacts()
        assert left.read() == BIG


def test_another_tenant_sees_no_artifacts(ps: Client) -> None:
    mine, theirs = (
        ps.keys.create(name, roles=[KeyRole.SUBMIT], tenant=name).token for name in ("mine", "not")
    )
    with penstock.connect(ps.url, token=mine) as client:
        job = client.submit("job.leave.async")
        (left,) = job.artifacts(timeout=30)
        assert left.read() == BIG
    at = f"/v1/jobs/{job.job_id}/artifacts"
    assert ask(ps, mine, f"{at}/plots/big.bin")[0] == 200
    assert ask(ps, theirs, at)[0] == ask(ps, theirs, f"{at}/plots/big.bin")[0] == 404
    with penstock.connect(ps.url, token=mine) as client:
        (left,) = client.submit("job.leave.some", {"names": ["only mine"]}).artifacts(timeout=30)
    assert ask(ps, mine, f"/v1/blobs/{left.sha256}")[0] == 200
    assert ask(ps, theirs, f"/v1/blobs/{left.sha256}")[0] == 404


def test_a_job_that_runs_has_no_artifacts_yet(ps: Client) -> None:
    token = ps.keys.create("early", roles=[KeyRole.SUBMIT]).token
    job = ps.submit("job.leave.some", {"names": []}, delay=60)
    assert ask(ps, token, f"/v1/jobs/{job.job_id}/artifacts")[0] == 409
    job.cancel()
