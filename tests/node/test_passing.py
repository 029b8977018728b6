"""What several nodes want of a bucket leaves it once; whatever goes wrong between them, each has the right bytes (P9, P10)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from ckptd.protect import settle
from ckptd.recover import passing as module
from ckptd.recover.passing import GROUP_NODES_MAX, PASSED_BYTES_MIN, group_of
from ckptd.wire.bulk import TransferError
from ckptd.wire.peer import ReadAsk, ReadTold
from tests.node.links import eventually
from tests.node.peers import Peer, Post
from tests.node.proxy import Proxy, flip
from tests.node.slots import JOB

NODES = ("a", "b", "c")
RESTORE = "3/1/attempt"
VALUES = {(f"model.{number}", None): PASSED_BYTES_MIN + 4096 * number for number in range(9)}
CUT_AT = 300_000  # bytes into a connection
Key = tuple[str, None]


def data_of(key: Key) -> bytes:
    return random.Random(repr(key)).randbytes(VALUES[key])


class Bucket:
    """``reads``: (node, key). A read takes a few turns of the loop, or as long as ``gate`` is shut. ``broken``: for those nodes."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, Key]] = []
        self.broken: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, node: str, key: Key, into: memoryview) -> None:
        self.reads.append((node, key))
        for _ in range(20):
            await asyncio.sleep(0)
        await self.gate.wait()
        if node in self.broken:
            raise OSError("the bucket is away")
        into[:] = data_of(key)

    def by_key(self) -> Counter[Key]:
        return Counter(key for _, key in self.reads)


class World:
    """A restore of several nodes, all of which want the same."""

    def __init__(self, nodes: tuple[str, ...] = NODES) -> None:
        self.post = Post()
        self.peers = {node: Peer(self.post, node) for node in nodes}
        self.bucket = Bucket()
        self.passings = {node: peer.passings.begin(JOB, RESTORE, node, nodes) for node, peer in self.peers.items()}

    async def fill(self, node: str, key: Key) -> tuple[bytes, bool]:
        into = memoryview(bytearray(VALUES[key]))
        passed = await self.passings[node].fill(key, into, lambda: self.bucket.read(node, key, into))
        return bytes(into), passed

    async def restored(self, node: str) -> int:
        """So many values came from other nodes; all are right."""
        keys, first = list(VALUES), self.passings[node].first_of(len(VALUES))
        keys = keys[first:] + keys[:first]
        found = await asyncio.gather(*(self.fill(node, key) for key in keys))
        assert [data == data_of(key) for key, (data, _) in zip(keys, found, strict=True)] == [True] * len(keys)
        return sum(passed for _, passed in found)

    def home_and_reader(self, home: str, reader: str) -> Key:
        """A value with that home which ``reader`` is the first to ask for."""
        key = next(key for key in VALUES if self.home_of(key) == home)
        self.passings[home]._readers[module._digest(repr(key))] = reader
        return key

    def home_of(self, key: Key) -> str:
        return NODES[int.from_bytes(module._digest(repr(key))[:8], "big") % len(NODES)]

    async def end(self) -> None:
        for passing in self.passings.values():
            await passing.ended()
        for peer in list(self.peers.values()):
            peer.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.end()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "REPEAT_S", 0.05)
    monkeypatch.setattr(settle, "UNREACHABLE_S", 0.2)


async def test_each_value_leaves_the_bucket_once_and_all_nodes_read(world: World) -> None:
    passed = await asyncio.gather(*(world.restored(node) for node in NODES))
    assert world.bucket.by_key() == dict.fromkeys(VALUES, 1)
    assert sum(passed) == 2 * len(VALUES)
    assert {node for node, _ in world.bucket.reads} == set(NODES)


async def test_each_begins_at_another_place(world: World) -> None:
    """And goes on from there: neighbours lie side by side in the bucket, which gives windows of 4 MiB."""
    assert [world.passings[node].first_of(10) for node in NODES] == [0, 3, 6]


async def test_who_comes_later_reads_nothing(world: World) -> None:
    assert await world.restored("a") == 0
    assert [await world.restored("b"), await world.restored("c")] == [len(VALUES)] * 2
    assert world.bucket.by_key() == dict.fromkeys(VALUES, 1)


async def test_small_values_are_nobody_elses_matter(world: World) -> None:
    into = memoryview(bytearray(PASSED_BYTES_MIN - 1))
    asked = []

    async def read() -> None:
        asked.append(1)

    for node in NODES:
        assert not await world.passings[node].fill("small", into, read)
    assert len(asked) == len(NODES) and not world.post.log


async def test_what_cannot_be_read_there_each_reads_by_itself(world: World) -> None:
    """P9: only the node whose reads fail hears of it."""
    world.bucket.broken = {"a"}
    key = world.home_and_reader("b", "a")
    world.bucket.gate.clear()
    failing, waiting = asyncio.ensure_future(world.fill("a", key)), asyncio.ensure_future(world.fill("c", key))
    await eventually(lambda: world.post.sent(ReadAsk) > 2, what="c asks a")
    world.bucket.gate.set()
    with pytest.raises(OSError, match="away"):
        await failing
    assert await waiting == (data_of(key), False)


