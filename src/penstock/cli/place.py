"""Where the engine that a command is about can be found, and opening its EngineApi.

`--data`, `--connect` and `--token` can stand before the command or after it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.terminal import echo

if TYPE_CHECKING:
    from penstock.app import App, Client
    from penstock.config import Settings
    from penstock.ports.engine_api import EngineApi

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """An engine, by its data directory or by its address."""

    data: str | None = None
    connect: str | None = None
    token: str | None = None

    def settings(self, **flags: Any) -> Settings:
        from penstock.config import load

        return load(flags={"data_dir": self.data, **flags})

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

    def spelled(self) -> str:
        """The options that name it again in a command we suggest, with a space after."""
        import shlex

        said = [("--data", self.data), ("--connect", self.connect)]
        return "".join(f"{name} {shlex.quote(value)} " for name, value in said if value)


def placed(command: F) -> F:
    """Give a command the options that say which engine it is about; see `click.pass_obj`."""
    for name, metavar, sentence in (
        ("--token", "TOKEN|@FILE", "The key, or TCP token, to come in with; else PENSTOCK_TOKEN."),
        ("--connect", "ADDR", "The engine: unix:/PATH, tcp://127.0.0.1:PORT, http(s)://HOST:PORT."),
        ("--data", "DIR", "The engine's data directory."),
    ):
        option = click.option(
            name, metavar=metavar, help=sentence, expose_value=False, callback=_note
        )
        command = option(command)
    return command


def _note(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    place = ctx.obj if isinstance(ctx.obj, Place) else Place()
    ctx.obj = replace(place, **{str(param.name): value}) if value is not None else place


@asynccontextmanager
async def client_at(place: Place, app: App | None = None) -> AsyncIterator[Client]:
    """A client of the running engine. Raises NotRunning if there is none."""
    from penstock.app import connect

    connecting = connect if app is None else app.connect
    async with connecting(place.connect, data=place.data, token=place.secret) as client:
        yield client


@asynccontextmanager
async def api_at(place: Place) -> AsyncIterator[EngineApi]:
    async with client_at(place) as client:
        yield client.api


@asynccontextmanager
async def reading_at(place: Place) -> AsyncIterator[EngineApi]:
    """The running engine's EngineApi; if none runs, one that reads its folder."""
    from penstock.app import connect
    from penstock.app.offline import offline
    from penstock.core.errors import NotRunning

    session = connect(place.connect, data=place.data, token=place.secret)
    try:
        client = await session.__aenter__()
    except NotRunning:
        settings = place.settings()
        if place.connect or not settings.database.is_file():
            raise
        echo(f"penstock: no engine is running; reading {settings.data_dir}", err=True)
        async with offline(settings) as api:
            yield api
        return
    try:
        yield client.api
    finally:
        await session.__aexit__(None, None, None)


def run(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    return asyncio.run(work)


def ask_engine(
    place: Place,
    question: Callable[[EngineApi], Awaitable[T]],
    opened: Callable[[Place], AbstractAsyncContextManager[EngineApi]] = api_at,
) -> T:
    """Open an engine's EngineApi, call it and close it."""

    async def asked() -> T:
        async with opened(place) as api:
            return await question(api)

    return run(asked())
