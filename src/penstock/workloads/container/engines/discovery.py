"""Which container engines work on this machine, and why one doesn't."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Coroutine
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import Misconfigured
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import NO_INIT, ContainerEngine, EngineFacts
from penstock.workloads.container.engines.sockets import (
    SCHEME,
    Absent,
    Opened,
    Unusable,
    first_of,
    greeted,
    merged,
    open_socket,
    sockets,
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
    reasons: list[Unusable] = []
    for name in names:
        try:
            engine, _ = await _open(name, config)
        except Unusable as error:
            reasons.append(Unusable(f"{name}: {error.problem}", error.advice))
        else:
            return engine
    refused = merged(reasons)
    what = "no engine for containers works here" if len(names) > 1 else "the engine does not work"
    raise Misconfigured(f"{what}: {refused.problem}", hint=refused.advice)


async def _open(name: str, config: WorkerConfig) -> Opened:
    root, runtime = config.jobs_dir / "oci", config.runtime
    if name == "oci":
        runtimes = (runtime,) if runtime else OCI_RUNTIMES
        return await _first_runtime(root, runtimes, config.images.max_bytes)
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


# -- Docker and Podman ----------------------------------------------------------------


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


async def _first_runtime(root: Path, runtimes: tuple[str, ...], max_image: int) -> Opened:
    reasons: list[Unusable] = []
    for runtime in runtimes:
        try:
            return await _open_runtime(root, runtime, max_image)
        except Unusable as error:
            reasons.append(error)
    raise merged(reasons)


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
