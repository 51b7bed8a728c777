"""Commands that have commands, as `penstock keys create`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from penstock.cli.exits import Exit
from penstock.cli.terminal import echo
from penstock.core.errors import did_you_mean


class Commands(click.Group):
    """A group that keeps its order, and names the nearest command if there is none such.

    Without a command it shows what there is, unless it `acts` by itself.
    """

    def __init__(self, *args: Any, acts: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "invoke_without_command": True})
        self.acts = acts

    def invoke(self, ctx: click.Context) -> Any:
        value = super().invoke(ctx)
        if ctx.invoked_subcommand is None and not self.acts:
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
