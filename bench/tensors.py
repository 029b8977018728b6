"""What thousands of small tensors cost one rank: the same bytes in many tensors, beside few.

    python -m bench.tensors --json out.json
    python -m bench.tensors --bytes 2e8 --many 20000 --few 100

A parameter and its two AdamW moments are three tensors; its step counter comes on top. Each state has a daemon of its own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from ckptd_client import Client

from bench.common import Report, Row, arguments, interleave
from bench.rig import Daemon, daemon, room
from bench.stall import Stall
from bench.training import Training

STALL_FLOOR, STALL_BESIDE_S = 1.5, 0.010  # times the stall of few tensors, and so much beside
RESTORE_MAX_S, JOIN_MAX_S, DAEMON_CPU_MAX_S = 0.3, 0.5, 0.1


class Rank:
    """One state, its daemon and client."""

    def __init__(self, training: Training, node: Daemon) -> None:
        self.training, self.node = training, node
        self.client = Client.connect(job="bench", socket=str(node.socket), required=True)
        self.client.register(model=training.model, optimizer=training.optimizer)
        started = time.perf_counter()
        assert self.client.restore() is None
        self.join_s = time.perf_counter() - started
        self.stall = Stall(training, self.client)
        self.cpu_s: list[float] = []
        self.phases: dict[str, list[float]] = {}

    def snapshot(self) -> float:
        before = self._daemon_cpu_s()
        blocked = self.stall.bare()
        self.cpu_s.append(self._daemon_cpu_s() - before)
        return blocked

    def restore(self) -> None:
        assert self.client.restore() == self.training.step
        assert self.client.last_restore["bytes"]["own"] >= self.training.nbytes
        for name, seconds in self.client.last_restore["seconds"].items():
            self.phases.setdefault(name, []).append(float(seconds))

    def prove(self) -> None:
        digests = self.training.digests()
        self.training.spoil()
        self.restore()
        assert self.training.digests() == digests, "restored is not what was captured"

    def _daemon_cpu_s(self) -> float:
        """Of keeper and daemon, all threads."""
        ticks = 0
        for pid in self.node.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def at_most(seconds: float, repeats: int) -> Row:
    return Row(f"{seconds:g} s", [seconds] * repeats)


def run(few: Rank, many: Rank, repeats: int) -> Report:
    report = Report("tensors: many small ones on one rank")
    taken = interleave({"few": few.snapshot, "many": many.snapshot}, repeats, warm=2)
    few.prove()
    many.prove()
    taken |= interleave({"few restored": few.restore, "many restored": many.restore}, repeats)
    counts = {name: len(rank.training.tensors()) for name, rank in {"few": few, "many": many}.items()}
    limit = report.add(Row(f"stall of {counts['few']}", taken["few"], few.training.nbytes))
    report.add(Row(f"stall of {counts['many']}", taken["many"], many.training.nbytes))
    less = [max(0.0, seconds - STALL_BESIDE_S) for seconds in taken["many"]]
    report.add(Row(f"less {STALL_BESIDE_S * 1e3:g} ms", less, floor=STALL_FLOOR, kind="time"), limit)
    report.add(Row(f"restore of {counts['few']}", taken["few restored"], few.training.nbytes))
    goals = (
        (f"restore of {counts['many']}", taken["many restored"], RESTORE_MAX_S),
        (f"join of {counts['many']}", [many.join_s], JOIN_MAX_S),
        ("daemon's CPU per snapshot", many.cpu_s[-repeats:], DAEMON_CPU_MAX_S),
    )
    for name, seconds, most_s in goals:
        report.add(Row(name, seconds, floor=1.0, kind="time"), at_most(most_s, repeats))
    for name, seconds in many.phases.items():
        report.add(Row(f"restore: {name}", seconds[-repeats:], kind="time"))
    return report


def main() -> int:
    args = arguments(
        __doc__ or "",
        nbytes=2e8,
        few={"type": int, "default": 100, "help": "tensors"},
        many={"type": int, "default": 20_000, "help": "tensors"},
    )
    torch.set_num_threads(1)
    states = [Training(args.bytes, tensors=count) for count in (args.few, args.many)]
    with daemon(memory_budget=room(states[0].nbytes)) as first, daemon(memory_budget=room(states[1].nbytes)) as second:
        few, many = Rank(states[0], first), Rank(states[1], second)
        report = run(few, many, args.repeats)
        few.client.close()
        many.client.close()
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
