"""Slices of held slots to whoever restores: verified, from memory to memory; damage found, sources told (P9, P10)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptd.arena.arena import Slot
from ckptd.core import failpoint
from ckptd.core.failpoint import arm
from ckptd.core.ids import SnapshotId
from ckptd.protect import fetch, settle
from ckptd.wire.bulk import Ticket
from ckptd.wire.peer import FetchAsk, FetchBad, FetchDone
from ckptd.wire.tcp import TcpTransport
from tests.node.links import eventually, stays
from tests.node.peers import Peer, Post
from tests.node.proxy import Proxy, flip
from tests.node.slots import JOB, MIB, small_layout

SNAPSHOT = SnapshotId(3, 7)
Spans = tuple[tuple[int, int], ...]
TRIES = 3  # again, after the first
CUT_AT = 300_000  # bytes into a connection


@pytest.fixture
def post() -> Post:
    return Post()


@pytest.fixture(params=["none", "aead"])
def holder(post: Post, request: pytest.FixtureRequest) -> Iterator[Peer]:
    peer = Peer(post, "holder", mode=request.param)
    yield peer
    peer.close()


@pytest.fixture
def asker(post: Post, holder: Peer) -> Iterator[Peer]:
    peer = Peer(post, "asker", mode=holder.transport._mode)
    yield peer
    peer.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(settle, "REPEAT_S", 0.05)
    monkeypatch.setattr(settle, "UNREACHABLE_S", 0.2)
    monkeypatch.setattr(fetch, "ASK_TIMEOUT_S", 1.0)
    monkeypatch.setattr(fetch, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(fetch, "RETRY_PAUSES_S", (0.01,) * TRIES)
    yield
    arm("")


@pytest.fixture
def slot(holder: Peer) -> Slot:
    return holder.sealed(7)


async def fetched(asker: Peer, spans: Spans, into: bytearray | None = None, **other: object) -> tuple[bool, str, bytes]:
    buffer = bytearray(sum(length for _, length in spans)) if into is None else into
    asked = {"job": JOB, "node": "holder", "snapshot": SNAPSHOT, "rank": 0, **other}
    ok, reason, _ = await asker.fetcher.fetch(spans=spans, into=memoryview(buffer), **asked)  # type: ignore[arg-type]
    return ok, reason, bytes(buffer)


def kinds_of_spans() -> dict[str, Spans]:
    layout = small_layout()
    w, end = layout.fragments[0], layout.payload_bytes
    return {
        "whole blocks": tuple((f.offset, f.nbytes) for f in layout.fragments),
        "objects": ((0, layout.objects_capacity),),
        "one row": ((w.offset + 4, 100),),
        "parts and wholes": ((w.offset, 512), (w.offset, w.nbytes), (w.offset + MIB - 10, 20), (0, 1)),
        "a part longer than a block": ((w.offset + 4, MIB + 100),),
        "a block and the next one's beginning": ((w.offset, MIB + 100),),
        "across fragments": ((w.offset + MIB, w.nbytes),),
        "all of it": ((0, end),),
        "crumbs": tuple((at, 8) for at in range(0, end - 8, 4096)),
        "backwards and twice": ((end - 4, 4), (0, 64), (0, 64)),
        "nothing": (),
        "empty spans": ((10, 0), (w.offset, 0)),
    }


SPANS = kinds_of_spans()


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
async def test_the_slices_arrive_in_the_order_asked_for(asker: Peer, slot: Slot, spans: Spans) -> None:
    ok, reason, data = await fetched(asker, spans)
    assert (ok, reason) == (True, "")
    assert data == b"".join(bytes(slot.payload[at : at + length]) for at, length in spans)


async def test_many_at_once(asker: Peer, slot: Slot) -> None:
    results = await asyncio.gather(*(fetched(asker, ((at * 1000, 1000),)) for at in range(20)))
    assert [data for _, _, data in results] == [bytes(slot.payload[at * 1000 : at * 1000 + 1000]) for at in range(20)]


@pytest.mark.parametrize("lost", [FetchAsk, FetchDone])
async def test_any_message_may_get_lost_once(post: Post, asker: Peer, slot: Slot, lost: type) -> None:
    seen = 0

    def copies(sender: str, to: str, message: object) -> int:
        nonlocal seen
        seen += isinstance(message, lost)
        return 0 if isinstance(message, lost) and seen == 1 else 1

    post.copies = copies
    ok, _, data = await fetched(asker, ((0, 5000),))
    assert ok
    assert data == bytes(slot.payload[:5000])
    assert seen >= 2


async def test_every_message_may_come_three_times(post: Post, asker: Peer, slot: Slot) -> None:
    post.copies = lambda *_: 3
    ok, reason, data = await fetched(asker, ((0, 5000),))
    assert (ok, reason) == (True, "")
    assert data == bytes(slot.payload[:5000])
    await stays(lambda: not asker.fetcher._answers, 0.05)  # those that come late find nobody, and hurt nobody


@pytest.mark.parametrize("whole", [True, False])
async def test_damage_at_the_holder_is_found_and_it_is_told(
    post: Post, holder: Peer, asker: Peer, slot: Slot, whole: bool
) -> None:
    """P10: by the asker where whole blocks travel with the sums of their seal, by the holder where parts do."""
    f = small_layout().fragments[0]
    slot.payload[f.offset + 100] ^= 4
    spans = ((f.offset, f.nbytes),) if whole else ((f.offset + 1000, 50),)
    ok, reason, _ = await fetched(asker, spans)
    assert not ok
    assert reason == ("the slices do not match their sums" if whole else "damage")
    await eventually(lambda: holder.damage, what="the holder looks at its copy")
    assert post.sent(FetchBad) == 2 * int(whole), "it asked once more, for it may have been the wire"


async def test_undamaged_blocks_of_a_damaged_slot_are_served(asker: Peer, holder: Peer, slot: Slot) -> None:
    first, second = small_layout().fragments[:2]
    slot.payload[first.offset] ^= 1
    ok, _, data = await fetched(asker, ((second.offset, 64),))
    assert ok
    assert data == bytes(slot.payload[second.offset : second.offset + 64])
    assert not holder.damage


async def test_damage_on_the_way_is_found_and_the_holder_finds_itself_sound(
    holder: Peer, asker: Peer, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = holder.transport.push

    def bend(ticket: Ticket, spans: list[memoryview], **options: object) -> None:
        bent = bytearray(b"".join(spans))
        bent[17] ^= 1
        push(ticket, [memoryview(bent)], **options)  # type: ignore[arg-type]

    monkeypatch.setattr(holder.transport, "push", bend)
    for spans in (((0, 4096),), ((8, 100),)):
        ok, reason, _ = await fetched(asker, spans)
        assert (ok, reason) == (False, "the slices do not match their sums")
    await eventually(lambda: not holder.fetcher._tasks.running)
    assert not holder.damage


async def test_a_damaged_stream_is_refused_and_counted_by_whoever_asked(
    holder: Peer, asker: Peer, slot: Slot
) -> None:
    """P10: by the chunk's tag in mode aead, by the block's sum in mode none."""
    f = small_layout().fragments[0]
    with Proxy(asker.transport.address, bend=flip(500_000)) as proxy:
        holder.send_through(proxy)
        assert not (await fetched(asker, ((f.offset, f.nbytes),)))[0]
    assert asker.refused[0] == "holder" and not holder.refused, "as often as it was asked"
    await eventually(lambda: not holder.fetcher._tasks.running)
    assert not holder.damage


async def test_a_link_that_breaks_is_tried_again_over_new_connections(holder: Peer, asker: Peer, slot: Slot) -> None:
    f = small_layout().fragments[0]
    with Proxy(asker.transport.address, cut_at=CUT_AT) as proxy:
        holder.send_through(proxy, TRIES)
        ok, reason, data = await fetched(asker, ((f.offset, f.nbytes),))
    assert (ok, reason, holder.pushes) == (True, "", TRIES + 1)
    assert data == bytes(slot.payload[f.offset : f.offset + f.nbytes])
    assert not holder.damage and not asker.refused


async def test_a_link_that_goes_on_breaking_says_nothing_against_the_copy(holder: Peer, asker: Peer, slot: Slot) -> None:
    """P1: who takes this for damage restores an older step than there is."""
    f = small_layout().fragments[0]
    into = memoryview(bytearray(f.nbytes))
    what = JOB, "holder", SNAPSHOT, 0, ((f.offset, f.nbytes),)
    with Proxy(asker.transport.address, cut_at=CUT_AT) as proxy:
        holder.send_through(proxy)
        found = await asker.fetcher.fetch(*what, into)
        assert (found.ok, found.away, holder.pushes) == (False, True, TRIES + 1)
        found = await asker.fetcher.fetch(*what, into, protects=1.0)
        assert (found.ok, found.away, holder.pushes) == (False, True, TRIES + 2), "for protection it is done again by others"
    assert not holder.damage and not asker.refused


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError()])
async def test_a_holder_that_lacks_means_for_it_is_asked_again(
    holder: Peer, asker: Peer, slot: Slot, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, pushes = holder.transport.push, list[int]()

    def poor(*args: object, **options: object) -> None:
        pushes.append(1)
        if len(pushes) < TRIES:
            raise error
        push(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(holder.transport, "push", poor)
    ok, _, data = await fetched(asker, ((0, 5000),))
    assert ok and data == bytes(slot.payload[:5000])


async def test_what_is_damaged_or_not_there_is_not_away(asker: Peer, slot: Slot) -> None:
    into = memoryview(bytearray(50))
    assert await asker.fetcher.fetch(JOB, "holder", SNAPSHOT, 1, ((0, 50),), into) == (False, "not held here", False)
    slot.payload[100] ^= 4
    assert await asker.fetcher.fetch(JOB, "holder", SNAPSHOT, 0, ((90, 50),), into) == (False, "damage", False)
    assert (await asker.fetcher.fetch(JOB, "nobody", SNAPSHOT, 0, ((90, 50),), into)).away


@pytest.mark.parametrize(
    "other", [{"rank": 1}, {"snapshot": SnapshotId(3, 8)}, {"job": "1000/other"}, {"job": "0/gpt"}]
)
async def test_what_is_not_held_is_refused(asker: Peer, slot: Slot, other: dict[str, object]) -> None:
    assert (await fetched(asker, ((0, 10),), **other))[:2] == (False, "not held here")


@pytest.mark.parametrize("spans", [((0, 3 << 30),), ((-1, 10),), ((10, -1), (0, 11)), ((2 << 20, 1 << 20), (2**62, 0))])
async def test_spans_outside_of_the_slot_are_refused(
    asker: Peer, holder: Peer, slot: Slot, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[FetchDone] = []
    monkeypatch.setattr(holder.fetcher, "_send", lambda node, job, message: told.append(message) or True)
    incoming = asker.transport.expect(memoryview(bytearray(10)), aad=fetch._aad(JOB, SNAPSHOT, 0))
    holder.fetcher.on_message("asker", JOB, FetchAsk("t", SNAPSHOT, 0, spans, incoming.ticket.encode()))
    await eventually(lambda: told)
    assert (told[0].ok, told[0].reason) == (False, "spans outside of the slot")
    assert not incoming.done.done()


async def test_a_ticket_for_something_else_is_not_used(asker: Peer, holder: Peer, slot: Slot) -> None:
    incoming = asker.transport.expect(memoryview(bytearray(10)), aad=fetch._aad("0/other", SNAPSHOT, 0))
    ask = FetchAsk("t", SNAPSHOT, 0, ((0, 10),), incoming.ticket.encode())
    with pytest.raises(fetch.TransferError, match="another transfer"):
        holder.fetcher._deliver(slot, slot.record, ask)


async def test_a_holder_that_is_gone_is_known_soon(asker: Peer) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    ok, reason, _ = await fetched(asker, ((0, 10),), node="nobody")
    assert not ok
    assert "does not answer" in reason
    assert loop.time() - started < 0.9


async def test_a_holder_that_dies_before_its_last_word(post: Post, asker: Peer, slot: Slot) -> None:
    """All bytes came, the sums never do: no endless wait, and nothing unverified is used."""
    post.copies = lambda sender, to, message: 0 if isinstance(message, FetchDone) else 1
    ok, reason, _ = await fetched(asker, ((0, 10),))
    assert not ok
    assert "no word after the last byte" in reason


async def test_the_memory_is_free_when_a_fetch_is_cancelled(holder: Peer, asker: Peer, slot: Slot) -> None:
    """A restore that gives up uses its scratch for something else at once."""
    arm("fetch.serve:sleep=0.5")
    into = bytearray(5000)
    task = asyncio.ensure_future(fetched(asker, ((0, 5000),), into))
    await eventually(lambda: holder.fetcher._serving)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    into[:] = b"\xee" * 5000
    await eventually(lambda: not holder.fetcher._serving, what="the holder's end of it")
    assert into == b"\xee" * 5000
    assert not asker.fetcher._answers


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_fetch_waits_until_no_stream_can_touch_its_memory(
    asker: Peer, slot: Slot, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Race: cancelled while a stream of it is about to decrypt a chunk into the memory; and again, by whoever is impatient."""
    if asker.transport._mode == "none":
        pytest.skip("mode none writes in the very call that is interrupted")
    arm("bulk.open:sleep=0.3")
    act, reached = failpoint._act, list[str]()
    monkeypatch.setattr(failpoint, "_act", lambda name, action: (reached.append(name), act(name, action)))
    into = bytearray(5000)
    task = asyncio.ensure_future(fetched(asker, ((0, 5000),), into))
    await eventually(lambda: reached == ["bulk.open"])
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    into[:] = b"\xee" * 5000
    await eventually(lambda: not asker.transport.connections)
    assert into == b"\xee" * 5000


