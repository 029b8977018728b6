"""What a rebuild does without, and what it says of it: who cannot be reached is no damage (P1, D11)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest

from ckptd.arena.arena import Arena, Slot, SlotRecord, Tenant
from ckptd.arena.sums import lower_tier
from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol.instructions import PrepareRestore
from ckptd.core.protocol.messages import Source
from ckptd.core.redundancy.parity_sets import Member, ParitySet
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import UNIQUE, Layout
from ckptd.core.state_map.layout_build import build_layout
from ckptd.core.state_map.recovery import Want
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import NotFound, StorageError
from ckptd.persist.sums import FileDamage
from ckptd.protect.columns import Undecodable
from ckptd.protect.fetched import Away, Fetched
from ckptd.recover import rebuild as module
from ckptd.recover.by_parity import ByParity
from ckptd.recover.host import Unrecoverable
from ckptd.recover.left_out import LeftOut
from ckptd.recover.rebuild import Rebuild
from ckptd.recover.stored import Stored
from ckptd.recover.wants import Wants
from ckptd.thread_pool import NoThread
from tests.node.pieces import rows_in
from tests.node.slots import JOB, MIB, OWN, fill_and_seal, small_arena

STEP = SnapshotId(3, 7)
AWAY = Fetched(False, "the stream broke", away=True)
DAMAGED = Fetched(False, "damage")
ITEMS = [
    (key, "F32", shape, Box.whole(shape), "param", UNIQUE, tier)
    for key, shape, tier in (("w", (600, 512), 1), ("b", (8,), 1), ("norm", (300, 512), 0))
]
LAYOUT = build_layout(0, 1, ITEMS, objects_capacity=4096)
NODE = NodeInfo("here", "c", "b", "d", "i", "")


class Host:
    """Copies of rank 0 on other nodes, real bytes; ``answers[node]``: how the next fetches from it end, then they succeed."""

    node = "here"

    def __init__(self, arena: Arena) -> None:
        self.executor = ThreadPoolExecutor(2)
        self.passing = None
        self._arena = arena
        self.slot = arena.allocate(OWN, 3 * MIB)
        fill_and_seal(self.slot, STEP.step, layout=LAYOUT)
        self.storage: OSError | CkptdError = OSError("storage is away")
        self.answers: dict[str, list[Fetched]] = {}
        self.asked: list[str] = []
        self.known: dict[str, Layout] = {}  # layouts of what lies here
        self.told_by: list[str] = []  # who was asked for a layout
        self.without: dict[str, CkptdError] = {}  # who does not tell it, and why
        self.here: Slot | None = None  # what this node holds of rank 0

    async def fetch(
        self, node: str, snapshot: SnapshotId, rank: int, spans: Sequence[tuple[int, int]], into: memoryview
    ) -> Fetched:
        self.asked.append(node)
        if self.answers.get(node):
            return self.answers[node].pop(0)
        into[:] = b"".join(bytes(self.slot.payload[at : at + length]) for at, length in spans)
        return Fetched(True)

    def held(self, snapshot: SnapshotId, rank: int) -> Slot | None:
        return self.here

    def hold_less(self) -> None:
        """A copy as others have it, without what is this rank's alone to keep."""
        assert self.slot.record is not None
        record = replace(self.slot.record, tier=1, sums=lower_tier(LAYOUT, self.slot.record.sums, 0, 1))
        self.here = self._arena.allocate(Tenant(JOB, 1000, "replica", 0), LAYOUT.live_bytes(1))
        self.here.fill(STEP.step)
        self.here.extent[: LAYOUT.live_bytes(1)] = self.slot.payload[: LAYOUT.live_bytes(1)]
        self.here.seal(record)

    def damaged(self, slot: Slot, record: SlotRecord, reason: str) -> None:
        raise AssertionError("nothing lies here")

    def unreadable(self, snapshot: SnapshotId, error: Exception) -> None:
        pass

    def open_checkpoint(self, snapshot: SnapshotId) -> Checkpoint:
        raise self.storage

    def layouts(self) -> dict[str, Layout]:
        return self.known

    async def layout(self, node: str, layout_id: str, tables: object) -> Layout:
        self.told_by.append(node)
        if node in self.without:
            raise self.without[node]
        return LAYOUT

    def set_columns(self, *_: Any) -> Any:
        raise AssertionError("there is no parity")

    async def set_cards(self, *_: Any) -> Any:
        raise AssertionError("there is no parity")

    async def room(self, rank: int, nbytes: int) -> Slot:
        return self._arena.allocate(Tenant(JOB, 1000, "scratch", rank), max(nbytes, 1), 0)

    scratch: Any = None

    def give_back(self, slot: Slot) -> None:
        self._arena.retire(slot)

    def close(self) -> None:
        self.executor.shutdown()


