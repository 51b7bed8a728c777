"""What a model's file says of itself, told from its header alone."""

from __future__ import annotations

import os
import re
import stat
from functools import lru_cache
from pathlib import Path

import msgspec

from penstock.workloads.llm.models.header import Header, Malformed, Value
from penstock.workloads.llm.models.quants import FILE_TYPES
from penstock.workloads.llm.values import LlmCode, LlmFailure, ModelFacts, is_model_name

SUFFIX = ".gguf"
_LONGEST_NAME = 120
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


class GgufFacts(ModelFacts, frozen=True, kw_only=True):
    """What is known of a model that is not loaded."""

    layers: int = 0
    embedding_length: int = 0
    kv_bytes_per_token: int = 0
    """What its cache takes for each token of context, at two bytes a number; less if some of its
    layers look at a window only."""
    chat_template: bool = False
    embeds: bool = False
    """Whether it was made for embeddings, and can't answer."""
    projector: bool = False
    """Whether it is no model, but what gives one eyes or ears."""


def read_facts(path: Path) -> GgufFacts:
    """Raises LlmFailure: MODEL_NOT_FOUND, or MODEL_INVALID with what is wrong with it. What was
    read is remembered for as long as the file stays as it is."""
    try:
        # Not a FIFO: opening one would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LlmFailure(LlmCode.MODEL_NOT_FOUND, f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise _invalid(path, f"can't be read: {_why(error)}") from error
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise _invalid(path, "is no regular file")
        facts = _remembered(str(path.absolute()), state.st_ino, state.st_size, state.st_mtime_ns)
    finally:
        os.close(descriptor)
    sees = not facts.projector and projector_of(path) is not None
    return msgspec.structs.replace(facts, vision=True) if sees else facts


@lru_cache(maxsize=256)
def _remembered(path: str, _inode: int, size: int, _changed: int) -> GgufFacts:
    try:
        with open(path, "rb", buffering=0) as file:
            header = Header(file, size, _is_wanted)
        return _facts(Path(path), header)
    except Malformed as problem:
        raise _invalid(Path(path), str(problem)) from None
    except OSError as error:
        raise _invalid(Path(path), f"can't be read: {_why(error)}") from error


def name_for(path: Path) -> str:
    """The name of the model in a file: that of the file, as far as a name may be like it."""
    stem = path.name[: -len(SUFFIX)] if path.name.lower().endswith(SUFFIX) else path.name
    words = [re.sub(r"[^A-Za-z0-9_-]+", "-", word).strip("-") for word in stem.split(".")]
    name = ".".join(word for word in words if word)[:_LONGEST_NAME].rstrip(".")
    return name if is_model_name(name) else "model"


def projector_of(path: Path) -> Path | None:
    """The file beside a model that has `mmproj` and the model's whole name in its own; where that
    holds for several models, it belongs to the one with the longest name."""
    try:
        names = sorted(name for name in os.listdir(path.parent) if name.lower().endswith(SUFFIX))
    except OSError:
        return None
    models = sorted({path.name, *(name for name in names if not is_projector(name))})
    found = [
        name
        for name in names
        if is_projector(name)
        and path.name == max((one for one in models if _names(name, one)), key=len, default="")
    ]
    return path.parent / min(found, key=len) if found else None


def _names(projector: str, model: str) -> bool:
    stem = re.escape(model.lower().removesuffix(SUFFIX))
    return re.search(rf"(?<![a-z0-9]){stem}(?![a-z0-9])", projector.lower()) is not None


def is_projector(name: str) -> bool:
    """Whether a file's name says that it is a projector's."""
    return "mmproj" in name.lower() and name.lower().endswith(SUFFIX)


def _is_wanted(key: str) -> bool:
    return key in _KEYS or key.endswith(_ENDINGS)


def _facts(path: Path, header: Header) -> GgufFacts:
    said = _Said(header)
    if header.needed > header.size:
        raise Malformed(
            f"is cut off: its tensors end at {header.needed:,} bytes and it has {header.size:,}"
        )
    parts = said.number("split.count")
    if parts > 1:
        raise Malformed(
            f"is part {said.number('split.no') + 1} of {parts}: llama-gguf-split --merge joins them"
        )
    projector = said.architecture == "clip" or said.text("general.type") == "mmproj"
    return GgufFacts(
        name=name_for(path),
        path=str(path),
        size=header.size,
        architecture=said.architecture,
        parameters=header.parameters,
        quantisation=said.quantisation(),
        train_context=said.own("context_length"),
        layers=said.own("block_count"),
        embedding_length=said.own("embedding_length"),
        kv_bytes_per_token=0 if projector else said.kv_bytes(),
        chat_template=bool(said.text("tokenizer.chat_template")),
        embeds=said.own("pooling_type") > 0,
        projector=projector,
    )


class _Said:
    """A header's metadata, each value checked to be what its key promises."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self.architecture = self.text("general.architecture")
        if not self.architecture or not header.parameters:
            raise Malformed("holds no model: it names no architecture, or has no tensors")

    def text(self, key: str) -> str:
        value = self._header.metadata.get(key, "")
        return value if isinstance(value, str) else self._refuse(key, value)

    def number(self, key: str) -> int:
        value = self._header.metadata.get(key, 0)
        if isinstance(value, tuple):
            value = max(value, default=0)
        if not isinstance(value, int) or not 0 <= value <= _MOST:
            self._refuse(key, value)
        return int(value)

    def own(self, ending: str) -> int:
        return self.number(f"{self.architecture}.{ending}")

    def quantisation(self) -> str:
        """As people call it, or the type that most of the file is in."""
        by_type = self._header.bytes_by_type
        most = by_type.most_common(1)[0][0]
        return FILE_TYPES.get(self.number("general.file_type"), most) if self._is_typed() else most

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
        value = self._header.metadata.get(key)
        if isinstance(value, tuple):
            if any(not 0 <= one <= _MOST for one in value):
                self._refuse(key, value)
            return sum(value)
        return layers * (heads if value is None else self.number(key))

    def _is_typed(self) -> bool:
        return "general.file_type" in self._header.metadata

    def _refuse(self, key: str, value: Value) -> str:
        raise Malformed(f"is damaged: {key[:80]} is {str(value)[:40]!r}")


def _invalid(path: Path, problem: str) -> LlmFailure:
    return LlmFailure(LlmCode.MODEL_INVALID, f"{path.name or path} {problem}", path=str(path))


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
