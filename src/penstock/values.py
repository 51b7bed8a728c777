"""Python values as JSON, and back as what an annotation says.

A value is stored as the JSON that any reader would expect: a dataclass as an object, a datetime
as ISO text, bytes as base64 text, a set as a list. The type is not stored: who reads it again has
an annotation. A type that JSON has no form for is taught with `register`:

    penstock.values.register(Money, encode=str, decode=Money.parse, form=str)

Nothing is pickled, and no class is looked up by a name that came from outside.
"""

from __future__ import annotations

import functools
import inspect
import io
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Struct

from penstock.core.check import check_finite
from penstock.core.errors import InvalidRequest, Misconfigured, did_you_mean
from penstock.core.pointer import JSON, RESULT_OF, references

T = TypeVar("T")

_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for a value that has no JSON form, or text that is not JSON."""
_MAX_DEPTH = 64
"""How deep a value is searched for the part that can't be stored."""
NPY = "application/x-npy"
ARROW = "application/vnd.apache.arrow.stream"


# -- types that msgspec does not know -------------------------------------------------------------


class Codec(Struct, frozen=True):
    """How values of one type are stored."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    form: Any = Any
    media_type: str | None = None


_codecs: dict[type, Codec] = {}


def register(
    kind: type[T],
    *,
    encode: Callable[[T], Any],
    decode: Callable[[Any], T],
    form: Any = Any,
    media_type: str | None = None,
) -> None:
    """Let values of `kind`, and of its subclasses, be inputs and results of jobs.

    `encode` gives something that can be stored: a plain value, or bytes. `decode` makes the value
    again from that; it gets it as `form` (a type, `bytes` for instance), and raises ValueError
    for what is wrong. With a `media_type`, `encode` gives bytes, and a result that is such a value
    is stored as these bytes; inside another value they are base64 text.

    Register a type wherever it is used: in the module that defines it, or beside the jobs.
    """
    if not isinstance(kind, type):
        raise Misconfigured(f"values.register: {kind!r} is not a class")
    if _is_known(kind):
        raise Misconfigured(
            f"values.register: {kind.__qualname__} has a JSON form already",
            hint="builtin types, dataclasses, Structs, attrs classes and Enums need no codec",
        )
    if media_type is not None:
        form = bytes
    _codecs[kind] = Codec(encode, decode, form, media_type)
    _found.clear()


def _is_known(kind: type) -> bool:
    return not isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)


_found: dict[type, Codec | None] = {}
"""The codec of each class that was looked up; None for a class that has none."""


def _codec(kind: type) -> Codec | None:
    try:
        return _found[kind]
    except KeyError:
        pass
    own = next((_codecs[base] for base in kind.__mro__ if base in _codecs), None)
    _found[kind] = own = own or _builtin(kind)
    return own


def _builtin(kind: type) -> Codec | None:
    """The codec of a class of the standard library, or of a package that many use."""
    if issubclass(kind, PurePath):
        return Codec(str, kind, str)
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "pydantic" in packages and hasattr(kind, "model_validate_json"):
        return _pydantic(kind)
    if "numpy" in packages:
        return _numpy(kind)
    if "pandas" in packages:
        return _pandas(kind)
    return None


def _pydantic(kind: Any) -> Codec:
    def decode(plain: Any) -> Any:
        try:
            return kind.model_validate_json(msgspec.json.encode(plain))
        except ValueError as error:
            (first, *more) = error.errors()  # type: ignore[attr-defined]
            where = ".".join(map(str, first["loc"]))
            also = f" (and {len(more)} more)" if more else ""
            raise ValueError(f"{where}: {first['msg']}{also}" if where else first["msg"]) from None

    def encode(value: Any) -> Any:
        return value.model_dump(mode="json", by_alias=True, round_trip=True)

    return Codec(encode, decode)


def _numpy(kind: Any) -> Codec | None:
    import numpy as np

    if issubclass(kind, np.generic):
        return Codec(lambda value: value.item(), kind)
    if kind is not np.ndarray:
        return None

    def encode(value: Any) -> bytes:
        file = io.BytesIO()
        np.lib.format.write_array(file, value, allow_pickle=False)
        return file.getvalue()

    def decode(data: bytes) -> Any:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)

    return Codec(encode, decode, bytes, NPY)


def _pandas(kind: Any) -> Codec | None:
    import pandas as pd

    if not issubclass(kind, pd.DataFrame):
        return None
    try:
        import pyarrow as pa
    except ImportError:
        return Codec(
            lambda frame: msgspec.json.decode(frame.to_json(orient="split", date_format="iso")),
            lambda plain: pd.read_json(io.BytesIO(msgspec.json.encode(plain)), orient="split"),
            dict,
        )

    def encode(frame: Any) -> bytes:
        table, file = pa.Table.from_pandas(frame), io.BytesIO()
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        return file.getvalue()

    def decode(data: bytes) -> Any:
        return pa.ipc.open_stream(data).read_all().to_pandas()

    return Codec(encode, decode, bytes, ARROW)


_MEDIA_TYPES = {NPY: ("numpy", "ndarray"), ARROW: ("pandas", "DataFrame")}
"""Classes that need not have been used here before a result of theirs is read."""


def _codec_for(media_type: str) -> Codec | None:
    for codec in _codecs.values():
        if codec.media_type == media_type:
            return codec
    if media_type not in _MEDIA_TYPES:
        return None
    package, name = _MEDIA_TYPES[media_type]
    try:
        own = _codec(getattr(import_module(package), name))
    except ImportError:
        return None
    return own if own is not None and own.media_type == media_type else None


# -- to JSON --------------------------------------------------------------------------------------


def _to_plain(value: Any) -> Any:
    """What msgspec asks of a value whose type it does not know."""
    codec = _codec(type(value))
    if codec is None:
        raise TypeError(f"a value of type {type(value).__qualname__} is unsupported")
    try:
        return codec.encode(value)
    except Exception as error:
        raise ValueError(f"{type(value).__qualname__}: {error}") from error


_encode = msgspec.json.Encoder(enc_hook=_to_plain).encode
_encode_in_order = msgspec.json.Encoder(enc_hook=_to_plain, order="deterministic").encode


def encode(value: Any, field: str) -> bytes:
    """The value as JSON. Raises InvalidRequest with the path, from `field` on, of what can't be."""
    try:
        data = _encode(value)
        if b"null" in data and value is not None:  # msgspec writes NaN and infinity as null
            check_finite(field, msgspec.to_builtins(value, enc_hook=_to_plain))
    except InvalidRequest:
        raise
    except _ERRORS as error:
        raise _refusal(value, field, error) from None
    return data


