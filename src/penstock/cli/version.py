"""`penstock version`."""

from __future__ import annotations

import platform

import click

from penstock import __version__
from penstock.cli.parameters import as_json
from penstock.cli.terminal import echo


@click.command()
@as_json
def version(json: bool) -> None:
    """Print the version, and those of what matters."""
    import apsw

    from penstock.cli.paper import print_json

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
