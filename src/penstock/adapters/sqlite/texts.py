"""SQL that lies in files of a package, with what stands in braces filled in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from importlib.resources import files


def read_migrations(package: str, fill: Mapping[str, str]) -> list[str]:
    """The numbered files of its folder `migrations`, in order."""
    folder = files(package).joinpath("migrations")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [_filled(folder.joinpath(name).read_text(), fill) for name in names]


def read_queries(package: str, fill: Mapping[str, str]) -> dict[str, str]:
    """The statements of its `queries.sql`, each under its name."""
    queries = {}
    for part in files(package).joinpath("queries.sql").read_text().split("-- name: ")[1:]:
        name, _, sql = part.partition("\n")
        queries[name.strip()] = _filled(sql, fill).strip()
    return queries


def one_of(column: str, words: Iterable[StrEnum]) -> str:
    """The condition that a column has one of these words."""
    return " OR ".join(f"{column} = '{word}'" for word in sorted(words))


def _filled(sql: str, fill: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: fill[found[1]], sql)
