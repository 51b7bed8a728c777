"""Which engine a command is about, and how it is reached.

`--data`, `--connect` and `--token` can stand before the command or after it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.output import warn

if TYPE_CHECKING:
    from penstock.app import App, Client
    from penstock.config import Settings
    from penstock.ports.engine_api import EngineApi

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True)
class EngineRef:
    """An engine, by its data directory or by its address."""

    data: str | None = None
    connect: str | None = None
    token: str | None = None

    def settings(self, **flags: Any) -> Settings:
        from penstock.config import load

        given = {name: value for name, value in flags.items() if value != ()}
        return load(flags={"data_dir": self.data, **given})

    @property
    def secret(self) -> str:
        """The token, read from its file if it was given as @FILE.

        Better so, or by PENSTOCK_TOKEN: a command's options can be seen by others.
        """
        token = self.token or os.environ.get("PENSTOCK_TOKEN", "")
        if not token.startswith("@"):
            return token
        try:
            return Path(token[1:]).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise click.BadParameter(
                f"can't read {token[1:]}: {error}", param_hint="--token"
            ) from error

    def command(self, words: str) -> str:
        """A command to suggest, with the options that name this engine again."""
        import shlex

        given = [("--data", self.data), ("--connect", self.connect)]
        options = "".join(f"{name} {shlex.quote(value)} " for name, value in given if value)
        return f"penstock {options}{words}"

    # -- reaching it ---------------------------------------------------------------

    @asynccontextmanager
    async def client(self, app: App | None = None) -> AsyncIterator[Client]:
        """A client of the running engine. Raises NotRunning if there is none."""
        from penstock.app import connect

        connecting = connect if app is None else app.connect
        async with connecting(self.connect, data=self.data, token=self.secret) as client:
            yield client

    @asynccontextmanager
    async def api(self) -> AsyncIterator[EngineApi]:
        async with self.client() as client:
            yield client.api

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[EngineApi]:
        """The running engine's EngineApi; if none runs, one that reads its folder."""
        from penstock.app.offline import offline
        from penstock.core.errors import NotRunning

        async with AsyncExitStack() as stack:
            try:
                api = await stack.enter_async_context(self.api())
            except NotRunning:
                settings = self.settings()
                if self.connect or not (settings.store or settings.database.is_file()):
                    raise
                warn(f"no engine is running; reading {settings.data_dir}")
                api = await stack.enter_async_context(offline(settings))
            yield api

    @asynccontextmanager
    async def client_or(
        self,
        own: Callable[[Client | None], AbstractAsyncContextManager[Client]],
        suits: Callable[[Client], Awaitable[bool]] | None = None,
    ) -> AsyncIterator[tuple[Client, bool]]:
        """The engine that runs, or else (True) one in this process.

        The one that runs is used if it suits, or if --connect names it. `own` is given it if not.
        If an engine is lost later, it is waited for: it has the job.
        """
        from penstock.core.errors import NotRunning

        async with AsyncExitStack() as stack:
            running = None
            try:
                running = await stack.enter_async_context(self.client())
            except NotRunning:
                if self.connect:
                    raise
            if running and (self.connect or suits is None or await suits(running)):
                yield running, False
            else:
                yield await stack.enter_async_context(own(running)), True

    def ask(self, question: Callable[[EngineApi], Awaitable[T]], *, reading: bool = False) -> T:
        """Open the engine's EngineApi, call it and close it."""

        async def asked() -> T:
            async with self.reading() if reading else self.api() as api:
                return await question(api)

        return run(asked())


def run(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    return asyncio.run(work)


def engine_options(command: F) -> F:
    """Give a command the options that say which engine it is about."""
    for name, metavar, sentence in (
        ("--token", "TOKEN|@FILE", "API key or TCP token; else PENSTOCK_TOKEN."),
        (
            "--connect",
            "ADDR",
            "The engine: unix:/PATH, penstock://HOST:PORT or http(s)://HOST:PORT.",
        ),
        ("--data", "DIR", "The engine's data directory."),
    ):
        option = click.option(
            name, metavar=metavar, help=sentence, expose_value=False, callback=_note
        )
        command = option(command)
    return command


def _note(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    engine = ctx.obj if isinstance(ctx.obj, EngineRef) else EngineRef()
    ctx.obj = replace(engine, **{str(param.name): value}) if value is not None else engine
