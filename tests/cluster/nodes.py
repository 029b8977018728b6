"""Real daemons and real training processes for tests, each in a session of its own, all gone when the test ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from ckptd.demo.job import free_port
from tests.cluster.forked import END_TIMEOUT_S, REPO, Forked, ForkedCommand
from tests.short import short_folder
from tests.waiting import until

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 90.0  # of a rank: nothing here takes that long, so whoever does hangs


class Node:
    """One ``ckptd run``: keeper and daemon, with its own directory, address and memory."""

    anew = False  # True: each is an interpreter of its own, as a user's are

    def __init__(self, root: Path, name: str, index: int, **settings: Any) -> None:
        self.name, self.root = name, root / name
        self.root.mkdir(exist_ok=True)
        self.socket = self.root / "s"
        defaults = {
            "node_id": name, "state_dir": self.root / "state", "socket": self.socket, "memory_budget": "512MiB",
            "bind_address": f"127.0.0.{index + 1}", "plain_loopback": "true", "bulk_mode": "none", "nice": 0,
            "inventory_timeout_s": 2, "steward_timeout_s": 3, "breakpoint_grace_s": 3600,
        }  # fmt: skip
        self.settings = {**defaults, **settings}
        self.process: subprocess.Popen[bytes] | ForkedCommand | None = None
        self.log = self.root / "log"

    def start(self, *, wait: bool = True, failpoint: str = "", within: Sequence[str] = ()) -> Node:
        """``within``: a command that runs the daemon's, with other rights for example."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
        env |= {
            f"CKPTD_{key.upper()}": str(value) for key, value in self.settings.items() if value is not None
        }
        env.pop("XDG_RUNTIME_DIR", None)
        env["TMPDIR"] = str(self.root)  # what a killed keeper leaves behind goes with the test
        if failpoint:
            env["CKPTD_FAILPOINT"] = failpoint
        if within or self.anew:
            with open(self.log, "ab") as log:
                command = [*within, sys.executable, "-m", "ckptd", "run"]
                self.process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=REPO
                )
        else:
            with open(self.log, "ab") as log:
                self.process = ForkedCommand(["run"], env, log, log)
        if wait:
            self.until_up()
        return self

    def until_up(self) -> None:
        until(self._answers, START_TIMEOUT_S, f"{self.name} to start: {self.log.read_text()[-2000:]}")

    def until_ended(self) -> tuple[int, str]:
        """Of a daemon that refuses to start: its status and what it said."""
        assert self.process is not None
        return self.process.wait(START_TIMEOUT_S), self.log.read_text()

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(
                f"{self.name} exited with {self.process.returncode}: {self.log.read_text()[-3000:]}"
            )
        with contextlib.suppress(OSError, ValueError):
            return bool(self.get("/status"))
        return False

    def get(self, path: str) -> Any:
        address = self.socket.with_suffix(".http").read_text().strip()
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            body = answer.read()
            return json.loads(body) if path != "/metrics" else body.decode()

    def job(self, name: str) -> dict[str, Any]:
        jobs = self.get("/status")["jobs"]
        return next((job for job in jobs if job["job"].endswith("/" + name)), {})

    def newest(self, name: str, level: str) -> int:
        return int(self.job(name).get("newest", {}).get(level, -1))

    def problems(self) -> dict[str, str]:
        """What health says: kind -> text."""
        return {problem["kind"]: problem["text"] for problem in self.get("/status")["health"]["problems"]}

    def metric(self, name: str) -> float:
        """Sum over the series whose line begins so."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def cli(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """`ckptd ARGUMENTS` with this node's settings."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
        env["CKPTD_SOCKET"] = str(self.socket)
        command = [*map(str, arguments)]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = ForkedCommand(command, env, out, err).wait(START_TIMEOUT_S)
            said = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
        return subprocess.CompletedProcess(command, code, *said)

    def daemon_pid(self) -> int:
        return int(self.get("/status")["node"]["pid"])

    def signal_daemon(self, number: signal.Signals) -> None:
        """To the daemon alone, found without asking it: it may be stopped."""
        os.kill(self._daemon().pid, number)

    def crash(self) -> None:
        """kill -9 of the daemon alone; returns once the one that the keeper starts in its place answers."""
        before = self.daemon_pid()
        self.signal_daemon(signal.SIGKILL)
        until(lambda: self.daemon_other_than(before), 45, "the daemon to be back")

    def daemon_other_than(self, pid: int) -> int:
        """Its process id; 0 while it is that one or does not answer."""
        try:
            now = self.daemon_pid()
        except OSError:
            return 0
        return now if now != pid else 0

    def _daemon(self) -> psutil.Process:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        return max(children, key=lambda child: child.memory_info().vms)

    def kill(self) -> None:
        """The whole node: keeper, daemon and whatever they started."""
        if self.process is not None:
            for victim in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            self.process.wait()
            self.process = None

    def processes(self) -> list[psutil.Process]:
        assert self.process is not None
        try:
            keeper = psutil.Process(self.process.pid)
            return [keeper, *keeper.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


class Trainer:
    """One rank, told line by line what to do (tests/cluster/trainer.py). ``env`` goes to the process; ``uid``: its user."""

    def __init__(
        self, node: Node, job: str, *, rank: int = 0, world: int = 1, port: int = 0, kind: str = "plain",
        failpoint: str = "", env: dict[str, str] | None = None, uid: int = 0,
    ) -> None:  # fmt: skip
        variables = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
        variables |= {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "CKPTD_SOCKET": str(node.socket), "PYTHONPATH": str(REPO),
        }  # fmt: skip
        if failpoint:
            variables["CKPTD_FAILPOINT"] = failpoint
        self.node, self.job, self.kind, self.rank = node, job, kind, rank
        self.log = node.root / f"trainer-{job}-{rank}.log"
        order = {"env": variables | (env or {}), "uid": uid, "job": job, "kind": kind}
        self._in, self._out, self._process = self._fork(order)

    def _fork(self, order: dict[str, Any]) -> tuple[Any, Any, Forked]:
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        with open(self.log, "ab") as log:
            process = Forked("tests.cluster.template", order, [in_read, out_write, log.fileno()])
        os.close(in_read)
        os.close(out_write)
        return os.fdopen(in_write, "w", buffering=1), os.fdopen(out_read, "rb", buffering=0), process

    def ask(self, do: str, **how: Any) -> None:
        try:
            self._in.write(json.dumps({"do": do, **how}) + "\n")
        except BrokenPipeError:
            raise AssertionError(f"rank {self.rank} ended: {self.log.read_text()[-3000:]}") from None

    def answer(self, timeout: float = ANSWER_TIMEOUT_S) -> Any:
        if not select.select([self._out], [], [], timeout)[0]:
            raise AssertionError(f"rank {self.rank} hangs: {self.log.read_text()[-3000:]}")
        line = self._out.readline()
        if not line:
            raise AssertionError(f"rank {self.rank} ended: {self.log.read_text()[-3000:]}")
        body = json.loads(line)
        if "error" in body:
            raise TrainerError(body["error"])
        return body["ok"]

    def do(self, do: str, **how: Any) -> Any:
        self.ask(do, **how)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.until_ended(), f"rank {self.rank} lives on"
        for pipe in (self._in, self._out):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def until_ended(self) -> bool:
        return self._process.ended(END_TIMEOUT_S)


class TrainerError(AssertionError):
    """The trainer raised; the text is "TypeName: message"."""


def together(trainers: Sequence[Trainer], do: str, **how: Any) -> list[Any]:
    """The same on all ranks at once. A rank's error is returned, not raised, so that all can be looked at."""
    for trainer in trainers:
        trainer.ask(do, **how)
    answers: list[Any] = []
    for trainer in trainers:
        try:
            answers.append(trainer.answer())
        except TrainerError as error:
            answers.append(error)
    return answers


class Cluster:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: list[Node] = []
        self.trainers: list[Trainer] = []

    def node(self, name: str | None = None, *, start: bool = True, **settings: Any) -> Node:
        node = Node(self.root, name or f"n{len(self.nodes)}", len(self.nodes), **settings)
        self.nodes.append(node)
        return node.start() if start else node

    def several(self, count: int, *, domains: Sequence[str] = (), **settings: Any) -> list[Node]:
        """Started side by side. ``domains``: the failure domain of each; a node is one by itself without it."""
        placed = [{"domain": name} for name in domains] or [{}] * count
        made = [self.node(start=False, **settings, **place).start(wait=False) for place in placed]
        for node in made:
            node.until_up()
        return made

    def world(self, nodes: Sequence[Node], job: str, *, kind: str = "plain", **how: Any) -> list[Trainer]:
        """One rank on each of these nodes, of one gloo world."""
        port = free_port()
        made = [
            Trainer(node, job, rank=i, world=len(nodes), port=port, kind=kind, **how)
            for i, node in enumerate(nodes)
        ]
        self.trainers += made
        return made

    def again(self, world: Sequence[Trainer], on: Sequence[Node] | None = None) -> list[Trainer]:
        """The same job on the same nodes, or ``on`` these. Killed first: ranks that say goodbye have their last step written."""
        for trainer in world:
            trainer.kill()
        return self.world(on or [trainer.node for trainer in world], world[0].job, kind=world[0].kind)

    def protected(
        self, job: str, count: int, redundancy: str, **settings: Any
    ) -> tuple[list[Node], list[Trainer], list[str]]:
        """A world of FSDP ranks with a protected snapshot of step 3, and the digests of what it holds."""
        made = self.several(count, redundancy=redundancy, **settings)
        world = self.world(made, job, kind="fsdp")
        assert together(world, "restore") == [None] * count
        together(world, "train", steps=3, snapshot=False)
        digests = together(world, "digest")
        together(world, "snapshot", must=True)
        said = together(world, "wait", level="protected", timeout=60)
        assert all("protected" in str(answer) for answer in said), (said, [node.log.read_text()[-3000:] for node in made])
        return made, world, digests

    def close(self) -> None:
        for trainer in self.trainers:
            with contextlib.suppress(OSError):
                trainer.kill()
        for node in self.nodes:
            node.kill()


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    with short_folder() as root:
        root.chmod(0o711)  # other users' ranks reach their sockets
        made = Cluster(root)
        try:
            yield made
        finally:
            made.close()
