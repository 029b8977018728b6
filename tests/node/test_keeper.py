"""The keeper with a real daemon process that owns real memory: killed, restarted, asked to stop (D1, P7)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.arena import keeper as module
from ckptd.arena.arena import SEGMENTS_MAX, Tenant
from ckptd.arena.fdstore import Keeper, NullKeeper, has_service_manager
from ckptd.arena.keeper import DIRECTORY_PREFIX, SOCKET_NAME, is_name
from tests.short import short_folder
from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
ORDER_TIMEOUT_S = 20.0  # the machine may be busy
POLL_TIMEOUT_S = 0.5
WRAPPER = """
import sys
from ckptd.arena.keeper import run_under_keeper
sys.exit(run_under_keeper(sys.argv[2:], float(sys.argv[1])))
"""
FULL = """
import os, signal, sys, time
sys.path[:0] = [sys.argv[3]]
from ckptd.arena.fdstore import Keeper
link = Keeper.from_env()
if taken := link.taken():
    print(f"taken back {len(taken)}", flush=True)
    os._exit(0)
fd = os.memfd_create("x")
for number in range(int(sys.argv[1])):
    while not link.store(f"scratch-{(int(time.time()) << 16) + number:x}-{sys.argv[2]}", fd):
        pass
link.ready()
os.kill(os.getpid(), signal.SIGKILL)
"""
NOWHERE = """
import sys
from ckptd.arena import keeper
def refused(*_): raise OSError(30, "Read-only file system")
keeper.os.mkdir = refused
sys.exit(keeper.main(["0", "true"]))
"""


class Kept:
    """``run_under_keeper`` in a process of its own, and a way to talk to the daemon under it."""

    def __init__(self, directory: Path, *options: str, watchdog_s: float = 0.0) -> None:
        self.path = directory / "orders"
        daemon = [sys.executable, "-m", "tests.node.child_daemon", str(self.path), *options]
        env = {**os.environ, "XDG_RUNTIME_DIR": str(directory), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRAPPER, str(watchdog_s), *daemon], cwd=ROOT, env=env
        )
        self._mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._mine.bind(str(directory / "answers"))
        self._number = 0

    def order(self, text: str) -> dict[str, Any]:
        """Give an order to a daemon that is up; its answer."""
        answer = self._ask(text, ORDER_TIMEOUT_S)
        assert answer is not None, f"no answer to {text}"
        return answer

    def tell(self, text: str) -> None:
        """An order that ends the daemon has no answer."""
        self._mine.sendto(f"0 {text}".encode(), str(self.path))

    def _ask(self, text: str, timeout_s: float) -> dict[str, Any] | None:
        self._number += 1
        self._mine.settimeout(timeout_s)
        try:
            self._mine.sendto(f"{self._number} {text}".encode(), str(self.path))
            while (answer := json.loads(self._mine.recv(65536)))["number"] != self._number:
                continue  # to an order that was given up
        except (OSError, TimeoutError):
            return None
        return dict(answer)

    def daemon(self, other_than: int = 0) -> dict[str, Any]:
        """The answer of a daemon that is up and is not that pid."""

        def there() -> dict[str, Any] | None:
            answer = self._ask("status", POLL_TIMEOUT_S)
            return answer if answer and answer["pid"] != other_than else None

        answer = until(there, ORDER_TIMEOUT_S, what="the daemon under the keeper")
        assert isinstance(answer, dict)
        return answer

    def end(self) -> None:
        self._mine.close()
        child = self.order_pid()
        self.process.kill()
        self.process.wait()
        if child:
            until(lambda: not _exists(child), what="the daemon follows its keeper")

    def order_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int((children.read_text().split() or ["0"])[0]) if children.exists() else 0


def _exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # in a container without init nobody reaps it


def memfds(pid: int) -> list[str]:
    """Names of the memfds that a process holds."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return [target.removeprefix("/memfd:").split()[0] for target in found if "memfd:" in target]


Start = Callable[..., Kept]


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Short enough for a keeper to use it whatever the test's name."""
    with short_folder() as folder:
        yield folder


