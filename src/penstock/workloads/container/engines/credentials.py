"""Registry credentials, where Docker's own tools keep them: in `config.json`, or with a credential
helper (`docker-credential-…`) that it names."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct, field

from penstock.workloads.container.engine import PullFailed, RegistryAuth
from penstock.workloads.container.engines.programs import run_program

DOCKER_HUB = "https://index.docker.io/v1/"
_HUB_HOSTS = ("docker.io", "index.docker.io", "registry-1.docker.io")
_PATIENCE = 30.0
_TOKEN = "<token>"
"""In place of a user's name: the secret is an identity token."""


class _Login(Struct):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _Config(Struct, rename="camel"):
    auths: Mapping[str, _Login] = {}
    cred_helpers: Mapping[str, str] = {}
    creds_store: str = ""


class _Answer(Struct, rename="pascal"):
    username: str = ""
    secret: str = field(default="", name="Secret")


def default_file(environ: Mapping[str, str]) -> Path:
    folder = environ.get("DOCKER_CONFIG")
    return Path(folder or Path(environ.get("HOME") or "/", ".docker"), "config.json")


def server_of(reference: str) -> str:
    """The registry that an image's name leads to, as logins are filed."""
    host, slash, _ = reference.partition("/")
    if not slash or not (host == "localhost" or set(".:") & set(host)) or host in _HUB_HOSTS:
        return DOCKER_HUB
    return host


class RegistryCredentials:
    """Of one file, which is read anew each time: a login takes effect at once."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file

    async def find(self, reference: str) -> RegistryAuth | None:
        """For the registry of an image; None if there are none. Raises PullFailed."""
        server, config = server_of(reference), await asyncio.to_thread(self._read)
        helper = config.cred_helpers.get(_host(server)) or config.cred_helpers.get(server)
        login = _of(config.auths, server)
        if helper or (config.creds_store and not (login and login.auth)):
            found = await _ask(helper or config.creds_store, server)
            if found is not None:
                return found
        return _auth(server, login) if login else None

    def _read(self) -> _Config:
        path = self._file or default_file(os.environ)
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Config)
        except FileNotFoundError:
            if self._file is None:
                return _Config()
            raise PullFailed(f"there is no file {path} (registry_auth_file)") from None
        except (OSError, msgspec.DecodeError) as error:
            raise PullFailed(f"{path} can't be read: {error}") from None


def _of(auths: Mapping[str, _Login], server: str) -> _Login | None:
    wanted = _host(server)
    return next((login for name, login in auths.items() if _host(name) == wanted), None)


def _host(server: str) -> str:
    host = server.partition("://")[2] or server
    host = host.partition("/")[0]
    return "docker.io" if host in _HUB_HOSTS else host


def _auth(server: str, login: _Login) -> RegistryAuth | None:
    user, password = login.username, login.password
    if login.auth:
        try:
            user, _, password = base64.b64decode(login.auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise PullFailed(f"the login for {server} can't be read") from None
    if not (user or login.identitytoken):
        return None
    return RegistryAuth(
        server=server,
        username=user,
        password=password.strip("\0"),
        identity_token=login.identitytoken,
    )


async def _ask(helper: str, server: str) -> RegistryAuth | None:
    """None if the helper has nothing for it."""
    program = f"docker-credential-{helper}"
    try:
        ended = await run_program(program, "get", stdin=server.encode(), timeout=_PATIENCE)
    except TimeoutError:
        raise PullFailed(f"{program} does not answer") from None
    except OSError as error:
        raise PullFailed(f"{program} can't be started: {error.strerror}") from None
    if ended.code:
        return None
    try:
        found = msgspec.json.decode(ended.stdout, type=_Answer)
    except msgspec.DecodeError:
        raise PullFailed(f"{program} answers nonsense") from None
    if found.username == _TOKEN:
        return RegistryAuth(server=server, identity_token=found.secret)
    return RegistryAuth(server=server, username=found.username, password=found.secret)