async def test_a_fault_of_the_holder_is_an_answer(asker: Peer, slot: Slot) -> None:
    arm("fetch.serve:error")
    assert (await fetched(asker, ((0, 10),)))[:2] == (False, "internal")


async def test_a_queue_at_the_holder_lets_no_ticket_expire(
    holder: Peer, asker: Peer, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many ranks restore from one node, which serves a few at a time; a copy that fails is not asked again (P9)."""
    monkeypatch.setattr(fetch, "ASK_TIMEOUT_S", 30.0)
    monkeypatch.setitem(TcpTransport.expect.__kwdefaults__, "ttl_s", 0.6)
    holder.fetcher._pushes = ThreadPoolExecutor(1)
    arm("fetch.serve:sleep=0.4")
    results = await asyncio.gather(*(fetched(asker, ((at * 1000, 1000),)) for at in range(3)))
    assert [(ok, reason) for ok, reason, _ in results] == [(True, "")] * 3


async def test_more_asks_than_are_remembered_are_all_served_once(
    holder: Peer, asker: Peer, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits in the queue asks again and again; that neither serves him twice nor pushes another out."""
    monkeypatch.setattr(fetch, "SERVED_MAX", 2)
    monkeypatch.setattr(fetch, "SERVING_MAX", 2)
    monkeypatch.setattr(fetch, "ASK_TIMEOUT_S", 30.0)
    pushes: list[bytes] = []
    push = holder.transport.push
    monkeypatch.setattr(holder.transport, "push", lambda ticket, *a, **o: (pushes.append(ticket.id), push(ticket, *a, **o)))
    holder.fetcher._pushes = ThreadPoolExecutor(1)
    arm("fetch.serve:sleep=0.2")
    results = await asyncio.gather(*(fetched(asker, ((at * 1000, 1000),)) for at in range(6)))
    assert [(ok, reason) for ok, reason, _ in results] == [(True, "")] * 6
    await eventually(lambda: not holder.fetcher._tasks.running, what="nothing is left to serve")
    assert len(pushes) == len(set(pushes)) == 6


# --- what lies here ----------------------------------------------------------------------------------------------
async def test_a_copy_that_is_called_off_has_ended_when_it_says_so(
    holder: Peer, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader's process dies amid a copy: the memory that it goes into is somebody else's, or unmapped, right afterwards."""
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
    copy = fetch.copy_verified

    def held_up(*what: Any) -> bool:
        begun.set()
        may_go_on.wait(5)
        done = copy(*what)
        ended.set()
        return done

    monkeypatch.setattr(fetch, "copy_verified", held_up)
    reading = asyncio.ensure_future(holder.fetcher.here(JOB, SNAPSHOT, 0, ((0, 4096),), memoryview(bytearray(4096)), "a look"))
    await eventually(begun.is_set)
    reading.cancel()
    await stays(lambda: not reading.done())
    may_go_on.set()
    await asyncio.wait([reading])
    assert ended.is_set() and reading.cancelled()


async def test_what_lies_here_is_copied_whole_or_said_to_be_damaged_or_gone(holder: Peer, slot: Slot) -> None:
    length = slot.record.layout.payload_bytes if slot.record is not None else 0
    into = bytearray(length)
    assert (await holder.fetcher.here(JOB, SNAPSHOT, 0, ((0, length),), memoryview(into), "a look")).ok
    assert bytes(into) == bytes(slot.payload[:length])
    slot.payload[7:8] = bytes([slot.payload[7] ^ 1])
    assert not (await holder.fetcher.here(JOB, SNAPSHOT, 0, ((0, length),), memoryview(into), "a look")).ok
    assert holder.damage == ["a look"]
    slot.free()
    gone = await holder.fetcher.here(JOB, SNAPSHOT, 0, ((0, length),), memoryview(into), "a look")
    assert (gone.ok, gone.reason) == (False, "not held here") and holder.damage == ["a look"]
