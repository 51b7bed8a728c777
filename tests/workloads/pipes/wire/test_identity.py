from __future__ import annotations

import ssl
import stat
import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from penstock.core.errors import Misconfigured
from penstock.ports.tls import Authority
from penstock.workloads.pipes.wire import identity as module
from penstock.workloads.pipes.wire.identity import Identity, check_node_id, new_key


def test_each_network_has_another_key() -> None:
    assert new_key() != new_key()


@pytest.mark.parametrize(
    "key", ["", "short", "x" * 42, "x" * 44, "x" * 86, "ä" * 43, "x" * 42 + "!", "x" * 42 + "+"]
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(Misconfigured, match="not a network key"):
        Identity.make(key, "node")


def test_space_around_a_key_does_no_harm() -> None:
    Identity.make(f" {new_key()}\n", "node")


@pytest.mark.seed("000", "17.14")
@pytest.mark.parametrize("node_id", ["", "a/b", "../x", "a b", "-a", ".a", "ä", "x" * 65, "a\n"])
def test_what_can_not_be_a_node_id_is_refused(node_id: str) -> None:
    with pytest.raises(Misconfigured):
        Identity.make(new_key(), node_id)


@pytest.mark.parametrize("node_id", ["a", "host-1.example_x", "0", "x" * 64])
def test_names_of_hosts_can_be_node_ids(node_id: str) -> None:
    assert check_node_id(node_id) == node_id


def test_the_authority_is_the_same_wherever_the_key_is() -> None:
    raw = module._key_bytes(new_key())
    once, again = (Authority(module._authority_key(raw), "penstock network").pem for _ in range(2))
    assert once == again
    other = Authority(module._authority_key(module._key_bytes(new_key())), "penstock network")
    assert other.pem != once


@pytest.mark.seed("000", "17.4")
def test_only_the_newest_tls_is_spoken_and_both_sides_are_asked() -> None:
    made = Identity.make(new_key(), "node")
    for context in (made.server, made.client):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED


def test_nothing_is_left_on_disk_and_what_was_there_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, bytes]] = []
    load = ssl.SSLContext.load_cert_chain

    def watched(self: ssl.SSLContext, file: Path, password: bytes) -> None:
        seen.append((file.stat().st_mode, file.parent.stat().st_mode, file.read_bytes()))
        load(self, file, password=password)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    Identity.make(new_key(), "node")
    assert list(tmp_path.iterdir()) == []
    assert len(seen) == 2
    for mode, folder, content in seen:
        assert stat.S_IMODE(mode) == 0o600
        assert stat.S_IMODE(folder) == 0o700
        with pytest.raises(TypeError, match="encrypted"):
            load_pem_private_key(content, password=None)