@pytest.fixture
def host() -> Iterator[Host]:
    arena = small_arena(64 * MIB)
    made = Host(arena)
    yield made
    made.close()
    arena.close()


def rebuild(host: Host, *nodes: str, durable: bool = False, lesser: str = "") -> Rebuild:
    """``lesser``: which node holds a tier-1 copy."""
    sources = tuple(Source(node, 0, int(node == lesser), LAYOUT.layout_id) for node in nodes)
    record = EpochRecord(4, "now", ("here",), (NODE,), (), (), (-1, ()))
    return Rebuild(host, PrepareRestore(record, 4, (0,), STEP, durable, sources))


def wants(*keys: str) -> Wants:
    rows = [f for f in LAYOUT.fragments if f.key in keys]
    return Wants(tuple(Want(i, f.key, f.dtype, f.shape, f.box) for i, f in enumerate(rows)), ("scheduler",))


async def brought(made: Rebuild, *keys: str) -> None:
    await made.catalogue()
    handover = await made.assemble(0, wants(*keys))
    handover.release()
    await made.ended()
    await made.close()


async def refused(host: Host, made: Rebuild, answers: dict[str, list[Fetched]], *, objects: bool = True) -> Unrecoverable:
    """With these answers to the fetch of the objects, or of the slices after it."""
    if not objects:
        await made.catalogue()
    host.answers = answers
    with pytest.raises(Unrecoverable) as error:
        await (made.catalogue() if objects else made.assemble(0, wants("w")))
    await made.ended()
    await made.close()
    return error.value


async def test_another_copy_takes_the_place_of_one_that_cannot_be_reached(host: Host) -> None:
    host.answers = {"a": [AWAY] * 9}
    await brought(rebuild(host, "a", "b"), "w")
    assert host.asked == ["a", "b", "b"], "nor is it asked for the slices then"


PARTS = (  # a fragment's rows and columns, a part of one that lies in a run, and all of one
    ("w", Box((100, 0), (200, 512))), ("w", Box((3, 7), (5, 11))), ("b", Box((2,), (3,))), ("norm", Box.whole((300, 512))),
)  # fmt: skip


@pytest.mark.parametrize("here", [False, True])
async def test_parts_of_what_others_and_this_node_hold_are_what_was_captured(host: Host, here: bool) -> None:
    """P1, P9: each element of every piece, where the load plan says that it lies."""
    if here:
        host.hold_less()  # all but the norm
    made = rebuild(host, "a", *(["here"] if here else []), lesser="here")
    host.known = {LAYOUT.layout_id: LAYOUT}
    await made.catalogue()
    of = {f.key: f for f in LAYOUT.fragments}
    tensors = tuple(Want(at, key, "F32", of[key].shape, box) for at, (key, box) in enumerate(PARTS))
    handover = await made.assemble(0, Wants(tensors, ()))
    frame = handover.frame()
    seen: dict[int, int] = {}
    for want, box, segment, at, stored in rows_in(msgpack.unpackb(frame.plan, strict_map_key=False)):
        fragment = of[tensors[want].key]
        payload = host.slot.payload[fragment.offset : fragment.offset + fragment.nbytes]
        captured = np.frombuffer(bytes(payload), np.uint32).reshape(fragment.shape)
        lies = np.frombuffer(os.pread(frame.fds[segment], stored.volume * 4, at), np.uint32).reshape(stored.sizes)
        inside = Box(tuple(a - b for a, b in zip(box.offsets, stored.offsets, strict=True)), box.sizes)
        assert np.array_equal(lies[slices(inside)], captured[slices(box)])
        seen[want] = seen.get(want, 0) + box.volume
    assert seen == {at: box.volume for at, (_, box) in enumerate(PARTS)}
    assert (handover.bytes_by_source["own"] > 0) == here
    handover.release()
    await made.ended()
    await made.close()


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(*box, strict=True))


