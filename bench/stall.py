"""How long a snapshot holds training, next to a warm memcpy of the same state in the same run. (Beside other systems:
bench.peers.)

    python -m bench.stall --json out.json
    python -m bench.stall --device cuda --bytes 12e9
    python -m bench.stall --device sim --bytes 5e7    the simulated device of tests/accelerator: what waits for what, not how fast

The state is a model and its AdamW moments. Training computes on all cores but one (--threads).
Blocking is the time inside snapshot() plus the time the next optimizer step waits for the fence.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from ckptd_client import Client

from bench.common import Report, Row, arguments, interleave
from bench.rig import Daemon, daemon, room
from bench.training import Copies, Training

COMPUTE_RATIO = 3.0  # forward and backward take this many times the memcpy
STEPS_AFTER = 10
BLOCKING_FLOOR, ADDED_FLOOR, BARE_FLOOR = 0.10, 0.25, 1.25
QUEUED_MS, D2H_FLOOR = 200, 0.9
COPY_US_PER_MIB = 500  # of the simulated device: 2 GB/s
DAEMON_BEYOND_ARENA_MAX = 200e6
GRANT_WAIT_S = 30.0


class Stall:
    def __init__(self, training: Training, client: Client) -> None:
        self.training, self.client = training, client
        self.loops: dict[bool, list[list[float]]] = {False: [], True: []}  # rounds of seconds per step

    def snapshot(self) -> float:
        """Seconds inside snapshot(); tries again at the next step while nothing is granted (not timed)."""
        deadline = time.monotonic() + GRANT_WAIT_S
        while time.monotonic() < deadline:
            self.training.optimize()
            started = time.perf_counter()
            handle = self.client.snapshot(self.training.step)
            seconds = time.perf_counter() - started
            if not handle.status.startswith("skipped"):
                return seconds
            time.sleep(0.01)
        raise RuntimeError(f"no snapshot was granted: {self.client.health()}")

    def fence(self) -> float:
        started = time.perf_counter()
        self.client.fence()
        return time.perf_counter() - started

    def hidden(self) -> float:
        """Blocking with forward and backward longer than the copy."""
        blocked = self.snapshot()
        self.training.compute()
        blocked += self.fence()
        self._settle()
        return blocked

    def bare(self) -> float:
        """Nothing to hide behind."""
        blocked = self.snapshot() + self.fence()
        self._settle()
        return blocked

    def loop(self, with_snapshot: bool) -> float:
        """A step and the ten after it."""
        first = self.snapshot() if with_snapshot else self._plain_first()
        steps = []
        for _ in range(STEPS_AFTER + 1):
            started = time.perf_counter()
            self.training.compute()
            self.training.optimize()
            steps.append(time.perf_counter() - started)
        steps[0] += first
        self.loops[with_snapshot].append(steps)
        self._settle()
        return sum(steps)

    def _plain_first(self) -> float:
        self.training.optimize()
        return 0.0

    def added(self, copy_s: float) -> tuple[float, list[float]]:
        """Seconds that a snapshot adds to these steps beyond ``copy_s``: each step's median over the rounds less that of a
        plain step, for one round's sum is as noisy as the machine. And the sums of the rounds, for the spread."""
        plain = statistics.median(second for steps in self.loops[False] for second in steps)
        medians = [statistics.median(seconds) for seconds in zip(*self.loops[True], strict=True)]
        rounds = [sum(steps) - len(steps) * plain - copy_s for steps in self.loops[True]]
        return max(0.0, sum(medians) - len(medians) * plain - copy_s), rounds

    def prove(self) -> None:
        """What was measured is a snapshot: the state comes back bit by bit."""
        self.snapshot()
        self._settle()
        step, digests = self.training.step, self.training.digests()
        self.training.spoil()
        assert self.client.restore() == step
        assert self.training.digests() == digests, "restored is not what was captured"

    def _settle(self) -> None:
        self.client.wait(level="sealed", timeout=GRANT_WAIT_S)


def calibrated(training: Training) -> Copies:
    """Copies that are warm; compute() takes COMPUTE_RATIO times as long from now on."""
    memcpy = Copies(training)
    for _ in range(3):
        memcpy()
    started = time.perf_counter()
    memcpy()
    training.calibrate(COMPUTE_RATIO * (time.perf_counter() - started))
    return memcpy


