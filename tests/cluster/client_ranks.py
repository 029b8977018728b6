"""The ranks of test_client_parallel.py: ``torchrun client_ranks.py FOLDER PART``.

Many cases in one launch, as importing torch in every process is most of the time. Each rank leaves a JSON file: case -> null
or the traceback.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import CkptdError, Client, _switches, own
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ckptd.core import failpoint
from tests.cluster import client_flat, client_rules
from tests.cluster import client_registrations as registrations
from tests.cluster.client_models import (
    IN,
    OUT,
    WAYS,
    Built,
    Net,
    Stage,
    adamw,
    eight_bits,
    evaluate,
    same,
    seeded,
    sharded,
    train,
    train_all,
    truth,
    whole,
)

HANGS_AFTER_S = 100.0  # then each thread says where it is; the launch's limit is a little more
FOLDER = Path(sys.argv[1])
Cases = dict[str, Callable[[], None]]


def connect(case: str, **objects: Any) -> Client:
    client = Client.connect(job="parallel", socket=FOLDER / f"{case}.s", required=True)
    client.register(**objects)
    return client


def until_durable(client: Client, handle: Any) -> None:
    began, taken = time.monotonic(), handle.status
    status = client.wait("sealed", 30)
    told = f"{status!r} after {time.monotonic() - began:.1f} s; the handle said {taken!r}, now {handle.status!r}"
    assert status == "durable", f"{told}; {client.health().problems}"


def refusal(client: Client) -> str:
    """The error that restore() raises."""
    try:
        client.restore()
    except CkptdError as error:
        return str(error)
    raise AssertionError("restore() raised no error")


# --- part one: four ranks -----------------------------------------------------------------------------------
def saves(way: str, then: str) -> None:
    """Snapshot under one parallelism, restore the same world under another, train on from both alike."""
    built = WAYS[way](seed=1)
    with connect(way, model=built[0], optimizer=built[1]) as client:
        assert client.restore() is None
        for step in (1, 2):
            train(built, 1)
            evaluate(built)
            handle = client.snapshot(step, must=True)
            assert handle.taken, handle.status
            expected = truth(built)
            train(built, 1)
            until_durable(client, handle)
    if dist.get_rank() == 0:
        torch.save(expected, FOLDER / f"{way}.truth")
    restores(way, then, expected)


def restores(way: str, then: str, expected: dict[str, torch.Tensor]) -> None:
    fresh = WAYS[then](seed=2)
    evaluate(fresh)
    with connect(way, model=fresh[0], optimizer=fresh[1]) as client:
        assert client.restore() == 2
        same(truth(fresh), expected)
        evaluate(fresh)
        same(truth(fresh), expected)
        train(fresh, 1)


SAVED = [
    ("ddp", "fsdp"),
    ("fsdp", "hsdp"),
    ("hsdp", "tp"),
    ("tp", "fsdp_tp"),
    ("fsdp_tp", "wrapped"),
    ("wrapped", "plain"),
]


def none_torn(case: str = "tears") -> None:
    assert torn(case) == []


def tears_without_fence() -> None:
    _switches.FENCE = False
    try:
        assert torn("tears_without_fence", delay_s=0.1) != [], "no tear was seen"
    finally:
        _switches.FENCE = True


def tears_without_reshard() -> None:
    """After an eval pass the plain full parameters are what the module has: they are not the ones that are trained."""
    _switches.RESHARD = False
    try:
        found = torn("tears_without_reshard")
        assert found != [], "no tear was seen"
    finally:
        _switches.RESHARD = True


class Large(Net):
    """Shards too large to be copied among the small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(IN, 9000), nn.Linear(9000, OUT)


