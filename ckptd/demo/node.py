"""One node of the demo: a real ``ckptd run`` with its own identity, address, socket, state and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from ckptd.demo import processes

MEMORY_BUDGET = "256MiB"
REPLICAS = 1
FLUSH_EVERY_STEPS = 10
KEEP_LAST = 3  # durable checkpoints
BREAKPOINT_GRACE_S = 60.0  # a restart of the job takes about ten seconds here: it is no breakpoint
ADDRESS_BASE = "127.0.0."
PAGE_TIMEOUT_S = 2.0


class Node:
    """``index`` makes its name (node-0), its address (127.0.0.10) and its folder. ``run`` marks its processes."""

    def __init__(self, index: int, *, root: Path, logs: Path, storage: Path, key: Path, run: str) -> None:
        self.index, self.name, self.address = index, f"node-{index}", f"{ADDRESS_BASE}{10 + index}"
        self.folder, self._logs, self._storage, self._key = root / f"n{index}", logs, storage, key
        self.socket = self.folder / "ckptd.sock"
        self.mark = f"{run}.{self.name}."
        self._daemon: subprocess.Popen[bytes] | None = None
        self.jobs: list[subprocess.Popen[bytes]] = []

    # --- its daemon ---------------------------------------------------------------------------------------------
    def start(self) -> None:
        environ = self.environ("daemon")
        config = self.folder / "ckptd.toml"
        config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in self._settings().items()))
        environ["CKPTD_CONFIG"] = str(config)
        self._daemon = spawn([sys.executable, "-m", "ckptd", "run"], environ, self._logs / f"{self.name}.ckptd.log")

    def environ(self, what: str) -> dict[str, str]:
        """For whatever runs here. What a killed keeper or torchrun cannot remove goes with the node."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        places = {"XDG_RUNTIME_DIR": str(self.folder), "TMPDIR": str(self.folder)}
        return plain_environ() | places | {processes.MARK: self.mark + what}

    def _settings(self) -> dict[str, Any]:
        return {
            "node_id": self.name,
            "state_dir": str(self.folder / "state"),
            "socket": str(self.socket),
            "bind_address": self.address,
            "key_file": str(self._key),
            "memory_budget": MEMORY_BUDGET,
            "replicas": REPLICAS,
            "storage_root": str(self._storage),
            "flush_every_steps": FLUSH_EVERY_STEPS,
            "keep_last": KEEP_LAST,
            "breakpoint_grace_s": BREAKPOINT_GRACE_S,
            "log_level": "info",
        }

    def log_tail(self, lines: int = 15) -> str:
        path = self._logs / f"{self.name}.ckptd.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def daemon_ended(self) -> int | None:
        """Exit status of what ``start`` started; None while it lives."""
        return self._daemon.poll() if self._daemon else None

    def status(self) -> dict[str, Any] | None:
        """``GET /status``; None while the daemon does not answer."""
        try:
            where = self.socket.with_suffix(".http").read_text().strip()
            with urllib.request.urlopen(f"http://{where}/status", timeout=PAGE_TIMEOUT_S) as answer:
                body: dict[str, Any] = json.load(answer)
                return body
        except (OSError, ValueError):
            return None

    def daemon_pid(self) -> int | None:
        """The daemon itself; its parent may be its keeper."""
        status = self.status()
        return int(status["node"]["pid"]) if status else None

    # --- its processes ------------------------------------------------------------------------------------------
    def living(self) -> list[processes.Found]:
        """Everything that runs on this node: keeper, daemon, torchrun, trainer, and whatever they started."""
        known = [p.pid for p in (self._daemon, *self.jobs) if p is not None and p.poll() is None]
        return processes.find(self.mark, known)

    def kill(self) -> list[processes.Found]:
        """Power off. Returns what was killed."""
        found = self.living()
        left = processes.kill(f.pid for f in found)
        for process in (self._daemon, *self.jobs):
            if process is not None and process.pid not in left:
                process.wait()
        self._daemon, self.jobs = None, []
        return found


def spawn(command: list[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Detached from our terminal and our signals: only the demo ends it, by its pid."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def plain_environ() -> dict[str, str]:
    """Ours, without what would configure another ckptd or another torchrun."""
    foreign = ("CKPTD_", "TORCHELASTIC_", "GLOO_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NOTIFY_SOCKET", "WATCHDOG_USEC"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in names}
    return kept | {"PYTHONUNBUFFERED": "1"}
