"""`penstock doctor`, `version` and `config`: this installation."""

from __future__ import annotations

import platform
from fnmatch import fnmatchcase

import click
import msgspec

from penstock import __version__
from penstock.app.doctor import Health, examine
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.groups import Commands, command, nearest
from penstock.cli.options import options
from penstock.cli.output import (
    Form,
    Listing,
    Row,
    Wrapped,
    echo,
    emit,
    print_json,
    print_list,
    rich_text,
    styled,
    warn,
)
from penstock.config.loading import TYPES, load_all, shown, variable
from penstock.config.settings import Settings
from penstock.core.errors import NotFound


@command()
async def doctor(engine: EngineRef, json: bool) -> int:
    """Check this installation and its data directory.

    An optional part that is absent is a note, never a failure; neither is an engine that
    isn't running. Changes nothing.
    """
    checks = await examine(engine.data, engine.connect, engine.api)
    rows: list[Row] = []
    for check in checks:
        rows.append({"": styled(check.health), "what": check.what, "found": Wrapped(check.found)})
        if check.advice:
            rows.append({"": "", "what": "", "found": Wrapped(check.advice)})
    print_json(checks) if json else emit(Listing(rows, header=False))
    return Exit.FAILED if any(check.health is Health.BAD for check in checks) else Exit.OK


@command()
def version(json: bool) -> None:
    """Print the version of Penstock and of what it uses."""
    import apsw

    facts = {
        "penstock": __version__,
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "platform": platform.platform(),
    }
    if json:
        print_json(facts)
    else:
        for name, value in facts.items():
            echo(f"{name:<8}  {value}")


# -- settings ----------------------------------------------------------------------


class SettingView(msgspec.Struct, frozen=True):
    """A setting, and where its value comes from."""

    name: str
    value: object
    source: str
    """`default`, `file`, `environment` or `option`."""
    origin: str
    """The file and line, the variable or the option; empty for a default."""
    default: object
    variable: str


@click.group(cls=Commands)
def config() -> None:
    """Show the settings in effect, and where each comes from."""


@config.command()
@click.argument("names", nargs=-1, metavar="[NAME…]")
@options("--changed  Only those that are not at their defaults.")
def show(engine: EngineRef, names: tuple[str, ...], changed: bool, form: Form) -> None:
    """Show the settings in effect, and where each comes from.

    NAME is a setting (http.listen), a section (http) or a glob (*.listen). Secrets are masked. It
    reads the file, the environment and the options of this command, not a running engine.
    """
    loaded, defaults = load_all(flags={"data_dir": engine.data}), Settings()
    views = [
        SettingView(
            name,
            shown(loaded.settings, name),
            loaded.sources.get(name, "default"),
            loaded.origins.get(name, ""),
            shown(defaults, name),
            variable(name),
        )
        for name in TYPES
        if not names or any(_matches(name, wanted) for wanted in names)
    ]
    if names and not views:
        known = {part for name in TYPES for part in (name, name.partition(".")[0])}
        raise NotFound(f"no setting {names[0]!r}{nearest(names[0], known)}")
    print_list(
        form,
        [one for one in views if not changed or one.source != "default"],
        _row,
        name=lambda one: one.name,
        empty="every setting has its default",
    )
    for line in loaded.renamed:
        warn(line)
    if loaded.ignored:
        warn(f"not settings, so ignored: {', '.join(loaded.ignored)}")


def _matches(name: str, wanted: str) -> bool:
    return name.startswith(f"{wanted}.") or fnmatchcase(name, wanted)


def _row(one: SettingView) -> Row:
    is_text = one.value and isinstance(one.value, str)
    value = str(one.value) if is_text else msgspec.json.encode(one.value).decode()
    dim = "" if one.origin else "dim"
    return {
        "SETTING": rich_text((one.name, dim)),
        "VALUE": Wrapped(value),
        "FROM": Wrapped(one.origin or "default"),
    }
