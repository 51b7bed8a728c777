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
    Attached,
    BuildPlan,
    ContainerState,
    EngineError,
    EngineFacts,
    EngineUnavailable,
    Exit,
    Found,
    Image,
    Plan,
)
from penstock.workloads.container.engines import seccomp as seccomp_rules
from penstock.workloads.container.engines.docker import podman, refusals
from penstock.workloads.container.engines.docker.answers import (
    ContainerAnswer,
    Created,
    Info,
    ListedContainer,
    Version,
    Waited,
    condition,
)
from penstock.workloads.container.engines.docker.api import Api, Refused, container
from penstock.workloads.container.engines.docker.attach import Attachment, attach
from penstock.workloads.container.engines.docker.building import Builder
from penstock.workloads.container.engines.docker.commands import Commands
from penstock.workloads.container.engines.docker.hello import greet
from penstock.workloads.container.engines.docker.images import Images, by_labels
from penstock.workloads.container.engines.docker.plan import create_body
from penstock.workloads.container.engines.docker.podman_build import PodmanBuild
from penstock.workloads.container.engines.docker.refusals import CONFLICT, NOT_FOUND
from penstock.workloads.container.engines.docker.usage import Meters
from penstock.workloads.container.job import Usage

KILL_PATIENCE = 5.0
"""Seconds after which a kill is tried again with the output cut off."""
_REMOVAL_POLL = 0.02

log = logging.getLogger(__name__)


