"""One process that collects the tests once, then forks a child for each piece of work that a line on its standard input names.

A child plants its mutant and runs the killers it was given, until one finds something. It has limits on processor time, on
time and on memory: a mutant that never ends, or that eats memory, counts as killed, and the table says so.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.by_hand import EDITS, SIMULATED, edited
from tests.mutants.generate import mutated
from tests.mutants.killers import Killer, Seed, killers_of, reached_by
from tests.mutants.plant import plant
from tests.mutants.targets import TRACED, files_of_tests, source_of
from tests.sim.mutants import MUTANTS

CPU_TIMES = 6  # what a killer usually takes, before it is said to be endless ...
CPU_MORE_S = 2.0
MEMORY_BYTES = 2 << 30  # beyond what the worker itself has
WAIT_S = 240.0  # for one child, whatever it does
ENDLESS = "it does not end"


def main() -> int:
    """Work comes in, results go out, as lines of JSON; whatever pytest prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arguments = [
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "-m",
        "not chaos and not soak and not elastic",
        *files_of_tests(),
    ]
    return int(pytest.main(arguments, plugins=[_Serve(out)]))


class _Serve:
    def __init__(self, out: Any) -> None:
        self._out = out

    def pytest_configure(self) -> None:
        """The same examples every time, and none made smaller. Before any test is imported, for settings are taken then."""
        from hypothesis import HealthCheck, Phase, settings  # pytest must have seen it first

        settings.register_profile(
            "mutants",
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Failed("tests cannot be collected")
        killers = killers_of(session)
        for path in TRACED:
            source_of(path)
        gc.collect()
        gc.freeze()  # a child that collects garbage must not copy all that was imported
        self._say({"killers": list(killers)})
        for line in sys.stdin:
            self._say(in_a_child(killers, json.loads(line)))
        return True

    def _say(self, answer: dict[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")


def in_a_child(killers: dict[str, Killer], work: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(killers, work, write)
    os.close(write)
    data = _read(read, began + WAIT_S)
    os.close(read)
    try:
        os.killpg(pid, signal.SIGKILL)  # also what a test had started
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    answer = (
        json.loads(data) if data.endswith(b"\n") else {"killed": True, "by": "all of them", "how": ENDLESS}
    )
    return {**answer, "name": work["name"], "seconds": round(time.monotonic() - began, 3)}


def _read(read: int, until: float) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        if not select.select([read], [], [], max(0.0, until - time.monotonic()))[0]:
            break
        more = os.read(read, 1 << 20)
        if not more:
            break
        data += more
    return data


def _child(killers: dict[str, Killer], work: dict[str, Any], write: int) -> None:
    os.setpgid(0, 0)
    now = "before the first"

    def answer(**what: Any) -> None:
        data = json.dumps(what).encode() + b"\n"
        while data:
            data = data[os.write(write, data) :]
        os._exit(0)

    def endless(signum: int, frame: Any) -> None:
        answer(killed=True, by=now, how=ENDLESS)

    try:
        _limit_memory()
        signal.signal(signal.SIGPROF, endless)
        if work.get("path") == SIMULATED:
            name = list(MUTANTS)[work["number"]]
            killers = {
                killer: Killer(killer, Seed(int(killer.split()[1]), name)) for killer, _ in work["run"]
            }
        elif "path" in work:
            plant(work["path"], _tree(work))
        elif "reach" in work:
            seconds, lines = reached_by(killers[work["reach"]])
            answer(cpu_s=round(seconds, 4), lines=lines)
        for now, usual in work["run"]:
            signal.setitimer(signal.ITIMER_PROF, usual * CPU_TIMES + CPU_MORE_S)
            try:
                how = killers[now].run()
            except pytest.skip.Exception:
                how = ""
            signal.setitimer(signal.ITIMER_PROF, 0)
            if how:
                answer(killed=True, by=now, how=how[:300])
        answer(killed=False)
    except MemoryError:
        answer(killed=True, by=now, how="it eats memory")
    except BaseException:
        answer(killed=False, error=traceback.format_exc()[-800:], by=now)


def _tree(work: dict[str, Any]) -> ast.Module:
    if work["by_hand"]:
        return edited(EDITS[work["number"]])
    return mutated(work["path"], source_of(work["path"]), work["number"])


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # of data
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
