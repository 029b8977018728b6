"""Nodes of a benchmark in network namespaces of their own, joined by a bridge over links of a limited rate (`tc tbf`).

Needs root, `ip` and `tc` (iproute2). Everything is named after this process and is gone when the context ends, also after
SIGINT and SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

SUBNET = "10.217.0"
BURST = "128kb"  # of tbf: a little more than one segment that the card would cut up
LATENCY = "30ms"  # of tbf: how long a packet may wait for its turn before it is dropped
LINK = "eth0"


def missing() -> str:
    """Why it cannot be done here; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not found: install iproute2"
    probe = f"ckptd-{os.getpid()}-p"
    try:
        run("ip", "netns", "add", probe)
        run(
            "tc",
            "-n",
            probe,
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "tbf",
            "rate",
            "1mbit",
            "burst",
            "16kb",
            "latency",
            "1s",
        )
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return ""


def run(*command: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Place:
    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]

    def python(self, *arguments: str) -> list[str]:
        return self.command(sys.executable, *arguments)


@contextlib.contextmanager
def places(count: int, mbit_s: float) -> Iterator[list[Place]]:
    """``count`` namespaces; each sends at most ``mbit_s``."""
    prefix = f"ckptd-{os.getpid()}"
    hub = f"{prefix}-hub"
    made = [Place(f"{prefix}-{index}", f"{SUBNET}.{index + 1}") for index in range(count)]
    with _signals_raise():
        try:
            run("ip", "netns", "add", hub)
            run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", hub, "link", "set", "br0", "up")
            for index, place in enumerate(made):
                _join(place, hub, f"p{index}", mbit_s)
            yield made
        finally:
            for name in (*(place.namespace for place in made), hub):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _join(place: Place, hub: str, port: str, mbit_s: float) -> None:
    ns = place.namespace
    run("ip", "netns", "add", ns)
    run("ip", "-n", ns, "link", "add", LINK, "type", "veth", "peer", "name", port, "netns", hub)
    run("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
    run("ip", "-n", ns, "addr", "add", f"{place.address}/24", "dev", LINK)
    run("ip", "-n", ns, "link", "set", LINK, "up")
    run("ip", "-n", ns, "link", "set", "lo", "up")
    rate = f"{mbit_s:g}mbit"
    run(
        "tc",
        "-n",
        ns,
        "qdisc",
        "add",
        "dev",
        LINK,
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        BURST,
        "latency",
        LATENCY,
    )


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, ended) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that were put into the list are killed at the end, with their children."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in started:
            process.wait()


def start(
    started: list[subprocess.Popen[str]],
    command: Sequence[str],
    env: dict[str, str],
    log: str,
    *,
    talks: bool = False,
) -> subprocess.Popen[str]:
    """In a session of its own. ``talks``: over its stdin and stdout."""
    pipe = subprocess.PIPE if talks else None
    with open(log, "a") as out:
        process = subprocess.Popen(
            command, env=env, stdin=pipe or subprocess.DEVNULL, stdout=pipe or out, stderr=out, text=True,
            bufsize=1, start_new_session=True,
        )  # fmt: skip
    started.append(process)
    return process
