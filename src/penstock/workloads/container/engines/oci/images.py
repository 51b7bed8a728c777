"""A small store of images: a folder each, and a file of names; filled from registries (by skopeo),
and from files: what `docker save` writes, the OCI image layout as a tar, and a plain root file
system.

    <root>/<64 hex digits>/rootfs, image.json
    <root>/tags.json      also names with a registry's digest, as name@sha256:…

An image appears at once, complete, or not at all. One program at a time changes the store.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import gzip
import hashlib
import lzma
import os
import platform
import re
import secrets
import shutil
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, BinaryIO, cast

import msgspec
from msgspec import Struct

from penstock.workloads.container.engine import (
    EngineError,
    Image,
    ImageNotFound,
    PullFailed,
    RegistryAuth,
)
from penstock.workloads.container.engines.credentials import DOCKER_HUB
from penstock.workloads.container.engines.oci.rootfs import BadImage, LayerTree
from penstock.workloads.container.engines.programs import run_program
from penstock.workloads.container.files.archives import decompressed

LARGEST = 16 << 30
"""Bytes that an image may have, unpacked, unless a worker's settings say otherwise."""
_LOCK_POLL = 0.05
_NEW = ".new-"
_ID = re.compile(r"sha256:[0-9a-f]{64}")
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,254}")
_IMAGE = msgspec.json.Decoder(Image)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_ADVICE = "`penstock container image load FILE` brings one in"


