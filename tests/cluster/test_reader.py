"""A job is read by a process that is none of its ranks, beside its training: ckptd_client.open(job) (P1, P5, P9)."""

from __future__ import annotations

import collections
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ckptd_client
import pytest
import torch
from ckptd_client import CkptdError
from ckptd_client.reader import Reading
from torch import Tensor

from ckptd.wire import rank as wire
from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.waiting import until

JOB = "read"
SAVES = 60
READS = 8
FEW = 16  # descriptors that come and go with saves
WEIGHT, OWN = "model.0.weight", "model.1.running_mean"


def trained(nodes: Cluster, count: int, level: str, **settings: Any) -> tuple[list[Node], list[Trainer], list[str]]:
    """Step 3 of an FSDP2 model whose ranks have BatchNorm statistics of their own."""
    made = nodes.several(count, **settings)
    world = nodes.world(made, JOB, kind="statistics")
    together(world, "restore")
    together(world, "train", steps=3, snapshot=False)
    parts = [str(part) for part in together(world, "bytes_of", name="0.weight")]
    together(world, "snapshot", must=True)
    assert all(level in str(said) for said in together(world, "wait", level=level))
    return made, world, parts


def opened(node: Node, **how: Any) -> Any:
    return ckptd_client.open(JOB, socket=node.socket, **how)


def rows_of(found: Any, first: int, rows: int) -> Tensor:
    """Of the weight, 64 wide."""
    out = torch.empty(rows, 64)
    found.read([(WEIGHT, (first, 0), (rows, 64), out)])
    return out


def opens(node: Node) -> int:
    """How many descriptors its daemon has."""
    return len(os.listdir(f"/proc/{node.daemon_pid()}/fd"))


def first_bytes(values: Tensor) -> str:
    return bytes(values.contiguous().view(-1).view(torch.uint8)[:64].tolist()).hex()


def test_boxes_of_a_running_job_are_read_from_outside(nodes: Cluster) -> None:
    """From either node, whatever rank holds them; the job's ranks go on, and restore what they would have."""
    made, world, parts = trained(nodes, 2, "protected")
    statistics = together(world, "statistics")
    for node in made:
        with opened(node) as found:
            assert (found.step, found.world, found.tensors[WEIGHT]) == (3, 2, (torch.float32, (64, 64)))
            assert [first_bytes(rows_of(found, 32 * rank, 32)) for rank in range(2)] == parts
            whole, half = rows_of(found, 0, 64), torch.empty(64, 32, dtype=torch.float64)
            found.read([(WEIGHT, (0, 16), (64, 32), half)])
            assert torch.equal(half, whole[:, 16:48].double())
            with pytest.raises(CkptdError, match="each rank had its own"):
                found.read([(OWN, (0,), (64,), torch.empty(64))])
            for rank in range(2):
                own, row = torch.empty(64), torch.empty(1, 64)
                found.read([(OWN, (0,), (64,), own), (WEIGHT, (9, 0), (1, 64), row)], rank=rank)
                assert own.tolist() == statistics[rank][0] and torch.equal(row, whole[9:10])
            assert found["extra.loader"] == {"at": 24} and len(found["optimizer.groups"]["groups"]) == 1
            with pytest.raises(CkptdError, match="not in step 3"):
                found.read([("model.nothing", (0,), (1,), torch.empty(1))])
    with opened(made[0]) as before:
        for step in range(4, 9):
            assert together(world, "train", steps=1)[0]["step"] == step
            said = together(world, "wait", level="protected")
            assert all("protected" in str(one) for one in said), (step, said, together(world, "health"))
            with opened(made[1]) as found:
                assert found.step == step and first_bytes(rows_of(found, 0, 32)) != parts[0]
        assert [first_bytes(rows_of(before, 32 * rank, 32)) for rank in range(2)] == parts, "kept for its reader"


@pytest.mark.chaos
def test_a_dead_node_is_read_from_its_peer_and_dead_memory_from_storage(nodes: Cluster, tmp_path: Path) -> None:
    made, world, parts = trained(nodes, 2, "protected", storage_root=nodes.root / "storage")
    assert all("durable" in str(said) for said in together(world, "wait", level="durable"))  # which may come before its copies
    for trainer in world:
        trainer.kill()
    made[1].kill()
    with opened(made[0], source="memory") as found:
        assert [first_bytes(rows_of(found, 32 * rank, 32)) for rank in range(2)] == parts
    with pytest.raises(CkptdError, match="step 9 cannot be read"):
        opened(made[0], step=9)
    made[0].kill()
    fresh = nodes.node(storage_root=nodes.root / "storage")
    with opened(fresh) as found:
        assert found.step == 3 and [first_bytes(rows_of(found, 32 * rank, 32)) for rank in range(2)] == parts
    with pytest.raises(CkptdError, match="nothing of this job is known"):
        ckptd_client.open("other", socket=fresh.socket)


