"""The page reference/settings.md, made from Settings itself."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, get_type_hints

from msgspec import NODEFAULT, Struct, structs

from penstock.config.loading import RESERVED, SECTIONS, allowed, variable
from penstock.config.settings import Pool, Settings

INTRODUCTION = f"""\
# Settings

A setting has a name (`concurrency`), and most belong to a section (`http.listen`). They come from
three places; what comes later wins:

1. the file that `--config` or `PENSTOCK_CONFIG` names, or else `penstock.toml` in the
   current folder, if there is one. A section is a table:

   ```toml
   # penstock.toml
   data_dir = "~/penstock"
   concurrency = 8

   [http]
   listen = "127.0.0.1:7470"

   [storage]
   retention = 86400
   sources = ["s3://my-bucket/inputs"]

   [pools.gpu]
   topics = ["job.train.*"]
   capacity = 4
   labels = {{ gpu = "a100" }}
   ```

2. the environment: `{variable("data_dir")}`, and with two underscores after the section
   `{variable("http.listen")}`. Lists are written with commas between or as JSON, tables as JSON;
3. options of the command line, or arguments in Python, with two underscores as well:
   `app.run(concurrency=8, http__listen="127.0.0.1:7470")`.

A relative path in the file is relative to the file's folder, elsewhere to the current
folder; `~` is your home. A wrong name, type or value is refused, with its place, what is allowed
there, and the name that was probably meant. Names from before there were sections (`http_rate`,
`pipe_model`) are accepted for one version, with a line that says the new name.

`penstock config show` prints the settings in effect and where each comes from, and with `--json`
for programs; `penstock config show http` is about one section. Secrets are masked.

Variables that begin with `{RESERVED}` are left to plug-ins. A variable whose name is like no
setting is ignored, as are those that Kubernetes sets for a Service named `penstock`;
`penstock doctor` lists them.
"""

PLACES = """\
## In the data directory

| path | what it is |
|---|---|
| `penstock.db` | every job and its history, and what jobs checkpointed, as the stages and items \
of pipelines; schedules, limits, keys (as hashes), the audit log |
| `blobs/` | payloads too large for their pointer, and files of the OpenAI API, named by their \
content |
| `files/` | files that a job may point to with `file:` |
| `token` | the owner's key: for TCP, and to do everything over HTTP; mode 0600 |
| `pipe.key` | the key of a network of nodes (`node.key`), if one was made here; mode 0600 |
| `containers/` | folders of container jobs, images of the engine `oci` (`oci/`), and the store \
of `penstock container serve` (`containers.db`, `jobs/`, `blobs/`) |
| `models/` | language models, if this is the default data directory and `models.dir` is not set |
| `starts/` | which jobs the workers on this machine have begun |
| `pipes/` | the addresses of nodes that run on this machine |
| `penstock.lock` | held by the engine that owns the folder |
| `penstock.sock` | where clients and workers connect |
| `pipelines.db` | pipeline runs of an older version; the engine's next start \
[moves them](../how-to/production.md#restarts-and-upgrades) to `penstock.db` |

A file whose name ends in `-wal` or `-shm` belongs to the database beside it.
[`penstock backup`](../how-to/production.md#backup) copies the first six, and of `containers/`
the store of `penstock container serve`.

A Unix socket's path can't be longer than about a hundred bytes. If that of
`penstock.sock` is, the socket is `/tmp/penstock-<uid>/<hash>.sock` instead, where the hash
is that of the data directory's path.
"""


def page() -> str:
    parts = [INTRODUCTION, "## At the top\n", *_entries(Settings)]
    parts += ["### In a pool\n\nEach `[pools.<name>]` may have:\n", *_entries(Pool, level=4)]
    for name, kind in SECTIONS.items():
        parts += [f"## `[{name}]`\n\n{inspect.getdoc(kind)}\n", *_entries(kind, f"{name}.")]
    return "\n".join([*parts, PLACES])


def sentences(kind: type[Struct]) -> dict[str, str]:
    """The docstring below each field."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        match item, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text).replace("\n", " ")
    return found


def _entries(kind: type[Struct], prefix: str = "", level: int = 3) -> Iterator[str]:
    said = sentences(kind)
    kinds = get_type_hints(kind, include_extras=True)
    for field in structs.fields(kind):
        if field.name in said:
            facts = f"*{allowed(kinds[field.name])}; default {_default(field)}*"
            yield f"{'#' * level} `{prefix}{field.name}`\n\n{said[field.name]}\n\n{facts}\n"


def _default(field: structs.FieldInfo) -> str:
    if field.name == "data_dir":
        return "`penstock` in your data folder (Linux: `~/.local/share/penstock`)"
    value: Any = field.default
    if value is NODEFAULT:
        value = field.default_factory()
    match value:
        case None | () | {}:
            return "none"
        case StrEnum():
            return f'`"{value.value}"`'
        case tuple():
            return "`[" + ", ".join(f'"{item}"' for item in value) + "]`"
        case _:
            return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