def run(training: Training, client: Client, node: Daemon, args: Any) -> Report:
    stall, memcpy = Stall(training, client), calibrated(training)
    report = Report("stall: how long a snapshot holds training")
    taken = interleave(
        {"memcpy": memcpy, "hidden": stall.hidden, "bare": stall.bare}, args.repeats, warm=2
    )
    stall.loop(True)
    stall.loops[True].clear()
    loops = interleave(
        {"plain": lambda: stall.loop(False), "snapshot": lambda: stall.loop(True)}, args.repeats, warm=0
    )
    stall.prove()
    limit = report.add(Row("memcpy, warm", taken["memcpy"], training.nbytes))
    hidden = Row("snapshot() + fence, behind compute", taken["hidden"], floor=BLOCKING_FLOOR, kind="time")
    report.add(hidden, limit)
    report.add(
        Row("snapshot() + fence, nothing to hide behind", taken["bare"], floor=BARE_FLOOR, kind="time"), limit
    )
    added, rounds = stall.added(limit.median)
    name = f"added over {STEPS_AFTER + 1} steps beyond the copy's CPU time"
    spread = f"single rounds {min(rounds):+.2f} to {max(rounds):+.2f} s"
    report.add(
        Row(name, [added], floor=ADDED_FLOOR, kind="time", note=spread), Row(limit.name, [limit.median])
    )
    beyond = node.beyond_arena_bytes()
    report.facts["daemon memory beyond its arena"] = (
        f"{beyond / 1e6:.0f} MB (at most {DAEMON_BEYOND_ARENA_MAX / 1e6:.0f})"
    )
    report.facts["state"] = f"{training.nbytes / 1e9:.2f} GB in {len(memcpy.sources)} tensors"
    report.facts["compute per step"] = f"{training.products} products on {torch.get_num_threads()} threads"
    report.facts["11 steps without / with a snapshot"] = (
        f"{sorted(loops['plain'])[len(loops['plain']) // 2]:.3f} / "
        + (f"{sorted(loops['snapshot'])[len(loops['snapshot']) // 2]:.3f} s")
    )
    return report


def run_device(training: Training, client: Client, queue: Callable[[], None], args: Any) -> Report:
    """Stall on the host and on the device apart, with QUEUED_MS of kernels queued; D2H against pinned copies of the same run."""
    sources, nbytes = training.tensors(), training.nbytes
    pinned = [torch.empty_like(t, device="cpu", pin_memory=True) for t in sources]
    report = Report(f"stall on {args.device}")
    stalled: list[float] = []  # seconds that the training stream stood still

    def d2h() -> None:
        for source, target in zip(sources, pinned, strict=True):
            target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()

    def take(behind: Callable[[], None]) -> float:
        while True:
            training.optimize()
            torch.accelerator.synchronize()
            behind()
            started = time.perf_counter()
            handle = client.snapshot(training.step)
            seconds = time.perf_counter() - started
            if not handle.status.startswith("skipped"):
                return seconds
            torch.accelerator.synchronize()
            time.sleep(0.01)

    def device_s() -> float:
        return float(client.health().facts["device_fence_s"])

    def blocked() -> float:
        before = device_s()
        seconds = take(queue)
        started = time.perf_counter()
        client.fence()
        seconds += time.perf_counter() - started
        torch.accelerator.synchronize()
        client.wait(level="sealed", timeout=GRANT_WAIT_S)
        stalled.append(device_s() - before)
        return seconds

    def drained() -> float:
        seconds = take(lambda: None)
        started = time.perf_counter()
        client.fence()
        torch.accelerator.synchronize()
        seconds += time.perf_counter() - started
        client.wait(level="sealed", timeout=GRANT_WAIT_S)
        return seconds

    taken = interleave({"d2h": d2h, "blocked": blocked, "drained": drained}, args.repeats, warm=2)
    limit = report.add(Row("D2H into pinned memory", taken["d2h"], nbytes))
    report.add(Row("ckptd D2H into its slots", taken["drained"], nbytes, floor=D2H_FLOOR), limit)
    behind = f"behind {QUEUED_MS} ms of kernels"
    report.add(Row(f"host: snapshot() + fence, {behind}", taken["blocked"], kind="time"), limit)
    report.add(Row(f"device: training stream waits for copies, {behind}", stalled[-args.repeats :], kind="time"), limit)
    return report


def cuda_queue() -> None:
    torch.cuda._sleep(int(QUEUED_MS * 1e-3 * 1.7e9))  # type: ignore[no-untyped-call]


def simulated_queue() -> Callable[[], None]:
    """The simulated device's training stream begins nothing for so long."""
    from tests.accelerator import device  # built by a compiler; no other benchmark needs it

    def queue() -> None:
        device.ops.hold(0, True)
        threading.Timer(QUEUED_MS / 1e3, device.ops.hold, (0, False)).start()

    device.use()
    device.tune(kernel_us=5, copy_us_per_mib=COPY_US_PER_MIB)
    return queue


def main() -> int:
    args = arguments(
        __doc__ or "",
        device={"default": "cpu", "choices": ["cpu", "cuda", "sim"]},
        threads={"type": int, "default": max(1, (os.cpu_count() or 2) - 1)},
    )
    torch.set_num_threads(args.threads)
    queue = {"cpu": lambda: None, "cuda": lambda: cuda_queue, "sim": simulated_queue}[args.device]()
    training = Training(args.bytes, args.device)
    with daemon(memory_budget=room(training.nbytes)) as node:
        client = Client.connect(job="bench", socket=str(node.socket), required=True)
        client.register(model=training.model, optimizer=training.optimizer)
        assert client.restore() is None
        if queue is not None:
            report = run_device(training, client, queue, args)
        else:
            report = run(training, client, node, args)
        client.close()
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
