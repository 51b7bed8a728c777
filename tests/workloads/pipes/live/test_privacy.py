"""What leaves the origin, byte by byte, and what a node that holds layers opens."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.support.chaos.pipes_network import Processes
from tests.support.chaos.pipes_nodes import WatchFiles
from tests.support.pipes.networks import LAYERS, Network, SmallModel, ranges
from tests.workloads.pipes.live.test_engine_nodes import answer_of, engine_of, settings

from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.ports.tls import SecureTransport
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import ChatRequest, LlmResult, Message, Sampling
from penstock.workloads.pipes.model.segment import Segment
from penstock.workloads.pipes.network_job import NetworkJob, unpack_steps
from penstock.workloads.pipes.weights.prepared import prepare
from penstock.workloads.pipes.weights.safetensors import INDEX
from penstock.workloads.pipes.weights.source import open_source
from penstock.workloads.pipes.wire.connection import Connection
from penstock.workloads.pipes.wire.messages import Kind

pytestmark = pytest.mark.timeout(120)

ORIGIN = "the-origin"
MARKER = "Zürich keeps a quick secret of 12 lazy foxes: 東京 漢字 xylophone"
JOB = "canonical-job-of-the-marker"
WINDOW = 4
EMBED = "model.embed_tokens.weight"
"""Numbers, or characters twice as many, that follow each other: what is looked for."""


class Tap:
    """All that one node sends: frames as they are before they are encrypted, and bytes as they
    leave."""

    def __init__(self, node_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: list[tuple[Kind, bytes]] = []
        self.raw: list[bytes] = []
        self.logits: list[torch.Tensor] = []
        write, made, head = Connection._write, SecureTransport.connection_made, Segment.head

        def tapped_write(it: Connection, kind: Kind, *buffers: Any) -> None:
            if it._hello.node_id == node_id:
                self.frames.append((kind, b"".join(buffers)))
            write(it, kind, *buffers)

        def tapped_made(it: SecureTransport, transport: Any) -> None:
            used_by = it._protocol
            ours = isinstance(used_by, Connection) and used_by._hello.node_id == node_id
            made(it, Tapped(transport, self.raw) if ours else transport)

        def tapped_head(it: Segment, x: torch.Tensor) -> torch.Tensor:
            logits = head(it, x)
            self.logits.append(logits.clone())
            return logits

        monkeypatch.setattr(Connection, "_write", tapped_write)
        monkeypatch.setattr(SecureTransport, "connection_made", tapped_made)
        monkeypatch.setattr(Segment, "head", tapped_head)

    @property
    def plain(self) -> bytes:
        return b"|".join(payload for _, payload in self.frames)

    def steps(self) -> list[NetworkJob]:
        return [
            job
            for kind, payload in self.frames
            if kind is Kind.STEPS
            for job in unpack_steps(memoryview(bytearray(payload)))
        ]


class Tapped:
    """A transport that keeps what is written."""

    def __init__(self, transport: Any, kept: list[bytes]) -> None:
        self._transport, self._kept = transport, kept

    def write(self, data: bytes) -> None:
        self._kept.append(bytes(data))
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def chat() -> ChatRequest:
    return ChatRequest(
        messages=(Message(role="user", content=MARKER),),
        max_tokens=12,
        sampling=Sampling(temperature=0),
        logprobs=0,
    )


def windows(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    yield from (values[at : at + size] for at in range(len(values) - size + 1))


def traces_of_text(text: str) -> Iterator[bytes]:
    for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le"):
        # Half of it is enough to know it by; its beginning may be a name that others have too.
        for part in windows(text, 2 * WINDOW):
            yield part.encode(encoding)  # type: ignore[attr-defined]


def traces_of_ids(ids: Sequence[int]) -> Iterator[bytes]:
    for part in windows(ids, WINDOW):
        for order in "<>":
            for form in "hHiIqQ":
                yield struct.pack(f"{order}{len(part)}{form}", *part)
        yield b"".join(msgspec.msgpack.encode(one) for one in part)
        yield b"".join(_varint(one) for one in part)
        for comma in (",", ", ", " "):
            yield comma.join(map(str, part)).encode()


def _varint(number: int) -> bytes:
    """As protobuf has it."""
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def traces_of_rows(rows: torch.Tensor) -> Iterator[bytes]:
    """Of a matrix: the first numbers of each row, and the last."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        numbers = rows.to(dtype).view(torch.uint8).numpy()
        size = WINDOW * dtype.itemsize
        for row in numbers[rows.abs().sum(dim=1).gt(0).numpy()]:
            yield row[:size].tobytes()
            yield row[-size:].tobytes()


