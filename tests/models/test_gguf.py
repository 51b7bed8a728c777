"""What a model's header says, and what is refused."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from tests.support.models import gguf

from penstock.models.facts import GgufFacts, name_for, projector_of, read_facts
from penstock.workloads.llm.values import LlmCode, LlmFailure

LLAMA = {
    "llama.context_length": 4096,
    "llama.embedding_length": 64,
    "llama.block_count": 3,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
}


def facts_of(folder: Path, data: bytes, name: str = "m.gguf") -> GgufFacts:
    file = folder / name
    file.write_bytes(data)
    return read_facts(file)


def refusal_of(folder: Path, data: bytes) -> str:
    with pytest.raises(LlmFailure) as refused:
        facts_of(folder, data)
    assert refused.value.code is LlmCode.MODEL_INVALID
    assert refused.value.message.startswith("m.gguf ")
    return refused.value.message


def test_the_cache_is_counted_over_layers_with_heads_of_their_own(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, gguf({**LLAMA, "llama.attention.head_count_kv": [2, 0, 8]}))
    assert facts.kv_bytes_per_token == 2 * (8 + 8) * (2 + 0 + 8)


def test_the_cache_is_counted_with_lengths_of_its_own(tmp_path: Path) -> None:
    lengths = {"llama.attention.key_length": 32, "llama.attention.value_length": 16}
    facts = facts_of(tmp_path, gguf({**LLAMA, **lengths}))
    assert facts.kv_bytes_per_token == 2 * (32 + 16) * 2 * 3


def test_without_shared_heads_all_of_them_are_counted(tmp_path: Path) -> None:
    without = {key: value for key, value in LLAMA.items() if "kv" not in key}
    assert facts_of(tmp_path, gguf(without)).kv_bytes_per_token == 2 * (8 + 8) * 8 * 3


def test_keys_of_another_architecture_don_t_count(tmp_path: Path) -> None:
    assert facts_of(tmp_path, gguf({"qwen2.context_length": 77})).train_context == 0


@pytest.mark.parametrize(("kind", "name"), [(15, "Q4_K_M"), (7, "Q8_0"), (999, "F32")])
def test_how_it_is_stored_goes_by_the_file_s_type_or_by_most_of_it(
    kind: int, name: str, tmp_path: Path
) -> None:
    assert facts_of(tmp_path, gguf({"general.file_type": kind})).quantisation == name


def test_a_model_for_embeddings_says_so(tmp_path: Path) -> None:
    assert facts_of(tmp_path, gguf({"llama.pooling_type": 1})).embeds


def test_a_projector_is_no_model(tmp_path: Path) -> None:
    assert facts_of(tmp_path, gguf({"general.architecture": "clip"})).projector
    assert facts_of(tmp_path, gguf({"general.type": "mmproj"})).projector


def test_a_tensor_of_a_type_that_is_not_known_is_let_pass(tmp_path: Path) -> None:
    data = gguf()
    at = data.index(b"blk.1.weight") + len("blk.1.weight") + 4 + 8
    facts = facts_of(tmp_path, data[:at] + struct.pack("<I", 1234) + data[at + 4 :])
    assert facts.parameters == 64 * 32 + 32


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    assert facts_of(tmp_path, gguf({"llama.context_length": 1})).train_context == 1
    assert facts_of(tmp_path, gguf({"llama.context_length": 2, "x": 1})).train_context == 2


def of_unknown_type(dimensions: tuple[int, ...]) -> bytes:
    data = gguf(tensors=((dimensions, 0),), data=False)
    at = data.index(b"blk.0.weight") + len("blk.0.weight") + 4 + 8 * len(dimensions)
    return data[:at] + struct.pack("<I", 1234) + data[at + 4 :]


CLAIMS = {
    "wrong magic": (b"GGML" + gguf()[4:], "not a GGUF"),
    "empty": (b"", "not a GGUF"),
    "three bytes": (b"GGU", "not a GGUF"),
    "magic alone": (b"GGUF", "cut off"),
    "text": (b"hello, I am a model", "not a GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(99), "big-endian"),
    "version one": (gguf(version=1), "version 1"),
    "version of tomorrow": (gguf(version=9), "version 9"),
    "huge count of tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1), "tensors"),
    "huge count of keys": (b"GGUF" + struct.pack("<IQQ", 3, 1, (1 << 64) - 1), "keys"),
    "more keys than bytes": (b"GGUF" + struct.pack("<IQQ", 3, 1, 60_000) + bytes(999), "keys"),
    "huge key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60) + bytes(99), "cut off"),
    "long key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 70_000) + bytes(80_000), "70000"),
    "no tensors": (gguf(tensors=()), "holds no model"),
    "no architecture": (gguf({"general.architecture": ""}), "holds no model"),
    "number for a text": (gguf({"general.architecture": 7}), "general.architecture"),
    "text for a number": (gguf({"llama.block_count": "many"}), "llama.block_count"),
    "impossible number": (gguf({"llama.block_count": 1 << 31}), "llama.block_count"),
    "alignment": (gguf({"general.alignment": 3}), "aligns"),
    "no data": (gguf(data=False), "cut off"),
    "five dimensions": (gguf(tensors=(((1, 1, 1, 1, 1), 0),)), "5 dimensions"),
    "endless tensor": (gguf(tensors=(((1 << 60, 1 << 60), 0),), data=False), "cut off"),
    "endless tensor of an unknown type": (of_unknown_type((1 << 60, 1 << 60)), "values"),
    "control characters": (gguf({"general.architecture": "\x1b[31m"}), "general.architecture"),
    "long architecture": (gguf({"general.architecture": "x" * 99_999}), "general.architecture"),
    "endless lists": (
        gguf({f"m{number}.context_length": [0] * 65_000 for number in range(17)}),
        "lists of numbers",
    ),
    "a part of it": (gguf({"split.count": 3, "split.no": 1}), "part 2 of 3"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_is_no_whole_model_is_refused_with_its_reason(claim: str, tmp_path: Path) -> None:
    data, reason = CLAIMS[claim]
    assert reason in refusal_of(tmp_path, data)


def with_value(kind: int, rest: bytes) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    return head + struct.pack("<I", kind) + rest


VALUES = {
    "unknown type": with_value(13, bytes(64)),
    "list of lists": with_value(9, struct.pack("<IQ", 9, 1) + bytes(64)),
    "endless string": with_value(8, struct.pack("<Q", 1 << 60)),
    "endless list of numbers": with_value(9, struct.pack("<IQ", 10, 1 << 61)),
    "endless list of strings": with_value(9, struct.pack("<IQ", 8, 1 << 60) + bytes(64)),
    "string in a list is endless": with_value(9, struct.pack("<IQQ", 8, 2, 1 << 63) + bytes(64)),
    "fewer strings than claimed": with_value(9, struct.pack("<IQ", 8, 1000) + bytes(64)),
}


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_can_t_be_is_refused(value: str, tmp_path: Path) -> None:
    refusal_of(tmp_path, VALUES[value])


def test_the_same_key_twice_is_refused(tmp_path: Path) -> None:
    data = gguf({"llama.block_count": 1, "llama.block_counx": 2})
    assert "twice" in refusal_of(tmp_path, data.replace(b"block_counx", b"block_count"))


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    for path in (tmp_path / "fifo.gguf", tmp_path / "folder.gguf", Path("/dev/zero")):
        with pytest.raises(LlmFailure, match="not a regular file"):
            read_facts(path)
    with pytest.raises(LlmFailure, match="can't be read"):
        read_facts(tmp_path / "loop.gguf")
    with pytest.raises(LlmFailure, match="can't be read"):
        read_facts(Path("nul\0byte.gguf"))


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(LlmFailure) as missing:
        read_facts(tmp_path / "none.gguf")
    assert missing.value.code is LlmCode.MODEL_NOT_FOUND


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Qwen2.5-0.5B-Instruct-Q4_K_M.gguf", "Qwen2.5-0.5B-Instruct-Q4_K_M"),
        ("my model (1).GGUF", "my-model-1"),
        ("a..b.gguf", "a.b"),
        ("modèle.gguf", "mod-le"),
        ("模型.gguf", "model"),
        (".gguf", "model"),
        ("x" * 300 + ".gguf", "x" * 120),
    ],
    ids=lambda text: text[:12] if text.isascii() else "not-ascii",
)
def test_a_model_is_called_as_its_file_is_as_far_as_that_can_be(file: str, name: str) -> None:
    assert name_for(Path(file)) == name


def test_a_projector_is_found_beside_its_model_and_no_other(tmp_path: Path) -> None:
    eyes = tmp_path / "mmproj-llava-7b-f16.gguf"
    eyes.touch()
    assert projector_of(tmp_path / "llava-7b.gguf") == eyes
    assert projector_of(tmp_path / "llava.gguf") == eyes
    assert projector_of(tmp_path / "lava-7b.gguf") is None
    assert projector_of(tmp_path / "llava-70b.gguf") is None
    assert projector_of(tmp_path / "none" / "llava.gguf") is None
    assert facts_of(tmp_path, gguf(), "llava-7b.gguf").vision
    assert not facts_of(tmp_path, gguf(), "llava.gguf").vision
