"""The outputs of a stage, as a later one reads them: page by page, never all at once."""

from __future__ import annotations

import asyncio
import builtins
import threading
import typing
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from penstock.core.job import Cancelled
from penstock.workloads.pipeline.payloads import Payloads, decoder, outputs_of
from penstock.workloads.pipeline.records import ItemOutcome, ItemRecord
from penstock.workloads.pipeline.store import PipelineStore

T = TypeVar("T")
_PAGE = 100
_MISSING = (ItemOutcome.FAILED, ItemOutcome.SKIPPED)


class Portal:
    """Lets a stage's thread wait for what the event loop does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = threading.get_ident()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if threading.get_ident() == self._owner:
            coroutine.close()
            raise TypeError("this would block the event loop; await it in an async function")
        if self._loop.is_closed():
            coroutine.close()
            raise Cancelled("its job is over")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Have it called in the loop, soon; now, where this is the loop."""
        if threading.get_ident() == self._owner:
            callback(*args)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)


class Reader:
    """Reads what finished items of one run gave."""

    def __init__(self, store: PipelineStore, payloads: Payloads, job_id: str) -> None:
        self._store, self._payloads, self._job_id = store, payloads, job_id

    async def items(
        self, stage: str, after: int, outcomes: tuple[ItemOutcome, ...] = (ItemOutcome.OK,)
    ) -> list[ItemRecord]:
        return await self._store.items(
            self._job_id, stage, after=after, limit=_PAGE, outcomes=outcomes
        )

    async def outputs(self, item: ItemRecord) -> list[msgspec.Raw]:
        """What an item gave, as JSON; one that is no array as an array of one."""
        data = await self._payloads.get(item.output)
        many = outputs_of(data)
        return [msgspec.Raw(data)] if many is None else many


class Results(Generic[T]):
    """The outputs of one stage, flattened, in the order of its items.

    `async for` in async functions, `for` in plain ones. Annotated as `Results[Article]`, it
    gives articles.
    """

    def __init__(
        self,
        reader: Reader,
        stage: str,
        count: int,
        *,
        kind: Any = Any,
        portal: Portal | None = None,
    ) -> None:
        self.stage, self.count = stage, count
        """How many outputs there are."""
        self._reader, self._portal = reader, portal
        self._decode: Callable[[msgspec.Raw], T] = decoder(kind) or msgspec.json.Decoder().decode

    def __aiter__(self) -> AsyncIterator[T]:
        self._async_only("async for x in results")
        return self._all()

    def __iter__(self) -> Iterator[T]:
        portal = self._plain_only("async for x in results")
        return self._drain(portal, self._values)

    def items(self) -> Any:
        """The ItemRecords that succeeded, by `async for` or `for` as the outputs."""
        if self._portal is None:
            return self._all_items()
        return self._drain(self._portal, self._records)

    def missing(self) -> Any:
        """The ItemRecords that failed or were skipped, by `async for` or `for`."""
        if self._portal is None:
            return self._all_items(_MISSING)
        return self._drain(self._portal, self._missing_records)

    def list(self) -> Any:
        """Every output at once: `await results.list()`, or plainly in a plain function."""
        if self._portal is None:
            return self._list()
        return self._portal.call(self._list())

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return self.count > 0

    def __repr__(self) -> str:
        return f"<{self.count} results of {self.stage}>"

    async def _all(self) -> AsyncIterator[T]:
        after = -1
        while page := await self._reader.items(self.stage, after):
            for item in page:
                for raw in await self._reader.outputs(item):
                    yield self._decode(raw)
            after = page[-1].seq

    async def _all_items(
        self, outcomes: tuple[ItemOutcome, ...] = (ItemOutcome.OK,)
    ) -> AsyncIterator[ItemRecord]:
        after = -1
        while page := await self._reader.items(self.stage, after, outcomes):
            for item in page:
                yield item
            after = page[-1].seq

    async def _list(self) -> builtins.list[T]:
        return [value async for value in self._all()]

    async def _records(self, after: int) -> tuple[builtins.list[ItemRecord], int]:
        page = await self._reader.items(self.stage, after)
        return page, page[-1].seq if page else -1

    async def _missing_records(self, after: int) -> tuple[builtins.list[ItemRecord], int]:
        page = await self._reader.items(self.stage, after, _MISSING)
        return page, page[-1].seq if page else -1

    async def _values(self, after: int) -> tuple[builtins.list[T], int]:
        page = await self._reader.items(self.stage, after)
        values = [self._decode(raw) for item in page for raw in await self._reader.outputs(item)]
        return values, page[-1].seq if page else -1

    def _drain(self, portal: Portal, turn: Callable[[int], Any]) -> Iterator[Any]:
        after = -1
        while True:
            values, after = portal.call(turn(after))
            if after < 0:
                return
            yield from values

    def _async_only(self, said: str) -> None:
        if self._portal is not None:
            raise TypeError("a plain function reads its results with `for`, without async")

    def _plain_only(self, said: str) -> Portal:
        if self._portal is None:
            raise TypeError(f"an async function reads its results with `{said}`")
        return self._portal


def element_of(annotation: Any) -> Any:
    """T of `Results[T]` or `list[T]`; Any where nothing is said."""
    arguments = typing.get_args(annotation)
    return arguments[0] if arguments and isinstance(arguments[0], type) else Any


def wants_list(annotation: Any) -> bool:
    """Whether a step's parameter is annotated as a list: then it is given one."""
    return annotation is list or typing.get_origin(annotation) is list
