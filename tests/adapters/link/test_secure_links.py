"""Links between machines: joining, certificates, keys, and who is not let in."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.secure_links import RawPeer, secured, unverified
from tests.support.waiting import soon

from penstock.adapters.link import server
from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Failure,
    Hello,
    Join,
    Pub,
    Sub,
    Trust,
    Trusted,
    Welcome,
)
from penstock.adapters.link.identity import WorkerIdentity
from penstock.adapters.link.proxy import RemoteBlobs, remote_api, remote_state
from penstock.core.errors import (
    AlreadyRunning,
    Conflict,
    Misconfigured,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    Superseded,
)
from penstock.core.job import JobRequest, JobResult
from penstock.lifecycles.canonical import JobState
from penstock.ports.bus import (
    HANDSHAKE,
    HEARTBEAT,
    RESULT,
    AnyMessage,
    Dispatch,
    Finished,
    Handshake,
    Heartbeat,
    jobs_of,
)
from penstock.ports.credentials import JoinToken
from penstock.ports.engine_api import KeyRole
from penstock.ports.tls import Authority, key_pem, new_private_key, pem_of, tls_context
from penstock.testing.aio import run_async

# -- joining -------------------------------------------------------------------------------------


@run_async
async def test_a_worker_that_joined_connects_as_itself(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        link = site.link(await site.joined("w1"))
        await link.connect()
        assert await remote_api(link).counts() is not None
        await remote_state(link).write("breaker/x", b"open")
        assert await site.engine.state.read("breaker/x") == b"open"
        await link.close()


@run_async
async def test_keys_and_certificates_are_for_their_owner_only(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        await site.joined("w1")
        folders = (site.authority.parent, tmp_path / "of-w1")
        for file in [file for folder in folders for file in folder.iterdir()]:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        for folder in folders:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@run_async
async def test_a_token_lets_as_many_workers_in_as_it_says(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        token = await site.token(uses=2)
        await site.joined("w1", token)
        await site.joined("w2", token)
        with pytest.raises(NotAuthenticated, match="used already"):
            await site.joined("w3", token)
        assert site.refused["not_authenticated"] == 1


@run_async
async def test_a_worker_whose_answer_was_lost_joins_again_with_the_same_token(
    tmp_path: Path,
) -> None:
    async with secured(tmp_path) as site:
        token = await site.token()
        identity = await site.joined("w1", token)
        await identity.join(site.address, token)
        assert (await site.engine.api.credentials.tokens())[0].used == 1
        identity.close()
        (tmp_path / "of-w1" / "worker.key").unlink()
        with pytest.raises(NotAuthenticated):  # another key is another worker
            await site.joined("w1", token)


@run_async
async def test_a_token_that_was_revoked_or_has_expired_lets_nobody_in(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        token = await site.token()
        await site.engine.api.credentials.revoke_token(token.token_id)
        with pytest.raises(NotAuthenticated):
            await site.joined("w1", token)
        late = await site.token(expires_in=1.0)
        await asyncio.sleep(1.1)
        with pytest.raises(NotAuthenticated):
            await site.joined("w2", late)
        with pytest.raises(NotAuthenticated):
            await site.joined("w3", replace(late, secret="guessed"))


@run_async
async def test_the_name_of_a_worker_is_its_own(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        first = await site.joined("w1")
        other = WorkerIdentity(tmp_path / "elsewhere", "w1")
        with pytest.raises(Conflict, match="has joined already"):
            await other.join(site.address, await site.token())
        with pytest.raises(NotPermitted, match="for the worker w2"):
            await other.join(site.address, await site.token(worker_id="w2"))
        await other.join(site.address, await site.token(worker_id="w1"))
        link = site.link(other)
        await link.connect()
        await link.close()
        with pytest.raises(NotAuthenticated):  # its certificate was replaced
            await site.link(first).connect()


@run_async
async def test_a_token_of_another_engine_is_not_sent_to_this_one(tmp_path: Path) -> None:
    async with secured(tmp_path / "a") as here, secured(tmp_path / "b") as there:
        token = await there.token()
        with pytest.raises(Misconfigured, match="not the one"):
            await here.joined("w1", token)
        assert here.refused == {}
        assert (await there.engine.api.credentials.tokens())[0].used == 0


def test_what_is_no_join_token_is_refused() -> None:
    for text in ("", "pjt_", "pst_abc_def", "pjt_!!!!", "pjt_" + "A" * 40):
        with pytest.raises(Misconfigured, match="not a join token"):
            JoinToken.parse(text)


@run_async
async def test_one_process_uses_an_identity(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        identity = await site.joined("w1")
        with pytest.raises(AlreadyRunning, match="--id"):
            WorkerIdentity(tmp_path / "of-w1", "w1")
        identity.close()
        WorkerIdentity(tmp_path / "of-w1", "w1").close()


@run_async
async def test_a_newer_process_of_a_worker_replaces_an_older_one(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        identity = await site.joined("w1")
        old, new = site.link(identity), site.link(identity)
        await old.connect()
        keeping = asyncio.create_task(old.keep())
        await new.connect()
        with pytest.raises(Superseded):
            await keeping
        await new.close()
        await old.close()


@run_async
async def test_a_certificate_is_renewed_over_the_live_link(tmp_path: Path) -> None:
    async with secured(tmp_path, **{"link.lifetime": 60}) as site:
        identity = await site.joined("w1")
        security = identity.security()
        link = site.link(identity)
        await link.connect()
        before = (await site.engine.api.credentials.list())[0]
        file = tmp_path / "of-w1" / "worker.pem"
        long_ago = file.stat().st_mtime - 3600
        os.utime(file, (long_ago, long_ago))
        renewing = asyncio.create_task(identity.keep_valid(link, security))
        known = site.engine.parts.credentials.known
        await soon(lambda: known["w1"].info.serial != before.serial)
        await soon(lambda: file.stat().st_mtime != long_ago)
        renewing.cancel()
        again = site.link(identity)
        await again.connect()
        await again.close()
        await link.close()


# -- revoking ------------------------------------------------------------------------------------


@run_async
async def test_revoking_a_certificate_ends_the_connection_at_once(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        identity = await site.joined("w1")
        link = site.link(identity)
        await link.connect()
        keeping = asyncio.create_task(link.keep())
        await site.engine.api.credentials.revoke("w1")
        with pytest.raises(NotAuthenticated, match="revoked"):
            await asyncio.wait_for(keeping, 5)
        with pytest.raises(NotAuthenticated, match="revoked"):
            await site.link(identity).connect()
        await identity.join(site.address, await site.token())
        again = site.link(identity)
        await again.connect()
        await again.close()
        await link.close()


@run_async
async def test_a_revoked_certificate_stays_revoked_after_a_restart(tmp_path: Path) -> None:
    flags = {"durability": "os"}
    async with secured(tmp_path, **flags) as site:
        kept, gone = await site.joined("kept"), await site.joined("gone")
        await site.engine.api.credentials.revoke("gone")
    async with secured(tmp_path, **flags) as site:
        link = site.link(kept)
        await link.connect()
        await link.close()
        with pytest.raises(NotAuthenticated):
            await site.link(gone).connect()


# -- clients with a key --------------------------------------------------------------------------


@run_async
async def test_a_client_with_a_key_has_the_rights_of_the_key_and_no_bus(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        new = await site.engine.api.keys.create("laptop", (KeyRole.SUBMIT,))
        link = site.client(new.token)
        await link.connect()
        api = remote_api(link)
        assert await api.counts() is not None
        with pytest.raises(NotPermitted):
            await api.keys.list()
        with pytest.raises(NotFound):
            await remote_state(link).read("breaker/x")
        link.subscribe(jobs_of("w1"), _ignore)
        link.publish(HEARTBEAT, [Heartbeat("w1")])
        await soon(lambda: site.refused.get("not_permitted", 0) > 0)
        await link.close()


@run_async
async def test_a_revoked_key_ends_its_connection(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        new = await site.engine.api.keys.create("laptop", (KeyRole.SUBMIT,))
        link = site.client(new.token)
        await link.connect()
        await site.engine.api.keys.revoke("laptop")
        with pytest.raises(NotAuthenticated):
            await remote_api(link).counts()
        await soon(lambda: site.refused.get("not_authenticated", 0) > 0)
        await link.close()


@pytest.mark.parametrize("key", ["", "pst_abc_def", "x" * 100])
@run_async
async def test_without_a_certificate_and_a_key_nobody_is_let_in(key: str, tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        with pytest.raises(NotAuthenticated):
            await site.client(key).connect()
        assert site.refused == {"not_authenticated": 1}
        assert await site.works()


# -- hostile input -------------------------------------------------------------------------------


@run_async
async def test_what_is_not_tls_is_refused_and_counted(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        for sent in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00" * 4096,
            b"\x16\x03\x01\xff\xff" + b"x" * 99,
        ):
            reader, writer = await asyncio.open_connection(site.address.host, site.address.port)
            writer.write(sent)
            await reader.read()
            writer.close()
        assert site.refused == {"not_tls": 3}
        assert await site.works()


@pytest.mark.parametrize(
    "sent",
    [
        (5000).to_bytes(4, "big"),
        (3000).to_bytes(4, "big") + b"\x91" * 3000,
        (4).to_bytes(4, "big") + b"\x92\xa1\xff\x01",
    ],
    ids=["large", "nested", "not UTF-8"],
)
@run_async
async def test_an_invalid_first_frame_ends_the_connection(sent: bytes, tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        peer = await RawPeer.connect(site.address, unverified())
        peer.send_bytes(sent)
        assert await peer.end() == []
        assert site.refused == {"invalid_frame": 1}
        assert await site.works()


@run_async
async def test_the_first_frame_must_be_a_greeting(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        peer = await RawPeer.connect(site.address, unverified())
        peer.send(Pub(HEARTBEAT, [Heartbeat("w1")]))
        assert [type(frame) for frame in await peer.end()] == [Failure]
        assert await site.works()


@pytest.mark.parametrize("after_handshake", [False, True])
@run_async
async def test_a_slow_handshake_is_ended(
    after_handshake: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HANDSHAKE_TIMEOUT", 0.3)
    async with secured(tmp_path) as site:
        if after_handshake:
            peer = await RawPeer.connect(site.address, unverified())
            assert await peer.end() == []
        else:
            reader, writer = await asyncio.open_connection(site.address.host, site.address.port)
            assert await reader.read() == b""
            writer.close()
        assert site.refused == {"handshake_timeout": 1}
        assert await site.works()


@run_async
async def test_silent_connections_crowd_out_only_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_UNAUTHENTICATED", 5)
    async with secured(tmp_path) as site:
        link = site.link(await site.joined("w1"))
        await link.connect()
        place = (site.address.host, site.address.port)
        crowd = [await asyncio.open_connection(*place) for _ in range(6)]
        assert await crowd[0][0].read() == b""
        assert site.refused == {"too_many_unauthenticated": 1}
        assert await remote_api(link).counts() is not None
        for _, writer in crowd:
            writer.close()
        await link.close()


@run_async
async def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        context = _with_leaf(tmp_path, Authority(new_private_key(), "penstock engine"))
        peer = await RawPeer.connect(site.address, context)
        assert await peer.end() == []
        assert site.refused == {"certificate_invalid": 1}
        assert await site.works()


@run_async
async def test_an_engine_of_another_authority_is_not_believed(tmp_path: Path) -> None:
    async with secured(tmp_path / "a") as here, secured(tmp_path / "b") as there:
        link = here.link(await here.joined("w1"))
        link.address = there.address
        with pytest.raises(Misconfigured, match="can't be trusted"):
            await link.connect()
        assert await there.works()


@run_async
async def test_the_certificate_of_a_worker_can_not_be_an_engines(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        identity = await site.joined("w1")
        files = [tmp_path / "of-w1" / name for name in ("worker.pem", "worker.key")]
        context = tls_context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(*files)
        impostor = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0, ssl=context)
        link = site.link(identity)
        link.address = Address(
            host="127.0.0.1", port=impostor.sockets[0].getsockname()[1], tls=True
        )
        with pytest.raises(Misconfigured, match="can't be trusted"):
            await link.connect()
        impostor.close()


@run_async
async def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        own = site.engine.parts.credentials.listener
        assert own is not None
        context = _with_leaf(tmp_path, own.own, expired=True)
        peer = await RawPeer.connect(site.address, context)
        assert await peer.end() == []
        assert site.refused == {"certificate_expired": 1}
        assert await site.works()


@run_async
async def test_a_certificate_that_the_engine_did_not_issue_is_refused(tmp_path: Path) -> None:
    """Such as one from before its database was replaced."""
    async with secured(tmp_path) as site:
        own = site.engine.parts.credentials.listener
        assert own is not None
        peer = await RawPeer.connect(site.address, _with_leaf(tmp_path, own.own))
        peer.send(Hello(PROTOCOL))
        assert [type(frame) for frame in await peer.end()] == [Failure]
        assert site.refused == {"not_authenticated": 1}


@pytest.mark.parametrize(
    ("subject", "messages"),
    [
        (HEARTBEAT, [Heartbeat("w2")]),
        (jobs_of("w2"), [Heartbeat("w1")]),
        (jobs_of("w1"), [Heartbeat("w1")]),
        (
            RESULT,
            [Finished(JobResult(job_id="a", status=JobState.SUCCEEDED, attempt=1, worker_id="w2"))],
        ),
    ],
    ids=["heartbeat", "orders", "its own orders", "result"],
)
@run_async
async def test_a_worker_that_speaks_as_another_is_ended(
    subject: str, messages: list[AnyMessage], tmp_path: Path
) -> None:
    async with secured(tmp_path) as site:
        heard: list[AnyMessage] = []

        async def hear(batch: list[AnyMessage]) -> None:
            heard.extend(batch)

        reading = site.engine.bus.subscribe(subject, hear)
        peer = await RawPeer.connect(site.address, _context_of(await site.joined("w1")))
        peer.send(Hello(PROTOCOL, boot=9), Pub(subject, messages))
        welcome, failure = await peer.end()
        assert isinstance(welcome, Welcome)
        assert isinstance(failure, Failure)
        assert heard == []
        assert site.refused == {"not_permitted": 1}
        await reading.close()
        assert await site.works()


@run_async
async def test_a_worker_hears_its_own_orders_only(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        for subject in (jobs_of("w2"), HANDSHAKE, RESULT):
            identity = await site.joined(f"w-{subject}".replace(".", "-"))
            peer = await RawPeer.connect(site.address, _context_of(identity))
            peer.send(Hello(PROTOCOL), Sub(subject))
            assert [type(frame) for frame in await peer.end()] == [Welcome, Failure]


@run_async
async def test_a_worker_can_not_speak_of_a_job_that_another_one_runs(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        worker = await RawPeer.connect(site.address, _context_of(await site.joined("w2")))
        hello = Handshake("w2", "default", ("job.x",), 1, {}, session="s", link=1)
        worker.send(Hello(PROTOCOL), Sub(jobs_of("w2")), Pub(HANDSHAKE, [hello]))
        await soon(lambda: "w2" in site.engine.open_jobs.roster.workers)
        request = JobRequest(job_id="job-1", topic="job.x", context_ptr="data:,1")
        await site.engine.api.submit([request])
        while not isinstance(frame := await worker.next(), Pub) or not isinstance(
            frame.messages[0], Dispatch
        ):
            pass
        peer = await RawPeer.connect(site.address, _context_of(await site.joined("w1")))
        forged = JobResult(job_id="job-1", status=JobState.SUCCEEDED, attempt=1, worker_id="w1")
        peer.send(Hello(PROTOCOL), Pub(RESULT, [Finished(forged)]))
        assert [type(frame) for frame in await peer.end()] == [Welcome, Failure]
        assert (await site.engine.api.get("job-1")).state is JobState.DISPATCHED
        worker.close()


@run_async
async def test_a_worker_may_not_approve_or_manage(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        link = site.link(await site.joined("w1"))
        await link.connect()
        api = remote_api(link)
        for refused in (
            api.keys.list(),
            api.credentials.create_token(),
            api.credentials.revoke("w1"),
        ):
            with pytest.raises(NotPermitted):
                await refused
        await link.close()


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (Hello(OLDEST_PROTOCOL - 1), "too old.*newer Penstock here"),
        (Hello(PROTOCOL + 7, oldest=PROTOCOL + 1), "too new.*where the engine runs"),
    ],
    ids=["old", "new"],
)
@run_async
async def test_a_peer_of_another_protocol_is_told_what_to_do(
    hello: Hello, words: str, tmp_path: Path
) -> None:
    async with secured(tmp_path) as site:
        peer = await RawPeer.connect(site.address, _context_of(await site.joined("w1")))
        peer.send(hello)
        (failure,) = await peer.end()
        assert isinstance(failure, Failure)
        with pytest.raises(Misconfigured, match=words):
            raise failure.revive()


@run_async
async def test_a_newer_peer_that_still_speaks_our_protocol_is_welcome(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        peer = await RawPeer.connect(site.address, _context_of(await site.joined("w1")))
        peer.send(Hello(PROTOCOL + 7, oldest=PROTOCOL))
        assert await peer.next() == Welcome(PROTOCOL)
        peer.close()


@run_async
async def test_a_request_that_is_none_is_refused(tmp_path: Path) -> None:
    async with secured(tmp_path) as site:
        token = await site.token()
        for request in (b"", b"garbage", b"0" * 2000):
            peer = await RawPeer.connect(site.address, unverified())
            peer.send(Join(PROTOCOL, token.token_id, token.secret, "w1", request))
            assert [type(frame) for frame in await peer.end()] == [Failure]
        assert (await site.engine.api.credentials.tokens())[0].used == 0
        peer = await RawPeer.connect(site.address, unverified())
        peer.send(Trust())
        assert isinstance(await peer.next(), Trusted)
        peer.close()


# -- large values --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100 << 20, 150 << 20], ids=["100 MB", "more than a frame"])
@run_async
async def test_large_values_go_both_ways(size: int, tmp_path: Path) -> None:
    flags = {"limits.max_input": 200 << 20, "limits.max_result": 200 << 20}
    async with secured(tmp_path, **flags) as site:
        link = site.link(await site.joined("w1"))
        await link.connect()
        blobs = RemoteBlobs(link, max_size=200 << 20)
        data = bytes(range(256)) * (size >> 8)
        uri = await blobs.put(data)
        assert await blobs.get(uri) == data
        await link.close()


# ------------------------------------------------------------------------------------------------


async def _ignore(messages: list[AnyMessage]) -> None: ...


def _context_of(identity: WorkerIdentity) -> ssl.SSLContext:
    return identity.security().context


def _with_leaf(folder: Path, authority: Authority, expired: bool = False) -> ssl.SSLContext:
    """A context with a certificate of this authority, of nobody that has joined."""
    key = new_private_key()
    until = datetime.datetime(2001 if expired else 2999, 1, 1, tzinfo=datetime.UTC)
    leaf = authority.sign(key.public_key(), "w1", server=False, client=True, until=until)
    (folder / "leaf.pem").write_bytes(pem_of(leaf) + key_pem(key))
    context = unverified()
    context.load_cert_chain(folder / "leaf.pem")
    return context
