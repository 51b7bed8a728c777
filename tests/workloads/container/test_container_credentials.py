"""Registry credentials are found where Docker's own tools keep them, and nowhere else."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.aio import run_async
from penstock.workloads.container.engine import PullFailed, RegistryAuth
from penstock.workloads.container.engines.credentials import (
    DOCKER_HUB,
    RegistryCredentials,
    server_of,
)
from penstock.workloads.container.engines.docker.images import encoded_auth

LOGIN = base64.b64encode(b"ann:se:cret").decode()


def credentials(folder: Path, **config: Any) -> RegistryCredentials:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return RegistryCredentials(file)


@pytest.mark.parametrize(
    ("reference", "server"),
    [
        ("alpine", DOCKER_HUB),
        ("library/alpine:3", DOCKER_HUB),
        ("docker.io/library/alpine", DOCKER_HUB),
        ("registry.test/team/app:1", "registry.test"),
        ("registry.test:5000/app@sha256:0", "registry.test:5000"),
        ("localhost/app", "localhost"),
    ],
)
def test_a_name_leads_to_its_registry(reference: str, server: str) -> None:
    assert server_of(reference) == server


@pytest.mark.parametrize(
    "name", ["registry.test", "https://registry.test", "https://registry.test/v1/"]
)
@run_async
async def test_a_login_of_the_file_is_found(tmp_path: Path, name: str) -> None:
    found = await credentials(tmp_path, auths={name: {"auth": LOGIN}}).find("registry.test/app")
    assert found == RegistryAuth(server="registry.test", username="ann", password="se:cret")


@run_async
async def test_a_login_is_for_its_registry_only(tmp_path: Path) -> None:
    some = credentials(
        tmp_path, auths={"registry.test": {"auth": LOGIN}, DOCKER_HUB: {"auth": LOGIN}}
    )
    assert await some.find("registry.test:5000/app") is None
    assert await some.find("other.test/app") is None
    hub = await some.find("team/app")
    assert hub is not None
    assert hub.server == DOCKER_HUB


@run_async
async def test_a_helper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "docker-credential-vault"
    answer = '{"ServerURL":"x","Username":"bob","Secret":"s3"}'
    program.write_text(f"#!/bin/sh\n[ \"$(cat)\" = registry.test ] || exit 1\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for config in ({"credHelpers": {"registry.test": "vault"}}, {"credsStore": "vault"}):
        some = credentials(tmp_path, **config)
        found = await some.find("registry.test/app")
        assert found == RegistryAuth(server="registry.test", username="bob", password="s3")
        assert await some.find("other.test/app") is None


@run_async
async def test_a_token_goes_as_a_token(tmp_path: Path) -> None:
    login = {"auth": base64.b64encode(b"00:").decode(), "identitytoken": "t0"}
    found = await credentials(tmp_path, auths={"registry.test": login}).find("registry.test/app")
    assert found is not None
    sent = json.loads(base64.urlsafe_b64decode(encoded_auth(found)))
    assert sent == {"serveraddress": "registry.test", "identitytoken": "t0"}


@run_async
async def test_no_file_of_docker_is_no_login_and_a_missing_file_of_ours_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert await RegistryCredentials().find("alpine") is None
    with pytest.raises(PullFailed, match="registry_auth_file"):
        await RegistryCredentials(tmp_path / "none.json").find("alpine")


@pytest.mark.parametrize("auth", ["!", base64.b64encode(b"\xff").decode()])
@run_async
async def test_a_login_that_cannot_be_read_is_an_error_without_its_text(
    tmp_path: Path, auth: str
) -> None:
    with pytest.raises(PullFailed) as caught:
        await credentials(tmp_path, auths={"registry.test": {"auth": auth}}).find("registry.test/a")
    assert auth not in str(caught.value)


def test_a_secret_is_not_printed() -> None:
    assert "hidden" not in repr(RegistryAuth(server="s", username="u", password="hidden"))
