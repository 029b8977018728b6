"""A real daemon for a benchmark, and what it uses."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 60.0
POLL_S = 0.05
OWN_SLOTS = 2
BESIDE_STATE = 1.1  # sums and records, and what rounding adds
RESERVE_BYTES = 256_000_000  # what the daemon keeps free of its budget, and a little


def room(nbytes: int) -> int:
    """The memory budget for OWN_SLOTS snapshots of a state of so many bytes."""
    return int(OWN_SLOTS * BESIDE_STATE * nbytes) + RESERVE_BYTES


class Daemon:
    def __init__(self, root: Path, settings: dict[str, object]) -> None:
        self.root, self.socket = root, root / "s"
        defaults = {
            "node_id": "bench", "state_dir": root / "state", "socket": self.socket, "plain_loopback": "true",
            "replicas": 0, "own_slots": OWN_SLOTS,
        }  # fmt: skip
        env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
        env |= {f"CKPTD_{name.upper()}": str(value) for name, value in {**defaults, **settings}.items()}
        env["XDG_RUNTIME_DIR"] = str(root)  # what a killed keeper leaves goes with the root
        self._log = (root / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckptd", "run"],
            env=env,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.get("/healthz")
                return
            if self.process.poll() is not None:
                break
            time.sleep(POLL_S)
        raise RuntimeError((self.root / "log").read_text()[-3000:])

    def get(self, path: str) -> str:
        where = self.socket.with_suffix(".http").read_text().strip()
        with urllib.request.urlopen(f"http://{where}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def beyond_arena_bytes(self) -> int:
        """Resident memory of keeper and daemon that is no shared memory (the arena is all of that)."""
        total = 0
        for pid in self.pids():
            status = Path(f"/proc/{pid}/status").read_text()
            for line in status.splitlines():
                if line.startswith(("RssAnon:", "RssFile:")):
                    total += int(line.split()[1]) * 1024
        return total

    def pids(self) -> list[int]:
        """Keeper and daemon."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


@contextlib.contextmanager
def daemon(**settings: object) -> Iterator[Daemon]:
    root = Path(tempfile.mkdtemp(prefix="ckptd-bench-"))
    made = Daemon(root, settings)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(root, ignore_errors=True)
