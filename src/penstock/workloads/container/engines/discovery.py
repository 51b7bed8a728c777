"""Which container engines work on this machine, and why one doesn't."""

from __future__ import annotations

import asyncio
import grp
import os
import shutil
import stat
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import Misconfigured
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import (
    NO_INIT,
    ContainerEngine,
    EngineError,
    EngineFacts,
)

ORDER = ("docker", "podman", "oci")
"""What `auto` tries: an engine that somebody runs already has their images, whereas `oci`, though
the fastest, has only those that were brought into the worker's folder."""
OCI_RUNTIMES = ("crun", "runc")
"""What `oci` tries if no runtime is named: crun starts a container in less time."""
GVISOR = "runsc"
GROUP = "penstock.container_engines"
"""Entry points: each is called with the worker's settings, and returns a `ContainerEngine`."""
_TRIAL = 25.0
"""Seconds that a runtime has to run a container, be the machine as busy as it may."""
_DAEMONS = {"docker": "dockerd", "podman": "podman"}
_STARTS = {
    "docker": "start it: systemctl start docker, or dockerd as root",
    "podman": "start its service: systemctl start podman.socket (with --user, if it is your own),"
    " or podman system service --time=0",
}
_NO_INIT = (
    "it has no init program: a process that ignores SIGTERM as PID 1 ends only when it is killed"
)
_INITS = {
    "docker": "install docker-init (tini), or name it with dockerd --init-path",
    "podman": "apt-get install catatonit",
    "oci": "apt-get install tini",
}
_PACKAGES = {
    "docker": "apt-get install docker.io",
    "podman": "apt-get install podman",
    "crun": "apt-get install crun",
    "runc": "apt-get install runc",
    GVISOR: "apt-get install runsc",
}


PATIENCE = 10.0
"""Seconds that an engine has to say who it is; on a busy machine Podman needs some."""
_CONNECT = 2.0
"""Seconds that it has to take a connection."""
SCHEME = "unix://"
VARIABLES = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}
"""What the engine's own tools read: whoever sets it means that engine and no other."""
SYSTEM = {
    "docker": ("/run/docker.sock", "/var/run/docker.sock"),
    "podman": ("/run/podman/podman.sock",),
}
_OWN = {"docker": "docker.sock", "podman": "podman/podman.sock"}
"""Below the user's runtime folder."""

Opened = tuple[ContainerEngine, EngineFacts]


class Unusable(Exception):
    """An engine that can't be used: why, and what to do about it."""

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(problem)
        self.problem, self.advice = problem, advice


class Absent(Unusable):
    """There is no such socket."""


class Candidate(Struct, frozen=True, kw_only=True):
    """An engine that might be used here."""

    name: str
    """`docker`, `podman`, `oci/crun`, `oci/runc`, `gvisor`."""
    works: bool
    where: str = ""
    """Its socket or its program."""
    facts: EngineFacts | None = None
    problem: str = ""
    """Why it does not work, or what it lacks."""
    advice: str = ""
    """What to do about that."""


async def candidates(root: Path) -> list[Candidate]:
    """Every kind of engine; `root` is where the engine `oci` keeps its files."""
    docker, podman, *oci, gvisor = await asyncio.gather(
        _candidate("docker", _open_daemon("docker")),
        _candidate("podman", _open_daemon("podman")),
        *(_try_runtime(f"oci/{name}", root, name) for name in OCI_RUNTIMES),
        _try_runtime("gvisor", root, GVISOR),
    )
    if not gvisor.works and docker.facts is not None and GVISOR in docker.facts.runtimes:
        gvisor = replace(docker, name="gvisor")
    return [docker, podman, *oci, gvisor]


async def _try_runtime(name: str, root: Path, runtime: str) -> Candidate:
    """Elsewhere than in `root`: whoever only asks wants nothing to be written there."""
    try:
        _check_runtime(runtime)
    except Unusable as error:
        return _refused(name, error)
    with TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as folder:
        found = await _candidate(name, _open_runtime(Path(folder), runtime, 1 << 30))
    facts = found.facts and replace(found.facts, root_dir=str(root))
    return replace(found, facts=facts)


