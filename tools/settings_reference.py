"""The page docs/reference/settings.md, made from Settings itself.

python tools/settings_reference.py > docs/reference/settings.md
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, get_type_hints

from msgspec import NODEFAULT, Struct, structs

from penstock.config.loading import PREFIX, RESERVED, allowed
from penstock.config.settings import Pool, Settings

INTRODUCTION = f"""\
# Settings

<!-- Made by `python tools/settings_reference.py`; a test keeps it in step. -->

Settings come from three places; what comes later wins:

1. the file that `--config` or `PENSTOCK_CONFIG` names, or else `penstock.toml` in the
   current folder, if there is one;
2. the environment: `{PREFIX}` and the setting's name in capitals, as in
   `{PREFIX}DATA_DIR`. Lists are written with commas between or as JSON, tables as JSON;
3. flags of the command line, or arguments in Python.

A relative path in the file is relative to the file's folder, elsewhere to the current
folder; `~` is your home. A key, type or value that is wrong is refused with the place where
it stands and what is allowed. Variables that begin with `{RESERVED}` are left to plug-ins, and
those that Kubernetes sets for a Service named `penstock` are ignored.

```toml
# penstock.toml
data_dir = "~/penstock"
retention = 86400
sources = ["s3://my-bucket/inputs"]

[pools.gpu]
topics = ["job.train.*"]
capacity = 4
labels = {{ gpu = "a100" }}
```
"""

PLACES = """\
## In the data directory

| path | what it is |
|---|---|
| `penstock.db` | every job and its history, and what jobs checkpointed, as the stages and items \
of pipelines; schedules, limits, keys (as hashes), the audit log |
| `blobs/` | payloads too large for their pointer, named by their content |
| `openai/` | files and batches of the OpenAI API |
| `files/` | files that a job may point to with `file:` |
| `token` | the owner's key: for TCP, and to do everything over HTTP; mode 0600 |
| `pipe.key` | the key of a network of nodes (`pipe_key`), if one was made here; mode 0600 |
| `containers/` | folders of container jobs, images of the engine `oci` (`oci/`), and the store \
of `penstock container serve` (`containers.db`, `jobs/`, `blobs/`) |
| `models/` | language models, if this is the default data directory and `models_dir` is not set |
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
    sections = [INTRODUCTION, "## The settings\n", *_entries(Settings)]
    sections += ["## Pools\n\nEach `[pools.<name>]` may have:\n", *_entries(Pool), PLACES]
    return "\n".join(sections)


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


def _entries(kind: type[Struct]) -> Iterator[str]:
    said = sentences(kind)
    kinds = get_type_hints(kind, include_extras=True)
    for field in structs.fields(kind):
        facts = f"*{allowed(kinds[field.name])}; default {_default(field)}*"
        yield f"### `{field.name}`\n\n{said[field.name]}\n\n{facts}\n"


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


if __name__ == "__main__":
    print(page(), end="")
