"""The node of an executor."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.workloads.llm.runner import Loading
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.runner import PipeRunner


class NodeHost:
    """See `penstock.workloads.pipes.executor.Host`."""

    def __init__(self, config: LpConfig) -> None:
        self._node = Node(config)
        self.runner = PipeRunner(self._node)
        self._joined: set[str] = set()

    @property
    def node_id(self) -> str:
        return self._node.node_id

    @property
    def address(self) -> str:
        return self._node.address

    async def start(self, told: Loading) -> None:
        await self._node.start(told)

    def records(self) -> Iterable[NodeRecord]:
        return self._node.mesh.table.live()

    def join(self, addresses: Iterable[str]) -> None:
        known = {record.address for record in self.records()}
        new = set(addresses) - known - self._joined
        self._joined |= new
        self._node.mesh.join(new)

    async def stop(self) -> None:
        await self.runner.close()