async def _candidate(name: str, opening: Coroutine[Any, Any, Opened]) -> Candidate:
    try:
        engine, facts = await _confined(await opening)
    except Unusable as error:
        return _refused(name, error)
    await engine.close()
    found = Candidate(name=name, works=True, where=facts.where, facts=facts)
    if NO_INIT in facts.security:
        found = replace(found, problem=_NO_INIT, advice=_INITS[facts.name])
    return found


def _refused(name: str, error: Unusable) -> Candidate:
    return Candidate(name=name, works=False, problem=error.problem, advice=error.advice)


async def open_engine(config: WorkerConfig) -> ContainerEngine:
    """The engine that a worker is configured for, ready. Raises Misconfigured, which says of
    each that was tried why it can't be used, and what to do."""
    names = ORDER if config.engine == "auto" else (config.engine,)
    try:
        engine, _ = await _first(_named(name, config) for name in names)
    except Unusable as error:
        many = len(names) > 1
        what = "no engine for containers works here" if many else "the engine does not work"
        raise Misconfigured(f"{what}: {error.problem}", hint=error.advice) from None
    return engine


async def _named(name: str, config: WorkerConfig) -> Opened:
    try:
        return await _open(name, config)
    except Unusable as error:
        raise Unusable(f"{name}: {error.problem}", error.advice) from None


async def _open(name: str, config: WorkerConfig) -> Opened:
    root, runtime = config.jobs_dir / "oci", config.runtime
    if name == "oci":
        runtimes = (runtime,) if runtime else OCI_RUNTIMES
        limit = config.images.max_bytes
        return await _first(_open_runtime(root, one, limit) for one in runtimes)
    if name in _DAEMONS or name.startswith(SCHEME):
        opening = open_socket(name.removeprefix(SCHEME)) if ":" in name else _open_daemon(name)
        opened = await _with_runtime(await opening, runtime)
        return opened if config.unconfined else await _confined(opened)
    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in plugins:
        return await greeted(plugins[name].load()(config), name, _TRIAL)
    names = ", ".join(dict.fromkeys((*ORDER, *plugins)))
    raise Misconfigured(
        f"there is no engine {name!r}",
        hint=f"choose auto, {names}, or {SCHEME} and the path of a socket",
    )


async def _first(openings: Iterable[Coroutine[Any, Any, Opened]]) -> Opened:
    """The first that can be opened. Raises Unusable with what is wrong with each; of those that are
    there, if some are."""
    reasons: list[Unusable] = []
    for opening in openings:
        try:
            return await opening
        except Unusable as error:
            reasons.append(error)
    there = [reason for reason in reasons if not isinstance(reason, Absent)]
    problems = "; ".join(reason.problem for reason in there or reasons)
    advice = dict.fromkeys(reason.advice for reason in reasons if reason.advice)
    raise (Unusable if there else Absent)(problems, ", or ".join(advice))


# -- Docker and Podman ----------------------------------------------------------------


def sockets(name: str, environ: Mapping[str, str]) -> list[str]:
    """Where to look for Docker, or for Podman, each place once. Raises Unusable."""
    variable = VARIABLES[name]
    if address := environ.get(variable, ""):
        if not address.startswith(SCHEME):
            raise Unusable(
                f"{variable} is {address}, but only a Unix socket of this machine can be used",
                f"unset {variable}, or set it to {SCHEME} and the path of a socket",
            )
        return [address.removeprefix(SCHEME)]
    own = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    places: dict[str, str] = {}
    for path in (*SYSTEM[name], f"{own}/{_OWN[name]}"):
        places.setdefault(os.path.realpath(path), path)
    return list(places.values())


async def first_of(name: str, paths: Sequence[str]) -> Opened:
    """The first that is the engine of this name. Raises Absent if there is no socket at all,
    Unusable with what is wrong with those that are there."""

    async def named(path: str) -> Opened:
        engine, facts = await open_socket(path)
        if facts.name == name:
            return engine, facts
        await engine.close()
        raise Unusable(f"{path} is {facts.name}'s")

    return await _first(named(path) for path in paths)


async def open_socket(path: str) -> Opened:
    """Whoever listens there, be it Docker or Podman. Raises Unusable."""
    from penstock.workloads.container.engines.docker.engine import DockerEngine

    await _knock(path)
    return await greeted(DockerEngine(path), path)