class ImageStore:
    """Images below a folder. Its methods block while they read and write files."""

    def __init__(self, root: Path, *, limit: int = LARGEST) -> None:
        self.root = root
        self._limit = limit

    # -- bringing in ----------------------------------------------------------

    def load(
        self,
        path: Path,
        tag: str = "",
        *,
        digest: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Image:
        """From a file that `docker save` or `podman save` wrote, or an OCI archive; its own
        tags are taken unless one is given. Raises BadImage, also once it is `stopped`. With
        `digest`, the tag is the name by which a registry knows it; one with a digest of its own
        (`name@sha256:…`) changes no tag."""
        with contextlib.closing(Archive(path)) as archive:
            machine = platform.machine()
            manifest = read_manifest(archive, _MACHINES.get(machine, machine))
            if manifest is None:
                raise BadImage(f"{path.name} is not an image; a root file system can be imported.")
            names = _names(tag, manifest, digest)
            with self._staging(stopped) as new:
                tree = LayerTree(new / "rootfs", self._limit, stopped=stopped)
                unpack(archive, manifest, tree)
                return self._keep(new, tree, _described(manifest, tree.size), names)

    def import_tree(
        self, source: Path, tag: str, *, cmd: Sequence[str] = (), env: Sequence[str] = ()
    ) -> Image:
        """From a folder, or a tar of one. Raises BadImage."""
        name = _full_tag(tag)
        if self.root.absolute().is_relative_to(source.absolute()):
            raise BadImage(f"{source} holds the images themselves.")
        with self._staging() as new:
            tree = LayerTree(new / "rootfs", self._limit)
            is_folder = source.is_dir()
            with TemporaryFile(dir=new) if is_folder else source.open("rb") as packed:
                if is_folder:
                    _pack(source, packed)
                digest = apply(tree, packed)
            config = {"Cmd": list(cmd), "Env": list(env)}
            described = {"os": "linux", "config": config, "rootfs": {"diff_ids": [digest]}}
            manifest = Manifest(msgspec.json.encode(described), ())
            return self._keep(new, tree, _described(manifest, tree.size), [name])

    # -- asking ---------------------------------------------------------------

    def find(self, reference: str) -> Image:
        """By name (without a tag: `latest`), id, the beginning of an id, or digest."""
        found = self._id_of(reference)
        if found is None:
            raise ImageNotFound(f"There is no image {reference!r} here; {_ADVICE}.")
        try:
            image = _IMAGE.decode((self._place(found) / "image.json").read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise ImageNotFound(f"There is no image {reference!r} here; {_ADVICE}.") from error
        names = sorted(name for name, kept in self._tags().items() if kept == found)
        return msgspec.structs.replace(
            image,
            tags=tuple(name for name in names if "@" not in name),
            digests=tuple(name for name in names if "@" in name),
        )

    def list(self) -> tuple[Image, ...]:
        images = []
        for identity in self._ids():
            with contextlib.suppress(ImageNotFound):
                images.append(self.find(identity))
        return tuple(sorted(images, key=lambda image: (image.tags, image.id)))

    def rootfs(self, image: Image) -> Path:
        return self._place(image.id) / "rootfs"

    # -- taking out -----------------------------------------------------------

    def remove(self, reference: str) -> None:
        """By a name: only that name, unless it is the last one. Raises ImageNotFound."""
        with self._locked():
            image = self.find(reference)
            tags = self._tags()
            named = self._tag_of(reference)
            if named and len(image.tags) > 1:
                self._write_tags({tag: kept for tag, kept in tags.items() if tag != named})
            else:
                self._write_tags({tag: kept for tag, kept in tags.items() if kept != image.id})
                away = self.root / f"{_NEW}{secrets.token_hex(8)}"
                self._place(image.id).rename(away)
                shutil.rmtree(away)

    # -- within ---------------------------------------------------------------

    def _keep(self, new: Path, tree: LayerTree, image: Image, names: Sequence[str]) -> Image:
        tree.finish()
        (new / "image.json").write_bytes(msgspec.json.encode(image))
        if not self._place(image.id).exists():
            new.rename(self._place(image.id))
        self._write_tags({**self._tags(), **dict.fromkeys(names, image.id)})
        return self.find(image.id)

    @contextlib.contextmanager
    def _staging(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Path]:
        with self._locked(stopped):
            for old in self.root.glob(f"{_NEW}*"):
                shutil.rmtree(old)
            new = self.root / f"{_NEW}{secrets.token_hex(8)}"
            new.mkdir(mode=0o755)
            try:
                yield new
            finally:
                shutil.rmtree(new, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.root / ".lock").open("w") as lock:
            while not _took(lock):
                if stopped():
                    raise BadImage("It was given up while another image was brought in.")
                time.sleep(_LOCK_POLL)
            yield

    def _id_of(self, reference: str) -> str | None:
        if _ID.fullmatch(reference):
            return reference
        if tag := self._tag_of(reference):
            return self._tags()[tag]
        if match := _HEX.fullmatch(reference):
            found = [one for one in self._ids() if one[7:].startswith(match[1])]
            return found[0] if len(found) == 1 else None
        return self._tags().get(_digest_name(reference)) if "@" in reference else None

    def _tag_of(self, reference: str) -> str:
        if not _is_name(reference):
            return ""
        tags, name = self._tags(), _full_tag(reference)
        # Podman calls what was built or imported on a machine localhost/name.
        return next((each for each in (name, f"localhost/{name}") if each in tags), "")

    def _ids(self) -> Sequence[str]:
        with contextlib.suppress(FileNotFoundError):
            return [f"sha256:{name}" for name in os.listdir(self.root) if len(name) == 64]
        return ()

    def _place(self, identity: str) -> Path:
        return self.root / identity.removeprefix("sha256:")

    def _tags(self) -> dict[str, str]:
        try:
            return msgspec.json.decode((self.root / "tags.json").read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.root / 'tags.json'} is damaged: {error}.") from error

    def _write_tags(self, tags: dict[str, str]) -> None:
        new = self.root / "tags.new"
        new.write_bytes(msgspec.json.encode(tags))
        new.replace(self.root / "tags.json")


def _pack(folder: Path, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(folder, ".")
    file.seek(0)


def _described(manifest: Manifest, size: int) -> Image:
    """What an image's configuration says."""
    try:
        config: dict[str, Any] = msgspec.json.decode(manifest.config).get("config") or {}
        return msgspec.convert(
            {
                "id": f"sha256:{hashlib.sha256(manifest.config).hexdigest()}",
                "size": size,
                "entrypoint": config.get("Entrypoint") or (),
                "cmd": config.get("Cmd") or (),
                "env": config.get("Env") or (),
                "workdir": config.get("WorkingDir") or "",
                "labels": config.get("Labels") or {},
                "created": time.time(),
            },
            Image,
        )
    except (AttributeError, msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadImage(f"The image's configuration is not as it should be: {error}.") from error


def _names(tag: str, manifest: Manifest, digest: bool) -> list[str]:
    if "@" in tag:
        return [_digest_name(tag)]
    names = [_full_tag(each) for each in ((tag,) if tag else manifest.tags)]
    if digest and manifest.digest:
        names += [f"{each.rpartition(':')[0]}@{manifest.digest}" for each in names]
    return names


def _digest_name(reference: str) -> str:
    """`name@sha256:…`, without the tag that may stand in it as well."""
    name, _, digest = reference.partition("@")
    return f"{_full_tag(name).rpartition(':')[0]}@{digest}"


def _took(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_name(reference: str) -> bool:
    """A tag must not pose as an id."""
    return bool(_TAG.fullmatch(reference)) and not _ID.fullmatch(reference)


def _full_tag(reference: str) -> str:
    if not _is_name(reference):
        raise BadImage(f"{reference!r} can't be an image's name.")
    return reference if ":" in reference.rpartition("/")[2] else f"{reference}:latest"


# -- registries ---------------------------------------------------------------------------------

_UNKNOWN = ("manifest unknown", "name unknown", "not found", "repository does not exist")


def can_fetch() -> bool:
    return shutil.which("skopeo") is not None


async def fetch(store: ImageStore, reference: str, auth: RegistryAuth | None = None) -> Image:
    """Raises ImageNotFound if nobody has it, or nobody can be asked; PullFailed."""
    program = shutil.which("skopeo")
    if program is None:
        raise ImageNotFound(
            f"There is no image {reference!r} here, and no skopeo to fetch it with; "
            "`penstock container image load FILE` brings one in."
        )
    with TemporaryDirectory(prefix="penstock-pull-") as folder:
        file = Path(folder, "image.tar")
        options = ["--quiet"]
        if auth is not None:
            options += ["--authfile", _auth_file(folder, reference, auth)]
        await _run(program, "copy", *options, f"docker://{reference}", f"oci-archive:{file}")
        stop = threading.Event()
        loading = asyncio.ensure_future(
            asyncio.to_thread(store.load, file, reference, digest=True, stopped=stop.is_set)
        )
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            # Else it would go on, and keep others from the store.
            stop.set()
            await asyncio.gather(loading, return_exceptions=True)
            raise


def _auth_file(folder: str, reference: str, auth: RegistryAuth) -> str:
    """A file for `skopeo`: the arguments of a process can be seen by everybody."""
    host = "docker.io" if auth.server == DOCKER_HUB else reference.partition("/")[0]
    login = {"identitytoken": auth.identity_token}
    if not auth.identity_token:
        pair = f"{auth.username}:{auth.password}".encode()
        login = {"auth": base64.b64encode(pair).decode()}
    file = Path(folder, "auth.json")
    file.touch(mode=0o600)
    file.write_bytes(msgspec.json.encode({"auths": {host: login}}))
    return str(file)


async def _run(*command: str) -> None:
    ended = await run_program(*command)
    if ended.code:
        text = ended.stderr.decode(errors="replace").strip()[-500:]
        unknown = any(word in text.lower() for word in _UNKNOWN)
        raise (ImageNotFound if unknown else PullFailed)(text)


# -- archives -----------------------------------------------------------------------------------

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
            raise BadImage(f"{path.name} is not a tar archive: {error}.") from error
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
            raise BadImage(f"{name!r} in the archive is not JSON: {error}.") from error


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
        raise BadImage(f"{digest!r} is not a known digest.")
    return f"blobs/sha256/{value}"


def unpack(archive: Archive, manifest: Manifest, tree: LayerTree) -> None:
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


def apply(tree: LayerTree, packed: IO[bytes]) -> str:
    """A layer, compressed or not. Returns the digest of the uncompressed archive."""
    head = packed.read(len(_ZSTD))
    packed.seek(0)
    if head == _ZSTD:
        raise BadImage("The layers are compressed with zstd; save the image with gzip.")
    hashed = _Hashed(decompressed(cast("BinaryIO", packed)))
    try:
        tree.apply(cast("IO[bytes]", hashed))
    except _PACKED as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise BadImage(f"The archive is damaged: {error}.") from error
    return f"sha256:{hashed.sum.hexdigest()}"


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
