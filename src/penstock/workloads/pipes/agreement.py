"""Whether nodes that hold a model of one name hold the same model. Pure.

Each node tells a fingerprint of every layer it holds. One layer that differs is enough: such a
node has other weights, also where nobody can compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.workloads.pipes.net.records import NodeRecord, SegmentRecord, ranges_of, written

Held = Sequence[tuple[NodeRecord, SegmentRecord]]


def distrust(
    model: str, num_layers: int, held: Held, origin: str, reference: Sequence[str]
) -> dict[str, str]:
    """Nodes that no job of `origin` may use, each with the reason.

    What the origin holds itself is right for it, then what it knows (`reference`, "" where it
    does not); beyond that, what most nodes have.
    """
    found: dict[str, str] = {}
    prints: dict[str, dict[int, str]] = {}
    for record, segment in held:
        node_id, layers = record.node_id, range(segment.layers.start, segment.layers.end)
        if segment.num_layers != num_layers or segment.layers.end > num_layers:
            found[node_id] = (
                f"{node_id} has a {model} of {segment.num_layers} layers, not of {num_layers}"
            )
        if len(segment.fingerprints) != len(layers):
            found[node_id] = f"{node_id} tells no fingerprints"
        prints.setdefault(node_id, {}).update(zip(layers, segment.fingerprints, strict=False))
    own = {n: seen for n, seen in enumerate(reference) if seen} | prints.pop(origin, {})
    voters = {n: seen for n, seen in prints.items() if n not in found}
    for node_id, seen in list(voters.items()):
        wrong = [n for n, print_ in seen.items() if own.get(n, print_) != print_]
        if wrong:
            found[node_id] = _differs(node_id, wrong)
            del voters[node_id]
    found.update(_outvoted(voters))
    return dict(sorted(found.items()))


def _outvoted(voters: dict[str, dict[int, str]]) -> dict[str, str]:
    """Those who have to go until all that are left agree: first who differs from most in most
    layers."""
    found: dict[str, str] = {}
    while True:
        wrong = _against_most(voters)
        if not wrong:
            return found
        worst = max(wrong, key=lambda node_id: (len(wrong[node_id]), node_id))
        found[worst] = _differs(worst, wrong[worst])
        voters = {node_id: seen for node_id, seen in voters.items() if node_id != worst}


def _against_most(voters: dict[str, dict[int, str]]) -> dict[str, list[int]]:
    """Who is not with most, and in which layers."""
    votes: dict[int, Counter[str]] = {}
    for seen in voters.values():
        for layer, print_ in seen.items():
            votes.setdefault(layer, Counter())[print_] += 1
    disputed = {
        layer: min(counted, key=lambda one: (-counted[one], one))
        for layer, counted in votes.items()
        if len(counted) > 1
    }
    wrong: dict[str, list[int]] = {}
    for layer, most in disputed.items():
        for node_id, seen in voters.items():
            if seen.get(layer, most) != most:
                wrong.setdefault(node_id, []).append(layer)
    return wrong


def _differs(node_id: str, layers: Sequence[int]) -> str:
    return f"layers {written(ranges_of(layers))} of {node_id} have other weights"