@pytest.fixture
def kept(runtime: Path) -> Iterator[Start]:
    started: list[Kept] = []

    def start(*options: str, watchdog_s: float = 0.0) -> Kept:
        started.append(Kept(runtime, *options, watchdog_s=watchdog_s))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_a_killed_daemon_finds_its_memory_again(kept: Start) -> None:
    """P7: kill -9; the next life has the same memory (same inodes), slots with their ids, sums intact, FILLING dropped."""
    keeper = kept()
    first = keeper.daemon()
    sealed = keeper.order("seal 41")
    assert len(sealed["slots"]) == 3
    os.kill(first["pid"], signal.SIGKILL)
    second = keeper.daemon(other_than=first["pid"])
    assert {key: second[key] for key in ("slots", "sealed", "inodes")} == {
        key: sealed[key] for key in ("slots", "sealed", "inodes")
    }
    assert len(second["sealed"]) == 2
    assert second["bad"] == []
    assert second["leaked"] == [], "no child of the daemon believes that the descriptors are its own"
    keeper.order("seal 42")
    os.kill(second["pid"], signal.SIGKILL)
    assert sorted(keeper.daemon(other_than=second["pid"])["sealed"].values()) == [41, 41, 42, 42]


def test_what_is_stored_in_the_last_moment_is_kept(kept: Start) -> None:
    """The descriptors are still in the socket when the daemon is dead."""
    keeper = kept()
    first = keeper.daemon()
    os.kill(keeper.process.pid, signal.SIGSTOP)
    sealed = keeper.order("seal 7")
    os.kill(first["pid"], signal.SIGKILL)
    os.kill(keeper.process.pid, signal.SIGCONT)
    assert keeper.daemon(other_than=first["pid"])["sealed"] == sealed["sealed"]


def test_a_swept_directory_costs_neither_the_daemon_nor_its_memory(kept: Start, runtime: Path) -> None:
    """P7: with the name of their socket gone (/tmp is swept) nothing more was kept, and after a minute the daemon was killed."""
    keeper = kept()
    pid = keeper.daemon()["pid"]
    for step in (41, 42):
        (directory,) = runtime.glob(f"{DIRECTORY_PREFIX}*")
        shutil.rmtree(directory)
        keeper.order(f"seal {step}")
        os.kill(pid, signal.SIGKILL)
        found = keeper.daemon(other_than=pid)
        pid = found["pid"]
        assert sorted(found["sealed"].values())[-2:] == [step, step]


def test_who_listens_under_the_same_name_anew_is_found(runtime: Path) -> None:
    path = runtime / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as first:
        first.bind(str(path))
        keeper = Keeper(str(path))
    assert not keeper.store("x", 0)
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as second:
        second.bind(str(path))
        assert keeper.store("x", 0)
        assert second.recv(100).startswith(b"FDSTORE=1")
    keeper.close()


def test_the_keeper_is_small_and_never_maps_the_memory(kept: Start) -> None:
    keeper = kept()
    keeper.daemon()
    keeper.order("seal 1")
    process = Path(f"/proc/{keeper.process.pid}")
    until(
        lambda: len(memfds(keeper.process.pid)) == 3, what="three segments are kept, the retired one is not"
    )
    assert "memfd:" not in (process / "maps").read_text()
    anonymous = next(line for line in (process / "status").read_text().splitlines() if "RssAnon" in line)
    assert int(anonymous.split()[1]) < 12 * 1024


@pytest.mark.parametrize("code", [0, 7])
def test_a_daemon_that_ends_cleanly_or_refuses_to_start_ends_the_keeper(kept: Start, code: int) -> None:
    keeper = kept("refuse") if code else kept()
    if not code:
        keeper.daemon()
        keeper.tell("exit 0")
    assert keeper.process.wait(ORDER_TIMEOUT_S) == code


def test_a_daemon_that_fails_later_is_started_again(kept: Start) -> None:
    keeper = kept()
    first = keeper.daemon()
    keeper.tell("exit 9")
    assert keeper.daemon(other_than=first["pid"])["pid"] != first["pid"]


