"""Image store: one folder per image and a file of names.

    <root>/<64 hex digits>/rootfs, image.json
    <root>/tags.json      also names with a registry's digest, as name@sha256:…
    <root>/.new-…         an image that is being made; locked as long as somebody works on it

skopeo copies an image from a registry or an archive into an OCI layout, and umoci unpacks that. A
plain root file system is copied by `cp` or `tar`. An image appears complete, or not at all.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import os
import re
import resource
import secrets
import select
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec

from penstock.workloads.container.engine import (
    EngineError,
    Image,
    ImageNotFound,
    PullFailed,
    RegistryAuth,
)
from penstock.workloads.container.engines.credentials import DOCKER_HUB
from penstock.workloads.container.engines.oci.rootfs import finish, tree_digest, tree_size
from penstock.workloads.container.files.tree import remove_tree

LARGEST = 16 << 30
"""Bytes that an image may have, unpacked, unless a worker's settings say otherwise."""
TOOLS = ("skopeo", "umoci")
_ADVICE = "install skopeo and umoci: apt-get install skopeo umoci, or dnf install skopeo umoci"

_NEW = ".new-"
_ID = re.compile(r"sha256:[0-9a-f]{64}")
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,254}")
_IMAGE = msgspec.json.Decoder(Image)
_REF_NAME = "org.opencontainers.image.ref.name"
_MOST_JSON = 16 << 20
_TAR_OPTIONS = ("--same-owner", "--numeric-owner", "--force-local")
_UNKNOWN = ("manifest unknown", "name unknown", "not found", "repository does not exist")


class BadImage(EngineError):
    """An archive that is no image, or one that can't be unpacked."""