async def test_a_layout_is_asked_of_one_holder_after_the_other_and_of_nobody_where_it_lies_here(host: Host) -> None:
    host.without = {"a": Away("no answer", where="a")}
    await brought(rebuild(host, "a", "b", "c"), "w")
    assert host.told_by == ["a", "b"]
    host.told_by, host.known = [], {LAYOUT.layout_id: LAYOUT}
    await brought(rebuild(host, "a", "b"), "w")
    assert host.told_by == []


async def test_what_this_node_held_and_has_let_go_of_is_not_asked_of_itself(host: Host) -> None:
    await brought(rebuild(host, "here", "a"), "w")
    assert host.told_by == ["a"]
    with pytest.raises(Unrecoverable) as raised:
        await (made := rebuild(host, "here")).catalogue()
    assert raised.value.code == "damage"
    await made.ended()
    await made.close()


@pytest.mark.parametrize(
    ("error", "code"), [(Away("no answer", where="a"), "unreachable"), (CkptdError("not held", where="a"), "damage")]
)
@pytest.mark.parametrize("durable", [False, True])
async def test_what_is_said_where_nobody_tells_a_layout(host: Host, error: CkptdError, code: str, durable: bool) -> None:
    host.without = {"a": error}
    made = rebuild(host, "a", durable=durable)
    with pytest.raises((Unrecoverable, OSError)) as raised:
        await made.catalogue()
    if durable:
        assert raised.value is host.storage, "it is asked, and has its own word"
    else:
        assert isinstance(raised.value, Unrecoverable)
        assert (raised.value.code, raised.value.what) == (code, f"a: {error.what}")
    await made.ended()
    await made.close()


async def test_a_lesser_copy_that_took_the_place_of_a_damaged_one_is_not_read_beyond_its_end(host: Host) -> None:
    """It came from another node between the plan and the restore; the plan knows of the whole one."""
    host.hold_less()
    made = rebuild(host, "here", "a")
    await made.catalogue()
    handover = await made.assemble(0, wants("w", "norm"))
    handover.release()
    await made.ended()
    await made.close()
    assert "a" in host.asked, "here nobody has what only the whole copy has"


@pytest.mark.parametrize(("answer", "code"), [(AWAY, "unreachable"), (DAMAGED, "damage")])
@pytest.mark.parametrize("objects", [True, False])
@pytest.mark.parametrize("durable", [False, True])
async def test_what_is_said_of_the_only_copy(host: Host, answer: Fetched, code: str, objects: bool, durable: bool) -> None:
    """Storage that is away may help later, where it has the snapshot."""
    error = await refused(host, rebuild(host, "a", durable=durable), {"a": [answer]}, objects=objects)
    assert error.code == ("unreachable" if durable else code), error.what
    assert ("a: the stream broke" in error.what) == (answer is AWAY)


@pytest.mark.parametrize(("first", "code"), [(AWAY, "unreachable"), (DAMAGED, "damage")])
async def test_damage_of_one_copy_leaves_the_word_to_the_other(host: Host, first: Fetched, code: str) -> None:
    assert (await refused(host, rebuild(host, "a", "b"), {"a": [first], "b": [DAMAGED]})).code == code


LACK = StorageError("open: Too many open files", errno=errno.EMFILE)
STALE = StorageError("open: Stale file handle", errno=errno.ESTALE)