def test_signals_reach_the_daemon_and_its_status_comes_back(kept: Start) -> None:
    keeper = kept()
    keeper.daemon()
    keeper.process.send_signal(signal.SIGHUP)
    until(lambda: keeper.order("status")["got"] == [signal.SIGHUP], what="SIGHUP forwarded")
    keeper.process.send_signal(signal.SIGTERM)
    assert keeper.process.wait(ORDER_TIMEOUT_S) == 3, "the status that the daemon gave"


def test_a_daemon_that_hangs_is_killed_by_the_third_request_to_stop(kept: Start) -> None:
    keeper = kept()
    pid = keeper.daemon()["pid"]
    os.kill(pid, signal.SIGSTOP)

    def ask() -> bool:  # signals that are not taken yet count once, so it asks until it is heard
        keeper.process.send_signal(signal.SIGTERM)
        return keeper.process.poll() is not None

    until(ask, what="the end of a daemon that is stopped")
    assert keeper.process.returncode == 128 + signal.SIGKILL


def test_the_daemon_dies_with_its_keeper(kept: Start) -> None:
    """PDEATHSIG: else an orphan would hold the socket path and nobody would restart it."""
    keeper = kept()
    pid = keeper.daemon()["pid"]
    keeper.process.kill()
    until(lambda: not _exists(pid), what="the daemon's end")


def test_a_terminal_interrupts_the_daemon_once(kept: Start) -> None:
    """Ctrl-C goes to the foreground group, where only the keeper is; it forwards."""
    pid = kept().daemon()["pid"]
    assert os.getpgid(pid) == pid


