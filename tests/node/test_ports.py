"""The ports of a daemon that chooses them itself: the same after a restart, also when its state directory is gone."""

from __future__ import annotations

from pathlib import Path

from ckptd.config import FIRST_PORT, PORTS
from ckptd.core.errors import CkptdError
from ckptd.daemon import ports
from ckptd.daemon.state import StateDir


def test_the_first_ports_are_those_of_the_configuration(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "a")
    first = ports.kept(state, "n0", "127.0.0.1")
    assert first == ports.kept(state, "n0", "127.0.0.1")
    assert first.control != first.bulk
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in (first.control, first.bulk))
    others = [
        ports.kept(StateDir(tmp_path / "b"), "n0", "127.0.0.1"), ports.kept(state, "n1", "127.0.0.1"),
        ports.kept(state, "n0", "127.0.0.2"),
    ]  # fmt: skip
    assert others.count(first) < 2, "of 4,000 pairs of ports; two may meet by chance"


def test_what_was_kept_comes_first(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    ports.keep(state, "tcp://127.0.0.1:4001", "127.0.0.1:4002")
    assert ports.kept(state, "n0", "127.0.0.1") == ports.Ports(4001, 4002)


def test_a_port_that_is_taken_gives_way_to_any() -> None:
    def make(port: int) -> int:
        if port:
            raise CkptdError("taken", where="")
        return port

    assert ports.listen(make, 0, 20000) == 0
