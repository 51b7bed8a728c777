"""What the file of a model says of itself, read from its header alone."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from penstock.models.gguf import (
    SUFFIX,
    GgufHeader,
    Malformed,
    Value,
    open_regular,
    part_paths,
    stem_of,
)
from penstock.models.values import LlmCode, LlmFailure, ModelFacts, is_model_name

_LONGEST_NAME = 120
_ARCHITECTURE = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MOST = 1 << 24
"""Nothing that is counted in a model (layers, heads, lengths) is more."""
_KEYS = {
    "general.architecture",
    "general.type",
    "general.file_type",
    "general.alignment",
    "split.count",
    "split.no",
    "tokenizer.chat_template",
}
_ENDINGS = (
    ".context_length",
    ".embedding_length",
    ".block_count",
    ".pooling_type",
    ".attention.head_count",
    ".attention.head_count_kv",
    ".attention.key_length",
    ".attention.value_length",
)
_FILE_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0",
    8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M",
    18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16",
    36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0",
}  # fmt: skip
"""A file's type: what people call the mixture that its tensors are stored in."""


class GgufFacts(ModelFacts, frozen=True, kw_only=True):
    """What is known of a model that is not loaded."""

    layers: int = 0
    embedding_length: int = 0
    kv_bytes_per_token: int = 0
    """What its KV cache takes for each token of context, at two bytes a number; less if some of
    its layers look at a window only."""
    chat_template: bool = False
    embeds: bool = False
    """Whether it is an embedding model, and can't chat."""
    projector: bool = False
    """Whether it is no model, but the projector (mmproj) that gives one vision or audio."""
    parts: int = 1
    """Files that it is split into."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        if self.embeds:
            return ("embedding",)
        return ("chat" if self.chat_template else "completion", *(("vision",) * self.vision))


def read_facts(path: Path) -> GgufFacts:
    """Of a split model any part may be given; all have to be there.

    Raises LlmFailure: MODEL_NOT_FOUND, or MODEL_INVALID with what is wrong. What was read is
    remembered for as long as the files stay as they are.
    """
    try:
        files = part_paths(path)
    except Malformed as problem:
        raise _invalid(path, str(problem)) from None
    headers = [_header(file) for file in files]
    try:
        facts = _facts(files[0], headers)
    except Malformed as problem:
        raise _invalid(files[0], str(problem)) from None
    sees = not facts.projector and projector_of(path) is not None
    return msgspec.structs.replace(facts, vision=True) if sees else facts


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """As much of a file's header as its facts need."""

    size: int
    metadata: Mapping[str, Value]
    parameters: int
    bytes_by_type: Mapping[str, int]


def _header(path: Path) -> _Header:
    try:
        with open_regular(path) as file:
            state = os.fstat(file.fileno())
        absolute = str(path.absolute())
        return _remembered(absolute, state.st_ino, state.st_size, state.st_mtime_ns)
    except FileNotFoundError:
        raise LlmFailure(LlmCode.MODEL_NOT_FOUND, f"there is no file {path}") from None
    except Malformed as problem:
        raise _invalid(path, str(problem)) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise _invalid(path, f"can't be read: {why}") from error


@lru_cache(maxsize=256)
def _remembered(path: str, _inode: int, _size: int, _changed: int) -> _Header:
    header = GgufHeader(Path(path), _is_wanted)
    bytes_by_type: Counter[str] = Counter()
    for tensor in header.tensors.values():
        bytes_by_type[tensor.type_name] += tensor.size
    return _Header(
        size=header.size,
        metadata=header.metadata,
        parameters=sum(tensor.values for tensor in header.tensors.values()),
        bytes_by_type=bytes_by_type,
    )


def name_for(path: Path) -> str:
    """The name of the model in a file: the file's, as far as a model may have it."""
    words = [
        re.sub(r"[^A-Za-z0-9_-]+", "-", one).strip("-") for one in stem_of(path.name).split(".")
    ]
    name = ".".join(word for word in words if word)[:_LONGEST_NAME].rstrip(".")
    return name if is_model_name(name) else "model"


def projector_of(path: Path) -> Path | None:
    """The file beside a model that has `mmproj` and the model's whole name in its own; where that
    holds for several models, it belongs to the one with the longest name."""
    try:
        names = sorted(name for name in os.listdir(path.parent) if name.lower().endswith(SUFFIX))
    except OSError:
        return None
    own = stem_of(path.name)
    models = sorted({own, *(stem_of(name) for name in names if not is_projector(name))})
    found = [
        name
        for name in names
        if is_projector(name)
        and own == max((one for one in models if _names(name, one)), key=len, default="")
    ]
    return path.parent / min(found, key=len) if found else None