def large(seed: int) -> Built:
    torch.manual_seed(seed)
    model = sharded(Large(), init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, adamw(model)


def torn(case: str, delay_s: float = 0.02) -> list[str]:
    """FSDP2 under the failpoint: wrong keys, or failed snapshots."""
    built = large(seed=3)
    train(built, 1)
    expected: dict[int, dict[str, torch.Tensor]] = {}
    wrong: list[str] = []
    with connect(case, model=built[0], optimizer=built[1]) as client:
        client.restore()
        failpoint.arm(f"capture.tensor:sleep={delay_s}")
        for step in range(1, 4):
            expected[step] = truth(built)
            if step != 2:
                evaluate(built)
            handle = client.snapshot(step, must=True)
            train(built, 1)
            status = handle.wait("sealed", 30)
            if status != "durable":
                wrong.append(f"{step}: {status}")
        failpoint.arm("")
    for step in expected:
        if not any(text.startswith(f"{step}:") for text in wrong):
            wrong += wrong_of(case, step, expected[step])
    return wrong


def wrong_of(case: str, step: int, expected: dict[str, torch.Tensor]) -> list[str]:
    fresh = large(seed=4)
    with connect(case, model=fresh[0], optimizer=fresh[1]) as client:
        assert client.restore(step=step) == step
        found = truth(fresh)
    return [f"{step}: {name}" for name in expected if not torch.equal(found[name], expected[name])]


class Own:
    """State that is each rank's own."""

    def __init__(self) -> None:
        self.value = dist.get_rank() * 10

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Resharded(Own):
    @staticmethod
    def reshard(states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        return {"value": sum(state["value"] for state in states) + rank + 100 * world}


def stages(kind: int) -> nn.Module:
    """Two pipeline stages of two ranks each that use the same names; ``common`` is equal everywhere."""
    stage = kind // 2
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((50, 50), float(stage)))
    model.common = nn.Parameter(torch.full((50, 50), 7.0))
    return model


def per_rank() -> None:
    rank = dist.get_rank()
    model, own, resharded = stages(rank), Own(), Resharded()
    with connect("per_rank", model=model, own=own, resharded=resharded) as client:
        client.restore()
        torch.manual_seed(rank)
        handle = client.snapshot(1, must=True)
        until_durable(client, handle)
        expected = torch.rand(4)
    fresh, mine, other = stages(3 - rank), Own(), Resharded()
    mine.value = other.value = -1
    with connect("per_rank", model=fresh, own=mine, resharded=other) as client:
        assert client.restore() == 1
    assert torch.equal(torch.rand(4), expected)
    assert (mine.value, other.value) == (own.value, own.value)
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(fresh.common, model.common)


def two_groups() -> None:
    """Two stages of equal names, each in a DDP group of its own: alike at step 0, each its group's own later (D7)."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def staged() -> Built:
        model = nn.parallel.DistributedDataParallel(Stage(), process_group=groups[rank // 2])
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    built = staged()
    model, optimizer = built
    with connect("two_groups", model=model, optimizer=optimizer) as client:
        client.restore()
        handle = client.snapshot(1, must=True)
        until_durable(client, handle)
        torch.manual_seed(20 + rank)
        model(torch.randn(4, IN) + rank).square().mean().backward()
        optimizer.step()
        handle = client.snapshot(2, must=True)
        until_durable(client, handle)
    expected = truth(built)
    fresh = staged()
    with connect("two_groups", model=fresh[0], optimizer=fresh[1]) as client:
        assert client.restore() == 2
    same(truth(fresh), expected)


def declared_over_sub_meshes() -> None:
    """Two replicas that nothing but replicated= says are equal, each sharded over a mesh of its own."""

    def shared(seed: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))["shard"]
        return sharded(seeded(seed), mesh)

    model = shared(1)
    with connect("sub_mesh", model=model, replicated=["*"]) as client:
        client.restore()
        handle = client.snapshot(1, must=True)
        until_durable(client, handle)
    expected = {name: whole(value) for name, value in model.state_dict().items()}
    fresh = shared(2)
    with connect("sub_mesh", model=fresh, replicated=["*"]) as client:
        assert client.restore() == 1
        found = {name: whole(value) for name, value in fresh.state_dict().items()}
        same(found, expected)


def declared_over_stages() -> None:
    """Pipeline stages of two ranks each, of different keys but for one, and all that is said of them is replicated=["*"]."""
    rank = dist.get_rank()

    def stage(seed: int) -> Built:
        torch.manual_seed(seed)
        model = nn.Module()
        model.common = nn.Parameter(torch.rand(40, 40))
        torch.manual_seed(seed + rank // 2)
        for name in ("first", "second"):
            setattr(model, f"{name}{rank // 2}", nn.Parameter(torch.rand(50, 50)))
        return model, adamw(model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    built = stage(1)
    with connect_declared("stages", built) as client:
        client.restore()
        for number in (1, 2):
            step(*built)
            handle = client.snapshot(number, must=True)
            until_durable(client, handle)
    expected = truth(built)
    fresh = stage(5)
    with connect_declared("stages", fresh) as client:
        assert client.restore() == 2
    same(truth(fresh), expected)


def connect_declared(case: str, built: Built) -> Client:
    client = Client.connect(job="parallel", socket=FOLDER / f"{case}.s", required=True)
    client.register(model=built[0], optimizer=built[1], replicated=["*"])
    return client


def batch_norm_of_ddp_is_rank_zeros(case: str = "batch_norm", **how: Any) -> None:
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 4) + rank)
    mean = model.module[1].running_mean.clone()
    dist.broadcast(mean, 0)
    with connect(case, model=model, **how) as client:
        client.restore()
        handle = client.snapshot(1, must=True)
        until_durable(client, handle)
        with torch.no_grad():
            model.module[1].running_mean.zero_()
        assert client.restore() == 1
    assert torch.equal(model.module[1].running_mean, mean)


def registered_before_it_is_wrapped() -> None:
    """On the meta device, then sharded, then materialised: whatever is registered is looked up when it is needed."""
    case = "before"
    for expected in (None, 1):
        with torch.device("meta"):
            model = Net()
        with connect(case, model=model) as client:
            sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))
            model.to_empty(device="cpu")
            with torch.no_grad():
                torch.manual_seed(5)
                for parameter in model.parameters():
                    parameter.fill_(3.0 if expected is None else 4.0)
            optimizer = adamw(model)
            client.register(optimizer=optimizer)
            assert client.restore() == expected
            assert bool((whole(model.first.weight) == 3.0).all())
            assert client.snapshot(2 if expected else 1, must=True).taken
            assert client.wait("sealed", 30) == "durable"


def one_rank_without_a_daemon() -> None:
    """Every rank raises, and names the one."""
    rank = dist.get_rank()
    case = "absent" if rank == 2 else "per_rank"
    with Client.connect(job="parallel", socket=FOLDER / f"{case}.s", timeout_s=0.2) as client:
        client.register(model=stages(rank))
        assert "no daemon for rank 2" in refusal(client)
        assert client.restore(allow_fresh=True) is None


def mismatch_of_one_rank() -> None:
    """Nothing is written on any rank, and all raise."""
    rank = dist.get_rank()
    model = stages(rank)
    if rank == 1:
        model.weight = nn.Parameter(torch.zeros(3))
    before = model.weight.detach().clone()
    with connect("per_rank", model=model, own=Own(), resharded=Resharded()) as client:
        assert "model.weight" in refusal(client)
    assert torch.equal(model.weight, before)


def compiled_step_is_fenced() -> None:
    """A compiled optimizer step: the hook stands outside of the graph."""
    torch.manual_seed(9)
    model = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = torch.compile(optimizer.step, backend="eager")
    model(torch.randn(2, 200)).sum().backward()
    step()
    with connect("compiled", model=model, optimizer=optimizer, replicated=["*"]) as client:
        client.restore()
        failpoint.arm("capture.tensor:sleep=0.2")
        for number in (1, 2):
            expected = model.weight.detach().clone()
            handle = client.snapshot(number, must=True)
            step()
            until_durable(client, handle)
        failpoint.arm("")
        fresh = nn.Linear(200, 200)
    with connect(
        "compiled", model=fresh, optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    ) as client:
        client.restore()
    assert torch.equal(fresh.weight, expected)


def moments_of_eight_bits() -> None:
    """torchao's optimizers under FSDP2: a moment is a DTensor of subclasses, whose codes are cut and whose scales are not."""
    saved, fresh = eight_bits(1), eight_bits(2)
    train_all(saved)
    with connect("eight_bits", model=saved[0], optimizer=saved[1]) as client:
        client.restore()
        handle = client.snapshot(1, must=True)
        until_durable(client, handle)
    expected = train_all(saved)
    with connect("eight_bits", model=fresh[0], optimizer=fresh[1]) as client:
        assert client.restore() == 1
    assert all(map(torch.equal, train_all(fresh), expected))


FIRST: Cases = {f"{way} to {then}": (lambda way=way, then=then: saves(way, then)) for way, then in SAVED}  # type: ignore[misc]
FIRST |= {
    "tears": none_torn,
    "per rank": per_rank, "two groups": two_groups,
    "declared over sub-meshes": declared_over_sub_meshes,
    "declared over stages": declared_over_stages,
    "cut by hand": lambda: client_rules.cut_by_hand(connect, until_durable, FOLDER),
    "flat parameters of FSDP1": lambda: client_flat.out_and_in(connect, until_durable, FOLDER),
    "cut by hand and by FSDP2": lambda: client_rules.cut_by_fsdp_too(connect, until_durable),
    "batch norm": batch_norm_of_ddp_is_rank_zeros,
    "batch norm declared": lambda: batch_norm_of_ddp_is_rank_zeros("batch_norm_declared", replicated=["*"]),
    "registered before it is wrapped": registered_before_it_is_wrapped,
    "one rank without a daemon": one_rank_without_a_daemon,
    "mismatch of one rank": mismatch_of_one_rank,
    "moments of eight bits": moments_of_eight_bits,
    "an average on rank zero": lambda: registrations.average_on_rank_zero(connect, until_durable, refusal),
    "an optimizer forgotten": lambda: registrations.optimizer_forgotten_on_one_rank(connect, until_durable, refusal),
    "parts of a dict": lambda: registrations.parts_of_a_dict(connect, until_durable),
    "stages undeclared": lambda: registrations.stages_undeclared(connect, until_durable),
}
SELDOM: Cases = {
    "tears without fence": tears_without_fence,
    "tears without reshard": tears_without_reshard,
    "compiled step": compiled_step_is_fenced,
}


# --- part two: two ranks restore what four have saved -------------------------------------------------------
def into_two(way: str, then: str) -> None:
    restores(way, then, torch.load(FOLDER / f"{way}.truth"))


def per_rank_values_need_reshard() -> None:
    rank = dist.get_rank()
    mine, resharded = Own(), Resharded()
    with connect("per_rank", model=stages(rank), own=mine, resharded=resharded) as client:
        why = refusal(client)
        assert "model.weight: its value was each rank's own" in why, why
        assert "own: its value was each rank's own" in why, why
        assert "resharded:" not in why, why
        assert "model.common" not in why, why
        client.register(model=(model := stages(rank)), rules={"model.weight": own("mean")})
        del client._registry.owners["own"]
        assert client.restore(only=["model.*", "resharded", "rng", "$meta"]) == 1 and model.weight.unique().tolist() == [0.5]
        assert any("reseeded" in note for note in client.last_restore["notes"])
        assert resharded.value == 60 + rank + 200
    drawn = torch.rand(1)
    both = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(both, drawn)
    assert not torch.equal(both[0], both[1])


SECOND: Cases = {
    f"{way} into two as {then}": (lambda way=way, then=then: into_two(way, then))  # type: ignore[misc]
    for way, then in [("ddp", "tp"), ("fsdp", "fsdp"), ("hsdp", "ddp"), ("tp", "fsdp"), ("fsdp_tp", "fsdp")]
}
SECOND |= {
    "per rank into two": per_rank_values_need_reshard,
    "cut by hand into two": lambda: client_rules.into_two(connect, FOLDER),
    "audited under FSDP2": lambda: none_torn("audited"),
}


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANGS_AFTER_S)
    dist.init_process_group("gloo")
    results = {}
    for name, case in {"one": FIRST, "two": SECOND, "seldom": SELDOM}[sys.argv[2]].items():
        print(f"rank {os.environ['RANK']} begins {name}", file=sys.stderr, flush=True)
        try:
            case()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
            print(f"rank {os.environ['RANK']}: {results[name]}", file=sys.stderr, flush=True)
            failpoint.arm("")
        dist.barrier()  # so that a failure does not shift the ranks against each other
    (FOLDER / f"{sys.argv[2]}.{os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
    )  # torch's threads may outlive the interpreter, and then abort a process that did all it had to


if __name__ == "__main__":
    main()