class ResultOf:
    """Stands in an input for the result of a job; see `penstock.value`."""

    __slots__ = ("job_id",)

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id

    def __repr__(self) -> str:
        return f"<the result of job {self.job_id}>"


class Input(bytes):
    """An input as JSON of which more is to be known."""

    results_of: tuple[str, ...] = ()
    """Jobs whose results are missing in it, in the order of their first places."""
    open_names: frozenset[str] = frozenset()
    """The arguments in which they are."""
    in_order: bytes = b""
    """The same with the members of sets and mappings in order: equal inputs have equal ones, in
    whatever process."""


_placed: ContextVar[dict[str, None] | None] = ContextVar("placed", default=None)


def _place(result: ResultOf) -> dict[str, str]:
    placed = _placed.get()
    if placed is None:
        raise TypeError("penstock.value(job) stands for an input, and can't be a result")
    placed[result.job_id] = None
    return {RESULT_OF: result.job_id}


_codecs[ResultOf] = Codec(_place, lambda plain: plain)


def encode_input(arguments: Mapping[str, Any], field: str = "input") -> bytes:
    """The arguments of a job as JSON; an Input if more is to be known of it."""
    if _SCALARS.issuperset(map(type, arguments.values())):
        return encode(arguments, field)
    placed: dict[str, None] = {}
    token = _placed.set(placed)
    try:
        data = encode(arguments, field)
        in_order = _encode_in_order(arguments)
    finally:
        _placed.reset(token)
    if not placed and in_order == data:
        return data
    made = Input(data)
    made.in_order = in_order
    if not placed:
        return made
    found = {name: list(references(part)) for name, part in msgspec.json.decode(data).items()}
    for name, jobs in found.items():
        if any(job_id not in placed for job_id in jobs):
            raise InvalidRequest(f"{field}.{name}", f"the key {RESULT_OF!r} is for penstock.value")
    made.results_of = tuple(placed)
    made.open_names = frozenset(name for name, jobs in found.items() if jobs)
    return made


