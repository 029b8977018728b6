"""Durable checkpoints in a bucket, end to end: real daemons and trainers, and moto's S3 server."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from safetensors.numpy import load

from ckptd.persist.names import DATA
from tests.cluster.nodes import Cluster, Trainer, TrainerError, together
from tests.object_server import Fault, FaultyServer, ObjectServer
from tests.waiting import until

JOB = "afar"
LARGE_VALUES = 6  # of "wide_ddp" that are worth passing on: two weights and their moments
LARGE = LARGE_VALUES * (2 << 20)  # bytes of them
AROUND_MAX = 1.25
LISTS_MAX, LISTS_OF_EPOCH_MAX = 60, 8  # of a restore: who claimed what is looked at again while it takes, 14 to 32 times were seen
POINTERS_READ_AGAIN = 6  # by who opens the step, and where two look at once
HEADER_BYTES_MAX = 4096  # of a data file, which lies in the window of what comes first


@pytest.mark.chaos
def test_durable_in_a_bucket_gives_the_step_back_after_everything_died(nodes: Cluster, bucket: str, objects: ObjectServer) -> None:
    """P4, P9, P12: fresh daemons, another world, the bucket alone, which stock tools read as well."""
    first, second = nodes.several(2, storage_root=bucket, keep_last=1)
    world = nodes.world([first, second], JOB, kind="fsdp")
    together(world, "restore")
    for _ in range(2):
        together(world, "train", steps=2)
        digests = together(world, "digest")
        assert all("durable" in str(answer) for answer in together(world, "wait", level="durable"))
    assert first.problems() == {} == second.problems()
    listed = lambda: [row["step"] for row in json.loads(first.cli("ls", bucket, "--json").stdout)["rows"]]  # noqa: E731
    until(lambda: listed() == [4], 45, "the older step to go")
    for gone in (*world, first, second):
        gone.kill()
    shown = first.cli("verify", bucket)
    assert shown.returncode == 0 and "step-0000000004" in shown.stdout, shown
    tensors = [load(objects.read(bucket, key)) for key in objects.keys(bucket) if key.endswith(DATA)]
    assert tensors and all(key.startswith(("model.", "optimizer.")) for found in tensors for key in found)
    fresh = nodes.node(storage_root=bucket)
    (alone,) = nodes.world([fresh], JOB, kind="fsdp")
    assert alone.do("restore") == 4
    assert alone.do("digest") == digests[0]
    moved = alone.do("last_restore")["bytes"]
    assert moved["durable"] > 0 and moved["own"] == moved["peer"] == 0


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        (Fault(status=404, code="NoSuchBucket"), "make the bucket"),
        (Fault(status=400, code="ExpiredToken"), "run out"),
        (Fault(status=500, code="InternalError"), "failed in itself"),
    ],
    ids=["no bucket", "credentials that ran out", "a broken store"],
)
def test_a_bucket_that_goes_away_and_comes_back(
    nodes: Cluster, bucket: str, objects: ObjectServer, fault: Fault, hint: str
) -> None:
    """P5, P14: training goes on, health says why nothing becomes durable; when the store answers again, durable follows."""
    assert hint in goes_away_and_comes_back(nodes, bucket, objects, fault)


def goes_away_and_comes_back(nodes: Cluster, bucket: str, objects: FaultyServer, fault: Fault) -> str:
    """What health says of it meanwhile."""
    node = nodes.node(storage_root=bucket, replicas=0, flush_every_steps=1)
    (trainer,) = nodes.world([node], JOB)
    trainer.do("restore")
    trainer.do("train", steps=1)
    assert trainer.do("wait", level="durable") == "durable"
    with objects.failing(lambda request: fault):
        until(lambda: trainer.do("train", steps=1) and "flush" in node.problems(), 90, "health to name it")
        said = str(node.problems()["flush"])
    newest = node.newest(JOB, "sealed")
    until(lambda: trainer.do("train", steps=1) and node.newest(JOB, "durable") >= newest, 90, "durable to follow")
    return said


def sent(objects: ObjectServer, since: int) -> int:
    """Bytes of data files that the server has sent, since so many requests."""
    return sum(request.sent for request in objects.requests[since:] if request.path.endswith(DATA))


def data_sizes(objects: ObjectServer, bucket: str) -> list[int]:
    name, _, prefix = bucket.removeprefix("s3://").partition("/")
    keys = [f"{prefix}/{key}" for key in objects.keys(bucket) if key.endswith(DATA)]
    return [objects.client.head_object(Bucket=name, Key=key)["ContentLength"] for key in keys]


def test_what_all_ranks_of_a_node_want_leaves_the_bucket_once(nodes: Cluster, bucket: str, objects: ObjectServer) -> None:
    """P9, P12: three replicas of one model, and memory that has nothing."""
    node = nodes.node(storage_root=bucket, replicas=0)
    world = nodes.world([node] * 3, JOB, kind="ddp")
    together(world, "restore")
    together(world, "train", steps=2)
    digests = together(world, "digest")
    assert all("durable" in str(answer) for answer in together(world, "wait", level="durable"))
    for gone in (*world, node):
        gone.kill()
    fresh = nodes.node(storage_root=bucket, replicas=0)
    again = nodes.world([fresh] * 3, JOB, kind="ddp")
    since = len(objects.requests)
    assert together(again, "restore") == [2] * 3 and together(again, "digest") == digests
    moved = [row["bytes"] for row in together(again, "last_restore")]
    (one,) = {row["durable"] + row["own"] for row in moved}
    assert sum(row["durable"] for row in moved) == one > 0
    sizes = data_sizes(objects, bucket)
    assert sent(objects, since) == sum(sizes), "files that are no longer than a window, each of them once"
    assert 0 <= sum(sizes) - one <= HEADER_BYTES_MAX * len(sizes)


def in_a_bucket(nodes: Cluster, bucket: str) -> tuple[list[Trainer], str]:
    """Three nodes with a replica each of a model whose weights and moments are of 2 MiB; step 2 is durable."""
    world = nodes.world(nodes.several(3, storage_root=bucket, replicas=0), JOB, kind="wide_ddp")
    together(world, "restore")
    together(world, "train", steps=2)
    (digest,) = set(together(world, "digest"))
    assert all("durable" in str(answer) for answer in together(world, "wait", level="durable"))
    return world, digest


def lost(world: list[Trainer]) -> None:
    for trainer in world:
        trainer.kill()
        trainer.node.kill()


def test_what_several_nodes_want_leaves_the_bucket_once(nodes: Cluster, bucket: str, objects: ObjectServer) -> None:
    """P9: of what is worth asking for. Each node reads a part, and passes it on."""
    world, digest = in_a_bucket(nodes, bucket)
    lost(world)
    again = nodes.world(nodes.several(3, storage_root=bucket, replicas=0), JOB, kind="wide_ddp")
    since = len(objects.requests)
    assert together(again, "restore") == [2] * 3 and together(again, "digest") == [digest] * 3
    moved = [row["bytes"] for row in together(again, "last_restore")]
    (whole,) = {sum(row.values()) for row in moved}
    assert sum(row["peer"] for row in moved) == 2 * LARGE
    assert sum(row["durable"] for row in moved) == LARGE + 3 * (whole - LARGE)
    assert all(trainer.node.problems() == {} for trainer in again)
    spans = Counter((request.path, request.span) for request in objects.requests[since:] if request.path.endswith(DATA))
    reads = {span: times for span, times in spans.items() if span[1]}
    assert reads and max(reads.values()) <= len(again), "no node asks for anything twice"
    # Small values lie between large ones: for them each node asks, and for some KB around.
    assert sum(row["durable"] for row in moved) <= sent(objects, since) <= sum(data_sizes(objects, bucket)) * AROUND_MAX


@pytest.mark.chaos
@pytest.mark.parametrize("action", ["error", "kill"])
def test_a_node_that_fails_while_it_passes_on(nodes: Cluster, bucket: str, action: str) -> None:
    """P1, P9: what it does not give the others read by themselves; when it dies the next start brings the step."""
    world, digest = in_a_bucket(nodes, bucket)
    lost(world)
    mark = nodes.root / "met"
    armed = f"restore.pass:{action}" + f"_once={mark}" * (action == "kill")
    made = [nodes.node(start=False, storage_root=bucket, replicas=0) for _ in range(3)]
    for node in made:
        node.start(failpoint=armed)
    again = nodes.world(made, JOB, kind="wide_ddp")
    restored = together(again, "restore")
    if action == "error":
        assert restored == [2] * 3
        assert sum(row["bytes"]["peer"] for row in together(again, "last_restore")) == 0
    else:
        assert mark.exists() and all(isinstance(answer, TrainerError) for answer in restored), restored
        again = nodes.again(again)
        assert together(again, "restore") == [2] * 3
    assert together(again, "digest") == [digest] * 3


def test_what_a_restore_has_read_is_there_for_the_next(nodes: Cluster, bucket: str, objects: ObjectServer) -> None:
    """P1, P9: a daemon that comes back without memory, beside its `cache_dir`; then one whose cache rotted."""
    settings: dict[str, Any] = {"storage_root": bucket, "replicas": 0, "cache_dir": nodes.root / "cache"}
    node = nodes.node(**settings)
    world = nodes.world([node] * 2, JOB, kind="fsdp")
    together(world, "restore")
    together(world, "train", steps=2)
    digests = together(world, "digest")
    assert all("durable" in str(answer) for answer in together(world, "wait", level="durable"))
    moved: list[Counter[str]] = []
    for rotten in (False, False, True):
        for gone in (*world, node):
            gone.kill()
        if rotten:
            for path in (nodes.root / "cache").iterdir():
                path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        node = nodes.node(**settings)
        world = nodes.world([node] * 2, JOB, kind="fsdp")
        assert together(world, "restore") == [2] * 2 and together(world, "digest") == digests
        moved.append(sum((Counter(row["bytes"]) for row in together(world, "last_restore")), Counter()))
        assert node.problems() == {}
    first, second, third = moved
    assert second["durable"] == 0 and second["own"] == first["durable"] + first["own"]
    assert first["durable"] >= first["own"] and third["durable"] >= third["own"], "what lies in one block is read once"


def test_another_steps_pointer_is_not_read_for_right(nodes: Cluster, bucket: str, objects: ObjectServer) -> None:
    """P1, P4: who may write in the bucket has overwritten the newest step's; the one before comes back, and it is said why."""
    node = nodes.node(storage_root=bucket, replicas=0)
    (trainer,) = nodes.world([node], JOB)
    assert trainer.do("restore") is None
    digests = []
    for _ in range(2):
        trainer.do("train", steps=2)
        digests.append(trainer.do("digest"))
        assert "durable" in str(trainer.do("wait", level="durable"))
    trainer.kill()
    node.kill()
    name, _, prefix = bucket.removeprefix("s3://").partition("/")
    older, newest = sorted(f"{prefix}/{key}" for key in objects.keys(bucket) if key.endswith(".pointer"))
    body = objects.client.get_object(Bucket=name, Key=older)["Body"].read()
    objects.client.put_object(Bucket=name, Key=newest, Body=body)
    fresh = nodes.node(storage_root=bucket, replicas=0)
    (again,) = nodes.world([fresh], JOB)
    assert again.do("restore") == 2 and again.do("digest") == digests[0]
    assert any("damaged pointer" in text for text in again.do("last_restore")["passed_over"])
    assert fresh.cli("verify", bucket).returncode == 1


