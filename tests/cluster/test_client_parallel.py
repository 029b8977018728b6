"""The client under real torchrun: DDP, FSDP2, HSDP, TP, both, wrappers; into each other, into another world (P9).

All cases of a launch run in the same processes; each is a test here. The daemon is the scripted double, so a failure is the
client's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from ckptd.core.state_map.layout import REPLICA
from ckptd.demo.job import free_port
from tests.cluster.nodes import REPO
from tests.node.rank_daemon_double import RankDaemonDouble

LAUNCH_TIMEOUT_S = 150
SOCKETS = (
    "ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "wrapped", "tears", "tears_without_fence", "tears_without_reshard", "per_rank",
    "two_groups", "sub_mesh", "stages", "batch_norm", "batch_norm_declared", "before", "compiled", "eight_bits", "audited",
    "apart", "apart_stages", "apart_parts", "apart_forgotten", "by_hand", "by_fsdp_too", "flat", "counts",
)  # fmt: skip
FIRST = (
    "ddp to fsdp", "fsdp to hsdp", "hsdp to tp", "tp to fsdp_tp", "fsdp_tp to wrapped", "wrapped to plain", "tears",
    "per rank", "two groups", "declared over sub-meshes",
    "declared over stages", "cut by hand", "cut by hand and by FSDP2", "flat parameters of FSDP1",
    "batch norm", "batch norm declared", "registered before it is wrapped",
    "one rank without a daemon",
    "mismatch of one rank", "moments of eight bits", "an average on rank zero", "stages undeclared",
    "parts of a dict", "an optimizer forgotten",
)  # fmt: skip
SELDOM = ("tears without fence", "tears without reshard", "compiled step")  # in `make chaos`
SECOND = (
    "ddp into two as tp", "fsdp into two as fsdp", "hsdp into two as ddp", "tp into two as fsdp", "fsdp_tp into two as fsdp",
    "per rank into two", "cut by hand into two", "audited under FSDP2",
)  # fmt: skip

Results = dict[str, list[str | None]]


def end_tree(pid: int) -> None:
    signal_tree(pid, signal.SIGKILL)


def signal_tree(pid: int, number: int) -> None:
    """The workers are in sessions of their own."""
    top = psutil.Process(pid)
    for process in [*top.children(recursive=True), top]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def launch(folder: Path, part: str, ranks: int) -> Results:
    """case -> traceback per rank."""
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", str(Path(__file__).with_name("client_ranks.py")), str(folder), part,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    with subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launched:
        try:
            _, errors = launched.communicate(timeout=LAUNCH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_tree(launched.pid)
            _, errors = launched.communicate()
            raise AssertionError(f"the ranks hang: {errors[-20_000:]}") from None
    found: Results = {}
    for rank in range(ranks):
        path = folder / f"{part}.{rank}.json"
        assert path.exists(), errors[-4000:]
        for case, trace in json.loads(path.read_text()).items():
            found.setdefault(case, []).append(trace)
    return found


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RankDaemonDouble]]:
    folder = tmp_path_factory.mktemp("parallel")
    with ExitStack() as stack:
        audits = {name: int(name == "audited") for name in SOCKETS}
        doubles = {name: RankDaemonDouble(folder / f"{name}.s", audit_every=audits[name]) for name in SOCKETS}
        yield {name: stack.enter_context(double) for name, double in doubles.items()}


@pytest.fixture(scope="module")
def four(daemons: dict[str, RankDaemonDouble]) -> Results:
    return launch(daemons["ddp"].path.parent, "one", 4)


@pytest.fixture(scope="module")
def two(daemons: dict[str, RankDaemonDouble], four: Results) -> Results:
    return launch(daemons["ddp"].path.parent, "two", 2)


def failures(results: Results, case: str) -> list[str]:
    """Tracebacks of the ranks that failed."""
    found = [f"rank {rank}: {trace}" for rank, trace in enumerate(results[case]) if trace is not None]
    if any("Cannot use ReduceOp.AVG with Gloo" in text for text in found):
        pytest.skip(f"torch {torch.__version__} itself cannot train HSDP on the CPU")
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", FIRST)
def test_four_ranks(four: Results, case: str) -> None:
    assert len(four[case]) == 4
    assert not failures(four, case)


@pytest.mark.chaos
def test_four_ranks_seldom(daemons: dict[str, RankDaemonDouble]) -> None:
    found = launch(daemons["ddp"].path.parent, "seldom", 4)
    assert set(found) == set(SELDOM)
    assert not [failure for case in SELDOM for failure in failures(found, case)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SECOND)
def test_two_ranks_restore_what_four_have_saved(four: Results, two: Results, case: str) -> None:
    for saving in FIRST:
        if saving.startswith(case.split(" into ")[0] + " to "):
            failures(four, saving)  # skips where this torch could not even train it
    assert len(two[case]) == 2
    assert not failures(two, case)


def test_nothing_was_left_out(four: Results, two: Results) -> None:
    assert set(four) == set(FIRST)
    assert set(two) == set(SECOND)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "wrapped"])
def test_copies_by_contract_were_equal_and_plans_agreed(
    four: Results, daemons: dict[str, RankDaemonDouble], way: str
) -> None:
    daemon = daemons[way]
    assert daemon.corruptions == []
    for ranks in daemon.held.values():
        assert len({held.layout.plan_id for held in ranks.values()}) == 1


def test_ddp_captures_everything_once(four: Results, daemons: dict[str, RankDaemonDouble]) -> None:
    """One failure domain and replicas=0: nothing needs a second copy (D8)."""
    ranks = daemons["ddp"].held[1, 2]
    keys = [fragment.key for held in ranks.values() for fragment in held.layout.fragments]
    assert len(keys) == len(set(keys))


def test_namesakes_of_two_groups_are_each_groups_own_and_no_corruption(
    four: Results, daemons: dict[str, RankDaemonDouble]
) -> None:
    """D7: equal-named pipeline stages agree at step 0 and differ later."""
    daemon = daemons["two_groups"]
    assert daemon.corruptions == []
    assert not [name for name in daemon.per_rank((1, 1))[0] if name.startswith("t:")]
    own, _ = daemon.per_rank((1, 2))
    assert {
        "t:model.line.weight",
        "t:optimizer.model.line.weight.exp_avg",
        "t:model.norm.running_mean",
    } <= set(own)
    assert "t:model.norm.num_batches_tracked" not in own


def test_declared_copies_over_sub_meshes_are_captured_once(
    four: Results, daemons: dict[str, RankDaemonDouble]
) -> None:
    daemon = daemons["sub_mesh"]
    held = daemon.held[1, 1].values()
    slices = [(f.key, f.box) for rank in held for f in rank.layout.fragments if f.nbytes]
    assert len(slices) == len(set(slices))
    assert {f.sharing for rank in held for f in rank.layout.fragments} == {REPLICA}
    assert daemon.corruptions == []
