"""Flipped bits in the memory of live daemons: found before training sees them, set aside, another copy used (P10)."""

from __future__ import annotations

import os

from tests.cluster.damage import flip_in_file, flip_in_memory
from tests.cluster.nodes import Cluster, TrainerError, together
from tests.cluster.test_bad_restore import protected
from tests.waiting import until

JOB = "flip"
QUARANTINED = f'ckptd_quarantines_total{{job="{os.getuid()}/flip",where="memory"}}'


def test_a_flipped_bit_is_found_and_another_copy_used(nodes: Cluster) -> None:
    """P1, P10: first in own memory: the peer's copy serves. Then in that too: the older snapshot on storage. Then there too."""
    storage = nodes.root / "storage"
    storage.mkdir()
    first, second = nodes.several(2, storage_root=storage)
    world = nodes.world([first, second], JOB, kind="fsdp")
    together(world, "restore")
    older = protected(world)
    assert together(world, "wait", level="durable") == ["durable", "durable"]
    newest = protected(world)
    ours = bytes.fromhex(world[0].do("bytes_of", name="2.weight"))
    assert flip_in_memory(first.daemon_pid(), ours) == 1  # rank 0's own slot
    world = nodes.again(world)
    assert together(world, "restore") == [4, 4]
    assert together(world, "digest") == [newest, newest]
    moved = world[0].do("last_restore")["bytes"]
    assert moved["peer"] > 0 and moved["durable"] == 0
    assert first.metric(QUARANTINED) >= 1 and second.metric(QUARANTINED) == 0
    assert "slot" in first.problems()["damage"]
    # The copy that is left is hit as well: both ranks go back to the older snapshot, and are told what was passed over.
    until(lambda: first.job(JOB)["level"] == 1, 60, "its copy to be made again: else it is found damaged when it is sent")
    assert sum(flip_in_memory(node.daemon_pid(), ours) for node in (first, second)) >= 2
    world = nodes.again(world)
    assert together(world, "restore") == [2, 2]
    assert together(world, "digest") == [older, older]
    passed = world[1].do("last_restore")["passed_over"]
    assert any("step 4" in text for text in passed), passed
    # And when nothing is whole any more, that is an error on every rank and not a fresh start.
    for path in storage.rglob("*.safetensors"):
        flip_in_file(path)
    world = nodes.again(world)
    for error in together(world, "restore"):
        assert isinstance(error, TrainerError) and str(error).startswith("CkptdError"), error
