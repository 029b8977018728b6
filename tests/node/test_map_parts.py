"""Layouts asked of the daemons that hold them: one at a time, and only their leaf where their table is known (P16)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.layout import Layout
from ckptd.protect.map_parts import MapParts
from ckptd.wire.peer import MapAsk, MapPart
from tests.core.old_layouts import in_rows
from tests.node.slots import small_layout

JOB = "0/maps"
HELD = [small_layout(rank) for rank in range(2)]


class Pair:
    """A daemon that asks and one that holds, and what went between them."""

    def __init__(self, work: ThreadPoolExecutor) -> None:
        self.said: list[MapAsk | MapPart] = []
        self.asker, self.holder = MapParts(self._to_holder, work), MapParts(self._to_asker, work)
        self.holder.held = lambda job: {layout.layout_id: layout for layout in HELD} if job == JOB else {}

    def _to_holder(self, node: str, job: str, message: object) -> bool:
        return self._pass(self.holder, job, message)

    def _to_asker(self, node: str, job: str, message: object) -> bool:
        return self._pass(self.asker, job, message)

    def _pass(self, to: MapParts, job: str, message: object) -> bool:
        assert isinstance(message, MapAsk | MapPart)
        self.said.append(message)
        asyncio.get_running_loop().call_soon(to.on_message, "other", job, message)
        return True

    def parts(self) -> list[bytes]:
        return [message.data for message in self.said if isinstance(message, MapPart)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ThreadPoolExecutor(2) as work:
        yield Pair(work)


async def test_a_leaf_is_enough_for_who_has_the_table(pair: Pair) -> None:
    first, second = HELD
    assert await pair.asker.ask(JOB, "holder", first.layout_id) == first
    assert await pair.asker.ask(JOB, "holder", second.layout_id, {first.fragments.table}) == second
    assert pair.parts() == [first.encoded, second.leaf]


async def test_a_layout_of_an_older_daemons_memory_is_told_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is that of its rows, which no table and leaf bring back: restores from memory after an upgrade."""
    first, second = (Layout.decode(in_rows(layout)) for layout in HELD)
    monkeypatch.setattr("tests.node.test_map_parts.HELD", [first, second])
    assert await pair.asker.ask(JOB, "holder", second.layout_id, {first.fragments.table}) == second
    assert pair.parts() == [in_rows(second)]


async def test_what_is_not_held_or_of_another_job_is_said_to_be(pair: Pair) -> None:
    for job, name in ((JOB, "0" * 32), ("0/other", HELD[0].layout_id)):
        with pytest.raises(CkptdError, match="nothing with this layout"):
            await pair.asker.ask(job, "holder", name)


@pytest.mark.parametrize("what", ["another layout", "garbage", "a table that is not here"])
async def test_what_was_not_asked_for_is_refused(pair: Pair, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"another layout": HELD[1].encoded, "garbage": b"\x90", "a table that is not here": HELD[0].leaf}[what]
    if what == "a table that is not here":
        wrong = wrong.replace(HELD[0].fragments.table.digest.encode(), b"0" * 32)
    monkeypatch.setattr(Layout, "encoded", property(lambda layout: wrong))
    with pytest.raises(CkptdError, match="what was sent for a layout is none"):
        await pair.asker.ask(JOB, "holder", replace(HELD[0]).layout_id)
