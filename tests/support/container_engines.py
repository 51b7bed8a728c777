"""Real container engines for tests and benchmarks: private, offline, gone afterwards.

Each runs in mount and network namespaces of its own, with its state on a tmpfs that vanishes
with it, so it meets no other engine, leaves nothing behind and can't leave the machine. Its one
image, `alpine:latest`, is made of the machine's static busybox; no registry is needed.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.testing.images import IMAGE, EngineMissing, busybox_tree, needed

_READY = 30.0


@contextmanager
def private_docker(folder: Path, *options: str) -> Iterator[Path]:
    """A Docker engine; gives its socket. `folder` is empty, and its path short; `options` are
    more of the daemon's."""
    daemon = needed("dockerd")
    state, address = _state(folder), folder / "docker.sock"
    command = (
        f"exec {daemon} --data-root {state}/data --exec-root {state}/exec --pidfile {state}/pid"
        f" -H unix://{address} --storage-driver=overlay2 --iptables=false --ip6tables=false"
        f" --bridge=none --oom-score-adjust=0 --log-driver=none {' '.join(options)}"
    )
    if runsc := shutil.which("runsc"):
        (folder / "daemon.json").write_text(
            json.dumps({"runtimes": {"runsc": {"path": runsc, "runtimeArgs": _GVISOR}}})
        )
        command += f" --config-file {folder}/daemon.json"
    with _running(folder, state, command, address):
        yield address


_GVISOR = ["--platform=ptrace", "--network=none", "--oci-seccomp"]


@contextmanager
def private_podman(folder: Path, init: str = "") -> Iterator[Path]:
    """Podman's API service; gives its socket. `folder` is empty, and its path short; `init` is
    where it looks for its init program."""
    podman, conmon, catatonit = needed("podman"), needed("conmon"), needed("catatonit")
    state, address = _state(folder), folder / "podman.sock"
    wrapper = folder / "conmon"
    # conmon leaves its word of a memory kill in the folder it is started in, not in the bundle.
    wrapper.write_text(_CONMON.format(conmon=conmon))
    wrapper.chmod(0o755)
    (folder / "containers.conf").write_text(_PODMAN.format(wrapper=wrapper, init=init or catatonit))
    (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    command = (
        f"exec {podman} --root {state}/root --runroot {state}/run --tmpdir {state}/tmp"
        f" --cgroup-manager=cgroupfs --events-backend=file"
        f" system service --time=0 unix://{address}"
    )
    environment = {"CONTAINERS_CONF": str(folder / "containers.conf")}
    with _running(folder, state, command, address, environment):
        yield address


_CONMON = """#!/bin/sh
folder=.
previous=
for part in "$@"; do
  [ "$previous" = -b ] && folder=$part
  previous=$part
done
cd "$folder" && exec {conmon} "$@"
"""
_PODMAN = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
netns = "none"
log_driver = "k8s-file"
[engine]
runtime = "runc"
init_path = "{init}"
conmon_path = ["{wrapper}"]
cgroup_manager = "cgroupfs"
events_logger = "file"
helper_binaries_dir = ["/usr/libexec/podman", "/usr/lib/podman", "/usr/bin"]
"""


def _state(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "t"
    state.mkdir()
    return state


@contextmanager
def _running(
    folder: Path,
    state: Path,
    command: str,
    address: Path,
    environment: dict[str, str] | None = None,
) -> Iterator[None]:
    """The engine, which dies with us however we die."""
    script = f"mount -t tmpfs tmpfs {state} && {command}"
    with (folder / "log").open("wb") as log:
        engine = subprocess.Popen(
            ["unshare", "-m", "-n", "setpriv", "--pdeathsig", "TERM", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    (folder / "pid").write_text(str(engine.pid))
    try:
        _await_ready(engine, address, folder / "log")
        _import_image(folder, address)
        _try_container(address)
        yield
    finally:
        _clear(address)
        _end(engine)


def _clear(address: Path) -> None:
    """Remove what a test that failed left behind: Podman's containers outlive its service."""
    with suppress(OSError, ValueError, http.client.HTTPException):
        _, listed = ask(address, "GET", "/containers/json?all=true")
        for one in json.loads(listed):
            ask(address, "DELETE", f"/containers/{one['Id']}?force=true&v=true")


def _await_ready(engine: subprocess.Popen[bytes], address: Path, log: Path) -> None:
    until = time.monotonic() + _READY
    while True:
        try:
            if ask(address, "GET", "/_ping")[0] == 200:
                return
        except OSError:
            pass
        if engine.poll() is not None or time.monotonic() > until:
            _end(engine)
            raise EngineMissing(f"the engine does not start: {log.read_text()[-600:]}")
        time.sleep(0.02)


def _end(engine: subprocess.Popen[bytes]) -> None:
    engine.send_signal(signal.SIGTERM)
    try:
        engine.wait(20)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait()


def _import_image(folder: Path, address: Path) -> None:
    tree = busybox_tree(folder / "image")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(tree, ".")
    shutil.rmtree(tree)
    name, tag = IMAGE.split(":")
    changes = "&changes=ENV%20PATH%3D/bin&changes=CMD%20%5B%22/bin/sh%22%5D"
    path = f"/images/create?fromSrc=-&repo={name}&tag={tag}{changes}"
    status, answer = ask(address, "POST", path, packed.getvalue())
    if status != 200:
        raise EngineMissing(f"the image can't be imported: {answer[:300]!r}")


def _try_container(address: Path) -> None:
    """Raises EngineMissing at once where every test would wait in vain for a container."""
    asked = {"Image": IMAGE, "Cmd": ["true"], "HostConfig": {"NetworkMode": "none"}}
    body = json.dumps(asked).encode()
    status, answer = ask(address, "POST", "/containers/create?name=trial", body)
    for path in ("/containers/trial/start", "/containers/trial/wait"):
        if status < 300:
            status, answer = ask(address, "POST", path)
    ask(address, "DELETE", "/containers/trial?force=true&v=true")
    if status >= 300 or json.loads(answer).get("StatusCode") != 0:
        raise EngineMissing(f"the engine runs no container: {answer[:300].decode()}")


def ask(address: Path, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """One request to an engine's API, without the code under test."""
    connection = _Local(address)
    try:
        kind = "application/json" if body.startswith(b"{") else "application/x-tar"
        connection.request(method, path, body or None, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class _Local(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, address: Path) -> None:
        super().__init__("localhost", timeout=_READY)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._address))
