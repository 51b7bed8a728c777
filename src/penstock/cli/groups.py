"""Commands and groups of commands, as `penstock key create`.

The parameters of a command's function are its options and arguments. Its own options are declared
by `penstock.cli.options.options`; those that several commands share are in `SHARED` there, under
the parameter's name: so the same name is the same option everywhere. Any other parameter is an
argument.

A function is given what it names: `engine` is the EngineRef; a coroutine's `api` is the API of the
running engine, and its `reading` the same or, if no engine runs, one that reads its folder. A
coroutine is run to its end.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from penstock.cli.engine import engine_options, run
from penstock.cli.exits import Exit
from penstock.cli.output import Form, echo
from penstock.core.errors import did_you_mean

_HELP = ("-h", "--help")
_LAST = ("yes", "verbose", "form", "quiet", "json", "data", "connect", "token")
"""Parameters whose options stand below all others in the help; the input is above them."""
_GIVEN = {"engine", "api", "reading"}
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Command(click.Command):
    """A command whose options are the parameters of its function.

    What a decorator has wrapped declares all of its options itself.
    """

    def __init__(
        self,
        name: str | None,
        callback: Callable[..., Any],
        params: list[click.Parameter],
        **more: Any,
    ) -> None:
        named = inspect.signature(callback).parameters
        own = [name for name, one in named.items() if one.kind not in _VARIABLE]
        found = {str(one.name): one for one in params}
        if not hasattr(callback, "__wrapped__") and any(name not in found for name in own):
            found = {str(one.name): one for one in _parameters(callback, own, found)}
            callback = _adapted(callback, own)
        last = sorted(
            found, key=lambda one: _LAST.index(one) if one in _LAST else -(one == "given")
        )
        super().__init__(name, callback=callback, params=[found[one] for one in last], **more)


command = partial(click.command, cls=Command)
"""What makes a command that is in no group."""


def _parameters(
    callback: Callable[..., Any], own: Iterable[str], found: dict[str, click.Parameter]
) -> Iterator[click.Parameter]:
    """Arguments, in the order of the function's parameters; its own options; those it shares."""
    from penstock.cli.options import SHARED

    hints = typing.get_type_hints(callback)
    for name in own:
        if isinstance(found.get(name), click.Argument):
            yield found.pop(name)
        elif not (name in found or name in SHARED or name in _GIVEN):
            several = typing.get_origin(hints[name]) is tuple
            optional = several or types.NoneType in typing.get_args(hints[name])
            shown = name.removesuffix("_id").upper() + ("..." if several else "")
            is_path = hints[name] in (Path, Path | None)
            yield click.Argument(
                [name],
                type=click.Path(path_type=Path) if is_path else None,
                nargs=-1 if several else 1,
                required=not optional,
                metavar=f"[{shown}]" if optional else shown,
            )
    yield from found.values()
    for name in own:
        if name in SHARED and name not in found:
            yield from _declared(SHARED[name])
    if _GIVEN & {*own}:
        yield from _declared(engine_options)


def _declared(decorator: Callable[[Any], Any]) -> list[click.Parameter]:
    """What a decorator of click declares."""

    def bare() -> None: ...

    params: list[click.Parameter] = decorator(bare).__click_params__
    return params[::-1]


def _adapted(callback: Callable[..., Any], own: Iterable[str]) -> Callable[..., Any]:
    """The function, called with what click has read."""

    @wraps(callback)
    def called(*args: Any, **said: Any) -> Any:
        if "form" in own:
            as_json, name_only = said.pop("json"), said.pop("quiet")
            form = Form(said["form"])
            said["form"] = Form.JSON if as_json else Form.NAME if name_only else form
        engine = click.get_current_context().obj
        if "engine" in own:
            args = (engine, *args)
        if "api" in own:
            return engine.ask(lambda api: callback(*args, api=api, **said))
        if "reading" in own:
            return engine.ask(lambda api: callback(*args, reading=api, **said), reading=True)
        done = callback(*args, **said)
        return run(done) if inspect.iscoroutine(done) else done

    return called


class Commands(click.Group):
    """A group that keeps its order, and names the nearest command if there is none such.

    Without a command it shows what there is. With options alone it is its `default` command.
    """

    command_class = Command
    group_class = type  # the groups in it are of its own class

    def __init__(self, *args: Any, default: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "invoke_without_command": True})
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.default and args and args[0].startswith("-") and args[0] not in _HELP:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        value = super().invoke(ctx)
        if ctx.invoked_subcommand is None:
            echo(ctx.get_help(), err=True)
            ctx.exit(Exit.USAGE)
        return value

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, names = args[0] if args else "", self.list_commands(ctx)
        if name and not name.startswith("-") and name not in names:
            raise click.UsageError(f"there is no command {name!r}{nearest(name, names)}", ctx)
        return super().resolve_command(ctx, args)


def nearest(name: str, names: Iterable[str]) -> str:
    meant = did_you_mean(name, names, "")
    return f"; {meant}" if meant else ""
