"""Mutants are handed to workers; what came out is written down as it comes, so that a run can be interrupted and go on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from tests.mutants.by_hand import BY_HAND, SIMULATED, first_seed, rare
from tests.mutants.generate import Mutant
from tests.mutants.killers import Lines
from tests.mutants.targets import PACKAGE, ROOT, TEST_S_MAX, TRACED

FOLDER = ROOT / "build" / "mutants"
RESULTS = FOLDER / "results.json"
REACH = FOLDER / "reach.json"
PRINT_EVERY_S = 20.0
SEED = "seed "
SIMULATED_SEEDS = 400  # for one that the simulator itself knows (tests/sim/test_mutants.py looks at as many)
SIMULATED_S = 1.0  # of processor time, that a seed usually takes at most


@dataclass(frozen=True)
class Outcome:
    """``by`` and ``how``: who killed it and what it said; of a survivor ``tried``, how many killers ran it without a word."""

    killed: bool
    by: str = ""
    how: str = ""
    tried: int = 0
    seconds: float = 0.0
    error: str = ""


class Worker:
    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": "0",  # a seed is the same world every time
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._said = (FOLDER / "worker.log").open("ab")
        command = [sys.executable, "-m", "tests.mutants.worker"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        self.killers: list[str] = self._answer()["killers"]

    def do(self, work: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended; its last words are in {FOLDER / 'worker.log'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._said.close()


def tree_hash(*tops: str) -> str:
    """Of all that decides about a result."""
    digest = hashlib.blake2b(digest_size=16)
    for top in tops:
        paths = sorted((ROOT / top).rglob("*.py")) if (ROOT / top).is_dir() else sorted(ROOT.glob(top))
        for path in paths:
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def everything() -> str:
    return tree_hash("ckptd", "tests/core", "tests/sim", "tests/node", "tests/mutants")


def file_hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else ""


# --- which killer reaches what --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reach:
    """``state``: of the file that the killer is in. ``useless``: why it is not used."""

    cpu_s: float
    lines: Lines
    state: str
    useless: str = ""


def reach(workers: list[Worker]) -> dict[str, Reach]:
    """Remembered until the file of the test changes, or a target that it reaches: it only says whom to try."""
    files = {path: file_hash(PACKAGE / path) for path in TRACED}
    stored = json.loads(REACH.read_text()) if REACH.exists() else {"files": {}, "reach": {}}
    if stored["files"].keys() != files.keys():  # nobody looked who reaches the new one
        stored = {"files": {}, "reach": {}}
    changed = {path for path in TRACED if stored["files"].get(path) != files[path]}
    known = {n: Reach(**one) for n, one in stored["reach"].items() if not changed.intersection(one["lines"])}
    seeds = tree_hash("tests/sim")
    states = {
        n: seeds if n.startswith(SEED) else file_hash(ROOT / n.partition("::")[0]) for n in workers[0].killers
    }
    found = {name: known[name] for name in states if name in known and known[name].state == states[name]}

    def save() -> None:
        REACH.write_text(
            json.dumps({"files": files, "reach": {name: asdict(one) for name, one in found.items()}})
        )

    todo = [name for name in states if name not in found]
    for name, answer in spread(
        workers, ({"name": n, "reach": n} for n in todo), len(todo), "killers looked at"
    ):
        useless = ""
        if "lines" not in answer:
            useless = str(answer.get("error", answer.get("how"))).strip().splitlines()[-1]
            print(f"  not used: {name}: {useless}", flush=True)
        found[name] = Reach(answer.get("cpu_s", 0.0), answer.get("lines", {}), states[name], useless)
        if not len(found) % 50:
            save()
    save()
    return {n: one for n, one in found.items() if not one.useless and one.lines and one.cpu_s <= TEST_S_MAX}


def killers_for(mutant: Mutant, known: dict[str, Reach], seeds_max: int) -> list[tuple[str, float]]:
    """Those that run its lines, tests and seeds mixed, the quickest first."""
    lines = set(range(mutant.line, mutant.end_line + 1))
    found = sorted(
        (
            (name, one.cpu_s)
            for name, one in known.items()
            if lines.intersection(one.lines.get(mutant.path, ()))
        ),
        key=lambda entry: entry[1],
    )
    seeds = [name for name, _ in found if name.startswith(SEED)]
    few = set(seeds[:seeds_max])
    return [entry for entry in found if entry[0] in few or not entry[0].startswith(SEED)]


# --- mutants --------------------------------------------------------------------------------------------------------
class Results:
    """One file; a result counts for as long as the tree is the one it was found in.

    ``keep_killed``: one that was killed also counts when only other files have changed since: for work on the tests.
    """

    def __init__(self, *, fresh: bool = False, keep_killed: bool = False) -> None:
        self._state = everything()
        self.known: dict[str, Outcome] = {}
        self._files: dict[str, str] = {}
        if RESULTS.exists() and not fresh:
            stored = json.loads(RESULTS.read_text())
            same = stored["state"] == self._state
            for name, outcome in stored["results"].items():
                path = name.partition(":")[0]
                keeps = keep_killed and outcome["killed"] and stored["files"].get(path) == self._hash(path)
                if same or keeps:
                    self.known[name] = Outcome(**outcome)

    def _hash(self, path: str) -> str:
        if path not in self._files:
            self._files[path] = file_hash(PACKAGE / path)
        return self._files[path]

    def add(self, name: str, outcome: Outcome) -> None:
        self.known[name] = outcome

    def save(self) -> None:
        files = {name.partition(":")[0]: self._hash(name.partition(":")[0]) for name in self.known}
        body = {
            "state": self._state,
            "files": files,
            "results": {n: asdict(o) for n, o in self.known.items()},
        }
        fresh = RESULTS.with_suffix(".new")
        fresh.write_text(json.dumps(body, indent=0))
        fresh.replace(RESULTS)


def judge(
    mutants: Iterable[Mutant],
    workers: list[Worker],
    known: dict[str, Reach],
    results: Results,
    seeds_max: int,
) -> None:
    """Fills ``results`` with those that are not there."""
    todo = [mutant for mutant in mutants if mutant.id not in results.known]
    plans = {mutant.id: killers_for(mutant, known, seeds_max) for mutant in todo}
    often = {mutant.id for mutant in todo if mutant.path == SIMULATED} - set(rare())
    plans.update(
        (mutant.id, [(f"{SEED}{seed}", SIMULATED_S) for seed in range(first_seed(mutant), first_seed(mutant) + SIMULATED_SEEDS)])
        for mutant in todo
        if mutant.id in often
    )
    work = [
        {
            "name": m.id,
            "path": m.path,
            "number": m.number,
            "by_hand": m.function == BY_HAND,
            "run": plans[m.id],
        }
        for m in todo
        if plans[m.id]
    ]
    for mutant in todo:
        if not plans[mutant.id]:
            results.add(mutant.id, Outcome(False))
    saved_at = time.monotonic()
    for name, answer in spread(workers, iter(work), len(work), "mutants"):
        if answer.get("error"):
            outcome = Outcome(False, answer["by"], tried=len(plans[name]), error=answer["error"])
        elif answer["killed"]:
            outcome = Outcome(True, answer["by"], answer["how"], seconds=answer["seconds"])
        else:
            outcome = Outcome(False, tried=len(plans[name]), seconds=answer["seconds"])
        results.add(name, outcome)
        if time.monotonic() - saved_at > PRINT_EVERY_S:
            results.save()
            saved_at = time.monotonic()
    results.save()


def spread(
    workers: list[Worker], work: Iterator[dict[str, Any]], total: int, what: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each worker takes the next piece when it has done the one before."""
    done: Queue[tuple[str, dict[str, Any]] | BaseException | None] = Queue()
    pending: Queue[dict[str, Any]] = Queue()
    for piece in work:
        pending.put(piece)

    def take(worker: Worker) -> None:
        try:
            while not pending.empty():
                piece = pending.get()
                done.put((piece["name"], worker.do(piece)))
        except BaseException as error:
            done.put(error)
        done.put(None)

    began = said = time.monotonic()
    count, ended = 0, 0
    with ThreadPoolExecutor(len(workers)) as pool:
        for worker in workers:
            pool.submit(take, worker)
        while ended < len(workers):
            answer = done.get()
            if answer is None:
                ended += 1
            elif isinstance(answer, BaseException):
                raise answer
            else:
                count += 1
                yield answer
                if time.monotonic() - said > PRINT_EVERY_S:
                    said = time.monotonic()
                    left = (said - began) / count * (total - count)
                    print(f"  {count} of {total} {what}, about {left / 60:.0f} minutes more", flush=True)
