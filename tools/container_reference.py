"""The page reference/container-http.md, made from the table of operations."""

from __future__ import annotations

from typing import cast

from tools.http_reference import (
    Row,
    connection_limits,
    operations_of,
    rows_of,
    size_of,
    types_of,
)

from penstock.api.container.facade import ContainerFacade
from penstock.api.container.server import INFO, http_options, operations
from penstock.api.container.views import MAX_WAIT
from penstock.api.openapi import document
from penstock.workloads.container.config import WorkerConfig

INTRODUCTION = """\
# The HTTP API of a container worker

`penstock container serve` answers here, by default at port 9000; the server
itself has this page at `/docs` and the OpenAPI 3.1 document at `/openapi.json`.

- It listens on loopback unless it has a token, or on a Unix socket (`socket`); with
  `tls_certificate` it speaks HTTPS. With a token, everything but `/health` (and `/info`, with
  `public_info`) needs `Authorization: Bearer <token>`; what is missing or wrong is answered 401.
- Unknown parameters of a query, and slashes at the end of a path, are ignored.
- Every answer is JSON, those to mistakes too, but for `/docs`, `/metrics`, streams and downloads.
- The protocol's endpoints, statuses, keys and the order of keys are kept; more keys follow them,
  and may be added at any time.
- Times are ISO 8601 in UTC with milliseconds. Offsets and sizes are in bytes.
- An id in a path is escaped as one segment: `a/b` is `a%2Fb`.
- `HEAD` works wherever `GET` does; `OPTIONS` is answered 204 everywhere.
- Web pages whose origin is in `cors` may read from it; where it has a token, a page that sends it
  may also submit and cancel. Others can't read its answers, and are refused (403) where they would
  change something. On loopback it answers only to its own names and those in `hosts` (421), so that
  no page can reach it by another.

## Refusals

A submission that is refused is answered in the protocol's shape, whatever is wrong with it:

```json
{"accepted": false, "job_id": "job-1", "state": "rejected",
 "error": {"code": "INVALID_FIELD", "message": "...", "field": "runtime.limits.memory_mb"}}
```

A job that is not here is `{"job_id": "...", "state": "not_found"}` with 404. Everything else:

```json
{"error": {"code": "METHOD_NOT_ALLOWED", "message": "...", "hint": "..."}}
```

`error.code` is stable and meant for programs. A 429 or 503 has `Retry-After`. A 500 tells nothing
but an incident, under which the worker's log says more.

"""

LIMITS = """\
## Limits

A client that takes too much, or too long, is answered and cut off. The sizes of submissions are
those of the worker's settings `max_body_bytes` and `inputs.max_bytes`.

| what | how much | answer |
|---|---|---|
"""


def page() -> str:
    # What the operations do is not asked for here, only what they are.
    told = document(operations(cast("ContainerFacade", None)), INFO)
    return "".join(
        [
            INTRODUCTION,
            LIMITS,
            *rows_of(_limits()),
            "\n",
            *operations_of(told),
            "## Types\n\n",
            *types_of(told),
        ]
    )


def _limits() -> list[Row]:
    http = http_options(WorkerConfig())
    return [
        ("size of a submission without files", size_of(http.max_body), "413"),
        *connection_limits(http),
        ("open streams of logs", f"{http.streams_per_key:,}", "429"),
        ("requests that wait", f"{http.waiting_per_key:,}", "429"),
        ("time that a request waits", f"{MAX_WAIT:g} s", "what there is then"),
    ]
