"""Inputs and outputs on their way to and from rows and blobs.

An output is JSON. A JSON array is many outputs to a stage that maps over it, anything else is
one. Small ones stand in their row as `data:` pointers, large ones in a blob.
"""

from __future__ import annotations

import asyncio
import builtins
import threading
import types
import typing
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from penstock import values
from penstock.core.errors import InvalidRequest, TooLarge
from penstock.core.job import Cancelled
from penstock.core.pointer import decode_data, encode_data
from penstock.ports.blobs import Blobs
from penstock.workloads.pipeline.records import ItemOutcome, ItemRecord, StageRecord
from penstock.workloads.pipeline.rows import RunRows

if TYPE_CHECKING:
    from penstock.workloads.pipeline.definition import Shape

WRONG_TYPE = "WRONG_TYPE"
RESULT_NOT_STORABLE = "RESULT_NOT_STORABLE"
RESULT_TOO_LARGE = "RESULT_TOO_LARGE"
TOO_MANY_OUTPUTS = "TOO_MANY_OUTPUTS"

_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Unfit(Exception):
    """A value that can't be what it should be. To try again would change nothing."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode(value: Any) -> bytes:
    """A value as JSON. Raises Unfit, also for NaN and infinity, which JSON does not have."""
    try:
        return values.encode(value, "output")
    except InvalidRequest as problem:
        kind = type(value).__qualname__
        raise Unfit(
            RESULT_NOT_STORABLE, f"an output of type {kind} can't be stored: {problem}"
        ) from None


def outputs_of(data: bytes) -> list[msgspec.Raw] | None:
    """The outputs in an array; None for what is a single output."""
    return _array(data) if data.startswith(b"[") else None


class Codec:
    """What a stage's function takes and gives, by its annotations. Safe in any thread."""

    def __init__(self, stage: str, shape: Shape) -> None:
        self._stage = stage
        self._decode = decoder(shape.input_type) or msgspec.json.Decoder().decode
        kind = shape.output_type
        returned = types.GenericAlias(list, (kind,)) if shape.is_generator else kind
        self._check = None if kind is Any else decoder(returned)

    def input(self, data: bytes) -> Any:
        try:
            return self._decode(data)
        except (msgspec.DecodeError, RecursionError) as problem:
            raise Unfit(WRONG_TYPE, f"{self._stage} can't take its input: {problem}") from None

    def output(self, value: Any) -> bytes:
        return self.checked(encode(value))

    def checked(self, data: bytes) -> bytes:
        """The output, if it is what the function said it returns."""
        if self._check is not None:
            try:
                self._check(data)
            except (msgspec.DecodeError, RecursionError) as problem:
                raise Unfit(
                    WRONG_TYPE, f"{self._stage} returned something else than it says: {problem}"
                ) from None
        return data


class Payloads:
    """Turns data into pointers and back."""

    def __init__(self, blobs: Blobs, inline_limit: int, max_result: int) -> None:
        self._blobs, self._limit, self._max = blobs, inline_limit, max_result

    async def put(self, data: bytes) -> str:
        """A pointer to the data. Raises Unfit for too much of it, and whatever the blobs do."""
        if len(data) <= self._limit:
            return encode_data(data)
        if len(data) > self._max:
            raise Unfit(RESULT_TOO_LARGE, f"{len(data):,} bytes; at most {self._max:,} are kept")
        try:
            return await self._blobs.put(data)
        except TooLarge as problem:
            raise Unfit(RESULT_TOO_LARGE, str(problem)) from None

    async def get(self, pointer: str) -> bytes:
        if pointer.startswith("data:"):
            return decode_data(pointer)
        return await self._blobs.get(pointer) if pointer else b"null"


def decoder(kind: Any) -> Any:
    """How to read JSON as a type; None for one that JSON can't be read as."""
    try:
        return values.decoder(values.readable(kind))
    except TypeError:
        return None


T = TypeVar("T")
_PAGE = 100
SUCCEEDED = (ItemOutcome.OK,)
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


class Reader(msgspec.Struct, frozen=True):
    """Reads what finished items of one run gave."""

    rows: RunRows
    payloads: Payloads
    stage: Callable[[str], StageRecord]

    async def items(
        self, stage: str, after: int, outcomes: tuple[ItemOutcome, ...] = SUCCEEDED
    ) -> list[ItemRecord]:
        return await self.rows.items(self.stage(stage), after, _PAGE, outcomes)

    async def outputs(self, item: ItemRecord) -> list[msgspec.Raw]:
        """What an item gave, as JSON; one that is no array as an array of one."""
        data = await self.payloads.get(item.output)
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
        if self._portal is not None:
            raise TypeError("a plain function reads its results with `for`, without async")
        return self._all()

    def __iter__(self) -> Iterator[T]:
        if self._portal is None:
            raise TypeError("an async function reads its results with `async for x in results`")
        return self._drain(self._portal)

    def items(self) -> Any:
        """The ItemRecords that succeeded, by `async for` or `for` as the outputs."""
        return self._items(SUCCEEDED)

    def missing(self) -> Any:
        """The ItemRecords that failed or were skipped, by `async for` or `for`."""
        return self._items(_MISSING)

    def list(self) -> Any:
        """Every output at once: `await results.list()`, or plainly in a plain function."""
        return self._list() if self._portal is None else self._portal.call(self._list())

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return self.count > 0

    def __repr__(self) -> str:
        return f"<{self.count} results of {self.stage}>"

    def _items(self, outcomes: tuple[ItemOutcome, ...]) -> Any:
        if self._portal is None:
            return self._each_item(outcomes)
        return (item for page in self._pages(self._portal, outcomes) for item in page)

    async def _each_item(self, outcomes: tuple[ItemOutcome, ...]) -> AsyncIterator[ItemRecord]:
        after = -1
        while page := await self._reader.items(self.stage, after, outcomes):
            for item in page:
                yield item
            after = page[-1].seq

    async def _all(self) -> AsyncIterator[T]:
        async for item in self._each_item(SUCCEEDED):
            for raw in await self._reader.outputs(item):
                yield self._decode(raw)

    async def _list(self) -> builtins.list[T]:
        return [value async for value in self._all()]

    def _pages(
        self, portal: Portal, outcomes: tuple[ItemOutcome, ...]
    ) -> Iterator[builtins.list[ItemRecord]]:
        after = -1
        while page := portal.call(self._reader.items(self.stage, after, outcomes)):
            yield page
            after = page[-1].seq

    def _drain(self, portal: Portal) -> Iterator[T]:
        for page in self._pages(portal, SUCCEEDED):
            yield from portal.call(self._outputs(page))

    async def _outputs(self, page: builtins.list[ItemRecord]) -> builtins.list[T]:
        return [self._decode(raw) for item in page for raw in await self._reader.outputs(item)]


def element_of(annotation: Any) -> Any:
    """T of `Results[T]` or `list[T]`; Any where nothing is said."""
    arguments = typing.get_args(annotation)
    return arguments[0] if arguments and isinstance(arguments[0], type) else Any


def wants_list(annotation: Any) -> bool:
    """Whether a step's parameter is annotated as a list: then it is given one."""
    return annotation is list or typing.get_origin(annotation) is list