@pytest.mark.parametrize(
    ("storage", "code"),
    [
        (NoThread(), "unreachable"),
        (LACK, "unreachable"),
        (STALE, "unreachable"),
        (FileDamage("its checksum does not match"), "damage"),
        (NotFound("no such checkpoint", errno=errno.ENOENT), "damage"),
        (StorageError("the file ends at byte 5"), "damage"),
    ],
)
@pytest.mark.parametrize("objects", [True, False])
async def test_only_what_storage_lacks_or_has_damaged_is_said_against_it(
    host: Host, objects: bool, storage: OSError | CkptdError, code: str
) -> None:
    host.storage = storage
    error = await refused(host, rebuild(host, "a", durable=True), {"a": [DAMAGED]}, objects=objects)
    assert error.code == code


@pytest.mark.parametrize("first_lacks", [True, False])
async def test_damage_beside_a_lack_of_means_is_damage(first_lacks: bool) -> None:
    """Several readers fail at once, and any of them last."""
    lack, damage = NoThread(), FileDamage("the disk")
    stored = Stored(True, lambda: None, lambda error: None)  # type: ignore[arg-type,return-value]

    def fails(error: Exception, checkpoint: object) -> None:
        raise error

    for error in (lack, damage) if first_lacks else (damage, lack):
        stored._checkpoint = True  # type: ignore[assignment]
        with pytest.raises((OSError, FileDamage), match=r"thread|disk"):
            await stored.call(partial(fails, error))
    assert not stored.ok and not stored.away
    stored.ask_again()
    assert not stored.ok


async def test_storage_that_was_away_is_asked_again_once_a_rank_has_begun_to_write() -> None:
    stored, answers = Stored(True, lambda: None, lambda error: None), [STALE]  # type: ignore[arg-type,return-value]
    stored._checkpoint = True  # type: ignore[assignment]

    def reads(checkpoint: object) -> str:
        if answers:
            raise answers.pop()
        return "read"

    with pytest.raises(StorageError):
        await stored.call(reads)
    assert not stored.ok and stored.away and stored.why
    stored.ask_again()
    assert stored.ok and not stored.why and await stored.call(reads) == "read"


class Beside:
    """What another fetch of the same restore could not reach, while this one looked for it."""

    def __init__(self, left_out: LeftOut, *failed: tuple[Source, Fetched]) -> None:
        self.failed, self._left_out = list(failed), left_out


@pytest.mark.parametrize("other", [AWAY, DAMAGED])
def test_a_parity_set_that_lacks_what_another_fetch_could_not_reach_is_not_given_up(host: Host, other: Fetched) -> None:
    parity_set = ParitySet(3, 0, 1, (Member(0), Member(1), Member(2)))
    source = Source("a", 1, 0, "")
    for failed in ([], [(source, other)]):
        left_out = LeftOut()
        by_parity = ByParity(host, STEP, (), {}, left_out)  # type: ignore[arg-type]
        left_out.note("a", 1, other)
        by_parity._note(parity_set, Beside(left_out, *failed), Undecodable("too few"))  # type: ignore[arg-type]
        assert (parity_set in left_out.parity_sets(hopeful=True)) == (other is DAMAGED and not failed)


async def test_once_a_rank_has_begun_to_write_who_is_away_is_waited_for(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct mode: to give up then would leave its objects dirty."""
    monkeypatch.setattr(module, "PART_PAUSES_S", (0.01, 0.01))
    made = rebuild(host, "a")
    await made.catalogue()
    room = await host.room(0, 3 * MIB)
    asked = [module.Want(i, s.key, s.dtype, s.shape, s.box) for i, s in enumerate(wants("w").tensors)]
    host.answers = {"a": [AWAY, AWAY]}
    (await made._gather_patiently(0, asked, room)).release()
    host.answers = {"a": [AWAY] * 3}
    with pytest.raises(Unrecoverable) as error:
        await made._gather_patiently(0, asked, room)
    assert (error.value.code, host.answers) == ("unreachable", {"a": []})
    host.asked, host.answers = [], {"a": [DAMAGED] * 3}
    made._left_out.ask_again()
    with pytest.raises(Unrecoverable) as error:
        await made._gather_patiently(0, asked, room)
    assert (error.value.code, host.asked) == ("damage", ["a"])
    await made.ended()
    await made.close()
