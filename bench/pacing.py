"""Does pacing keep training from being slowed down? Step time with no checkpointing, with copies unpaced, with copies paced.

Two nodes in network namespaces, joined by links limited with `tc tbf`; a real daemon on each and a small DDP job whose all-reduce
takes the same links as the copies. The contenders are jobs of their own that take turns (blocks of steps, in another order each
round); a slow-down is a block's mean step over that of the same round without checkpointing, and its interval is a bootstrap over
the rounds. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.common import machine
from bench.netns import Place, missing, places, processes, start
from ckptd.core.pacing.slowdown import UNSEEN

NODES = 2
WARM_STEPS = 3  # of each block
RESAMPLES = 10_000
GOOD_IN_A_ROW = 5  # looks at a slow-down under what the loop aims at: it has found its rate
START_TIMEOUT_S = 120.0
POLL_S = 0.1
NONE, UNPACED, PACED, WINDOWS = "none", "unpaced", "paced", "windows"
PACING = {UNPACED: "off", PACED: "aimd", WINDOWS: "windows"}
MET, MISSED, INCONCLUSIVE = "met", "missed", "inconclusive"


@dataclass
class Contender:
    """One job on both nodes, with daemons of its own or none."""

    name: str
    ranks: list[subprocess.Popen[str]]
    blocks: list[list[float]] = field(
        default_factory=list
    )  # seconds of the steps of each block, the slower rank's
    moved: list[float] = field(default_factory=list)  # bytes/s of copies sent in each block, of one node
    pacing: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, **do: Any) -> list[dict[str, Any]]:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(do) + "\n")
        return [self._answer(rank) for rank in self.ranks]

    def _answer(self, rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank of {self.name} ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def block(self, steps: int) -> None:
        before = self.ask(do="state")
        began = time.monotonic()
        said = self.ask(do="block", warm=WARM_STEPS, steps=steps)
        took = time.monotonic() - began
        self.blocks.append([max(row) for row in zip(*(answer["steps"] for answer in said), strict=True)])
        self.moved.append((sent_bytes(said[0]) - sent_bytes(before[0])) / took)
        self.pacing.append(said[0]["pacing"])
        self.ask(do="settle")


class Rig:
    def __init__(
        self, root: Path, nodes: list[Place], started: list[subprocess.Popen[str]], args: argparse.Namespace
    ) -> None:
        self._root, self._nodes, self._started, self._args = root, nodes, started, args
        self._key = root / "key"
        command = [sys.executable, "-m", "ckptd", "keygen", str(self._key)]
        subprocess.run(command, check=True, capture_output=True, env=environment())
        self._ports = iter(range(23000, 24000))

    def contender(self, name: str) -> Contender:
        sockets = (
            [self._daemon(name, place) for place in self._nodes]
            if name in PACING
            else [""] * len(self._nodes)
        )
        for socket in sockets:
            self._await(socket)
        port = next(self._ports)
        ranks = [self._rank(name, index, socket, port) for index, socket in enumerate(sockets)]
        made = Contender(name, ranks)
        for rank in ranks:
            made._answer(rank)
        return made

    def _daemon(self, name: str, place: Place) -> str:
        root = self._root / f"{name}-{place.address}"
        root.mkdir()
        settings = {
            "node_id": root.name, "state_dir": root / "state", "socket": root / "s", "bind_address": place.address,
            "key_file": self._key, "memory_budget": f"{int(8 * self._args.state_bytes) + (64 << 20)}", "replicas": 1,
            "pacing": PACING[name], "overhead_max": self._args.overhead_max, "pacing_deadline_s": 600, "nice": 10,
        }  # fmt: skip
        env = environment() | {f"CKPTD_{key.upper()}": str(value) for key, value in settings.items()}
        start(self._started, place.python("-m", "ckptd", "run", "--no-keeper"), env, str(root / "log"))
        return str(root / "s")

    def _await(self, socket: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while socket and not Path(socket).with_suffix(".http").exists():
            if time.monotonic() > deadline:
                raise RuntimeError(Path(socket).with_name("log").read_text()[-3000:])
            time.sleep(POLL_S)

    def _rank(self, name: str, index: int, socket: str, port: int) -> subprocess.Popen[str]:
        place = self._nodes[index]
        env = environment() | {
            "RANK": str(index), "WORLD_SIZE": str(len(self._nodes)), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": self._nodes[0].address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        log = str(self._root / f"{name}-rank{index}.log")
        process = start(self._started, place.python("-m", "bench.pacing_rank"), env, log, talks=True)
        order = {"socket": socket, "reduce_bytes": self._args.reduce_bytes, "state_bytes": self._args.state_bytes,
                 "compute_s": self._args.compute_s}  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        return process


def sent_bytes(answer: dict[str, Any]) -> int:
    return int(answer["pacing"].get("sent_bytes", {}).get("protect", 0))


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}


# --- the measurement ------------------------------------------------------------------------------------------------
def measure(contenders: Sequence[Contender], args: argparse.Namespace) -> None:
    for contender in contenders:
        if contender.name in (PACED, WINDOWS):
            learn(contender, args.learn_s)
        else:
            contender.ask(do="block", warm=WARM_STEPS, steps=WARM_STEPS)
            contender.ask(do="settle")
    for turn in range(args.rounds):
        for index in range(len(contenders)):
            contenders[(turn + index) % len(contenders)].block(args.steps)
        said = ", ".join(f"{c.name} {1000 * statistics.fmean(c.blocks[-1]):.1f} ms" for c in contenders)
        print(f"round {turn + 1} of {args.rounds}: {said}", file=sys.stderr, flush=True)


def learn(contender: Contender, seconds: float) -> None:
    """Until the loop has found its rate, at most so long; not counted."""
    until, good = time.monotonic() + seconds, 0
    while time.monotonic() < until and good < GOOD_IN_A_ROW:
        pacing = contender.ask(do="block", warm=0, steps=WARM_STEPS * 4)[0]["pacing"]
        slow = pacing.get("slowdown")
        good = good + 1 if slow is not None and slow <= (1 - UNSEEN) * pacing["overhead_max"] else 0
        print(f"{contender.name} learns: {said_of(pacing)}", file=sys.stderr, flush=True)
    contender.ask(do="settle")


def said_of(pacing: dict[str, Any]) -> str:
    rate, slow = pacing.get("rate_bytes_s"), pacing.get("slowdown")
    limit = "no limit" if rate is None else f"{rate / 1e6:.2f} MB/s"
    return f"{pacing.get('state')}, {limit}, slow-down {'not known' if slow is None else f'{slow:.1%}'}"


@dataclass
class Row:
    name: str
    step_ms: float
    median_ms: float
    moved_mb_s: float
    slowdown: float = 0.0
    low: float = 0.0
    high: float = 0.0
    rounds: list[float] = field(default_factory=list)


def rows_of(contenders: Sequence[Contender]) -> list[Row]:
    base = [statistics.fmean(block) for block in contenders[0].blocks]
    rows = []
    for contender in contenders:
        means = [statistics.fmean(block) for block in contender.blocks]
        steps = [step for block in contender.blocks for step in block]
        row = Row(
            contender.name, 1000 * statistics.fmean(means), 1000 * statistics.median(steps),
            statistics.fmean(contender.moved) / 1e6,
        )  # fmt: skip
        if contender is not contenders[0]:
            row.rounds = [mine / its - 1 for mine, its in zip(means, base, strict=True)]
            row.slowdown = statistics.fmean(row.rounds)
            row.low, row.high = interval(row.rounds)
        rows.append(row)
    return rows


def interval(values: Sequence[float], resamples: int = RESAMPLES, seed: int = 1) -> tuple[float, float]:
    """95 % bootstrap interval (percentiles) of the mean."""
    chance = random.Random(seed)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(resamples))
    return means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]


def verdict(paced: Row, unpaced: Row, overhead_max: float) -> str:
    """Met: the paced interval lies under the limit and the unpaced one above it."""
    if paced.high < overhead_max < unpaced.low:
        return MET
    return MISSED if paced.low > overhead_max else INCONCLUSIVE


# --- telling --------------------------------------------------------------------------------------------------------
def tell(rows: Sequence[Row], said: str, args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"pacing: {NODES} nodes, {args.mbit:g} Mbit/s, {args.rounds} rounds of {args.steps} steps ({machine()})"
    table = Table(title=title)
    for column in (
        "contender",
        "mean step ms",
        "median step ms",
        "copies MB/s",
        "slow-down",
        "95 % interval",
    ):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in rows:
        slow = ("", "") if not row.rounds else (f"{row.slowdown:+.2%}", f"{row.low:+.2%} .. {row.high:+.2%}")
        table.add_row(row.name, f"{row.step_ms:.1f}", f"{row.median_ms:.1f}", f"{row.moved_mb_s:.2f}", *slow)
    Console(width=140).print(table)
    print(said)


def sentence(rows: Sequence[Row], found: str, overhead_max: float) -> str:
    by_name = {row.name: row for row in rows}
    paced, unpaced = by_name[PACED], by_name[UNPACED]
    spread = f"paced {paced.low:+.2%} .. {paced.high:+.2%}, unpaced {unpaced.low:+.2%} .. {unpaced.high:+.2%}"
    return f"slow-down under {overhead_max:.1%}: {found} ({spread})"


def plot(contenders: Sequence[Contender], rows: Sequence[Row], path: Path, overhead_max: float) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for contender in contenders:
        steps = [1000 * step for block in contender.blocks for step in block]
        left.plot(sorted(steps), [i / len(steps) for i in range(len(steps))], label=contender.name)
    left.set_xlabel("step, ms")
    left.set_ylabel("share of steps")
    left.legend()
    told = [row for row in rows if row.rounds]
    for index, row in enumerate(told):
        right.plot([index] * len(row.rounds), [100 * value for value in row.rounds], ".", alpha=0.5)
        right.plot([index, index], [100 * row.low, 100 * row.high], "k-", linewidth=3)
    right.axhline(100 * overhead_max, linestyle="--", color="grey")
    right.set_xticks(range(len(told)), [row.name for row in told])
    right.set_ylabel("slow-down, % (rounds, 95 % interval)")
    figure.tight_layout()
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=300.0, help="rate of each link, Mbit/s (default 300)")
    parser.add_argument("--reduce-bytes", type=float, default=8e6, help="gradients of a step (default 8 MB)")
    parser.add_argument(
        "--state-bytes", type=float, default=40e6, help="of a rank's snapshot (default 40 MB)"
    )
    parser.add_argument("--compute-s", type=float, default=0.04, help="of a step without the network")
    parser.add_argument("--overhead-max", type=float, default=0.02, help="the setting, and the bar")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30, help="of a block")
    parser.add_argument(
        "--learn-s", type=float, default=150.0, help="training before the first round, at most"
    )
    parser.add_argument("--windows", action="store_true", help='also pacing = "windows"')
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, default=None, help="also draw them into this file (matplotlib)")
    return parser.parse_args()


def main() -> int:
    """1 when the bar was missed, 0 otherwise, also when the spread does not let it be told."""
    args = arguments()
    why = missing()
    if why:
        print(f"skipped: {why}")
        return 0
    names = [NONE, UNPACED, PACED, *([WINDOWS] if args.windows else [])]
    with (
        tempfile.TemporaryDirectory(prefix="ckptd-") as root,
        places(NODES, args.mbit) as nodes,
        processes() as started,
    ):
        rig = Rig(Path(root), nodes, started, args)
        contenders = [rig.contender(name) for name in names]
        measure(contenders, args)
    rows = rows_of(contenders)
    by_name = {row.name: row for row in rows}
    found = verdict(by_name[PACED], by_name[UNPACED], args.overhead_max)
    said = sentence(rows, found, args.overhead_max)
    tell(rows, said, args)
    if args.json is not None:
        pacing = {contender.name: contender.pacing for contender in contenders}
        settings = {key: str(value) for key, value in vars(args).items()}
        body = {
            "machine": machine(),
            "settings": settings,
            "verdict": found,
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps({**body, "pacing": pacing}, indent=1))
    if args.plot is not None:
        plot(contenders, rows, args.plot, args.overhead_max)
    return int(found == MISSED)


if __name__ == "__main__":
    raise SystemExit(main())
