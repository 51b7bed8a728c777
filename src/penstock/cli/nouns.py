"""The commands that every noun has, from a description of its things: `list`, `show` and acts on
one of them, as `delete` or `pause`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from penstock.cli.engine import EngineRef
from penstock.cli.output import (
    Form,
    Listing,
    Row,
    as_rows,
    name_of,
    print_done,
    print_list,
    print_one,
    row_facts,
)
from penstock.core.errors import NotFound
from penstock.ports.engine_api import EngineApi

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")


@dataclass(frozen=True)
class Noun(Generic[T]):
    """Things of one kind. The first column of a row is the thing's name."""

    group: click.Group
    row: Callable[[T, float], Row | list[Row]]
    """Its columns now; of a thing that takes several lines, those."""
    find: Callable[[EngineApi], Awaitable[Sequence[T]]]
    empty: str = ""
    """What is said if there are none."""
    reading: bool = False
    """Whether it works without a running engine."""

    def print(self, form: Form, found: Sequence[T], more: str = "") -> None:
        now = time.time()
        print_list(form, found, lambda one: self.row(one, now), empty=self.empty, more=more)

    def list(self, sentence: str) -> None:
        """Add the command `list`."""

        @self.group.command("list", help=sentence)
        def list_all(engine: EngineRef, form: Form) -> None:
            self.print(form, engine.ask(self.find, reading=self.reading))

    def show(
        self, sentence: str, get: Callable[[EngineApi, str], Awaitable[T]] | None = None
    ) -> None:
        """Add the command `show`; without `get` it looks in the list."""

        @self.group.command("show", help=sentence)
        def show_one(engine: EngineRef, name: str, form: Form) -> None:
            one = engine.ask(lambda api: (get or self._get)(api, name), reading=self.reading)
            rows = as_rows(self.row(one, time.time()))
            name = name_of(rows)

            def page() -> Iterator[RenderableType]:
                if len(rows) > 1:
                    yield Listing(rows)
                else:
                    yield f"{self.group.name} {name}"
                    yield row_facts(rows[0])

            print_one(form, one, name, page)

    async def _get(self, api: EngineApi, name: str) -> T:
        for one in await self.find(api):
            if name_of(self.row(one, 0.0)) == name:
                return one
        path = click.get_current_context().command_path.rpartition(" ")[0]
        raise NotFound(f"no {self.group.name} {name!r}", hint=f"'{path} list' lists them")

    def act(
        self,
        verb: str,
        sentence: str,
        do: Callable[[EngineApi, str], Awaitable[Any]],
        said: Callable[[Any], str] | None = None,
    ) -> None:
        """Add a command that does something to one of them; `said` tells what came of it."""

        @self.group.command(verb, help=sentence)
        def act_on(engine: EngineRef, name: str, json: bool) -> None:
            done = engine.ask(lambda api: do(api, name))
            if said is None:
                print_done(json, {"name": name, "deleted": True}, f"{name} deleted")
            else:
                print_done(json, done, said(done))
