"""`penstock.container`: a command in a container, as a job."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from msgspec.structs import replace

from penstock.app.client import DefaultClient
from penstock.config import load
from penstock.core.errors import InvalidRequest, NotFound
from penstock.workloads.container.executor import TOPIC, Ran, ran, result_pointer
from penstock.workloads.function.definition import SubmitOptions

if TYPE_CHECKING:
    from penstock.app.application import Session
    from penstock.app.client import Client, JobHandle

Content = str | bytes | Path
"""A file's content, or where it is."""
_LIMITS = frozenset({"memory_mb", "cpus", "pids", "max_output_bytes", "tmp_mb"})


class Container:
    """A command in a container, ready to be run as a job. Make one with `penstock.container`."""

    def __init__(self, job: Mapping[str, Any], timeout: float | None) -> None:
        self.job = job
        """The protocol's Job object."""
        self._timeout = timeout

    def submit(
        self, client: Client | None = None, **options: Unpack[SubmitOptions]
    ) -> JobHandle[Any]:
        """Submit it; returns when it is durable. Without a client: to the engine on the data
        folder, or one in this process. Raises InvalidRequest and its kin."""
        return (client or _default.client()).submit(TOPIC, self.job, **self._timed(options))

    async def asubmit(
        self, client: Client | None = None, **options: Unpack[SubmitOptions]
    ) -> JobHandle[Any]:
        engine = await _engine(client)
        return await engine.asubmit(TOPIC, self.job, **self._timed(options))

    def run(self, client: Client | None = None, **options: Unpack[SubmitOptions]) -> Ran:
        """Run it to its end, whatever the end."""
        engine = client or _default.client()
        job = self.submit(engine, **options).wait()
        pointer = result_pointer(job)
        return ran(job, engine.read(pointer) if pointer else b"")

    async def arun(self, client: Client | None = None, **options: Unpack[SubmitOptions]) -> Ran:
        engine = await _engine(client)
        job = await (await self.asubmit(engine, **options)).await_end()
        pointer = result_pointer(job)
        return ran(job, await engine.aread(pointer) if pointer else b"")

    def _timed(self, options: SubmitOptions) -> SubmitOptions:
        if self._timeout is not None:
            options.setdefault("timeout", self._timeout + _SPARE)
        return options


_SPARE = 330.0
"""Seconds beyond a container's own limit that its job has: for its image and its end."""


def container(
    image: str,
    *cmd: str,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
    inputs: Mapping[str, Content] | None = None,
    outputs: bool = False,
    timeout: float | None = None,
    payload: Any = None,
    **others: Any,
) -> Container:
    """A command in a container.

    `inputs` are files that it finds in /input; with `outputs` it may leave files in /output.
    `timeout` is how many seconds it may run. `stdin` is what it reads; without it, it reads the
    whole job, with `payload` in it, as JSON. Limits (`memory_mb`, `cpus`, `pids`,
    `max_output_bytes`, `tmp_mb`) and other fields of `runtime` (`user`, `network`, `workdir`,
    `runtime`) can be given by name.
    """
    limits = {name: others.pop(name) for name in _LIMITS & others.keys()}
    if timeout is not None:
        limits["max_runtime_seconds"] = timeout
    runtime: dict[str, Any] = {"image": image, "cmd": list(cmd), **others}
    if env:
        runtime["env"] = dict(env)
    if limits:
        runtime["limits"] = limits
    if stdin is not None:
        runtime["stdin"] = _content(stdin)
    job: dict[str, Any] = {"runtime": runtime}
    if payload is not None:
        job["task"] = {"type": "container", "payload": payload}
    if inputs:
        job["inputs"] = [_input(path, content) for path, content in inputs.items()]
    if outputs:
        job["outputs"] = True
    return Container(job, timeout)


def _input(path: str, content: Content) -> dict[str, Any]:
    if isinstance(content, Path):
        try:
            content = content.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"inputs[{path!r}]", f"can't be read: {error}") from error
    return {"path": path, **_content(content)}


def _content(content: str | bytes) -> dict[str, str]:
    if isinstance(content, str):
        return {"text": content}
    return {"base64": base64.b64encode(content).decode()}


def _embedded() -> Session:
    from penstock.app.application import App

    settings = load()
    if not settings.containers:
        settings = replace(settings, containers="auto")
    return App().run(settings=settings)


def _check_served(client: Client) -> None:
    served = {topic for worker in client.workers() for topic in worker.topics}
    if TOPIC not in served:
        raise NotFound(
            "the engine that is running here runs no containers",
            hint="start it with 'penstock up --containers auto', or join it with"
            " 'penstock worker --containers auto'",
        )


_default = DefaultClient(_embedded, _check_served)


async def _engine(client: Client | None) -> Client:
    return client if client is not None else await asyncio.to_thread(_default.client)
