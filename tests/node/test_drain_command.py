"""`ckptd drain NODE` where answers of the other node are lost on the way: asked again on the same connection, not for ever."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ckptd.cli.drain import UNANSWERED_MAX
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import RankSocket
from tests.node.commands import Cli, places

Answers = Sequence[wire.DrainState | wire.Refused]
NODE = "n1"
LOST = wire.Refused(wire.NO_ANSWER, NODE, "ask again")


def left(slots: int) -> wire.DrainState:
    job = {"job": "0/gpt", "leaving": True, "known": True, "done": not slots, "slots": slots, "bytes": slots << 20}
    return wire.DrainState(NODE, True, [{**job, "stuck": 0, "reasons": [], "falls": []}])


class Script:
    """A daemon's rank socket that takes one connection, ever, and answers each question with what is next."""

    def __init__(self, path: Path, answers: Answers) -> None:
        self.asked: list[tuple[str, str]] = []
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener:
            sock, _ = self._listener.accept()
        with sock:
            link = RankSocket(sock, wire.TO_DAEMON)
            for answer in self._answers:
                received = link.recv(30)
                if received is None:
                    return
                self.asked.append((received[0].want, received[0].node))
                link.send(answer)
            assert link.recv(30) is None, "more was asked than has an answer"

    def end(self) -> list[tuple[str, str]]:
        """What was asked, when the command is over."""
        self._thread.join(60)
        return self.asked


Scripted = Callable[[Answers], Script]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr("ckptd.cli.drain.LOOK_S", 0.001)
    with contextlib.ExitStack() as ending:

        def start(answers: Answers) -> Script:
            script = Script(tmp_path / "ckptd.sock", answers)
            ending.callback(script.end)
            return script

        yield start


def test_a_lost_answer_does_not_end_it(cli: Cli, scripted: Scripted, tmp_path: Path) -> None:
    script = scripted([left(2), LOST, left(1), left(0)])
    shown = cli("drain", NODE, *places(tmp_path))
    assert (shown.code, script.end()) == (0, [("on", NODE), *[("look", NODE)] * 3]), shown.err
    assert shown.out.splitlines() == [
        "n1: 2 slots left, 2.0 MiB",
        "n1: 1 slots left, 1.0 MiB",
        "n1: no slots left",
        "nothing on n1 is needed any more",
        "until it ends it gets nothing new to hold that another node could take: `ckptd drain n1 --cancel` undoes that",
    ]


def test_so_many_in_a_row_do_and_fewer_never(cli: Cli, scripted: Scripted, tmp_path: Path) -> None:
    few = [LOST] * (UNANSWERED_MAX - 1)
    script = scripted([left(1), *few, left(1), *few, left(1), *few, LOST])
    shown = cli("drain", NODE, *places(tmp_path))
    assert (shown.code, len(script.end())) == (1, 3 * UNANSWERED_MAX + 1)
    assert "no answer" in shown.err and "ask again" in shown.err


def test_any_other_refusal_ends_it_at_once(cli: Cli, scripted: Scripted, tmp_path: Path) -> None:
    script = scripted([left(1), wire.Refused("only root may", "uid 1", "use sudo")])
    shown = cli("drain", NODE, *places(tmp_path))
    assert (shown.code, script.end()) == (1, [("on", NODE), ("look", NODE)])
    assert "only root may" in shown.err
