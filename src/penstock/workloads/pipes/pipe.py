"""A job's way over the nodes, as one of them sees it: what is local, and what is elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.workloads.pipes.job import ComputeStep, Hop, Job
from penstock.workloads.pipes.routes import check_hops

if TYPE_CHECKING:
    from penstock.workloads.pipes.llm_model import LlmModel
    from penstock.workloads.pipes.network_job import NetworkJob


class Outbox(Protocol):
    """What leaves a node. Never blocks."""

    def put(self, node_id: str, job: NetworkJob) -> None:
        """To be handed to that node."""

    def land(self, job: Job) -> None:
        """A pass that returns nothing has been through its last layer: its origin is to know."""


class Pipe:
    """From the first layer to the last. `segments` are those of this node when the job was opened:
    it keeps them, also if the node drops them."""

    def __init__(
        self,
        pipe_id: str,
        model_id: str,
        hops: Sequence[Hop],
        num_layers: int,
        node_id: str,
        segments: Sequence[LlmModel],
        outbox: Outbox,
    ) -> None:
        self.pipe_id, self.model_id, self.node_id = pipe_id, model_id, node_id
        self.hops, self.num_layers = tuple(hops), num_layers
        self.unavailable = check_hops(self.hops, num_layers) or ""
        """Why it can't be used."""
        self.released = ""
        """Why this node has no segment any more for some of it."""
        self._outbox = outbox
        self._at = {layer: hop for hop in self.hops for layer in range(hop.start, hop.end)}
        self._local = {
            layer: (segment, min(hop.end, segment.layers.end))
            for layer, hop in self._at.items()
            if hop.node_id == node_id
            for segment in reversed(segments)
            if layer in segment.layers
        }
        """By layer: the segment of this node, and how far it goes without leaving the hop."""
        self.window = 1 + sum(hop.node_id != node_id for hop in self.hops)
        """How many chunks of a prompt may be under way at once: one for each node elsewhere, and
        one between them."""

    @property
    def is_complete(self) -> bool:
        return not self.unavailable

    def hop_at(self, layer: int) -> Hop | None:
        """Who has this layer."""
        return self._at.get(layer)

    def is_local(self, layer: int) -> bool:
        hop = self._at.get(layer)
        return hop is not None and hop.node_id == self.node_id

    def local(self, layer: int) -> tuple[LlmModel, int] | None:
        """The segment of this node that computes this layer, and how far it goes from there
        without leaving the hop; None if it is virtual, that is on another node, or not loaded."""
        return self._local.get(layer)

    def release(self, layers: Collection[int], why: str) -> None:
        """This node drops these layers: a pass that comes for a hop over them finds none."""
        self.released = why
        for hop in self.hops:
            if any(hop.start <= layer < hop.end for layer in layers):
                for layer in range(hop.start, hop.end):
                    self._local.pop(layer, None)

    def before(self, layer: int, origin: str) -> str:
        """Which node hands over a job at this layer (the number of layers stands for the head)."""
        return self._at[layer - 1].node_id if layer > 0 else origin

    def destination(self, job: Job) -> str:
        """Where a job goes next: to its origin for the head, else to who has the next layer."""
        if job.compute_step is ComputeStep.HEAD:
            return job.origin_node_id
        return self._at[job.current_layer].node_id

    def send_job(self, job: NetworkJob, node_id: str) -> None:
        self._outbox.put(node_id, job)

    def land_job(self, job: Job) -> None:
        """Instead of hidden states that nobody needs."""
        self._outbox.land(job)
