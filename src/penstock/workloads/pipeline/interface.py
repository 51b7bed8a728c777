"""What callers can ask about pipelines and their runs, and items as JSON shows them."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from penstock.core.errors import UnreadablePointer
from penstock.core.pointer import JSON, data_media_type, decode_data, encode_data
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import Patience, Reason
from penstock.ports.operations import KeyRole, Paging, operation
from penstock.workloads.pipeline.records import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineInfo,
    PipelineRecord,
)

MAX_PAGE = 1000
"""Runs or items of one answer."""


class RunQuery(Struct, frozen=True, kw_only=True):
    """Which runs, newest first. All conditions must hold."""

    pipeline: str | None = None
    statuses: tuple[PipelineJobStatus, ...] = ()
    tenant: str | None = None
    retry_of: str | None = None
    """Only those that retry this run."""
    before: tuple[float, str] | None = None
    """(created_at, id) at which the page before ended."""
    limit: int = 50


class CancelAnswer(Struct, frozen=True):
    """What became of a request to cancel a run."""

    accepted: bool
    status: PipelineJobStatus
    """The status after the request."""
    reason: str = ""
    """Why it was not accepted."""


class Pipelines(Protocol):
    """What a caller can ask about pipelines. A run's id is its canonical job's id."""

    @operation(
        "list_pipelines",
        "GET /v1/pipelines",
        "List pipelines",
        "What can be started.",
        field="pipelines",
    )
    async def list(self) -> builtins.list[PipelineInfo]:
        """What can be started."""

    @operation(
        "get_pipeline",
        "GET /v1/pipelines/{name}",
        "Get a pipeline's definition",
        "Its stages in their order, and the JSON schema of its config.",
        refusals=(404,),
    )
    async def show(self, name: str) -> PipelineInfo:
        """One of them. NotFound."""

    @operation(
        "start_pipeline",
        "POST /v1/pipelines/{name}/runs",
        "Start a pipeline",
        "A canonical job, accepted durably. 422 names the field, as `config.max_items`. 409 with "
        "the code PIPELINE_BUSY and the id of the job that runs, in `running`, for a pipeline that "
        "runs once at a time.",
        role=KeyRole.SUBMIT,
        status=202,
        refusals=(404, 409, 415, 422, 429),
    )
    async def start(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        *,
        tenant: str = "default",
        idempotency_key: str | None = None,
        retry_of: str | None = None,
    ) -> PipelineRecord:
        """Submit a canonical job for it. NotFound, InvalidRequest (names the config's field),
        PipelineBusy (names the running job)."""

    @operation(
        "get_run",
        "GET /v1/runs/{job_id}",
        "Get a run's record",
        "Of one shape while it runs and after.",
        refusals=(404,),
    )
    async def get(self, job_id: str) -> PipelineRecord: ...

    @operation(
        "list_runs",
        "GET /v1/runs?pipeline&status=statuses&tenant&retry_of&limit",
        "List runs of pipelines",
        "Newest first. "
        "Pages are stable: a run that comes in between shifts nothing and is not shown twice.",
        field="runs",
        refusals=(422,),
        paging=Paging("before", ("created_at", "id"), 500),
    )
    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]: ...

    @operation(
        "list_items",
        "GET /v1/runs/{job_id}/stages/{stage}/items?outcome=outcomes&limit",
        "List the items of a stage",
        "Each with its outcome, attempts and error.",
        field="items",
        refusals=(404, 422),
        paging=Paging("after", ("seq",), 500),
    )
    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        """NotFound also for a stage that the run does not have."""

    @operation(
        "cancel_run",
        "POST /v1/runs/{job_id}/cancel",
        "Cancel a run",
        "Cancel and finish race; `status` says which won. `accepted` is false for a run that had "
        "ended, and `reason` says so.",
        role=KeyRole.SUBMIT,
        action="pipeline.cancel",
        refusals=(404, 422),
        waits=True,
    )
    async def cancel(
        self, job_id: str, *, reason: Reason = "", timeout: Patience = 10.0
    ) -> CancelAnswer:
        """Waits up to `timeout` for running work to stop."""

    @operation(
        "retry_failed",
        "POST /v1/runs/{job_id}/retry-failed",
        "Run again what failed in a run",
        "A new run, linked by `retry_of`, of the items that failed and what depends on them. 409 "
        "unless the run has ended; 422 if nothing failed in it.",
        role=KeyRole.SUBMIT,
        action="pipeline.retry_failed",
        once=True,
        status=202,
        refusals=(404, 409, 415, 422, 429),
    )
    async def retry_failed(self, job_id: str) -> PipelineRecord:
        """A new run, linked by `retry_of`, of what failed and what depends on it.
        IllegalMove unless the run has ended; InvalidRequest if nothing failed in it."""

    def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """Its events from an id on, as they come, until `job_complete`. NotFound at once."""

    @operation(
        "list_breakers",
        "GET /v1/breakers",
        "List circuit breakers",
        role=KeyRole.OPERATE,
        field="breakers",
    )
    async def breakers(self) -> builtins.list[Breaker]: ...

    @operation(
        "reset_breaker",
        "POST /v1/breakers/{name}/reset",
        "Close a circuit breaker by hand",
        role=KeyRole.OPERATE,
        all_tenants=True,
        refusals=(404,),
    )
    async def reset_breaker(self, name: str) -> Breaker:
        """Close it by hand. NotFound."""


# -- items as JSON ----------------------------------------------------------------

INLINE = 4096
"""Bytes of JSON that are shown as the value that they are."""
_LONGEST = len(encode_data(b"#" * INLINE))


class ItemView(ItemRecord, frozen=True, kw_only=True, omit_defaults=False):
    """One item of one stage. Of a value and its pointer one is there; none if there is none."""

    # The value itself stands where a record has its pointer.
    input: Raw | UnsetType = UNSET  # type: ignore[assignment]
    """What it was given, where that is JSON of at most 4 KiB."""
    input_ptr: str | UnsetType = UNSET
    """Where else it is: a `data:` URI or a blob."""
    output: Raw | UnsetType = UNSET  # type: ignore[assignment]
    """What it gave, where that is JSON of at most 4 KiB."""
    output_ptr: str | UnsetType = UNSET
    """Where else it is: a `data:` URI or a blob."""


_ITEM_FIELDS = tuple(
    name for name in ItemRecord.__struct_fields__ if name not in ("input", "output")
)


def item_view(item: ItemRecord) -> ItemView:
    given, gave = _shown(item.input), _shown(item.output)
    return ItemView(
        input=UNSET if given is None else given,
        input_ptr=item.input if given is None and item.input else UNSET,
        output=UNSET if gave is None else gave,
        output_ptr=item.output if gave is None and item.output else UNSET,
        **{name: getattr(item, name) for name in _ITEM_FIELDS},
    )


def item_of(view: ItemView) -> ItemRecord:
    """The record that a view was made of."""
    return ItemRecord(
        input=_pointer(view.input, view.input_ptr),
        output=_pointer(view.output, view.output_ptr),
        **{name: getattr(view, name) for name in _ITEM_FIELDS},
    )


def _shown(pointer: str) -> Raw | None:
    """The value behind a pointer; None where there is none that can be shown."""
    if not pointer.startswith("data:") or len(pointer) > _LONGEST:
        return None
    try:
        data = decode_data(pointer) if data_media_type(pointer) == JSON else b""
        if not 0 < len(data) <= INLINE:
            return None
        msgspec.json.decode(data)  # or the whole answer would be no JSON
    except (UnreadablePointer, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return Raw(data)


def _pointer(value: Raw | UnsetType, pointer: str | UnsetType) -> str:
    if value is not UNSET:
        return encode_data(bytes(value))
    return "" if pointer is UNSET else pointer