class _NewImage:
    """A folder in which an image is made, by programs that are watched."""

    def __init__(self, folder: Path, limit: int, stopped: Callable[[], bool]) -> None:
        self.folder = folder
        self.rootfs = folder / "rootfs"
        self._limit = limit
        self._stopped = stopped

    def copy(self, source: str, *options: str) -> str:
        """An image as an OCI layout. Returns the digest of its manifest."""
        # umoci takes only gzip. skopeo unpacks some archives on the way, beside the layout.
        how = ("--quiet", "--dest-compress-format=gzip", "--dest-compress-level=1", *options)
        self.run("skopeo", "copy", *how, source, "oci:layout:image", watched=".", times=2)
        [entry] = self._json("index.json")["manifests"]
        return str(entry["digest"])

    def unpack(self, digest: str) -> tuple[str, Mapping[str, Any]]:
        """The root file system of the layout's image. Returns its id and its configuration."""
        try:
            identity = str(self._blob(digest)["config"]["digest"])
            config = self._blob(identity).get("config") or {}
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadImage(f"The image has an invalid manifest: {error!r}.") from error
        self.run("umoci", "--log=error", "raw", "unpack", "--image", "layout:image", "rootfs")
        return identity, config

    def run(self, *command: str, watched: str = "rootfs", times: int = 1) -> None:
        """A program, until it ends or what it writes is too large. Raises BadImage."""
        program = shutil.which(command[0])
        if program is None:
            raise EngineError(f"There is no program {command[0]} in PATH; {_ADVICE}.")
        limit = times * self._limit
        with TemporaryFile() as said:
            process = subprocess.Popen(
                ("setpriv", "--pdeathsig", "KILL", program, *command[1:]),
                cwd=self.folder,
                env={**os.environ, "TMPDIR": str(self.folder), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
            try:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
                self._watch(process.pid, self.folder / watched, limit)
            finally:
                process.kill()
                process.wait()
            if process.returncode:
                said.seek(0)
                text = said.read(_MOST_JSON).decode(errors="replace").strip()[-500:]
                raise BadImage(text or f"{command[0]} ended with {process.returncode}.")

    def _watch(self, pid: int, folder: Path, limit: int) -> None:
        fd = os.pidfd_open(pid)
        try:
            pause, is_over = 0.05, False
            while not is_over:
                is_over = bool(select.select([fd], [], [], pause)[0])
                if self._stopped():
                    raise BadImage("The pull was cancelled.")
                began = time.monotonic()
                if tree_size(folder) > limit:
                    raise BadImage(f"The image is larger than {limit} bytes (images.max_bytes).")
                # A large tree takes a while to measure; most of the time is the program's.
                pause = min(max(4 * (time.monotonic() - began), 0.05), 1.0)
        finally:
            os.close(fd)

    def _json(self, path: str) -> Any:
        with (self.folder / "layout" / path).open("rb") as file:
            return msgspec.json.decode(file.read(_MOST_JSON))

    def _blob(self, digest: str) -> Any:
        if not _ID.fullmatch(digest):
            raise ValueError(digest)
        return self._json(f"blobs/sha256/{digest[7:]}")


class ImageStore:
    """Images below a folder. Its methods block while they read and write files."""

    def __init__(self, root: Path, *, limit: int = LARGEST) -> None:
        self.root = root
        self._limit = limit

    # -- adding -----------------------------------------------------------------

    def load(self, path: Path, tag: str = "") -> Image:
        """From a file that `docker save`, `podman save` or `skopeo copy` wrote; its own tags are
        taken unless one is given. Raises BadImage."""
        transport, tags = _archive(path)
        names = [_full_tag(each) for each in ((tag,) if tag else tags)]
        with self._staging() as new:
            # A colon in a path would mean something to skopeo.
            (new.folder / "archive").symlink_to(path.absolute())
            digest = new.copy(f"{transport}:archive", "--insecure-policy")
            return self._add(new, *new.unpack(digest), names)

    def pull(
        self,
        reference: str,
        auth: RegistryAuth | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Image:
        """From a registry, by a tag or a digest; a digest changes no tag. Raises ImageNotFound,
        PullFailed, BadImage. Once it is `stopped`, it raises soon, and leaves nothing."""
        if not can_pull():
            raise ImageNotFound(f"There is no image {reference!r} here. To pull images, {_ADVICE}.")
        name = _digest_name(reference) if "@" in reference else _full_tag(reference)
        with self._staging(stopped) as new:
            options = () if auth is None else ("--authfile", _auth_file(new, reference, auth))
            try:
                digest = new.copy(f"docker://{name}", *options)
            except BadImage as error:
                unknown = any(word in str(error).lower() for word in _UNKNOWN)
                raise (ImageNotFound if unknown else PullFailed)(str(error)) from None
            names = [name] if "@" in name else [name, f"{name.rpartition(':')[0]}@{digest}"]
            return self._add(new, *new.unpack(digest), names)

    def import_tree(
        self, source: Path, tag: str, *, cmd: Sequence[str] = (), env: Sequence[str] = ()
    ) -> Image:
        """From a folder, or a tar of one. Raises BadImage."""
        name, source = _full_tag(tag), source.absolute()
        if self.root.absolute().is_relative_to(source):
            raise BadImage(f"{source} contains the image store itself.")
        with self._staging() as new:
            new.rootfs.mkdir()
            if source.is_dir():
                new.run("cp", "--archive", f"{source}/.", "rootfs")
            else:
                new.run("tar", "-xpf", str(source), *_TAR_OPTIONS, "--directory=rootfs")
            config = {"Cmd": list(cmd), "Env": list(env)}
            about = msgspec.json.encode([tree_digest(new.rootfs), config])
            identity = f"sha256:{hashlib.sha256(about).hexdigest()}"
            return self._add(new, identity, config, [name])

    def _add(
        self, new: _NewImage, identity: str, config: Mapping[str, Any], names: Sequence[str]
    ) -> Image:
        """The finished image, under its names."""
        about = {
            "id": identity,
            "size": finish(new.rootfs),
            "entrypoint": config.get("Entrypoint") or (),
            "cmd": config.get("Cmd") or (),
            "env": config.get("Env") or (),
            "workdir": config.get("WorkingDir") or "",
            "labels": config.get("Labels") or {},
            "created": time.time(),
        }
        try:
            image = msgspec.convert(about, Image)
        except msgspec.ValidationError as error:
            raise BadImage(f"The image has an invalid configuration: {error}.") from error
        for rest in set(os.listdir(new.folder)) - {"rootfs"}:
            remove_tree(new.folder / rest)
        (new.folder / "image.json").write_bytes(msgspec.json.encode(image))
        with self._locked():
            if not self._place(image.id).exists():
                new.folder.rename(self._place(image.id))
            self._write_tags({**self._tags(), **dict.fromkeys(names, image.id)})
            return self.find(image.id)

    # -- asking -----------------------------------------------------------------

    def find(self, reference: str) -> Image:
        """By name (without a tag: `latest`), id, the beginning of an id, or digest."""
        tags = self._tags()
        found = self._id_of(reference, tags) or reference
        image = self.read(found)
        names = sorted(name for name, kept in tags.items() if kept == found)
        return msgspec.structs.replace(
            image,
            tags=tuple(name for name in names if "@" not in name),
            digests=tuple(name for name in names if "@" in name),
        )

    def read(self, identity: str) -> Image:
        """By its id alone, and without its names."""
        try:
            if not _ID.fullmatch(identity):
                raise FileNotFoundError(identity)
            return _IMAGE.decode((self._place(identity) / "image.json").read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise ImageNotFound(
                f"There is no image {identity!r} here; "
                "`penstock container image load FILE` brings one in."
            ) from error

    def list(self) -> tuple[Image, ...]:
        images = []
        for identity in self._ids():
            with contextlib.suppress(ImageNotFound):
                images.append(self.find(identity))
        return tuple(sorted(images, key=lambda image: (image.tags, image.id)))

    def rootfs(self, image: Image) -> Path:
        return self._place(image.id) / "rootfs"

    # -- removing ---------------------------------------------------------------

    def remove(self, reference: str) -> None:
        """By a name: only that name, unless it is the last one. Raises ImageNotFound."""
        with self._locked():
            image = self.find(reference)
            tags = self._tags()
            named = _tag_of(reference, tags)
            if named and len(image.tags) > 1:
                self._write_tags({tag: kept for tag, kept in tags.items() if tag != named})
                return
            self._write_tags({tag: kept for tag, kept in tags.items() if kept != image.id})
            away = self.root / f"{_NEW}{secrets.token_hex(8)}"
            self._place(image.id).rename(away)
            remove_tree(away)

    # -- within -----------------------------------------------------------------

    @contextlib.contextmanager
    def _staging(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[_NewImage]:
        with contextlib.ExitStack() as stack:
            with self._locked():
                for old in self.root.glob(f"{_NEW}*"):
                    # One that nobody has locked is of a program that died.
                    with contextlib.suppress(BlockingIOError), _flock(old, fcntl.LOCK_NB):
                        remove_tree(old)
                new = self.root / f"{_NEW}{secrets.token_hex(8)}"
                new.mkdir(mode=0o755)
                stack.enter_context(_flock(new))
            stack.callback(remove_tree, new)
            yield _NewImage(new, self._limit, stopped)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Only for moments: nobody copies or unpacks with it."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.root / ".lock").touch()
        with _flock(self.root / ".lock"):
            yield

    def _id_of(self, reference: str, tags: Mapping[str, str]) -> str | None:
        if _ID.fullmatch(reference):
            return reference
        if tag := _tag_of(reference, tags):
            return tags[tag]
        if match := _HEX.fullmatch(reference):
            found = [one for one in self._ids() if one[7:].startswith(match[1])]
            return found[0] if len(found) == 1 else None
        return tags.get(_digest_name(reference)) if "@" in reference else None

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


def can_pull() -> bool:
    return all(shutil.which(tool) for tool in TOOLS)


async def pull(store: ImageStore, reference: str, auth: RegistryAuth | None = None) -> Image:
    """Pull in a thread; nothing of it goes on after a cancellation."""
    stop = threading.Event()
    pulling = asyncio.ensure_future(asyncio.to_thread(store.pull, reference, auth, stop.is_set))
    try:
        return await asyncio.shield(pulling)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(pulling, return_exceptions=True)
        raise


@contextlib.contextmanager
def _flock(path: Path, flags: int = 0) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(fd)


def _archive(path: Path) -> tuple[str, list[str]]:
    """skopeo's word for the kind of an archive, and the tags of the image in it."""
    found: dict[str, Any] = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                name = os.path.normpath(member.name)
                if name in ("manifest.json", "index.json") and (file := tar.extractfile(member)):
                    found[name] = msgspec.json.decode(file.read(_MOST_JSON))
        # A newer `docker save` writes both.
        if (images := found.get("manifest.json")) is not None:
            return "docker-archive", [tag for one in images for tag in one.get("RepoTags") or ()]
        if (index := found.get("index.json")) is not None:
            notes = [one.get("annotations") or {} for one in index["manifests"]]
            return "oci-archive", [
                str(one[_REF_NAME]) for one in notes if ":" in one.get(_REF_NAME, "")
            ]
    except (
        tarfile.TarError,
        OSError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise BadImage(f"{path.name} is not an image archive: {error}.") from error
    raise BadImage(
        f"{path.name} is not an image; `penstock container image import` takes a root file system."
    )


def _auth_file(new: _NewImage, reference: str, auth: RegistryAuth) -> str:
    """A file for `skopeo`: the arguments of a process can be seen by everybody."""
    host = "docker.io" if auth.server == DOCKER_HUB else reference.partition("/")[0]
    login = {"identitytoken": auth.identity_token}
    if not auth.identity_token:
        pair = f"{auth.username}:{auth.password}".encode()
        login = {"auth": base64.b64encode(pair).decode()}
    file = new.folder / "auth.json"
    file.touch(mode=0o600)
    file.write_bytes(msgspec.json.encode({"auths": {host: login}}))
    return file.name


def _digest_name(reference: str) -> str:
    """`name@sha256:…`, without the tag that may stand in it as well."""
    name, _, digest = reference.partition("@")
    return f"{_full_tag(name).rpartition(':')[0]}@{digest}"


def _tag_of(reference: str, tags: Mapping[str, str]) -> str:
    """Its tag among these; empty if it has none."""
    if not _is_name(reference):
        return ""
    # Podman calls what was built or imported on a machine localhost/name.
    name = _full_tag(reference)
    return next((each for each in (name, f"localhost/{name}") if each in tags), "")


def _is_name(reference: str) -> bool:
    """A tag must not pose as an id."""
    return bool(_TAG.fullmatch(reference)) and not _ID.fullmatch(reference)


def _full_tag(reference: str) -> str:
    if not _is_name(reference):
        raise BadImage(f"Invalid image name: {reference!r}.")
    return reference if ":" in reference.rpartition("/")[2] else f"{reference}:latest"
