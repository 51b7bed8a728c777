"""What a map stage goes over: its items, before any of them is run.

They come from a field of the config, from the outputs of a stage before, or from a function
of (config, ctx). They are read in pages; nothing here holds them all.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.core.job import Cancelled
from penstock.ports.executor import CancelToken
from penstock.workloads.pipeline.context import AsyncStageContext, StageContext, report_of
from penstock.workloads.pipeline.definition import Stage
from penstock.workloads.pipeline.items import ItemRunner, check_report
from penstock.workloads.pipeline.payloads import WRONG_TYPE, Unfit, encode, outputs_of
from penstock.workloads.pipeline.records import ErrorClass, ItemOutcome, ItemRecord
from penstock.workloads.pipeline.retrying import bounded
from penstock.workloads.pipeline.rows import ItemReport

_MAX_KEY = 256
_decode = msgspec.json.Decoder().decode


class StageFailed(Exception):
    """A stage that can't be run, or not to its end."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Lister:
    """Lists the items of one map stage. Their `seq` is left to whoever takes them."""

    def __init__(self, runner: ItemRunner, stage: Stage, cancel: CancelToken) -> None:
        self._runner, self._stage, self._cancel = runner, stage, cancel
        self._payloads, self._page = runner.scope.payloads, runner.scope.options.page
        self._ctx: StageContext | None = None

    @property
    def report(self) -> ItemReport | None:
        """What a source function reported. Raises StageFailed for too much."""
        report = None if self._ctx is None else report_of(self._ctx)
        try:
            check_report(report)
        except Unfit as problem:
            raise StageFailed(problem.code, str(problem)) from None
        return report

    async def pages(self) -> AsyncIterator[list[ItemRecord]]:
        """Raises StageFailed where the source is to blame."""
        page: list[ItemRecord] = []
        async for item in self._items():
            page.append(item)
            if len(page) >= self._page:
                yield page
                page = []
        if page:
            yield page

    def _items(self) -> AsyncIterator[ItemRecord]:
        kind, _, name = self._stage.info.over.partition(":")
        if kind == "stage":
            return self._outputs_of(name)
        return self._from(self._given(name) if kind == "config" else self._source())

    # -- from a stage -------------------------------------------------------------

    async def _outputs_of(self, upstream: str) -> AsyncIterator[ItemRecord]:
        after, reader = -1, self._runner.scope.reader
        while page := await reader.items(upstream, after):
            for item in page:
                data = await self._payloads.get(item.output)
                many = outputs_of(data)
                if many is None:
                    yield self._item(item.key, item.output, data)
                    continue
                for index, raw in enumerate(many):
                    one = bytes(raw)
                    pointer = await self._payloads.put(one)
                    yield self._item(f"{item.key}/{index}", pointer, one)
            after = page[-1].seq

    # -- from values --------------------------------------------------------------

    async def _from(self, values: AsyncIterator[Any]) -> AsyncIterator[ItemRecord]:
        index = 0
        async for value in values:
            try:
                data = encode(value)
                yield self._item(str(index), await self._payloads.put(data), data)
            except Unfit as problem:
                yield _unfit(str(index), problem)
            index += 1

    async def _given(self, field: str) -> AsyncIterator[Any]:
        config = self._runner.scope.config
        found = config.get(field) if isinstance(config, Mapping) else getattr(config, field, None)
        for value in self._iterable(found, f"config.{field}"):
            yield value

    async def _source(self) -> AsyncIterator[Any]:
        source = self._stage.source
        assert source is not None
        try:
            async for value in self._asked(source):
                yield value
        except (StageFailed, Cancelled, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise StageFailed(type(error).__name__, f"its source failed: {error}") from error

    async def _asked(self, source: Any) -> AsyncIterator[Any]:
        if inspect.isasyncgenfunction(source):
            async for value in source(**self._arguments(source, is_async=True)):
                yield value
            return
        if inspect.iscoroutinefunction(source):
            found = await source(**self._arguments(source, is_async=True))
            if hasattr(found, "__aiter__"):
                async for value in found:
                    yield value
                return
            for value in self._iterable(found, self._stage.info.over):
                yield value
            return
        calls = self._runner.calls
        begin = partial(self._begin, source, self._arguments(source, is_async=False))
        name = f"{self._stage.name}/(its source)"
        iterator = await calls.in_thread(name, begin)
        while values := await calls.in_thread(name, partial(_take, iterator, self._page)):
            for value in values:
                yield value

    def _begin(self, source: Any, arguments: dict[str, Any]) -> Iterator[Any]:
        return iter(self._iterable(source(**arguments), self._stage.info.over))

    def _arguments(self, source: Any, *, is_async: bool) -> dict[str, Any]:
        """A source takes the config, and ctx if it likes, or less."""
        names = list(inspect.signature(source).parameters)
        kind = AsyncStageContext if is_async else StageContext
        self._ctx = kind(self._runner.scope, self._stage.name, "", 1, self._cancel)
        given: dict[str, Any] = {name: self._ctx for name in names if name == "ctx"}
        for name in [name for name in names if name != "ctx"][:1]:
            given[name] = self._runner.scope.config
        return given

    def _iterable(self, found: Any, where: str) -> Iterable[Any]:
        if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
            kind = type(found).__name__
            raise StageFailed(WRONG_TYPE, f"{where} gave {kind}, which is no list of items")
        return found

    # -- keys ---------------------------------------------------------------------

    def _item(self, key: str, pointer: str, data: bytes) -> ItemRecord:
        if self._stage.key is not None:
            key = self._own_key(data)
        return ItemRecord(seq=0, key=key, input=pointer)

    def _own_key(self, data: bytes) -> str:
        assert self._stage.key is not None
        try:
            value = self._stage.codec.input(data)
        except Unfit:
            value = _decode(data)  # the item will fail by itself; its key need not
        try:
            return short_key(str(self._stage.key(value)))
        except Exception as error:
            raise StageFailed(
                type(error).__name__, f"its key function failed on {data[:200]!r}: {error}"
            ) from error


def short_key(key: str) -> str:
    """A key that can be stored; a long one ends in a digest."""
    key = bounded(key, 1 << 20)
    if len(key) <= _MAX_KEY:
        return key
    return f"{key[: _MAX_KEY - 33]}~{sha256(key.encode()).hexdigest()[:32]}"


def numbered(items: Iterable[ItemRecord], first: int) -> list[ItemRecord]:
    return [replace(item, seq=first + index) for index, item in enumerate(items)]


def _take(iterator: Iterator[Any], count: int) -> list[Any]:
    return list(islice(iterator, count))


def _unfit(key: str, problem: Unfit) -> ItemRecord:
    """An item that can't be stored fails, and nothing else does."""
    return ItemRecord(
        seq=0,
        key=key,
        outcome=ItemOutcome.FAILED,
        error_class=ErrorClass.PERMANENT,
        error_code=problem.code,
        error=bounded(str(problem)),
    )
