"""A model whose layers are sums, and a ring of nodes that compute with it, all in one thread.

What a layer makes of a position depends on all positions before it, so a chunk that is missing,
repeated or out of order shows in the answer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.lifecycles.processor import ProcessorEvent
from penstock.workloads.llm.values import LlmFailure
from penstock.workloads.pipes.config import LayerRange, LpConfig
from penstock.workloads.pipes.end_model import EndModel
from penstock.workloads.pipes.job import ComputeStep, Hop, Job, JobTable, JobTime, OriginText
from penstock.workloads.pipes.network_job import NetworkJob, pack_steps
from penstock.workloads.pipes.pipe import Pipe
from penstock.workloads.pipes.receiver import JobReceiver
from penstock.workloads.pipes.scheduler import PassScheduler
from penstock.workloads.pipes.text.sampler import Chosen

HIDDEN = 4
PRIME = 1009


def layer_sum(values: Sequence[int], layer: int) -> list[int]:
    total, out = 0, []
    for value in values:
        total += value
        out.append((value + total * (layer + 1)) % PRIME)
    return out


def answer(prompt: Sequence[int], count: int, layers: int) -> list[int]:
    """What the unsplit model says."""
    ids = list(prompt)
    for _ in range(count):
        values = ids
        for layer in range(layers):
            values = layer_sum(values, layer)
        ids.append(values[-1])
    return ids[len(prompt) :]


class SumCache:
    def __init__(self, layers: int, capacity: int = 4096) -> None:
        self.capacity = capacity
        self.filled = dict.fromkeys(range(layers), 0)
        self.sums = {layer: [0] * (capacity + 1) for layer in range(layers)}

    def remember(self, layer: int, start: int, states: torch.Tensor) -> None:
        """Nothing is lost here."""


class SumModel:
    """Layers `start` to `end`. `raises` is asked before each pass."""

    def __init__(self, start: int, end: int, num_layers: int) -> None:
        self.layers, self.num_layers = LayerRange(start, end), num_layers
        self.passes: list[tuple[int, int, list[Job], list[int]]] = []
        """First layer, end, jobs, and how many tokens of each."""
        self.raises: Callable[[Sequence[Job]], Exception | None] = lambda jobs: None

    def process_jobs(self, jobs: Sequence[Job], end: int) -> None:
        first = jobs[0].current_layer
        assert all(job.current_layer == first for job in jobs)
        assert self.layers.start <= first < end <= self.layers.end
        if error := self.raises(jobs):
            raise error
        self.passes.append((first, end, list(jobs), [job.count for job in jobs]))
        for job in jobs:
            self._process(job, end)

    def _process(self, job: Job, end: int) -> None:
        cache: Any = job.cache
        assert job.data is not None
        assert job.data.shape == (job.count, HIDDEN)
        values = [int(value) for value in job.data[:, 0]]
        for layer in range(job.current_layer, end):
            assert job.start <= cache.filled[layer], "a gap"
            sums, out = cache.sums[layer], []
            for at, value in enumerate(values, job.start):
                sums[at + 1] = sums[at] + value
                out.append((value + sums[at + 1] * (layer + 1)) % PRIME)
            cache.filled[layer] = job.start + job.count
            values = out
        job.data = rows(values)
        job.current_layer = end
        job.compute_step = ComputeStep.HEAD if end == self.num_layers else ComputeStep.LAYER


class SumEnds:
    def __init__(self) -> None:
        self.heads: list[int] = []
        """How many positions went through the head at once."""
        self.raises: Callable[[int], Exception | None] = lambda rows: None

    def embed(self, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        assert len(ids) == len(positions)
        return rows(ids)

    def norm(self, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        assert len(x) == len(positions)
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        if error := self.raises(x.shape[0]):
            raise error
        self.heads.append(x.shape[0])
        return x


class Likeliest:
    """A sampler. Its `raises` is asked before each choice."""

    def __init__(self) -> None:
        self.raises: Callable[[], Exception | None] = lambda: None

    def choose(self, logits: torch.Tensor, ids: Sequence[int]) -> Chosen:
        if error := self.raises():
            raise error
        return Chosen(int(logits[0]))


def rows(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, HIDDEN)


def config_of(node_id: str = "A", **options: Any) -> LpConfig:
    return LpConfig(model="sums", source=Path("sums"), node_id=node_id, **options)


def text_of(prompt: Sequence[int], count: int, **more: Any) -> tuple[OriginText, list[int]]:
    """What the origin knows of a job, and where its tokens are told."""
    told: list[int] = []

    def on_token(job: Job, token: int, logprobs: Any) -> bool:
        told.append(token)
        return True

    values: dict[str, Any] = {"on_token": on_token, "sampler": Likeliest(), **more}
    return OriginText(None, list(prompt), len(prompt), count, **values), told


class Stand:
    """A node without a network: what it sends lies in the ring until it is carried."""

    def __init__(
        self, ring: Ring, node_id: str, segments: Sequence[Any], end_model: bool, **options: Any
    ) -> None:
        self.ring, self.node_id, self.segments = ring, node_id, list(segments)
        self.config = config_of(node_id, **options)
        self.ends = ring.make_ends()
        self.jobs, self.refused = JobTable(), Counter[str]()
        self.compute = PassScheduler(self, self.config)
        end = EndModel(self.ends, lambda text: [int(word) for word in text.split()])
        self.receiver = JobReceiver(
            self.config,
            self.jobs,
            self.compute,
            ring.hidden,
            self.refused,
            end if end_model else None,
        )
        self.ends_told: list[tuple[ProcessorEvent, str]] = []
        self.failures: list[tuple[bytes, str, int, LlmFailure]] = []

    def open(self, job_id: bytes, hops: Sequence[Hop], **more: Any) -> Job:
        text = more.get("text")
        step = ComputeStep.LAYER if text is None else ComputeStep.TOKENIZE
        own = [n for hop in hops if hop.node_id == self.node_id for n in range(hop.start, hop.end)]
        cache = self.ring.make_cache(own)
        job = Job(
            job_id,
            "pipe",
            "sums",
            self.ring.origin,
            tuple(hops),
            compute_step=step,
            cache=cache,
            text=text,
        )
        pipe = Pipe(
            "pipe", "sums", hops, self.ring.layers, self.node_id, self.segments, self.compute
        )
        self.jobs.add(job, pipe)
        return job

    # What the thread that computes calls.

    def send(self, node_id: str, jobs: Sequence[NetworkJob]) -> None:
        payload = bytearray(b"".join(pack_steps(jobs)))
        self.ring.frames += 1
        self.ring.carry(
            self.node_id,
            node_id,
            lambda to: to.receiver.receive(memoryview(payload), self.node_id),
        )

    def acked(self, origin: str, job_id: bytes, sequence: int, times: Sequence[JobTime]) -> None:
        self.ring.landings += 1
        self.ring.carry(
            self.node_id,
            origin,
            lambda to: to.compute.acked(to.receiver.context(job_id), sequence, times),
        )

    def done(self, job: Job, event: ProcessorEvent, reason: str) -> None:
        self.ends_told.append((event, reason))

    def failed(self, job_id: bytes, origin: str, sequence: int, failure: LlmFailure) -> None:
        self.failures.append((job_id, origin, sequence, failure))


class Ring:
    """Nodes A (the origin), B, C ... and what is between them."""

    hidden = HIDDEN

    def make_segment(self, start: int, end: int) -> Any:
        return SumModel(start, end, self.layers)

    def make_ends(self) -> Any:
        return SumEnds()

    def make_cache(self, layers: Sequence[int]) -> Any:
        return SumCache(self.layers)

    def __init__(self, layers: int, held: dict[str, Sequence[tuple[int, int]]], **options: Any):
        self.layers, self.origin = layers, "A"
        self.frames = self.landings = 0
        self.route: dict[tuple[str, str], deque[Callable[[Stand], None]]] = {}
        self.nodes = {
            node_id: Stand(
                self,
                node_id,
                [self.make_segment(start, end) for start, end in ranges],
                node_id == "A",
                **options,
            )
            for node_id, ranges in held.items()
        }
        for one in self.nodes:
            for other in self.nodes:
                self.route[one, other] = deque()

    def begin(
        self, hops: Sequence[Hop], prompt: Sequence[int], count: int, **more: Any
    ) -> tuple[Job, list[int]]:
        """A job on its way: as its origin knows it, and where its tokens are told."""
        text, told = text_of(prompt, count, **more)
        number = len(self.nodes["A"].jobs) + 1
        job_id = number.to_bytes(16, "big")
        for node_id in sorted({hop.node_id for hop in hops} - {"A"}):
            self.nodes[node_id].open(job_id, hops)
        job = self.nodes["A"].open(job_id, hops, text=text)
        self.nodes["A"].compute.begin(self.nodes["A"].receiver.context(job_id))
        return job, told

    def carry(self, sender: str, to: str, act: Callable[[Stand], None]) -> None:
        """It lies there, behind what was sent before, until its turn comes."""
        self.route[sender, to].append(act)

    def choices(self) -> list[Callable[[], None]]:
        """All that could happen next."""
        could: list[Callable[[], None]] = [
            node.compute.round for node in self.nodes.values() if not node.compute.is_idle
        ]
        for (_, to), lying in self.route.items():
            if lying:
                could.append(lambda lying=lying, to=to: lying.popleft()(self.nodes[to]))  # type: ignore[misc]
        return could

    def run(self, pick: Callable[[int], int] = lambda count: 0) -> None:
        """Until nothing is left to happen. `pick` says which of so many comes next."""
        with torch.inference_mode():
            while could := self.choices():
                could[pick(len(could))]()