class DockerEngine:
    """One engine, through its Unix socket; implements `Engine`.

    `seccomp` is a profile as JSON. Without one Docker's own holds, and for Podman, whose own
    allows user namespaces, that of `engines.seccomp`.
    """

    keeps_output = False

    def __init__(
        self, socket: Path | str, *, seccomp: str | None = None, timeout: float = 60
    ) -> None:
        path = str(socket).removeprefix("unix://")
        self.name = "docker"
        self._api = Api(path, timeout)
        self._images = Images(self._api)
        self._builder = Builder(self._api, self._images)
        self._commands = Commands(self._api)
        self._meters = Meters(self._api)
        self._seccomp = seccomp
        self._init = True
        """False once Podman has said that it has none."""
        self._profile: tempfile._TemporaryFileWrapper[bytes] | None = None
        self._version: Version | None = None
        self._info: Info | None = None
        self._planned: dict[str, Plan] = {}
        """Containers made here and not yet started."""
        self._attached: dict[str, set[Attachment]] = {}

    # -- itself -------------------------------------------------------------------

    async def facts(self) -> EngineFacts:
        # Other calls go on meanwhile: what they use is replaced, and never taken away.
        version = self._version = await self._greet()
        info = self._info = await self._api.ask(Info, "GET", "/info")
        runtimes = [name for name in info.runtimes or () if not name.startswith("io.containerd.")]
        return EngineFacts(
            name=self.name,
            version=version.version,
            runtimes=(info.default_runtime,) if self._is_podman else tuple(runtimes),
            root_dir=info.docker_root_dir,
            can_build=True,
            can_pull=True,
            where=self._api.socket,
            security=(*(info.security_options or ()), *(() if self._has_init() else (NO_INIT,))),
        )

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

    async def _greeted(self) -> Version:
        if self._version is None:
            self._version = await self._greet()
        return self._version

    async def _greet(self) -> Version:
        version = await greet(self._api)
        self.name = "podman" if version.is_podman else "docker"
        return version

    async def _asked_info(self) -> Info:
        if self._info is None:
            self._info = await self._api.ask(Info, "GET", "/info")
        return self._info

    @property
    def _is_podman(self) -> bool:
        return self.name == "podman"

    # -- images -------------------------------------------------------------------

    async def image(self, reference: str) -> Image:
        await self._greeted()
        return await self._images.image(reference)

    async def pull(self, reference: str) -> Image:
        await self._greeted()
        return await self._images.pull(reference)

    async def build(self, plan: BuildPlan, say: Callable[[bytes], None]) -> Image:
        await self._greeted()
        if not self._is_podman:
            return await self._builder.on_docker(plan, say)
        security = (await self._asked_info()).security_options or ()
        podman_build = PodmanBuild(self._profile_file(), rootless="name=rootless" in security)
        return await self._builder.on_podman(plan, say, podman_build)

    async def images(self, labels: Mapping[str, str]) -> list[Image]:
        await self._greeted()
        return await self._images.listed(labels)

    async def remove_image(self, reference: str) -> None:
        await self._greeted()
        await self._images.remove(reference)

    # -- a container's life -------------------------------------------------------

    async def create(self, plan: Plan) -> None:
        await self._greeted()
        image = await self._images.known(plan.image)
        if self._is_podman and plan.runtime:
            podman.check_runtime(plan, (await self._asked_info()).default_runtime)
        if self._is_podman:
            body = create_body(plan, volumes=image.volumes, init=self._init)
            podman.adapt(body, self._profile_file())
        else:
            body = create_body(
                plan, volumes=image.volumes, seccomp=self._seccomp, init=self._has_init()
            )
        try:
            await self._make(plan, body)
        except Refused as refused:
            if not (body["HostConfig"]["Init"] and refusals.means_no_init(refused)):
                self._images.forget(plan.image)
                raise refusals.of_create(refused) from None
            log.warning("%s; containers run without an init", refused.message)
            self._init = False
            await self.create(plan)
        else:
            self._planned[plan.name] = plan

    async def _make(self, plan: Plan, body: dict[str, Any]) -> None:
        making = asyncio.ensure_future(
            self._api.ask(Created, "POST", "/containers/create", {"name": plan.name}, body)
        )
        try:
            await asyncio.shield(making)
        except (asyncio.CancelledError, EngineUnavailable):
            # It may be made all the same.
            await asyncio.gather(making, return_exceptions=True)
            await self._remove_quietly(plan.name)
            raise

    async def attach(self, name: str, *, stdin: bool) -> Attached:
        await self._greeted()
        new = name in self._planned
        if self._is_podman and not new:
            await self._must_run(name)
        try:
            attachment = await attach(
                self._api,
                name,
                stdin=stdin or new,
                gone=lambda gone: self._attached.get(name, set()).discard(gone),
            )
        except Refused as refused:
            raise refusals.of_container(refused) from None
        self._attached.setdefault(name, set()).add(attachment)
        if new and not stdin:
            await attachment.end_input()
        if not new:
            await self._adopt(name, attachment)
        return attachment

    async def _must_run(self, name: str) -> None:
        """Podman would make one that has ended ready for another start, and forget its end."""
        found = await self._inspect(name)
        if found is not None and condition(found.state.status) is not ContainerState.RUNNING:
            raise EngineError(f"{name} does not run; nothing of its output is kept")

    async def _adopt(self, name: str, attachment: Attachment) -> None:
        """What ended before we were there would never say so."""
        found = await self._inspect(name)
        if found is None or condition(found.state.status) is ContainerState.EXITED:
            attachment.close()
        elif found.state.pid:
            self._meters.begin(name, found)

    async def start(self, name: str) -> None:
        await self._greeted()
        plan = self._planned.pop(name, None)
        if plan is not None:
            await self._commands.check(plan, (await self._images.known(plan.image)).value())
        try:
            await self._api.tell("POST", container(name, "/start"))
        except Refused as refused:
            raise refusals.of_start(refused) from None
        self._meters.begin(name)

    async def wait(self, name: str) -> Exit:
        await self._greeted()
        try:
            if self._is_podman:
                waited = await podman.wait(self._api, name, self._silent(name))
            else:
                waited = await self._api.wait(Waited, container(name, "/wait"))
        except Refused as refused:
            raise refusals.of_container(refused) from None
        self._meters.over(name)
        if waited.error is not None and waited.error.message:
            return Exit(None, error=waited.error.message)
        if waited.status_code == 0:
            return Exit(0)
        return Exit(waited.status_code, oom=await self._ran_out_of_memory(name))

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
        await self._greeted()
        return await self._meters.usage(name)

    # -- ending -------------------------------------------------------------------

    async def signal(self, name: str, number: int) -> None:
        await self._greeted()
        await self._signal(name, number)

    async def kill(self, name: str) -> None:
        await self._greeted()
        for attachment in list(self._attached.get(name, ())):
            attachment.unblock()
        await self._signal(name, signal.SIGKILL)

    async def _signal(self, name: str, number: int) -> None:
        try:
            await self._kill(name, number, min(KILL_PATIENCE, self._api.timeout))
        except EngineUnavailable:
            # Output that nobody reads can hold it up.
            self._let_go(name)
            await self._kill(name, number, self._api.timeout)

    async def _kill(self, name: str, number: int, timeout: float) -> None:
        query = {"signal": signal.Signals(number).name}
        try:
            await self._api.tell("POST", container(name, "/kill"), query, timeout=timeout)
        except Refused as refused:
            if not refusals.means_that_nothing_runs(refused):
                raise

    async def remove(self, name: str) -> None:
        await self._greeted()
        self._let_go(name)
        await self._meters.end(name)
        self._planned.pop(name, None)
        try:
            async with asyncio.timeout(self._api.timeout):
                # Nothing tells when somebody else's removal is through.
                while not await self._removed(name):  # noqa: ASYNC110
                    await asyncio.sleep(_REMOVAL_POLL)
        except TimeoutError:
            raise EngineUnavailable(f"the engine does not remove {name}") from None
        self._attached.pop(name, None)

    async def _removed(self, name: str) -> bool:
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

    async def find(self, labels: Mapping[str, str]) -> list[Found]:
        await self._greeted()
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

    # -- the enclosure ------------------------------------------------------------

    def _profile_file(self) -> str:
        if self._profile is None:
            # Podman reads a file, and reads it when a container is made.
            self._profile = tempfile.NamedTemporaryFile(prefix="penstock-seccomp-")  # noqa: SIM115
            text = self._seccomp or msgspec.json.encode(seccomp_rules.profile()).decode()
            self._profile.write(text.encode())
            self._profile.flush()
        return self._profile.name
