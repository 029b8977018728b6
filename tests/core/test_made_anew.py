"""A machine that broke and was made anew in the same process: it counts from zero, and nothing else tells that it is another one
(daemon/supervisor.py).
"""

from __future__ import annotations

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.uplink import REGISTER_S
from tests.core.flushes import ask, orders, steward
from tests.core.machines import Node, Steward, at, fact, record_of, sent


def test_a_session_that_it_takes_up_begins_anew() -> None:
    """What it says would be taken for old, acknowledged, and lost."""
    node = Steward(record_of(), Policy(replicas=1, durable=False)).greet()
    b = node.others["b"]
    b.tell_inventory(incarnation="1")
    b.state(1, 5)
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    before = b.session
    b.tell_inventory(fact(7, 1), incarnation="1", turn=0)
    assert node.said(msg.OpenSession, "b")[-1].nonce == before, "what it said to an earlier question was on its way"
    b.serial = 0
    node.tick(REGISTER_S)
    b.tell_inventory(fact(7, 1), incarnation="1")
    b.tell_inventory(fact(7, 1), incarnation="1")
    assert b.session != before
    assert node.machine.steward.table.states[at(7)].holders == {1: {"b": 0}}


def test_its_sessions_have_names_of_their_own() -> None:
    """A word that was said in one of the first machine's and comes again would be one of the second's (P2)."""
    first, again = (Node("a", record_of()) for _ in range(2))
    again.now += 1.0
    names = [{hello.nonce for hello in sent(node.tick(), msg.OpenSession)} for node in (first, again)]
    assert all(names) and not names[0] & names[1]


def test_its_first_flush_has_a_name_of_its_own() -> None:
    """Who has carried out the order of the one before answers with what it wrote then, and the two lack a part together."""
    first, again = (steward().train().capture(7).protect(7) for _ in range(2))
    again.now += 1.0
    names = [{order.attempt for order in orders(ask(node, 7))} for node in (first, again)]
    assert all(names) and not names[0] & names[1]