def _names(projector: str, stem: str) -> bool:
    pattern = rf"(?<![a-z0-9]){re.escape(stem.lower())}(?![a-z0-9])"
    return re.search(pattern, projector.lower()) is not None


def is_projector(name: str) -> bool:
    """Whether a file's name says that it is a projector's."""
    return "mmproj" in name.lower() and name.lower().endswith(SUFFIX)


def _is_wanted(key: str) -> bool:
    return key in _KEYS or key.endswith(_ENDINGS)


def _facts(path: Path, headers: Sequence[_Header]) -> GgufFacts:
    metadata = _Metadata(headers)
    projector = metadata.architecture == "clip" or metadata.text("general.type") == "mmproj"
    return GgufFacts(
        name=name_for(path),
        path=str(path),
        size=sum(one.size for one in headers),
        architecture=metadata.architecture,
        parameters=sum(one.parameters for one in headers),
        quantisation=metadata.quantisation(),
        train_context=metadata.own("context_length"),
        layers=metadata.own("block_count"),
        embedding_length=metadata.own("embedding_length"),
        kv_bytes_per_token=0 if projector else metadata.kv_bytes(),
        chat_template=bool(metadata.text("tokenizer.chat_template")),
        embeds=metadata.own("pooling_type") > 0,
        projector=projector,
        parts=len(headers),
    )


class _Metadata:
    """The metadata of a model's first file, each value checked to be what its key promises."""

    def __init__(self, headers: Sequence[_Header]) -> None:
        self._headers, self._values = headers, headers[0].metadata
        self.architecture = self.text("general.architecture")
        if not self.architecture or not any(one.parameters for one in headers):
            raise Malformed("holds no model: it names no architecture, or has no tensors")
        if not _ARCHITECTURE.fullmatch(self.architecture):
            self._refuse("general.architecture", self.architecture)
        parts = self.number("split.count")
        if parts > 1 and len(headers) != parts:
            raise Malformed(
                f"is part {self.number('split.no') + 1} of {parts} of a split model:"
                f" name the parts …-00001-of-{parts:05}{SUFFIX} and so on, in one folder"
            )

    def text(self, key: str) -> str:
        value = self._values.get(key, "")
        return value if isinstance(value, str) else self._refuse(key, value)

    def number(self, key: str) -> int:
        value = self._values.get(key, 0)
        if isinstance(value, tuple):
            value = max(value, default=0)
        if not isinstance(value, int) or not 0 <= value <= _MOST:
            self._refuse(key, value)
        return int(value)

    def own(self, ending: str) -> int:
        return self.number(f"{self.architecture}.{ending}")

    def quantisation(self) -> str:
        """The usual name of the mixture, or the type of most of the file."""
        by_type: Counter[str] = Counter()
        for one in self._headers:
            by_type.update(one.bytes_by_type)
        most = by_type.most_common(1)[0][0]
        typed = "general.file_type" in self._values
        return _FILE_TYPES.get(self.number("general.file_type"), most) if typed else most

    def kv_bytes(self) -> int:
        layers, heads = self.own("block_count"), max(1, self.own("attention.head_count"))
        usual = self.own("embedding_length") // heads
        each = (self.own("attention.key_length") or usual) + (
            self.own("attention.value_length") or usual
        )
        return 2 * each * self._kv_heads(layers, heads)

    def _kv_heads(self, layers: int, heads: int) -> int:
        """Those of all layers together; each may have its own number of them."""
        key = f"{self.architecture}.attention.head_count_kv"
        value = self._values.get(key)
        if isinstance(value, tuple):
            if any(not isinstance(one, int) or not 0 <= one <= _MOST for one in value):
                self._refuse(key, value)
            return int(sum(value))
        return layers * (heads if value is None else self.number(key))

    def _refuse(self, key: str, value: Value) -> str:
        raise Malformed(f"is damaged: {key[:80]} is {str(value)[:40]!r}")


def _invalid(path: Path, problem: str) -> LlmFailure:
    return LlmFailure(LlmCode.MODEL_INVALID, f"{path.name or path} {problem}", path=str(path))