def test_each_step_that_is_read_beside_saves_is_that_step(nodes: Cluster) -> None:
    """Never torn: every element tells the step that it is of."""
    made = nodes.several(2)
    world = nodes.world(made, JOB, kind="explicit")
    together(world, "save", step=0)
    with opened(made[0]), opened(made[1]):
        few = {node.name: opens(node) for node in made}
    seen: dict[int, int] = {}
    refused: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(lambda: [together(world, "save", step=step) for step in range(1, SAVES + 1)])
        while not saving.done():
            try:
                with opened(made[len(seen) % 2]) as found:
                    rows, common = torch.empty(6, 40), torch.empty(500, 40)
                    found.read([("rows", (0, 0), (6, 40), rows), ("common", (0, 0), (500, 40), common)])
                    assert found["plan"] == f"of {found.step}".encode() and found["own"] == {0: b"rank 0", 1: b"rank 1"}
            except CkptdError as error:
                refused.append(str(error))  # it was replaced meanwhile, or none is there yet
                continue
            parts = [torch.arange(120.0).view(3, 40) + 1000 * rank + found.step for rank in range(2)]
            assert torch.equal(rows, torch.cat(parts)) and torch.equal(common, torch.full((500, 40), float(found.step)))
            seen[found.step] = seen.get(found.step, 0) + 1
        assert saving.result()[-1] == [None, None]
    assert len(seen) >= 3 and sorted(seen) == list(seen), (seen, collections.Counter(refused))
    for node in made:
        assert not re.search("never awaited|Traceback|internal", node.log.read_text()), node.log.read_text()[-2000:]
        until(lambda node=node: opens(node) <= few[node.name] + FEW, what="readers to leave no descriptors behind")  # type: ignore[misc]


def test_a_reader_that_ends_while_it_asks_leaves_nothing_behind(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both words are read in one turn of the daemon's: what it began for the first is called off before it has begun."""
    made, _, _ = trained(nodes, 1, "sealed", replicas=0)
    say = Reading._say
    before = opens(made[0])

    def dies(reading: Reading, message: object, fds: list[int] | None = None) -> None:
        if isinstance(message, wire.Wants):
            made[0].signal_daemon(signal.SIGSTOP)
        say(reading, message, fds)
        if isinstance(message, wire.Wants):
            raise KeyboardInterrupt

    monkeypatch.setattr(Reading, "_say", dies)
    for _ in range(READS):
        with pytest.raises(KeyboardInterrupt), opened(made[0]) as found:
            rows_of(found, 0, 64)
        made[0].signal_daemon(signal.SIGCONT)
    until(lambda: opens(made[0]) < before + READS, what="what was asked for to be closed")


@pytest.mark.chaos
def test_what_peers_have_is_read_before_what_no_peer_has_yet(nodes: Cluster) -> None:
    """Of that training lets go as soon as it lacks the slot, whoever reads it. Who names a step gets it."""
    made = [nodes.node(start=False).start(failpoint="protect.push:sleep=3") for _ in range(2)]
    world = nodes.world(made, JOB, kind="statistics")
    together(world, "restore")
    together(world, "train", steps=1)
    assert all("protected" in str(said) for said in together(world, "wait", level="protected"))
    together(world, "train", steps=1)
    assert all("sealed" in str(said) for said in together(world, "wait", level="sealed"))
    with opened(made[0]) as found, opened(made[1], step=2) as newest:
        assert (found.step, newest.step) == (1, 2)


@pytest.mark.chaos
def test_threads_share_a_reading_and_an_answer_that_comes_late_is_not_taken_for_the_next_ones(nodes: Cluster) -> None:
    made, world, parts = trained(nodes, 1, "sealed", replicas=0)
    daemon = made[0].daemon_pid()
    with opened(made[0]) as found:
        whole = rows_of(found, 0, 64)
        assert first_bytes(whole) == parts[0]
        with ThreadPoolExecutor(4) as pool:
            rows = list(pool.map(lambda first: rows_of(found, first, 1), range(64)))
        assert torch.equal(torch.cat(rows), whole)
        row = torch.empty(1, 64)
        for out in (row.numpy(), row[:, :1].expand(1, 64), row.to_sparse(), row.to("meta")):
            with pytest.raises(CkptdError, match=WEIGHT):
                found.read([(WEIGHT, (0, 0), (1, 64), out)])
        os.kill(daemon, signal.SIGSTOP)
        try:
            found._timeout_s = 0.2
            with pytest.raises(CkptdError, match="no answer"):
                rows_of(found, 0, 1)
        finally:
            os.kill(daemon, signal.SIGCONT)
        with pytest.raises(CkptdError, match="did not come to its end"):
            rows_of(found, 1, 1)
    with opened(made[0]) as found:
        assert torch.equal(rows_of(found, 1, 1), whole[1:2])
        world[0].kill()
        until(lambda: made[0].cli("forget", JOB).returncode == 0, what="the job to be forgotten")
        with pytest.raises(CkptdError, match="holds nothing of the job any more"):
            rows_of(found, 1, 1)


@pytest.mark.chaos
def test_what_training_has_let_go_of_is_not_read_to_its_end(nodes: Cluster) -> None:
    """Never torn: it is said. Storage has none of it, and of two slots neither is kept for a reader."""
    made, world, parts = trained(nodes, 1, "sealed", replicas=0, own_slots=2)
    with opened(made[0]) as found:
        assert first_bytes(rows_of(found, 0, 64)) == parts[0]
        for _ in range(4):
            together(world, "train", steps=1, snapshot=False)
            together(world, "snapshot", must=True)
            together(world, "wait", level="sealed")
        with pytest.raises(CkptdError, match="nowhere to be had"):
            rows_of(found, 0, 64)
    with opened(made[0]) as found:
        assert found.step == 7
