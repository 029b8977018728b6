"""A node whose link is down and that speaks all the same is up, for as long as it speaks: its link tells nothing twice (P2)."""

from __future__ import annotations

from ckptd.core.ids import NodeInfo
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.machine import SPOKE_S, JobMachine

A = NodeInfo("a", "tcp://a", "a", "a", "a#1")
TICK_S = 0.25
WORD = ev.Received("b", msg.Inventory("", None, ()))


class Machine:
    def __init__(self) -> None:
        self.machine, self.now = JobMachine("1/job", A, Policy()), 0.0

    def feed(self, event: ev.Event) -> None:
        self.machine.handle(event, self.now)

    def silence(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S) + 1):
            self.now += TICK_S
            self.feed(ev.Tick())

    @property
    def down(self) -> list[str]:
        return list(self.machine.view()["down"])


def test_one_that_spoke_while_its_link_was_down_and_went_again_is_down() -> None:
    machine = Machine()
    machine.feed(ev.NodeDown("b"))
    machine.feed(WORD)
    assert machine.down == []
    machine.silence(SPOKE_S / 2)
    machine.feed(WORD)
    machine.silence(SPOKE_S / 2)
    assert machine.down == []  # it goes on speaking
    machine.silence(SPOKE_S)
    assert machine.down == ["b"]


def test_a_link_that_came_up_needs_no_words() -> None:
    machine = Machine()
    machine.feed(ev.NodeDown("b"))
    machine.feed(WORD)
    machine.feed(ev.NodeUp("b"))
    machine.silence(2 * SPOKE_S)
    assert machine.down == []
