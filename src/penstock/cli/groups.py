"""Command groups, as `penstock key create`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from penstock.cli.exits import Exit
from penstock.cli.output import echo
from penstock.core.errors import did_you_mean

_HELP = ("-h", "--help")


class Commands(click.Group):
    """A group that keeps its order, and names the nearest command if there is none such.

    Without a command it shows what there is. With options alone it is its `default` command.
    """

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
