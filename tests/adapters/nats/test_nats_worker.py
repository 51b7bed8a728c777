"""Workers that reach the engine through a real NATS server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nkeys
import pytest
from tests.support.nats import (
    NatsIdentity,
    NatsServer,
    make_credentials,
    make_tls_files,
    working,
)
from tests.support.waiting import soon

from penstock import App
from penstock.adapters.nats.connection import NatsOptions, open_client, token_of
from penstock.app.engine import Engine
from penstock.app.nats import NatsWorker
from penstock.app.worker_process import wait_for_engine
from penstock.config import Settings, load
from penstock.config.loading import shown
from penstock.core.errors import (
    Misconfigured,
    NotAuthenticated,
    NotPermitted,
    NotRunning,
    PenstockError,
)
from penstock.core.job import Job, JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.tls import Authority, new_private_key
from penstock.testing.aio import run_async

LARGE = 3 << 20
"""More than one NATS message can have."""


def settings_of(folder: Path, url: str, **flags: object) -> Settings:
    given = {"data_dir": str(folder), "bus.url": url, "bus.prefix": f"t-{folder.name}", **flags}
    return load(environ={}, flags=given)


def request(topic: str, data: bytes = b"{}", **fields: object) -> JobRequest:
    return JobRequest(job_id="", topic=topic, context_ptr=encode_data(data), **fields)


async def result(engine: Engine, job: Job) -> bytes:
    done = await engine.api.wait(job.job_id, 20)
    assert done.state is JobState.SUCCEEDED, done.result
    assert done.result is not None
    assert done.result.result_ptr is not None
    return await engine.blobs.get(done.result.result_ptr)


@run_async
async def test_a_worker_runs_jobs_with_large_results_and_children(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    app = App()

    @app.job("job.nats.large")
    async def large() -> str:
        return "x" * LARGE

    @app.job("job.nats.parent")
    async def parent() -> int:
        return len(await (await large.asubmit()).aresult())

    settings = settings_of(tmp_path, nats_server.url)
    async with Engine(settings) as engine, working(app, settings) as site:
        job = (await engine.api.submit([request("job.nats.parent")]))[0]
        assert await result(engine, job) == str(LARGE).encode()
        view = await engine.api.worker("host.example-1")
        assert (view.status, view.local) == ("ready", False)
        assert site.options.worker_id == "host.example-1"


@run_async
async def test_a_job_survives_the_death_of_the_nats_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    app, begun, goes_on = App(), 0, asyncio.Event()

    @app.job("job.nats.slow")
    async def slow() -> str:
        nonlocal begun
        begun += 1
        await goes_on.wait()
        return "done"

    # Longer than the worker's time to come back, and than its lease.
    flags = {"timeouts.lost_grace": 0.5, "timeouts.lease": 1.0}
    settings = settings_of(tmp_path / "data", server.url, **flags)
    try:
        async with Engine(settings) as engine, working(app, settings):
            job = (await engine.api.submit([request("job.nats.slow")]))[0]
            await soon(lambda: begun == 1)
            server.kill()
            await asyncio.sleep(1.5)
            goes_on.set()  # its result waits until there is a way
            await asyncio.sleep(0.1)
            assert (await engine.api.get(job.job_id)).state is JobState.RUNNING
            server.start()
            done = await engine.api.wait(job.job_id, 20)
            assert (done.state, done.attempt, begun) == (JobState.SUCCEEDED, 1, 1)
    finally:
        server.kill()


@run_async
async def test_a_worker_survives_a_restart_of_the_engine(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    app, begun, goes_on = App(), 0, asyncio.Event()

    @app.job("job.nats.slow")
    async def slow() -> str:
        nonlocal begun
        begun += 1
        await goes_on.wait()
        return "done"

    settings = settings_of(tmp_path, nats_server.url, **{"timeouts.lost_grace": 15.0})
    async with Engine(settings) as engine:
        working_here = working(app, settings)
        await working_here.__aenter__()
        job = (await engine.api.submit([request("job.nats.slow")]))[0]
        await soon(lambda: begun == 1)
    try:
        async with Engine(settings) as engine:
            goes_on.set()
            done = await engine.api.wait(job.job_id, 20)
            assert (done.state, done.attempt, begun) == (JobState.SUCCEEDED, 1, 1)
    finally:
        await working_here.__aexit__(None, None, None)


@run_async
async def test_only_one_engine_can_use_a_prefix(nats_server: NatsServer, tmp_path: Path) -> None:
    one = settings_of(tmp_path / "one", nats_server.url, **{"bus.prefix": "shared"})
    other = settings_of(tmp_path / "other", nats_server.url, **{"bus.prefix": "shared"})
    async with Engine(one):
        with pytest.raises(Misconfigured, match=r"another engine uses the subjects shared\.>"):
            await Engine(other).start()
    async with Engine(other):
        pass


@run_async
async def test_without_engine_or_with_a_wrong_token_nobody_is_let_in(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, nats_server.url)
    with pytest.raises(Misconfigured, match="needs the engine's token"):
        NatsWorker(settings, "w", "")
    worker = NatsWorker(settings, "w", "wrong")
    with pytest.raises(NotRunning, match="no engine answers"):
        await worker.probe()
    async with Engine(settings):
        with pytest.raises(NotPermitted, match="token"):
            await worker.probe()
    await worker.close()


@run_async
async def test_an_engine_starts_before_its_nats_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    server.kill()
    app = App()

    @app.job("job.nats.hello")
    async def hello() -> str:
        return "hello"

    settings = settings_of(tmp_path / "data", server.url)
    try:
        async with Engine(settings) as engine:
            server.start()
            worker = NatsWorker(settings, "w", "")

            await wait_for_engine(worker.probe, server.url)
            await worker.close()
            async with working(app, settings):
                job = (await engine.api.submit([request("job.nats.hello")]))[0]
                assert await result(engine, job) == b'"hello"'
    finally:
        server.kill()


@run_async
async def test_a_worker_says_that_its_function_has_another_signature(
    nats_server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = App(), App()

    @old.job("job.nats.same")
    @new.job("job.nats.same")
    async def same(n: int) -> int:
        return n

    @old.job("job.nats.changed")
    async def before(n: int) -> int:
        return n

    @new.job("job.nats.changed")
    async def after(n: int, m: str) -> int:
        return n

    settings = settings_of(tmp_path, nats_server.url)
    async with Engine(settings) as engine, working(old, settings, "old"):
        while not await engine.api.describe_topics():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert caplog.messages == []
        async with working(new, settings, "new"):
            (said,) = (m for m in caplog.messages if "other arguments" in m)
            assert said.startswith("job.nats.changed: ")


# -- credentials and TLS ------------------------------------------------------------


async def reaches(options: NatsOptions) -> bool:
    client = await open_client(options, "test", lambda: None)
    await client.close()
    return True


@run_async
async def test_a_user_needs_the_right_password(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, 'authorization { user: "ada", password: "s3cret" }\n')
    try:
        address = f"127.0.0.1:{server.port}"
        assert await reaches(NatsOptions(url=f"nats://ada:s3cret@{address}"))
        for wrong in (f"nats://ada:wrong@{address}", f"nats://{address}"):
            with pytest.raises(NotAuthenticated, match="refused the credentials") as refused:
                await reaches(NatsOptions(url=wrong))
            assert "wrong" not in str(refused.value)
    finally:
        server.kill()


@run_async
async def test_tls_needs_a_certificate_of_the_right_authority(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path, "127.0.0.1")
    (tmp_path / "other.pem").write_bytes(Authority(new_private_key(), "other").pem)
    server = NatsServer(tmp_path, tls)
    try:
        url = f"tls://127.0.0.1:{server.port}"
        assert await reaches(NatsOptions(url=url, ca=tmp_path / "ca.pem"))
        for wrong in (NatsOptions(url=url, ca=tmp_path / "other.pem"), NatsOptions(url=url)):
            with pytest.raises(Misconfigured, match="no TLS with the NATS server"):
                await reaches(wrong)
    finally:
        server.kill()


@run_async
async def test_a_server_may_ask_for_a_certificate(tmp_path: Path) -> None:
    verify = f', ca_file: "{tmp_path}/ca.pem", verify: true }}'
    server = NatsServer(tmp_path, make_tls_files(tmp_path, "127.0.0.1").replace(" }", verify))
    try:
        url, ca = f"tls://127.0.0.1:{server.port}", tmp_path / "ca.pem"
        own = {"certificate": tmp_path / "cert.pem", "private_key": tmp_path / "key.pem"}
        assert await reaches(NatsOptions(url=url, ca=ca, **own))
        with pytest.raises(PenstockError):
            await reaches(NatsOptions(url=url, ca=ca))
        with pytest.raises(Misconfigured, match=r"can't use the files of \[bus\]"):
            await reaches(NatsOptions(url=url, ca=ca, certificate=tmp_path / "none.pem"))
    finally:
        server.kill()


@run_async
async def test_a_worker_and_an_engine_with_credentials(tmp_path: Path) -> None:
    own, other = tmp_path / "own.creds", tmp_path / "other.creds"
    server = NatsServer(tmp_path, make_credentials(own), jetstream=False)
    make_credentials(other)
    app = App()

    @app.job("job.nats.hello")
    async def hello() -> str:
        return "hello"

    settings = settings_of(tmp_path / "data", server.url, **{"bus.credentials": str(own)})
    try:
        async with Engine(settings) as engine, working(app, settings):
            job = (await engine.api.submit([request("job.nats.hello")]))[0]
            assert await result(engine, job) == b'"hello"'
        for wrong in (other, None):
            with pytest.raises(NotAuthenticated, match="refused the credentials"):
                await reaches(NatsOptions(url=server.url, credentials=wrong))
        with pytest.raises(Misconfigured, match="can't read the NATS credentials"):
            await reaches(NatsOptions(url=server.url, credentials=tmp_path / "none.creds"))
    finally:
        server.kill()


@run_async
async def test_an_nkey_lets_in_its_owner(tmp_path: Path) -> None:
    seeds = []
    for name in ("own", "other"):
        identity = NatsIdentity(nkeys.PREFIX_BYTE_USER)
        (tmp_path / name).write_bytes(identity.key.seed)
        seeds.append(identity.public)
    server = NatsServer(tmp_path, f"authorization {{ users: [ {{ nkey: {seeds[0]} }} ] }}\n")
    try:
        assert await reaches(NatsOptions(url=server.url, credentials=tmp_path / "own"))
        with pytest.raises(NotAuthenticated, match="refused the credentials"):
            await reaches(NatsOptions(url=server.url, credentials=tmp_path / "other"))
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("nats://example.com:4222", "not on this machine"),
        ("http://127.0.0.1:4222", "is not the address of a NATS server"),
        ("nats://", "is not the address of a NATS server"),
        (" , ", "no NATS server is named"),
    ],
)
def test_a_useless_or_unsafe_address_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(Misconfigured, match=complaint):
        NatsOptions(url=url).check()


@pytest.mark.parametrize("prefix", ["", "a b", "a.*", ">", "a..b", ".a"])
def test_a_prefix_is_part_of_a_subject(prefix: str) -> None:
    with pytest.raises(Misconfigured, match="prefix"):
        NatsOptions(url="nats://127.0.0.1:4222", prefix=prefix).check()


@pytest.mark.parametrize("name", ["plain-1", "host.example", "a b", "*", ">", "ü~%"])
def test_any_worker_id_becomes_one_token(name: str) -> None:
    token = token_of(name)
    assert not set(token) & set(" .*>")
    assert token.isascii()


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    url = "tls://ada:s3cret@example.com:4222,tls://ada:s3cret@example.org:4222"
    assert "s3cret" not in shown(settings_of(tmp_path, url), "bus.url")
    assert str(NatsOptions(url=url)) == "tls://example.com:4222,tls://example.org:4222"
