"""The commands that every noun has, from a description of its things: `list`, `show` and acts on
one of them, as `delete` or `pause`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from penstock.cli.engine import EngineRef
from penstock.cli.options import together
from penstock.cli.output import (
    Form,
    Listing,
    Row,
    as_rows,
    facts,
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
    from rich.text import Text

T = TypeVar("T")
_NO_OPTIONS = together()


@dataclass(frozen=True)
class Noun(Generic[T]):
    """Things of one kind. The first column of a row is the thing's name."""

    group: click.Group
    row: Callable[[T, float], Row | list[Row]]
    """Its columns now; of a thing that takes several lines, those."""
    find: Callable[..., Awaitable[Sequence[T]]]
    """Given the engine's API, and the options of `list`."""
    empty: str = ""
    """What is said if there are none."""
    reading: bool = False
    """Whether it works without a running engine."""
    naming: Callable[[Any], Any] = _NO_OPTIONS
    """Options that name one of them beside its name; what acts on one is given them too."""

    def list(self, sentence: str, options: Callable[[Any], Any] = _NO_OPTIONS) -> None:
        """Add the command `list`."""

        @self.group.command("list", help=sentence)
        @options
        def list_all(engine: EngineRef, /, form: Form, **said: Any) -> None:
            found = engine.ask(lambda api: self.find(api, **said), reading=self.reading)
            now = time.time()
            print_list(form, found, lambda one: self.row(one, now), empty=self.empty)

    def show(
        self,
        sentence: str,
        get: Callable[..., Awaitable[T]] | None = None,
        details: Callable[[T, float], Iterable[tuple[str, str | Text]]] | None = None,
    ) -> None:
        """Add the command `show`; without `get` it looks in the list, without `details` it shows
        the columns."""

        @self.group.command("show", help=sentence)
        @self.naming
        def show_one(engine: EngineRef, /, name: str, form: Form, **said: Any) -> None:
            found = engine.ask(
                lambda api: (get or self._get)(api, name, **said), reading=self.reading
            )
            now = time.time()
            rows = as_rows(self.row(found, now))
            title = name_of(rows)

            def page() -> Iterator[RenderableType]:
                if len(rows) > 1:
                    yield Listing(rows)
                else:
                    yield f"{self.group.name} {title}"
                    yield facts(details(found, now)) if details else row_facts(rows[0])

            print_one(form, found, title, page)

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
        do: Callable[..., Awaitable[Any]],
        said: Callable[[Any], str] | None = None,
    ) -> None:
        """Add a command that does something to one of them; `said` tells what came of it."""

        @self.group.command(verb, help=sentence)
        @self.naming
        def act_on(engine: EngineRef, /, name: str, json: bool, **more: Any) -> None:
            done = engine.ask(lambda api: do(api, name, **more))
            if said is None:
                print_done(json, {"name": name, "deleted": True}, f"{name} deleted")
            else:
                print_done(json, done, said(done))