def found(traces: Iterable[bytes], data: bytes) -> list[bytes]:
    return [trace for trace in traces if trace in data]


def random_looking(data: bytes) -> bool:
    """More than 7.9 bits in each byte."""
    counts = Counter(data)
    bits = -sum(n / len(data) * math.log2(n / len(data)) for n in counts.values())
    return bits > 7.9


async def answered(network: Network, folder: Path, **more: Any) -> LlmResult:
    """The marker, asked of an engine whose node is the origin."""
    (small, first, *_) = network.model, *network.nodes.values()
    mine = settings(
        folder,
        small,
        node__key=network.key,
        node__join=first.address,
        node__end_model="true",
        node__node_id=ORIGIN,
        node__prefill_chunk_size=16,
        **more,
    )
    async with engine_of(mine) as engine:
        payload = encode_data(msgspec.json.encode(chat()))
        request = JobRequest(job_id=JOB, topic="job.chat.tiny", context_ptr=payload)
        (job,) = await engine.api.submit([request])
        assert job.job_id == JOB
        return await answer_of(engine.api, job)


def ids_of(text: str, small: SmallModel) -> list[int]:
    return [int(one) for one in open_source(small.folder).tokenizer().encode(text)]


@pytest.mark.seed("000", "13.4")
@run_async
async def test_nothing_that_leaves_the_origin_tells_text_tokens_or_weights(
    tmp_path: Path, small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = Tap(ORIGIN, monkeypatch)
    async with Network(small) as network:
        for name, layers in zip("bc", ranges(2, 4, 6), strict=True):
            await network.add(name, layers)
        result = await answered(network, tmp_path, node__layers="0-1")
    said = result.choices[0].text
    assert {hop.node for hop in result.hops} == {ORIGIN, "b", "c"}
    assert {kind for kind, _ in tap.frames} >= {Kind.STEPS, Kind.OPEN, Kind.END, Kind.STATE}

    ids, answer = ids_of(MARKER, small), ids_of(said, small)
    assert min(len(ids), len(answer)) > WINDOW
    ends = open_source(small.folder).ends()
    secrets = {
        "the prompt": traces_of_text(MARKER),
        "the answer": traces_of_text(said),
        "tokens of the prompt": traces_of_ids(ids),
        "tokens of the answer": traces_of_ids(answer),
        "the embedding": traces_of_rows(ends[EMBED]),
        "the head": traces_of_rows(ends.get("lm_head.weight", ends[EMBED])),
        "logits": traces_of_rows(torch.cat(tap.logits)),
        "the job": (JOB.encode(),),
    }
    for what, traces in secrets.items():
        assert not found(traces, tap.plain), what


@run_async
async def test_without_layers_of_its_own_an_origin_would_send_embeddings(
    tmp_path: Path, small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is looked for above would be found."""
    tap = Tap(ORIGIN, monkeypatch)
    async with Network(small) as network:
        await network.add("b", *ranges(0, LAYERS))
        await answered(network, tmp_path, node__layers="none", node__local_layers=0)
    rows = open_source(small.folder).ends()[EMBED][sorted(set(ids_of(MARKER, small)))]
    assert len(found(traces_of_rows(rows), tap.plain)) >= 2 * len(rows)


@pytest.mark.seed("000", "18.11")
@run_async
async def test_what_leaves_the_origin_is_encrypted(
    tmp_path: Path, small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = Tap(ORIGIN, monkeypatch)
    async with Network(small) as network:
        await network.add("b", *ranges(2, 6))
        await answered(network, tmp_path, node__layers="0-1")
    raw = b"".join(tap.raw)
    assert len(raw) > len(tap.plain) > 0
    assert random_looking(raw)
    assert not random_looking(tap.plain)
    assert ORIGIN.encode() in tap.plain
    assert not found((ORIGIN.encode(), b"tiny", network.key.encode()), raw)
    states = [job.data for job in tap.steps() if job.data is not None]
    assert not found(traces_of_rows(torch.cat(states)), raw)


@pytest.mark.parametrize("local", [1, 3])
@run_async
async def test_hidden_states_leave_the_origin_after_its_own_layers_only(
    local: int, tmp_path: Path, small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = Tap(ORIGIN, monkeypatch)
    async with Network(small) as network:
        # It has the first layers too, and is not asked for them.
        await network.add("b", *ranges(0, LAYERS))
        await answered(network, tmp_path, node__layers="none", node__local_layers=local)
    steps = tap.steps()
    assert {job.current_layer for job in steps} == {local}
    prompt = (
        open_source(small.folder)
        .tokenizer()
        .apply_chat_template(
            [{"role": "user", "content": MARKER}], add_generation_prompt=True, return_dict=False
        )
    )
    sent = {
        job.start + row: job.data[row]
        for job in steps
        if job.data is not None
        for row in range(job.count)
    }
    with torch.inference_mode():
        told = small.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    for position in range(len(prompt)):
        torch.testing.assert_close(sent[position], told[local][0, position], rtol=1e-3, atol=1e-3)
        assert not torch.allclose(sent[position], told[0][0, position], rtol=0.1)


@pytest.mark.seed("000", "13.4")
@run_async
async def test_a_node_that_holds_layers_opens_these_and_nothing_of_text(
    tmp_path: Path, small: SmallModel, pipe_nursery: str
) -> None:
    folder = tmp_path / "prepared"
    prepare(open_source(small.folder), folder)
    async with Processes(pipe_nursery, folder) as network:
        origin = await network.origin(*ranges(0, 2))
        holder = await network.born("b")
        holder.tell(WatchFiles())
        await holder.start(network.config("b", *ranges(2, LAYERS)))
        network.nodes["b"] = holder
        await origin.until(lambda now: now.whole)
        await origin.ended(origin.ask(range(20, 40), 8))
        opened = {
            str(Path(file).relative_to(folder))
            for file in (await holder.now()).files
            if Path(file).is_relative_to(folder)
        }
        assert opened == {"config.json", INDEX} | {
            f"layer-{layer:03}.safetensors" for layer in range(2, LAYERS)
        }
        # Wherever they lie.
        assert not [file for file in (await holder.now()).files if "tokenizer" in file]


@run_async
async def test_a_node_that_holds_layers_needs_no_more_than_them(
    tmp_path: Path, small: SmallModel, pipe_nursery: str
) -> None:
    """As on a machine where nothing else was ever copied to."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    prepare(open_source(small.folder), whole)
    part.mkdir()
    for file in ("config.json", INDEX, "layer-002.safetensors", "layer-003.safetensors"):
        (part / file).write_bytes((whole / file).read_bytes())
    async with Processes(pipe_nursery, whole) as network:
        origin = await network.origin(*ranges(0, 2), *ranges(4, 6))
        await network.add("b", *ranges(2, 4), source=part)
        await origin.until(lambda now: now.whole)
        asked = origin.ask(range(20, 40), 8)
        await origin.ended(asked)
        assert asked.text == small.text(range(20, 40), 8)
