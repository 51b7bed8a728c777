"""Inputs and outputs on their way to and from rows and blobs.

An output is JSON. A JSON array is many outputs to a stage that maps over it, anything else is
one. Small ones stand in their row as `data:` pointers, large ones in a blob.
"""

from __future__ import annotations

import types
from typing import Any

import msgspec

from penstock import values
from penstock.core.errors import InvalidRequest, TooLarge
from penstock.core.pointer import decode_data, encode_data
from penstock.ports.blobs import Blobs
from penstock.workloads.pipeline.options import RunOptions
from penstock.workloads.pipeline.shape import Shape

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

    def __init__(self, blobs: Blobs, options: RunOptions) -> None:
        self._blobs, self._limit = blobs, options.inline_limit
        self._max = options.max_result

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