def said_under_keeper(*command: str) -> str:
    """All that a keeper and its daemons say until they end."""
    keeper = [sys.executable, "-I", "-S", module.__file__, "0", *command]
    with subprocess.Popen(keeper, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            return process.communicate(timeout=30)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.communicate()[0]


def test_as_many_segments_as_there_may_be_come_back_after_a_crash() -> None:
    """P7: their names are one environment variable; beyond what the kernel takes no daemon would start any more."""
    tag = Tenant("1000/gpt", 1000, "scratch").tag
    command = [sys.executable, "-S", "-c", FULL, str(SEGMENTS_MAX), tag, str(ROOT)]
    assert f"taken back {SEGMENTS_MAX}" in said_under_keeper(*command)


def test_why_a_daemon_cannot_be_started_is_said() -> None:
    assert "cannot be started: [Errno 2] No such file" in said_under_keeper("/no/such/daemon")


def test_only_the_daemon_itself_is_listened_to(kept: Start) -> None:
    """The kernel says who sent a datagram; another process of the same user cannot make the keeper forget."""
    keeper = kept()
    first = keeper.daemon()
    sealed = keeper.order("seal 3")
    variables = Path(f"/proc/{first['pid']}/environ").read_text().split("\0")
    liar = Keeper(next(text for text in variables if text.startswith("NOTIFY_SOCKET=")).partition("=")[2])
    until(lambda: len(memfds(keeper.process.pid)) == 3)
    assert all(liar.remove(name) for name in memfds(keeper.process.pid))
    liar.close()
    os.kill(first["pid"], signal.SIGKILL)
    assert keeper.daemon(other_than=first["pid"])["sealed"] == sealed["sealed"]


def test_a_crash_loop_slows_down(tmp_path: Path) -> None:
    script = ROOT / "ckptd" / "arena" / "keeper.py"
    command = [sys.executable, "-I", "-S", str(script), "0", "sh", "-c", "kill -9 $$"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as keeper:
        assert keeper.stderr is not None
        delays = [float(keeper.stderr.readline().split()[-2]) for _ in range(3)]
        keeper.terminate()
        assert keeper.wait(ORDER_TIMEOUT_S) == 128 + signal.SIGKILL
    assert delays == [0.2, 0.4, 0.8]


def test_a_silent_daemon_is_aborted_and_comes_back_with_its_memory(kept: Start) -> None:
    keeper = kept(watchdog_s=2.0)
    first = keeper.daemon()
    assert first["interval"] == pytest.approx(1.0)
    sealed = keeper.order("seal 5")
    keeper.order("silent")
    assert keeper.daemon(other_than=first["pid"])["sealed"] == sealed["sealed"]


# --- its directory ----------------------------------------------------------------------------------------------
STOPPED_AT_ONCE = """
import os, signal, sys
from ckptd.arena import keeper

class Interrupted(keeper.NotifySocket):
    def __init__(self):
        super().__init__()
        signal.raise_signal(signal.SIGTERM)

keeper.NotifySocket = Interrupted
sys.exit(keeper.KeeperProcess(["sleep", "inf"]).run())
"""


def under(directory: Path) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": str(directory), "PYTHONPATH": str(ROOT)}


def keep(directory: Path, *command: str) -> None:
    """A whole life of a keeper whose directory is made there."""
    script = ROOT / "ckptd" / "arena" / "keeper.py"
    subprocess.run(
        [sys.executable, "-I", "-S", str(script), "0", *command], env=under(directory), timeout=ORDER_TIMEOUT_S, check=True
    )


def test_a_keeper_that_is_stopped_while_it_starts_leaves_no_directory(runtime: Path) -> None:
    command = [sys.executable, "-c", STOPPED_AT_ONCE]
    ran = subprocess.run(command, env=under(runtime), timeout=ORDER_TIMEOUT_S, check=False)
    assert ran.returncode == 128 + signal.SIGTERM
    assert list(runtime.iterdir()) == []


def test_a_container_without_tmp_has_a_place_for_the_socket_or_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a read-only root the daemon ended in a traceback of its keeper."""
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "access", lambda path, mode: path == "/dev/shm")
        directory = Path(module._private_directory())
    directory.rmdir()
    assert directory.parent == Path("/dev/shm")
    ran = subprocess.run([sys.executable, "-c", NOWHERE], capture_output=True, text=True, timeout=ORDER_TIMEOUT_S, check=False)
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1 and "set TMPDIR" in ran.stderr, ran.stderr


def test_the_next_keeper_removes_what_killed_ones_left_and_nothing_else(runtime: Path) -> None:
    living, killed, unbound, new, other = (runtime / f"{DIRECTORY_PREFIX}{name}" for name in "lkuno")
    for folder in (living, killed, unbound, new, other):
        folder.mkdir()
    (other / "precious").touch()
    for folder in (unbound, other):
        os.utime(folder, (0, 0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(str(living / SOCKET_NAME))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
            gone.bind(str(killed / SOCKET_NAME))
        keep(runtime, "true")
    assert set(runtime.iterdir()) == {living, new, other}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every directory")
def test_a_directory_that_cannot_be_listed_is_no_reason_not_to_start(runtime: Path) -> None:
    runtime.chmod(0o300)
    try:
        keep(runtime, "touch", str(ran := runtime / "ran"))
    finally:
        runtime.chmod(0o700)
    assert list(runtime.iterdir()) == [ran], "the daemon was started, and the keeper's own directory is gone"


def test_without_a_keeper_nothing_is_kept_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    keeper = Keeper.from_env()
    assert type(keeper) is NullKeeper
    assert keeper.store("x", 0)
    assert keeper.taken() == {}
    keeper.ready()
    keeper.watchdog()


def test_a_vanished_keeper_is_said_not_raised(tmp_path: Path) -> None:
    keeper = Keeper(str(tmp_path / "nobody"))
    assert not keeper.store("x", 0)
    keeper.ready()
    keeper.close()


def test_descriptors_of_another_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "3")
    keeper = Keeper.from_env()
    assert keeper.taken() == {}
    assert "LISTEN_FDS" not in os.environ
    keeper.close()


def test_a_notify_socket_meant_for_another_process_is_no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.delenv("SYSTEMD_EXEC_PID", raising=False)
    assert has_service_manager()
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    assert has_service_manager()
    monkeypatch.setenv("SYSTEMD_EXEC_PID", "1")
    assert not has_service_manager()


@pytest.mark.parametrize(
    ("name", "good"), [("own-1f-0a", True), ("", False), ("a:b", False), ("a\nb", False), ("x" * 256, False)]
)
def test_names_are_those_of_systemd(name: str, good: bool) -> None:
    assert is_name(name) is good
