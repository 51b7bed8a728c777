"""The nodes of a network, as one of them (or an observer) knows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.workloads.pipes.net.records import NodeRecord


class Table:
    """One record for each node: the newest. Pure; its user decides which records to trust."""

    def __init__(self, records: Iterable[NodeRecord] = ()) -> None:
        self._records: dict[str, NodeRecord] = {}
        for record in records:
            self.apply(record)

    def apply(self, record: NodeRecord) -> bool:
        """Take a record unless an equally new one is there; whether it was taken."""
        known = self._records.get(record.node_id)
        if known is not None and _age(record) <= _age(known):
            return False
        self._records[record.node_id] = record
        return True

    def lose(self, node_id: str, boot: str = "") -> NodeRecord | None:
        """Forget a node; with `boot`, only if it is that process. Gives what was known."""
        known = self._records.get(node_id)
        if known is None or (boot and known.boot != boot):
            return None
        return self._records.pop(node_id)

    def get(self, node_id: str) -> NodeRecord | None:
        return self._records.get(node_id)

    def live(self) -> tuple[NodeRecord, ...]:
        """All of them, by id."""
        return tuple(self._records[n] for n in sorted(self._records))

    def of(self, model: str) -> tuple[NodeRecord, ...]:
        """Those that have to do with a model: hold layers of it, or its ends, or were started
        for it."""
        return tuple(
            r for r in self.live() if model == r.model or model in r.end_models or r.of(model)
        )

    def models(self) -> tuple[str, ...]:
        names = {r.model for r in self._records.values() if r.model}
        for record in self._records.values():
            names.update(record.end_models)
            names.update(s.model for s in record.segments)
        return tuple(sorted(names))

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._records

    def __iter__(self) -> Iterator[NodeRecord]:
        return iter(self.live())

    def __len__(self) -> int:
        return len(self._records)


def _age(record: NodeRecord) -> tuple[str, int]:
    return record.boot, record.version