def encode_result(value: Any, field: str = "result") -> tuple[bytes, str]:
    """A value that stands for itself: as the bytes of its own media type, or as JSON."""
    codec = _codec(type(value)) if type(value) not in _PLAIN else None
    if codec is None or codec.media_type is None:
        return encode(value, field), JSON
    try:
        return bytes(_to_plain(value)), codec.media_type
    except _ERRORS as error:
        raise _refusal(value, field, error) from None


_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_PLAIN = _SCALARS | {list, dict, tuple, set}


def _refusal(value: Any, field: str, error: Exception) -> InvalidRequest:
    """The refusal of a value that has no JSON form, naming the innermost part that is to blame."""
    for depth in range(_MAX_DEPTH):
        for step, part in _parts(value):
            try:
                _encode(part)
            except _ERRORS as own:
                if depth and isinstance(own, RecursionError):
                    continue  # it contains itself: its parts are no better
                value, field, error = part, field + step, own
                break
        else:
            break
    if isinstance(error, RecursionError):
        return InvalidRequest(
            field, "can't be stored as JSON: it is nested too deeply, or contains itself"
        )
    if inspect.iscoroutine(value):
        value.close()
    hint = "penstock.values.register adds a type" if isinstance(error, TypeError) else ""
    return InvalidRequest(field, f"can't be stored as JSON: {error}", hint=hint)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of, with the step that leads there."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f".{key}", item
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield f".{name}", getattr(value, name)
    elif is_dataclass(value):
        for one in fields(value):
            yield f".{one.name}", getattr(value, one.name, None)
    else:
        for one in getattr(type(value), "__attrs_attrs__", ()):
            yield f".{one.name}", getattr(value, one.name, None)


# -- from JSON ------------------------------------------------------------------------------------


def _from_plain(kind: Any, plain: Any) -> Any:
    """What msgspec asks for a type that it does not know."""
    cls = typing.get_origin(kind) or kind
    if isinstance(cls, _AnyOf):
        return cls.read(plain)
    codec = _codec(cls)
    if codec is None:
        raise ValueError(f"a {cls.__qualname__} can't be read from JSON")
    try:
        if codec.form is not Any:
            plain = convert(plain, codec.form)
    except msgspec.ValidationError as error:
        raise ValueError(f"expected {cls.__qualname__}: {lowered(str(error))}") from None
    try:
        return codec.decode(plain)
    except Exception as error:
        raise ValueError(f"expected {cls.__qualname__}: {error}") from error


def convert(plain: Any, kind: Any) -> Any:
    """Read what was decoded from JSON as a type. Raises msgspec.ValidationError."""
    return msgspec.convert(plain, kind, str_keys=True, dec_hook=_from_plain)


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """How to read JSON as a type that `readable` gave."""
    return msgspec.json.Decoder(kind, dec_hook=_from_plain).decode


def readable(kind: Any) -> Any:
    """The type, in a form that `decoder` and `convert` can read.

    Raises TypeError with the reason if values of the type can't be read from JSON.
    """
    kind = _adapted(kind)
    info = msgspec.inspect.type_info(kind)
    msgspec.json.Decoder(kind)  # refuses what it can't read
    for cls in _unknown_types(info, set()):
        if not isinstance(cls, _AnyOf) and _codec(cls) is None:
            raise TypeError(f"type {cls.__qualname__} is not supported")
    return kind


def json_schema(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type that `readable` gave, as plain JSON; empty where it has none.

    A type that only a codec can read is described by its name.
    """
    try:
        schema = msgspec.json.schema(kind, schema_hook=_titled)
        plain: dict[str, Any] = msgspec.json.decode(encode(schema, "schema"))
    except (TypeError, ValueError, RecursionError, InvalidRequest):
        return {}
    return flat_schema(plain)


def _titled(kind: Any) -> dict[str, Any]:
    return {"title": getattr(kind, "__name__", str(kind))}


def flat_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema, with what a `$ref` at its root names in place of that reference."""
    definitions = dict(schema.get("$defs", {}))
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name not in definitions:
        return dict(schema)
    flat = dict(definitions[name])
    if f'"#/$defs/{name}"'.encode() not in msgspec.json.encode(definitions):
        del definitions[name]
    return flat | ({"$defs": definitions} if definitions else {})


def _unknown_types(info: Any, seen: set[int]) -> Iterator[type]:
    """The types within a type that msgspec asks us about."""
    if id(info) in seen:  # a type may contain itself
        return
    seen.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType):
        yield info.cls
    parts = info if isinstance(info, tuple) else ()
    if isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        parts = tuple(getattr(info, name) for name in info.__struct_fields__)
    for part in parts:
        yield from _unknown_types(part, seen)


