"""Docker and Podman as engines of container jobs.

The round trips of a job are create, attach, start and wait, and one more to ask why it failed.
What differs between the two is in `podman`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.workloads.container.engine import (
    NO_INIT,
    AttachSession,
    BuildRequest,
    ContainerNotFound,
    ContainerSpec,
    ContainerState,
    ContainerSummary,
    EngineError,
    EngineFacts,
    EngineUnavailable,
    ExitStatus,
    Image,
    RegistryAuth,
    Unsupported,
)
from penstock.workloads.container.engines import seccomp as seccomp_rules
from penstock.workloads.container.engines.docker import podman
from penstock.workloads.container.engines.docker.answers import (
    ContainerAnswer,
    Info,
    ListedContainer,
    Waited,
    condition,
)
from penstock.workloads.container.engines.docker.api import (
    CONFLICT,
    NOT_FOUND,
    Api,
    Refused,
    container,
    means_no_init,
    means_that_nothing_runs,
    of_container,
    of_create,
    of_start,
)
from penstock.workloads.container.engines.docker.attach import (
    LOG_BYTES,
    Attachment,
    LogSession,
    attach,
)
from penstock.workloads.container.engines.docker.build import Builder, PodmanBuild
from penstock.workloads.container.engines.docker.images import Images, by_labels
from penstock.workloads.container.engines.docker.spec import NO_GPU, create_body, has_gpu
from penstock.workloads.container.engines.docker.usage import Meters
from penstock.workloads.container.job import Stream, Usage

KILL_PATIENCE = 5.0
"""Seconds after which a kill is tried again with the output cut off."""
_REMOVAL_POLL = 0.02

log = logging.getLogger(__name__)


class DockerEngine:
    """One engine, through its Unix socket; implements `ContainerEngine`."""

    def __init__(self, socket: Path | str, *, timeout: float = 60) -> None:
        self._api = Api(str(socket).removeprefix("unix://"), timeout)
        self._images = Images(self._api)
        self._builder = Builder(self._api, self._images)
        self._meters = Meters(self._api)
        self._init = True
        """False once Podman has said that it has none."""
        self._profile: tempfile._TemporaryFileWrapper[bytes] | None = None
        self._info: Info | None = None
        self._attached: dict[str, set[Attachment | LogSession]] = {}

    # -- itself -------------------------------------------------------------------

    @property
    def name(self) -> str:
        return "podman" if self._is_podman else "docker"

    async def facts(self) -> EngineFacts:
        # Other calls go on meanwhile: what they use is replaced, and never taken away.
        version = await self._api.greet()
        info = self._info = await self._api.ask(Info, "GET", "/info")
        runtimes = [name for name in info.runtimes or () if not name.startswith("io.containerd.")]
        return EngineFacts(
            name=self.name,
            version=version.version,
            runtimes=(info.default_runtime,) if self._is_podman else tuple(runtimes),
            root_dir=info.docker_root_dir,
            can_build=True,
            can_pull=True,
            networks=True,
            no_gpus=self._no_gpus(),
            user_namespaces=self._has_user_namespaces(),
            where=self._api.socket,
            security=(*(info.security_options or ()), *(() if self._has_init() else (NO_INIT,))),
        )

    def _no_gpus(self) -> str:
        if self._is_podman:
            return podman.gpus_problem(self._api.version.version if self._api.version else "")
        if "nvidia" in ((self._info and self._info.runtimes) or ()) or has_gpu():
            return ""
        return NO_GPU

    def _has_user_namespaces(self) -> bool:
        options = (self._info and self._info.security_options) or ()
        return bool({"name=userns", "name=rootless"} & set(options))

    def _has_init(self) -> bool:
        if self._is_podman:
            return self._init and podman.has_init()
        return self._info is None or self._info.has_init

    async def close(self) -> None:
        for attachments in list(self._attached.values()):
            for attachment in list(attachments):
                attachment.close()
        await self._meters.close()
        await self._api.close()
        if self._profile is not None:
            self._profile.close()
            self._profile = None

    async def _asked_info(self) -> Info:
        if self._info is None:
            self._info = await self._api.ask(Info, "GET", "/info")
        return self._info

    @property
    def _is_podman(self) -> bool:
        return self._api.version is not None and self._api.version.is_podman

    # -- images -------------------------------------------------------------------

    async def image(self, reference: str) -> Image:
        return await self._images.image(reference)

    async def pull(self, reference: str, auth: RegistryAuth | None = None) -> Image:
        return await self._images.pull(reference, auth)

    async def build(self, request: BuildRequest, on_log: Callable[[bytes], None]) -> Image:
        await self._api.greeted()
        if not self._is_podman:
            return await self._builder.on_docker(request, on_log)
        security = (await self._asked_info()).security_options or ()
        podman_build = PodmanBuild(
            self._profile_file(await self._profile_text()), rootless="name=rootless" in security
        )
        return await self._builder.on_podman(request, on_log, podman_build)

    async def images(self, labels: Mapping[str, str]) -> list[Image]:
        return await self._images.listed(labels)

    async def remove_image(self, reference: str) -> None:
        await self._images.remove(reference)

    # -- a container's life -------------------------------------------------------

    async def create(self, spec: ContainerSpec) -> None:
        await self._api.greeted()
        image = await self._images.known(spec.image)
        await self._check(spec)
        profile = await self._profile_text()
        if self._is_podman:
            body = create_body(spec, volumes=image.volumes, init=self._init)
            podman.adapt(body, self._profile_file(profile) if profile else "")
        else:
            body = create_body(spec, volumes=image.volumes, seccomp=profile, init=self._has_init())
        try:
            await self._make(spec, body)
        except Refused as refused:
            if not (body["HostConfig"]["Init"] and means_no_init(refused)):
                self._images.forget(spec.image)
                raise of_create(refused) from None
            log.warning("%s; containers run without an init", refused.message)
            self._init = False
            await self.create(spec)

    async def _check(self, spec: ContainerSpec) -> None:
        """Raises Unsupported for what this engine would ignore."""
        if not (spec.gpus or spec.user_namespace or spec.runtime):
            return
        info = await self._asked_info()
        if spec.gpus and (problem := self._no_gpus()):
            raise Unsupported(problem)
        if spec.user_namespace and not self._has_user_namespaces():
            raise Unsupported(
                "the engine has no user namespaces: start dockerd with --userns-remap, or use a"
                " rootless Docker or Podman"
            )
        if self._is_podman:
            podman.check_runtime(spec, info.default_runtime)

    async def _make(self, spec: ContainerSpec, body: dict[str, Any]) -> None:
        making = asyncio.ensure_future(
            self._api.ask(dict[str, Any], "POST", "/containers/create", {"name": spec.name}, body)
        )
        try:
            await asyncio.shield(making)
        except (asyncio.CancelledError, EngineUnavailable):
            # It may be made all the same.
            await asyncio.gather(making, return_exceptions=True)
            await self._remove_quietly(spec.name)
            raise

    async def attach(self, name: str, *, stdin: bool) -> AttachSession:
        try:
            attachment = await attach(self._api, name, gone=self._forget(name))
        except Refused as refused:
            raise of_container(refused) from None
        self._attached.setdefault(name, set()).add(attachment)
        if not stdin:
            await attachment.end_input()
        return attachment

    async def reattach(self, name: str, received: Mapping[Stream, int]) -> AttachSession:
        found = await self._inspect(name)
        if found is None:
            raise ContainerNotFound(f"no such container: {name}")
        if condition(found.state.status) is ContainerState.RUNNING and found.state.pid:
            self._meters.begin(name, found)
        session = LogSession(
            self._api,
            name,
            received,
            of_docker=not self._is_podman,
            limit=podman.LOG_BYTES if self._is_podman else LOG_BYTES,
            gone=self._forget(name),
        )
        self._attached.setdefault(name, set()).add(session)
        return session

    def _forget(self, name: str) -> Callable[[Attachment | LogSession], None]:
        return lambda session: self._attached.get(name, set()).discard(session)

    async def start(self, name: str) -> None:
        try:
            await self._api.tell("POST", container(name, "/start"))
        except Refused as refused:
            raise of_start(refused) from None
        self._meters.begin(name)

    async def wait(self, name: str) -> ExitStatus:
        await self._api.greeted()
        try:
            if self._is_podman:
                waited = await podman.wait(self._api, name, self._silent(name))
            else:
                waited = await self._api.wait(Waited, container(name, "/wait"))
        except Refused as refused:
            raise of_container(refused) from None
        self._meters.over(name)
        if waited.failure:
            return ExitStatus(None, error=waited.failure)
        if waited.status_code == 0:
            return ExitStatus(0)
        return ExitStatus(waited.status_code, oom=await self._ran_out_of_memory(name))

    async def _silent(self, name: str) -> None:
        """Until all that we hear of it has ended."""
        while attachments := list(self._attached.get(name, ())):
            await attachments[0].ended()
            self._attached[name].discard(attachments[0])

    async def _ran_out_of_memory(self, name: str) -> bool:
        if self._meters.saw_a_memory_kill(name):
            return True
        found = await self._inspect(name)
        return found is not None and found.state.oom_killed

    async def usage(self, name: str) -> Usage:
        return await self._meters.usage(name)

    # -- ending -------------------------------------------------------------------

    async def signal(self, name: str, number: int) -> None:
        await self._signal(name, number)

    async def kill(self, name: str) -> None:
        for attachment in list(self._attached.get(name, ())):
            attachment.unblock()
        await self._signal(name, signal.SIGKILL)

    async def _signal(self, name: str, number: int) -> None:
        try:
            await self._kill(name, number, min(KILL_PATIENCE, self._api.timeout))
        except EngineUnavailable:
            # Unread output can block the kill.
            self._let_go(name)
            await self._kill(name, number, self._api.timeout)

    async def _kill(self, name: str, number: int, timeout: float) -> None:
        query = {"signal": signal.Signals(number).name}
        try:
            await self._api.tell("POST", container(name, "/kill"), query, timeout=timeout)
        except Refused as refused:
            if not means_that_nothing_runs(refused):
                raise

    async def remove(self, name: str) -> None:
        self._let_go(name)
        await self._meters.end(name)
        try:
            async with asyncio.timeout(self._api.timeout):
                # Nothing tells when somebody else's removal is through.
                while not await self._removed(name):  # noqa: ASYNC110
                    await asyncio.sleep(_REMOVAL_POLL)
        except TimeoutError:
            raise EngineUnavailable(f"the engine does not remove {name}") from None
        self._attached.pop(name, None)

    async def _removed(self, name: str) -> bool:
        await self._api.greeted()
        query = {"force": 1, "v": 1} | (podman.REMOVE if self._is_podman else {})
        try:
            await self._api.tell("DELETE", container(name), query)
        except Refused as refused:
            if refused.status == CONFLICT:
                return False  # somebody else is at it
            if refused.status != NOT_FOUND:
                raise
        return True

    async def _remove_quietly(self, name: str) -> None:
        with suppress(EngineError):
            await self.remove(name)

    def _let_go(self, name: str) -> None:
        for attachment in list(self._attached.get(name, ())):
            attachment.close()

    # -- finding ------------------------------------------------------------------

    async def find(self, labels: Mapping[str, str]) -> list[ContainerSummary]:
        query: dict[str, str | int] = {"all": 1, **by_labels(labels)}
        found = await self._api.ask(list[ListedContainer], "GET", "/containers/json", query)
        return [one.value() for one in found]

    async def _inspect(self, name: str) -> ContainerAnswer | None:
        try:
            return await self._api.ask(ContainerAnswer, "GET", container(name, "/json"))
        except Refused as refused:
            if refused.status == NOT_FOUND:
                return None
            raise

    # -- the sandbox --------------------------------------------------------------

    async def _profile_text(self) -> str:
        """Empty for an engine without seccomp, which only a worker's settings allow."""
        if any("seccomp" in word for word in (await self._asked_info()).security_options or ()):
            return msgspec.json.encode(seccomp_rules.profile()).decode()
        return ""

    def _profile_file(self, text: str) -> str:
        if self._profile is None:
            # Podman reads a file, and reads it when a container is made.
            self._profile = tempfile.NamedTemporaryFile(prefix="penstock-seccomp-")  # noqa: SIM115
            self._profile.write(text.encode())
            self._profile.flush()
        return self._profile.name
