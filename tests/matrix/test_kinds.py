"""Each kind of parallelism into the logical tensors and back, in 1, 2, 3, 4 and 6 ranks; then named pairs of kinds, end to end.

What a cell proves: what storage holds of a kind's snapshot is, element by element, what torch gathers of that kind; what one
process saved comes back into the kind; and both train on as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster, Node
from tests.matrix.kinds.cells import Cell, differing, launch, stored, values

pytestmark = pytest.mark.timeout(1500)
PRECISION = 1e-4  # of a loss whose sums other ranks made in another order
EVERYWHERE = ("DDP", "FSDP2", "HSDP")
ENGINES = ("FSDP1", "FSDP1 (use_orig_params)", "ZeRO-1", "ZeRO-2", "ZeRO-3", "Megatron's distributed optimizer")
LINES = ("plain", *EVERYWHERE, "CP", "TP", "PP", *ENGINES)
SQUARES = ("FSDP2xTP", "PPxFSDP2")
OTHERS = [
    *(("tied", kind) for kind in (*EVERYWHERE, "FSDP1", "ZeRO-1")), ("mixture", "FSDP2"),
    *(("adapted", kind) for kind in ("FSDP2", "DDP", "FSDP1 (use_orig_params)", "ZeRO-2", "ZeRO-3")),
]  # fmt: skip
REFERENCES = ("llama", "tied", "mixture", "adapted", "sparse", "fused")


def cells(ranks: int) -> list[Cell]:
    kinds = [*LINES, *(SQUARES if ranks in (4, 6) else ())]
    found = [Cell(kind, "llama", ranks) for kind in kinds] + [Cell("EP", "sparse", ranks), Cell("TP by rules", "fused", ranks)]
    return found + [Cell(kind, model, ranks) for model, kind in OTHERS if ranks in (2, 3)]


def agree(rows: list[dict[str, Any]], expected: list[float], name: str) -> None:
    assert rows[0][name] == pytest.approx(expected, rel=PRECISION)
    assert all(row[name] == rows[0][name] for row in rows)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_a_kind_is_its_logical_tensors_and_comes_from_them(
    nodes: Cluster, tmp_path: Path, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    storage = nodes.root / "storage"
    storage.mkdir()
    node = nodes.node(replicas=0, storage_root=storage, memory_budget="1GiB")
    references = [Cell("plain", model, 1) for model in REFERENCES]
    (*alone,) = launch([node], 1, tmp_path, [cell.save("durable") for cell in references])
    of = {cell.model: (cell, rows[0]) for cell, rows in zip(references, alone, strict=True)}
    mine = [cell for cell in cells(ranks) if cell not in references]
    orders = [cell.save("durable") for cell in mine] + [cell.restore(of[cell.model][0]) for cell in mine]
    rows = launch([node], ranks, tmp_path, orders)
    for cell, saved, back in zip(mine, rows[: len(mine)], rows[len(mine) :], strict=True):
        origin, reference = of[cell.model]
        agree(saved, reference["before"], "before")
        assert {row["step"] for row in back} == {2}
        agree(back, reference["after"], "after")
        out = differing(values(tmp_path, cell.job), stored(storage, cell.job))
        into = differing(values(tmp_path, origin.job), values(tmp_path, f"{origin.job}.into.{cell.job}"))
        record_property("cell", [*cell, saved[0]["how"], out, into])
        assert (out, into) == (0, 0), cell
    for cell in references if ranks == 1 else ():
        assert differing(values(tmp_path, cell.job), stored(storage, cell.job)) == 0


TIERS: dict[str, list[tuple[Cell, Cell]]] = {
    tier: [(Cell(a, model, m), Cell(b, model, n)) for a, m, b, n, model in pairs]
    for tier, pairs in {
        "peer": [
            ("DDP", 4, "FSDP2", 2, "llama"), ("FSDP2", 4, "TP", 3, "llama"), ("TP", 4, "PP", 2, "llama"),
            ("PP", 4, "HSDP", 2, "llama"), ("FSDP2xTP", 4, "PP", 3, "llama"), ("PPxFSDP2", 4, "FSDP2", 3, "llama"),
            ("HSDP", 4, "PP", 3, "llama"), ("EP", 4, "EP", 2, "sparse"), ("FSDP2", 4, "DDP", 3, "mixture"),
            ("DDP", 4, "HSDP", 2, "tied"),
        ],
        "storage": [
            ("FSDP2", 3, "FSDP2xTP", 4, "llama"), ("PP", 3, "PPxFSDP2", 4, "llama"), ("TP", 3, "FSDP2", 4, "llama"),
            ("HSDP", 2, "CP", 4, "llama"), ("CP", 2, "PP", 4, "llama"), ("DDP", 3, "TP", 4, "llama"), ("EP", 3, "EP", 4, "sparse"),
            ("FSDP2", 2, "HSDP", 4, "tied"), ("DDP", 2, "FSDP2", 4, "adapted"), ("FSDP2", 3, "DDP", 4, "mixture"),
        ],
        "own": [
            ("FSDP2", 4, "FSDP2", 4, "llama"), ("TP", 4, "TP", 4, "llama"), ("PP", 4, "PP", 4, "llama"),
            ("PPxFSDP2", 4, "FSDP2xTP", 4, "llama"), ("FSDP2xTP", 4, "PPxFSDP2", 4, "llama"), ("HSDP", 4, "DDP", 4, "llama"),
            ("EP", 4, "EP", 4, "sparse"), ("CP", 4, "HSDP", 4, "llama"), ("FSDP2", 4, "FSDP2", 4, "adapted"),
            ("DDP", 4, "FSDP2", 4, "mixture"),
        ],
    }.items()
}  # fmt: skip
LEVEL = {"peer": "protected", "storage": "durable", "own": "sealed"}


@pytest.mark.parametrize("tier", TIERS)
def test_thirty_pairs_end_to_end(
    nodes: Cluster, tmp_path: Path, tier: str, record_property: Callable[[str, object], None]
) -> None:
    """From a peer's memory alone (one of two nodes died, there is no storage), from storage alone (both died), from its own."""
    pairs = TIERS[tier]
    assert len(pairs) == 10
    where = nodes_of(nodes, tier)
    before: dict[Cell, list[dict[str, Any]]] = {}
    for ranks in sorted({source.ranks for source, _ in pairs}):
        sources = [source for source, _ in pairs if source.ranks == ranks]
        before |= zip(sources, launch(where, ranks, tmp_path, [cell.save(LEVEL[tier]) for cell in sources]), strict=True)
    where = after_the_failure(nodes, tier)
    for ranks in sorted({target.ranks for _, target in pairs}):
        chosen = [pair for pair in pairs if pair[1].ranks == ranks]
        rows = launch(where, ranks, tmp_path, [target.restore(source) for source, target in chosen])
        for (source, target), back in zip(chosen, rows, strict=True):
            assert {row["step"] for row in back} == {2}
            agree(back, before[source][0]["after"], "after")
            if source.kind == target.kind and source.ranks == target.ranks:
                assert back[0]["after"] == before[source][0]["after"], "the same sums in the same order"
            count = differing(values(tmp_path, source.job), values(tmp_path, f"{source.job}.into.{target.job}"))
            record_property("pair", [tier, *source, *target, count])
            assert count == 0, (source, target)


def nodes_of(nodes: Cluster, tier: str) -> list[Node]:
    if tier == "peer":
        return nodes.several(2, replicas=1, memory_budget="2GiB")  # eight jobs of 134 MiB and a third slot of one
    if tier == "storage":
        (nodes.root / "storage").mkdir()
        return nodes.several(2, replicas=0, storage_root=nodes.root / "storage", memory_budget="1GiB")
    return [nodes.node(replicas=0, memory_budget="1GiB")]


def after_the_failure(nodes: Cluster, tier: str) -> list[Node]:
    first, *others = nodes.nodes
    if tier == "peer":
        first.kill()
        return others
    if tier == "storage":
        for node in (first, *others):
            node.kill()
        return [nodes.node(replicas=0, storage_root=nodes.root / "storage", memory_budget="1GiB")]
    return [first]
