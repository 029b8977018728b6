"""Where nodes are said to be: who is believed, and who is dialed when (D20)."""

from __future__ import annotations

import pytest

from ckptd.core.ids import NodeInfo
from ckptd.wire import address_book
from ckptd.wire.address_book import DIAL_S, DIALS_MAX, SILENT_S, TURN_S, AddressBook

OURS, HIS = "0/ours", "12345/his"
UNREACHED_S = 3.0


def info(node: str, address: str = "") -> NodeInfo:
    return NodeInfo(node, address or f"tcp://{node}:1", "", "")


class Book(AddressBook):
    """``at``: node -> address on which it greets."""

    def __init__(self, **at: str) -> None:
        self.at, self.links, self.now = at, dict[str, str](), 0.0
        super().__init__(lambda node: self.links.get(node) == self.at.get(node, "nowhere"), UNREACHED_S)

    def says(self, job: str, *nodes: NodeInfo) -> None:
        for node in nodes:
            assert self.propose(node, job, self.now)

    def turns(self, seconds: float = 0.0) -> list[str]:
        """What was dialed meanwhile, looking four times a second."""
        dialed = []
        for _ in range(int(seconds * 4) + 1):
            moves = self.turn(self.now)
            for node in moves.close:
                self.links.pop(node, None)
            for one in moves.open:
                self.links[one.node] = one.control
                dialed.append(one.control)
            self.now += 0.25
        return dialed


def test_a_link_that_works_stays_whatever_is_said() -> None:
    book = Book(b="tcp://b:1")
    book.says(OURS, info("b"))
    assert book.turns() == ["tcp://b:1"]
    book.says(HIS, info("b", "tcp://false:9"))
    assert book.turns(10.0) == []


def test_a_node_that_moved_is_found_at_the_newest_word() -> None:
    book = Book(b="tcp://b:1")
    book.says(OURS, info("b"))
    book.turns()
    book.at["b"] = "tcp://b:2"
    assert book.turns(10.0) == [], "it may come back where it was"
    book.says(OURS, info("b", "tcp://b:2"))
    assert book.turns() == ["tcp://b:2"]


def test_where_it_worked_last_and_what_is_said_take_turns() -> None:
    """A false word about a node that is just being restarted keeps nobody from it."""
    book = Book(b="tcp://b:1")
    book.says(OURS, info("b"))
    book.turns(1.0)
    book.at["b"] = "nowhere"
    book.says(HIS, info("b", "tcp://false:9"))
    assert book.turns(3 * TURN_S - 0.25) == ["tcp://false:9", "tcp://b:1", "tcp://false:9"]
    book.at["b"] = "tcp://b:1"
    assert book.turns(2 * TURN_S) == ["tcp://b:1"]


def test_of_each_job_one_word_counts() -> None:
    book = Book()
    for port in range(9):
        book.says(HIS, info("b", f"tcp://false:{port}"))
    assert set(book.turns(20.0)) == {"tcp://false:8"}


def test_one_user_dials_so_many_at_a_time_and_others_do_not_wait_for_him() -> None:
    book = Book(n1="tcp://n1:1")
    book.says(HIS, *(info(f"nowhere{n}") for n in range(1000)), info("n1", "tcp://false:9"))
    assert len(book.turns()) == DIALS_MAX == len(book.links)
    book.says(OURS, info("n1"), info("n2"))
    assert book.turns() == ["tcp://n1:1", "tcp://n2:1"]
    seen = set(book.turns(1000 / DIALS_MAX * (DIAL_S + 0.5)))
    assert len(book.links) == DIALS_MAX + 2
    assert len(seen) >= 1000 - DIALS_MAX, "all get their turn"


def test_those_that_greet_make_room_for_the_next() -> None:
    nodes = [f"n{n}" for n in range(500)]
    book = Book(**{node: f"tcp://{node}:1" for node in nodes})
    book.says(OURS, *map(info, nodes))
    assert len(book.turns(500 / DIALS_MAX / 4 + 0.5)) == 500
    assert len(book.links) == 500


def test_who_was_not_reached_is_told_once_also_when_nobody_dialed_it() -> None:
    book = Book()
    book.says(HIS, *(info(f"nowhere{n}") for n in range(DIALS_MAX + 1)))
    told = []
    for _ in range(40):
        told += book.turn(book.now).unreached
        book.now += 0.25
    assert told == [f"nowhere{DIALS_MAX}"], "of the others their links tell"


def test_what_no_job_names_is_forgotten() -> None:
    book = Book(b="tcp://b:1")
    book.says(OURS, info("b"), info("c"))
    book.says(HIS, info("b"))
    book.turns()
    assert book.withdraw(OURS) == ["c"]
    assert book.withdraw(HIS) == ["b"]
    assert book.withdraw(HIS) == []


def test_there_is_an_end_to_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_book, "NODES_MAX", 2)
    book = Book()
    assert [book.propose(info(node), HIS, 0.0) for node in "aabbc"] == [True, True, True, True, False]


def test_nodes_of_months_ago_give_way_to_those_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose machines are replaced one after the other meets more of them than there are links."""
    monkeypatch.setattr(address_book, "NODES_MAX", 3)
    book = Book(**{node: f"tcp://{node}:1" for node in "abcde"})
    book.says(OURS, *map(info, "abc"))
    book.turns()
    del book.at["a"], book.at["b"]
    assert not book.propose(info("d"), OURS, book.now), "they may come back"
    for _ in range(int(SILENT_S)):  # c works all the time
        book.turn(book.now)
        book.now += 1.0
    book.says(OURS, *map(info, "de"))
    assert book.turns() == ["tcp://d:1", "tcp://e:1"]
    assert set(book.links) == {"c", "d", "e"}


def test_who_names_thousands_does_not_keep_others_from_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_book, "NODES_MAX", 300)
    book = Book(**{f"n{n}": f"tcp://n{n}:1" for n in range(100)})
    book.says(HIS, *(info(f"nowhere{n}") for n in range(300)))
    book.turns(1.0)
    book.says(OURS, *(info(f"n{n}") for n in range(100)))
    assert {f"tcp://n{n}:1" for n in range(100)} <= set(book.turns(10.0))
    for job in ("12345/his", "12345/other"):
        for n in range(300, 400):
            book.propose(info(f"nowhere{n}"), job, book.now)
    assert all(f"n{n}" in book.links for n in range(100))
    assert len(book.links) <= 100 + DIALS_MAX
