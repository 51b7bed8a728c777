"""Where Docker and Podman listen on a machine, and what can be wrong with a socket."""

from __future__ import annotations

import asyncio
import grp
import os
import stat
from collections.abc import Mapping, Sequence

from penstock.workloads.container.engine import ContainerEngine, EngineError, EngineFacts

PATIENCE = 2.0
"""Seconds that an engine has to say who it is."""
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
    reasons: list[Unusable] = []
    for path in paths:
        try:
            engine, facts = await open_socket(path)
        except Unusable as error:
            reasons.append(error)
            continue
        if facts.name == name:
            return engine, facts
        await engine.close()
        reasons.append(Unusable(f"{path} is {facts.name}'s"))
    there = [reason for reason in reasons if not isinstance(reason, Absent)]
    raise merged(there) if there else Absent(merged(reasons).problem)


def merged(reasons: Sequence[Unusable]) -> Unusable:
    problems = "; ".join(reason.problem for reason in reasons)
    advice = ", or ".join(dict.fromkeys(reason.advice for reason in reasons if reason.advice))
    return Unusable(problems, advice)


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
        async with asyncio.timeout(PATIENCE):
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
    return Unusable(f"nobody listens at {path}", "start the engine again: it has ended")


def _way_in(path: str) -> str:
    """What gives one the right to a socket."""
    try:
        group = grp.getgrgid(os.stat(path).st_gid).gr_name
    except (OSError, KeyError):
        return "run as root"
    if group == "root":
        return "run as root"
    return f"run as root, or join the group {group} (usermod -aG) and log in again"
