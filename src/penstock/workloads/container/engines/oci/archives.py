"""Files that hold an image: what `docker save` writes, what the OCI image layout is as a tar,
and a plain root file system."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import msgspec
from msgspec import Struct

from penstock.workloads.container.engines.oci.tree import BadImage, Tree

_COPY = 1 << 20
_MOST_JSON = 16 << 20
_MANIFEST_LISTS = ("manifest.list", "image.index")
_REF_NAME = "org.opencontainers.image.ref.name"
_ZSTD = b"\x28\xb5\x2f\xfd"
_PACKED = (gzip.BadGzipFile, EOFError, OSError, lzma.LZMAError, zlib.error)


class Manifest(Struct, frozen=True):
    """One image of an archive."""

    config: bytes
    layers: tuple[str, ...]
    """Names of members."""
    tags: tuple[str, ...] = ()
    digest: str = ""
    """Of the manifest, by which registries know it."""


class Archive:
    """A tar whose members are read in any order."""

    def __init__(self, path: Path) -> None:
        try:
            self._tar = tarfile.open(path)  # noqa: SIM115 - closed by close()
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise BadImage(f"{path.name} is no tar archive: {error}.") from error
        try:
            self._members = {_name(member): member for member in self._tar}
        except (tarfile.TarError, *_PACKED) as error:
            self._tar.close()
            raise BadImage(f"{path.name} is damaged: {error}.") from error

    def close(self) -> None:
        self._tar.close()

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @contextlib.contextmanager
    def member(self, name: str) -> Iterator[IO[bytes]]:
        """Links between members are followed, as older engines write layers that are the same."""
        for _ in range(8):
            member = self._members.get(name)
            if member is None or not (member.issym() or member.islnk()):
                break
            base = PurePosixPath(name).parent if member.issym() else PurePosixPath()
            name = os.path.normpath(base / member.linkname)
        if member is None or not member.isreg():
            raise BadImage(f"The archive lacks {name!r}.")
        file = self._tar.extractfile(member)
        assert file is not None
        with file:
            yield file

    def json(self, name: str) -> tuple[bytes, Any]:
        with self.member(name) as file:
            data = file.read(_MOST_JSON)
        try:
            return data, msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise BadImage(f"{name!r} in the archive is no JSON: {error}.") from error


def read_manifest(archive: Archive, machine: str) -> Manifest | None:
    """None if it is no image, but may be a root file system."""
    try:
        if "manifest.json" in archive:
            return _docker(archive)
        if "index.json" in archive and "oci-layout" in archive:
            return _oci(archive, machine)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise BadImage(f"The archive's manifest is not as it should be: {error!r}.") from error
    return None


def _docker(archive: Archive) -> Manifest:
    _, manifests = archive.json("manifest.json")
    if len(manifests) != 1:
        raise BadImage(f"The archive holds {len(manifests)} images; save one at a time.")
    [manifest] = manifests
    config, _ = archive.json(str(manifest["Config"]))
    layers = tuple(str(name) for name in manifest["Layers"])
    return Manifest(config, layers, tuple(map(str, manifest.get("RepoTags") or ())))


def _oci(archive: Archive, machine: str) -> Manifest:
    _, index = archive.json("index.json")
    entry = _choose(index["manifests"], machine)
    name = str((entry.get("annotations") or {}).get(_REF_NAME, ""))
    digest = str(entry["digest"])
    _, manifest = _blob(archive, digest)
    while any(kind in str(entry.get("mediaType", "")) for kind in _MANIFEST_LISTS):
        entry = _choose(manifest["manifests"], machine)
        _, manifest = _blob(archive, str(entry["digest"]))
    config, _ = _blob(archive, str(manifest["config"]["digest"]))
    layers = tuple(_path(str(layer["digest"])) for layer in manifest["layers"])
    return Manifest(config, layers, (name,) if ":" in name else (), digest)


def _choose(entries: list[Any], machine: str) -> Any:
    """The one for this machine; the only one, if there is but one."""
    if len(entries) == 1:
        return entries[0]
    for entry in entries:
        platform = entry.get("platform") or {}
        if (platform.get("os"), platform.get("architecture")) == ("linux", machine):
            return entry
    raise BadImage(f"The archive has no image for linux/{machine}.")


def _blob(archive: Archive, digest: str) -> tuple[bytes, Any]:
    data, value = archive.json(_path(digest))
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise BadImage(f"{digest} in the archive has other contents.")
    return data, value


def _path(digest: str) -> str:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise BadImage(f"{digest!r} is no digest that is known here.")
    return f"blobs/sha256/{value}"


def unpack(archive: Archive, manifest: Manifest, tree: Tree) -> None:
    """All layers; each must be what the image's configuration says it is."""
    try:
        expected = msgspec.json.decode(manifest.config)["rootfs"]["diff_ids"]
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise BadImage("The image's configuration does not tell its layers.") from error
    if len(expected) != len(manifest.layers):
        raise BadImage("The image has other layers than its configuration says.")
    for name, digest in zip(manifest.layers, expected, strict=True):
        with archive.member(name) as packed:
            found = apply(tree, packed)
        if found != digest:
            raise BadImage(f"The layer {name} is damaged: it is {found}, not {digest}.")


def apply(tree: Tree, packed: IO[bytes]) -> str:
    """A layer, compressed or not. Returns the digest of the uncompressed archive."""
    with _plain(packed) as plain:
        hashed = _Hashed(plain)
        try:
            tree.apply(cast("IO[bytes]", hashed))
        except _PACKED as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise BadImage(f"The archive is damaged: {error}.") from error
    return f"sha256:{hashed.sum.hexdigest()}"


def _plain(packed: IO[bytes]) -> contextlib.AbstractContextManager[IO[bytes]]:
    head = packed.read(6)
    packed.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=packed))
    if head.startswith(b"BZh"):
        return bz2.BZ2File(packed)
    if head.startswith(b"\xfd7zXZ"):
        return lzma.LZMAFile(packed)
    if head.startswith(_ZSTD):
        raise BadImage("The layers are compressed with zstd; save the image with gzip.")
    return contextlib.nullcontext(packed)


class _Hashed:
    """A file whose contents are hashed as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sum.update(data)
        return data


def _name(member: tarfile.TarInfo) -> str:
    return os.path.normpath(member.name)