@pytest.mark.parametrize("gone", NODES)
async def test_a_node_that_is_gone_costs_its_values_only(world: World, gone: str) -> None:
    """P9: whether it was their home or their reader."""
    assert await world.restored(gone) == 0
    world.peers.pop(gone).close()
    left = [node for node in NODES if node != gone]
    await asyncio.gather(*(world.restored(node) for node in left))
    assert all(count <= 1 + len(left) for count in world.bucket.by_key().values())


@pytest.mark.parametrize("lost", [ReadAsk, ReadTold])
async def test_words_that_get_lost_or_come_twice(world: World, lost: type) -> None:
    seen: Counter[str] = Counter()

    def copies(sender: str, to: str, message: object) -> int:
        if isinstance(message, lost):
            seen[message.transfer] += 1
            return 0 if seen[message.transfer] == 1 else 2
        return 1

    world.post.copies = copies
    await asyncio.gather(*(world.restored(node) for node in NODES))
    assert world.bucket.by_key() == dict.fromkeys(VALUES, 1)


async def test_a_node_that_says_nothing_is_asked_no_more(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: its values are read after one wait, not after one each."""
    assert await world.restored("a") == 0
    for name in ("HOME_TIMEOUT_S", "PATIENCE_S"):
        monkeypatch.setattr(module, name, 0.5)
    world.post.copies = lambda sender, to, message: int(sender != "a")
    with caplog.at_level(logging.WARNING):
        await world.restored("b")
    told = [record.message for record in caplog.records if "read from storage again" in record.message]
    assert len(told) == 1 and "what a has read" in told[0]


async def test_what_was_changed_on_the_way_is_not_taken(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """P10: the sums say so, and the bucket has it."""
    key = world.home_and_reader("b", "a")
    assert (await world.fill("a", key))[1] is False
    with Proxy(world.peers["c"].transport.address, bend=flip(CUT_AT)) as proxy:
        world.peers["a"].send_through(proxy)
        with caplog.at_level(logging.WARNING):
            assert await world.fill("c", key) == (data_of(key), False)
    assert "something else" in caplog.text


async def test_what_is_going_to_be_written_is_not_passed_on(world: World) -> None:
    """P1: a plan that failed is made again in the same memory."""
    key = world.home_and_reader("b", "a")
    await world.fill("a", key)
    await world.passings["a"].forget()
    assert await world.fill("c", key) == (data_of(key), False)


async def test_a_push_ends_before_its_memory_goes(world: World) -> None:
    """P1: ``forget()`` and ``ended()`` return when nobody reads there."""
    key = world.home_and_reader("b", "a")
    await world.fill("a", key)
    under_way, goes = asyncio.Event(), asyncio.Event()
    loop, push = asyncio.get_running_loop(), world.peers["a"].transport.push

    def slow(*args: object, **options: object) -> None:
        loop.call_soon_threadsafe(under_way.set)
        asyncio.run_coroutine_threadsafe(goes.wait(), loop).result()
        push(*args, **options)  # type: ignore[arg-type]

    world.peers["a"].transport.push = slow  # type: ignore[method-assign]
    taking = asyncio.ensure_future(world.fill("c", key))
    await under_way.wait()
    ending = asyncio.ensure_future(world.passings["a"].ended())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not ending.done()
    goes.set()
    await ending
    assert (await taking)[0] == data_of(key)


async def test_a_ticket_of_something_else_is_not_served(world: World) -> None:
    """P13: what a node may push is bound to what it was asked for."""
    key = world.home_and_reader("b", "a")
    await world.fill("a", key)
    incoming = world.peers["c"].transport.expect(memoryview(bytearray(VALUES[key])), aad=b"other")
    ask = ReadAsk("t", RESTORE, module._digest(repr(key)), incoming.ticket.encode())
    world.post.send("c", "a", JOB, ask)
    told = await eventually(lambda: [m for m in world.post.log if isinstance(m, ReadTold) and m.transfer == "t"])
    assert told == [ReadTold("t")]
    incoming.cancel()
    with pytest.raises(TransferError):
        incoming.done.result()


@pytest.mark.parametrize(("sender", "restore"), [("stranger", RESTORE), ("b", "another")])
async def test_nobody_else_is_told_anything(world: World, sender: str, restore: str) -> None:
    """P13: of another restore, or a node that has no part in it; and after the end."""
    key = world.home_and_reader("a", "a")
    await world.fill("a", key)
    world.post.peers[sender] = world.peers["b"]
    for ticket in (b"", b"ticket"):
        world.post.send(sender, "a", JOB, ReadAsk(f"t{ticket!r}", restore, module._digest(repr(key)), ticket))
    told = lambda: [m for m in world.post.log if isinstance(m, ReadTold)]  # noqa: E731
    await eventually(lambda: len(told()) == 2)
    assert [(m.ok, m.reader) for m in told()] == [(False, "")] * 2
    del world.post.peers[sender]
    world.post.peers["b"] = world.peers["b"]


def test_groups_are_bounded_and_the_same_on_all_nodes() -> None:
    """P16: a restore of thousands of nodes links none to all others."""
    nodes = [f"node-{number:04}" for number in range(100)]
    groups = {node: group_of(node, random.Random(node).sample(nodes * 2, 200)) for node in nodes}
    assert all(node in group and len(group) <= GROUP_NODES_MAX for node, group in groups.items())
    assert sorted(node for group in set(groups.values()) for node in group) == nodes


