"""A node that computes nothing: for tests of what is around one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from msgspec.structs import replace
from tests.support.fake_llm import FakeRunner

from penstock.workloads.llm.runner import Loading, ProgressListener
from penstock.workloads.llm.values import (
    Completion,
    Delta,
    EmbeddingRequest,
    EmbeddingResult,
    GenerationRequest,
    HopTime,
    LlmCode,
    LlmFailure,
)
from penstock.workloads.pipes.config import LayerRange, LpConfig
from penstock.workloads.pipes.net.records import NodeRecord, SegmentRecord, SegmentState

HOPS = (
    HopTime(node="a", layers="0-1", compute_ms=2.0, queue_ms=0.5, passes=3, tokens=5),
    HopTime(node="b", layers="2-3", compute_ms=3.0, network_ms=0.25, passes=3, tokens=5),
)


def a_node(
    node_id: str,
    layers: tuple[int, int] | None = None,
    *,
    model: str = "fake",
    of: int = 4,
    mark: str = "w",
    ready: bool = True,
    end_model: bool = False,
    local_layers: int = 0,
    **figures: object,
) -> NodeRecord:
    """A node with one segment at most, of a model with `of` layers; `mark` tells weights apart."""
    segments: tuple[SegmentRecord, ...] = ()
    if layers is not None:
        start, end = layers
        segments = (
            SegmentRecord(
                model=model,
                layers=LayerRange(start, end),
                num_layers=of,
                fingerprints=tuple(f"{mark}{n}" for n in range(start, end)) if ready else (),
                state=SegmentState.READY if ready else SegmentState.LOADING,
                loaded=end - start if ready else 0,
                dtype="float32",
                layer_ms=1.0,
            ),
        )
    record = NodeRecord(
        node_id=node_id,
        address=f"{node_id}.example:7000",
        boot="1",
        model=model,
        num_layers=of,
        end_models=(model,) if end_model else (),
        local_layers=local_layers,
        segments=segments,
    )
    return replace(record, **figures)


class WatchedRunner(FakeRunner):
    """Answers like a FakeRunner, after telling what a split model tells, and says its hops."""

    engine = "fake pipes 1"

    async def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        if watch is not None:
            watch.progress(None, "waits for room on node b")
            watch.log("node c was lost; going on over node b", "warning")
            watch.progress(0.5, "read 1 of 2 tokens")
        async with aclosing(super().generate(model, ask, choice)) as pieces:
            async for piece in pieces:
                yield replace(piece, hops=HOPS) if isinstance(piece, Completion) else piece

    async def embed(self, model: str, ask: EmbeddingRequest) -> EmbeddingResult:
        raise LlmFailure(LlmCode.NOT_SUPPORTED, "a split model makes no embeddings")


class FakeHost:
    """See `penstock.workloads.pipes.executor.Host`."""

    def __init__(
        self,
        config: LpConfig,
        runner: FakeRunner | None = None,
        records: Sequence[NodeRecord] = (),
        failure: Exception | None = None,
    ) -> None:
        self.config = config
        self.node_id = config.node_id or "a"
        self.address = f"{self.node_id}.example:7000"
        self.runner = runner or WatchedRunner((config.model,))
        self._records, self._failure = tuple(records), failure
        self.joined: list[tuple[str, ...]] = []
        self.running = False
        self.stopped = 0

    async def start(self, on_progress: Loading) -> None:
        on_progress(0.0, "loading")
        if self._failure is not None:
            raise self._failure
        on_progress(1.0, "loaded")
        self.running = True

    def records(self) -> Iterable[NodeRecord]:
        return self._records

    def join(self, addresses: Iterable[str]) -> None:
        self.joined.append(tuple(addresses))

    async def stop(self) -> None:
        self.running = False
        self.stopped += 1
        await self.runner.close()
