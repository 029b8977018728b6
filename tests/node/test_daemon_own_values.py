"""What turns out to be each rank's own in a snapshot is told to one rank, each key once (D7)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from ckptd.daemon.own_values import BYTES_TOLD_MAX, KEYS_TOLD_MAX
from ckptd.wire import rank as wire
from ckptd.wire.world import pack_world
from tests.node.daemon_rig import Rank, Rig, rig

OBJECTS_BYTES = 4096


def layout(rank: int, *keys: str) -> Layout:
    box = Box.whole((5,))
    return build_layout(rank, 2, [LayoutItem(key, "F64", (5,), box, "buffer", MAYBE, 1) for key in keys], OBJECTS_BYTES)


async def two(house: Rig, attempt: str, *keys: str) -> list[Rank]:
    node = asdict(house.daemon.services.node)
    ranks = [house.rank(), house.rank()]
    for number, rank in enumerate(ranks):
        join = wire.Join(attempt, number, layout(number, *keys).payload_bytes, None)
        rank.say_join(join, pack_world([node["node"]] * 2, [node]))
    for rank in ranks:
        await rank.heard(wire.Ready)
    return ranks


async def captured(ranks: list[Rank], step: int, *keys: str, seeds: tuple[int, int]) -> None:
    """Both ranks have drawn what they hold from these seeds, objects included."""
    for number, rank in enumerate(ranks):
        await rank.capture(step, seeds[number], layout=layout(number, *keys))
    for rank in ranks:
        await rank.heard(wire.Level, step=step, level=0)


def told(rank: Rank) -> list[Any]:
    """Since it was asked last."""
    rank.read()
    news = [message.facts for message, _ in rank.seen if isinstance(message, wire.Health)]
    rank.seen = [(message, fds) for message, fds in rank.seen if not isinstance(message, wire.Health)]
    return [facts[wire.OWN_VALUES] for facts in news if wire.OWN_VALUES in facts]


async def test_one_rank_hears_once_of_what_differs_and_nobody_of_what_does_not() -> None:
    """Objects differ, too: these have no rule."""
    async with rig() as house:
        ranks = await two(house, "a", "mean", "var")
        await captured(ranks, 1, "mean", "var", seeds=(1, 1))
        assert [told(rank) for rank in ranks] == [[], []]
        await captured(ranks, 2, "mean", "var", seeds=(1, 2))
        await captured(ranks, 3, "mean", "var", seeds=(1, 2))
        await captured(ranks, 4, "mean", "var", seeds=(1, 1))
        assert [told(rank) for rank in ranks] == [[["mean", "var"]], []]


async def test_what_does_not_fit_a_frame_follows_with_the_next_snapshots() -> None:
    long = [f"{'x' * 3000}.{number:02}" for number in range(12)]
    short = [f"y.{number:04}" for number in range(KEYS_TOLD_MAX)]
    async with rig() as house:
        first, second = await two(house, "a", *long, *short)
        seen: list[list[str]] = []
        for step in range(1, 5):
            await captured([first, second], step, *long, *short, seeds=(1, 2))
            seen += told(first)
        assert [key for some in seen for key in some] == sorted([*long, *short])
        assert [len(some) for some in seen[:-1]] == [BYTES_TOLD_MAX // len(f"t:{long[0]}"), KEYS_TOLD_MAX]
        assert told(second) == []


async def test_ranks_that_join_anew_hear_of_it_anew() -> None:
    async with rig() as house:
        for attempt, step in (("a", 1), ("b", 2)):
            ranks = await two(house, attempt, "mean")
            await captured(ranks, step, "mean", seeds=(1, 2))
            assert [told(rank) for rank in ranks] == [[["mean"]], []]
            for rank in ranks:
                rank.say(wire.Goodbye(False))