class _AnyOf(type):
    """A union that msgspec can't tell apart by the JSON alone, such as that of two dataclasses:
    the first member that a value can be read as."""

    members: tuple[Any, ...]

    def read(cls, plain: Any) -> Any:
        for member in cls.members:
            try:
                return convert(plain, member)
            except msgspec.ValidationError:
                continue
        raise ValueError(f"expected {cls.__name__}")

    def __instancecheck__(cls, value: Any) -> bool:
        return True


def _adapted(kind: Any) -> Any:
    """The type, with each union that msgspec does not support replaced."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if not args or origin is typing.Literal:
        return kind
    if origin is typing.Annotated:
        return typing.Annotated[(_adapted(args[0]), *kind.__metadata__)]
    inner = tuple(_adapted(arg) for arg in args)
    if origin is typing.Union or origin is types.UnionType:
        return _union(inner)
    return kind if inner == args else origin[inner]


def _union(members: tuple[Any, ...]) -> Any:
    whole: Any
    try:
        whole = functools.reduce(operator.or_, members)
        msgspec.json.Decoder(whole)
    except TypeError:
        own = tuple(member for member in members if member is not types.NoneType)
        name = " | ".join(getattr(member, "__qualname__", str(member)) for member in own)
        whole = _AnyOf(name, (), {"members": own})
        return whole if len(own) == len(members) else whole | None
    return whole


class Reader:
    """Reads a stored result as one type; without a type it is plain JSON, or what the media type
    says."""

    def __init__(self, kind: Any = Any) -> None:
        """Raises TypeError for a type that can't be read."""
        self.kind = readable(kind)
        self._decode = decoder(self.kind)

    def read(self, data: bytes, media_type: str = JSON, field: str = "result") -> Any:
        """Raises InvalidRequest, with the path from `field` on, for what is not of the type."""
        if media_type == JSON:
            try:
                return self._decode(data)
            except (ValueError, RecursionError) as error:
                raise refusal(error, field) from None
        codec = _codec_for(media_type)
        if codec is None:
            return data
        try:
            value = codec.decode(data)
        except Exception as error:
            raise InvalidRequest(field, f"can't be read as {media_type}: {error}") from error
        try:
            return msgspec.convert(value, self.kind, dec_hook=_as_it_is)
        except msgspec.ValidationError as error:
            raise refusal(error, field) from None


def _as_it_is(kind: Any, value: Any) -> Any:
    return value


PLAIN = Reader()


# -- refusals -------------------------------------------------------------------------------------

_WHERE = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`")


def refusal(error: Exception, field: str, names: tuple[str, ...] = ()) -> InvalidRequest:
    """The refusal of JSON that can't be read as its type, from what msgspec raised.

    msgspec's ``Expected `str`, got `int` - at `$.text` `` becomes ``input.text: expected str, got
    int`` for the field `input`. `names` are the fields that there are at the top.
    """
    if not isinstance(error, msgspec.ValidationError):
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return InvalidRequest(field, f"is not valid JSON: {why}")
    where = _WHERE.fullmatch(str(error))
    what, path = (where["what"], where["path"] or "") if where else (str(error), "")
    if missing := _MISSING.fullmatch(what):
        return InvalidRequest(f"{field}{path}.{missing['name']}", "is missing")
    if unknown := _UNKNOWN.fullmatch(what):
        return unexpected(f"{field}{path}", unknown["name"], () if path else names)
    what = lowered(what)
    return InvalidRequest(field + path, f"in a key, {what}" if where and where["key"] else what)


def unexpected(field: str, name: str, names: tuple[str, ...]) -> InvalidRequest:
    return InvalidRequest(f"{field}.{name}", "unexpected", hint=did_you_mean(name, names))


def lowered(text: str) -> str:
    text = text.replace("`", "")
    return text[:1].lower() + text[1:]