async def greeted(engine: ContainerEngine, where: str, patience: float | None = None) -> Opened:
    """The engine, once it has said who it is; it is closed otherwise. Raises Unusable."""
    patience = patience or PATIENCE
    try:
        async with asyncio.timeout(patience):
            return engine, await engine.facts()
    except BaseException as error:
        await engine.close()
        if isinstance(error, TimeoutError):
            problem = f"{where} does not answer within {patience:g} s"
            raise Unusable(problem, "restart it, and look into its log") from None
        if isinstance(error, EngineError):
            raise Unusable(f"{where} does not work: {error}") from error
        raise


async def _knock(path: str) -> None:
    """Raises Unusable if nobody opens."""
    try:
        async with asyncio.timeout(_CONNECT):
            _, writer = await asyncio.open_unix_connection(path)
    except FileNotFoundError:
        raise Absent(f"there is no {path}") from None
    except PermissionError:
        raise Unusable(f"this user may not use {path}", _way_in(path)) from None
    except ConnectionRefusedError:
        raise _nobody(path) from None
    except TimeoutError:
        raise Unusable(f"{path} takes no connection", "restart the engine") from None
    except OSError as error:
        raise Unusable(f"can't connect to {path}: {error.strerror or error}") from error
    writer.close()
    await writer.wait_closed()


def _nobody(path: str) -> Unusable:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return Unusable(f"{path} is not a socket", "give the path of the engine's socket")
    return Unusable(f"nothing listens at {path}", "start the engine again: it has ended")


def _way_in(path: str) -> str:
    """What gives one the right to a socket."""
    try:
        group = grp.getgrgid(os.stat(path).st_gid).gr_name
    except (OSError, KeyError):
        return "run as root"
    if group == "root":
        return "run as root"
    return f"run as root, or join the group {group} (usermod -aG) and log in again"


async def _open_daemon(name: str) -> Opened:
    try:
        return await first_of(name, sockets(name, os.environ))
    except Unusable as error:
        if name == "podman" and (found := await _disguised()) is not None:
            return found
        raise _explained(name, error) if isinstance(error, Absent) else error from None


async def _disguised() -> Opened | None:
    """Podman where Docker is expected; it can be installed so."""
    try:
        return await first_of("podman", sockets("docker", os.environ))
    except Unusable:
        return None


def _explained(name: str, absent: Absent) -> Unusable:
    if shutil.which(_DAEMONS[name]) is None:
        return Unusable(f"it is not installed, and {absent.problem}", _PACKAGES[name])
    return Unusable(f"it is installed, but does not run: {absent.problem}", _STARTS[name])


async def _with_runtime(opened: Opened, runtime: str) -> Opened:
    engine, facts = opened
    if runtime in ("", *facts.runtimes):
        return opened
    await engine.close()
    raise Unusable(
        f"{facts.where} has no runtime {runtime!r}; it has {', '.join(facts.runtimes) or 'none'}",
        f"choose one of those, or add {runtime!r} to the engine's configuration",
    )


async def _confined(opened: Opened) -> Opened:
    """Raises Unusable for an engine whose containers may make any system call."""
    engine, facts = opened
    if facts.has_seccomp:
        return opened
    await engine.close()
    raise Unusable(
        f"{facts.where} runs containers without a seccomp profile",
        "start the engine with its default profile, or accept that with unconfined: true in the"
        " worker's settings file",
    )


# -- runtimes without an engine ---------------------------------------------------------


async def _open_runtime(root: Path, runtime: str, max_image: int) -> Opened:
    from penstock.workloads.container.engines.oci.engine import OciEngine

    _check_runtime(runtime)
    engine = OciEngine(root, runtime=runtime, max_image=max_image)
    return await greeted(engine, runtime, _TRIAL)


def _check_runtime(runtime: str) -> None:
    """Raises Unusable for what need not be tried."""
    if not sys.platform.startswith("linux"):
        raise Unusable(f"{runtime} runs on Linux only", "use docker or podman")
    if shutil.which(runtime) is None:
        advice = _PACKAGES.get(runtime, f"install {runtime}, or choose another runtime")
        raise Unusable(f"there is no program {runtime} in PATH", advice)
    if os.geteuid() != 0:
        advice = "run the worker as root, or use an engine that runs without, as podman"
        raise Unusable(f"{runtime} needs root to make cgroups and mounts", advice)