@pytest.mark.chaos
def test_a_restore_lists_as_often_whatever_the_number_of_checkpoints(
    nodes: Cluster, bucket: str, objects: ObjectServer
) -> None:
    """A list is what costs most. A few find the newest step; none belongs to reading it."""
    node = nodes.node(storage_root=bucket, replicas=0, keep_last=10, flush_every_steps=1)
    for steps in (2, 6):
        (trainer,) = nodes.world([node], f"of{steps}")
        trainer.do("restore")
        for _ in range(steps):
            trainer.do("train", steps=1)
            assert "durable" in str(trainer.do("wait", level="durable"))
        trainer.kill()
    node.kill()
    fresh = nodes.node(storage_root=bucket, replicas=0, keep_last=10, inventory_timeout_s=30)
    for steps in (2, 6):
        (again,) = nodes.world([fresh], f"of{steps}")
        since = len(objects.requests)
        assert again.do("restore") == steps
        asked = [request for request in objects.requests[since:] if f"of{steps}" in request.path + request.query]
        lists = [request.query for request in asked if "list-type" in request.query]
        assert not any("step-" in query for query in lists), "of a checkpoint's own files"
        assert len(lists) <= LISTS_MAX and sum("epoch-000001" in query for query in lists) <= LISTS_OF_EPOCH_MAX, lists
        assert sum(request.path.endswith(".pointer") for request in asked) <= steps + POINTERS_READ_AGAIN
