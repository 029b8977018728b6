"""One job's parity on this node: makes what the machine orders, takes back what an earlier life of the daemon held (D8, P7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.arena.arena import NoMemory, Slot, SlotRecord
from ckptd.arena.sums import bad_blocks
from ckptd.core.errors import CkptdError
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.redundancy.parity_sets import NOBODY, joined_digests
from ckptd.core.state_map.layout import Layout
from ckptd.daemon.services import Services, log
from ckptd.protect.cards import unpacked

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell


class ParityShards:
    def __init__(self, services: Services, job: JobShell) -> None:
        self._services, self._job = services, job

    def make(self, do: ins.MakeParity) -> None:
        what = f"slot of rank {do.shard.member.rank}" if do.data else f"parity of parity set {do.shard.parity_set.number}"
        self._services.spawn(self._make(do), f"{what}, {self._job.job} {do.snapshot}")

    async def _make(self, do: ins.MakeParity) -> None:
        maker, job = self._services.parity, self._job
        started = self._services.now()
        try:
            slot = await (maker.data(job.job, do) if do.data else maker.shard(job.job, do))
            layouts, _ = ((), ()) if do.data else await self._services.in_work(_of_members, slot)
        except NoMemory as error:
            job.feed(ev.ParityFailed(do.snapshot, do.shard, do.data, f"{ev.NO_MEMORY}: {error.what}"))
            return
        except (CkptdError, ValueError) as error:
            log.info("job=%s snapshot=%s %s not made: %s", job.job, do.snapshot, do.shard, error)
            job.feed(ev.ParityFailed(do.snapshot, do.shard, do.data, str(error)))
            return
        except Exception as error:  # the machine waits for an answer before it orders it again
            self._services.went_wrong(f"parity {job.job} {do.snapshot}", error, job.job)
            job.feed(ev.ParityFailed(do.snapshot, do.shard, do.data, f"internal: {error!r}"))
            return
        if job.dropped:  # meanwhile: nobody would ever free it
            self._services.arena.release(slot)
            return
        seconds = self._services.now() - started
        self._services.metrics.encoded(job.job, seconds, len(slot.extent), data=do.data)
        job.meter.encoded(len(slot.extent), seconds)
        if do.data:
            job.arrived(slot)
        else:
            self._made(slot, layouts)

    def adopt(self, slot: Slot, record: SlotRecord) -> None:
        """Half of it is what the record says, half are the cards of the parity set's members: a part without them brings
        nothing."""
        region = [(0, record.layout.objects_capacity)]
        if bad_blocks(slot.extent, record.layout, record.sums, region, record.tier):
            log.warning("job=%s parity of %s is damaged", self._job.job, record.snapshot)
            self._job.slots.pop(slot.id, None)
            self._services.arena.release(slot)
            return
        self._job.slots[slot.id] = slot
        layouts, digests = _of_members(slot)  # what an earlier release wrote into the record named each fragment
        self._job.feed(
            ev.HoldingFound(slot.id, record.snapshot, record.rank, 0, False, record.layout, digests, record.keep, record.shard,
                            layouts)
        )  # fmt: skip

    def _made(self, slot: Slot, layouts: tuple[Layout, ...]) -> None:
        record = slot.record
        assert record is not None and record.shard is not None, "it was sealed, and only parity comes here"
        self._job.slots[slot.id] = slot
        self._job.feed(
            ev.ParityMade(record.snapshot, record.shard, slot.id, record.layout, record.digests, layouts, record.keep)
        )


def _of_members(slot: Slot) -> tuple[tuple[Layout, ...], tuple[tuple[str, bytes], ...]]:
    """Of its parity set; the layouts' ids are made here too, which takes long for a large one: in a thread for what is made, on the
    event loop for what is adopted."""
    record = slot.record
    assert record is not None and record.shard is not None, "only parity comes here"
    cards = unpacked(record.job, record.snapshot, slot.extent[: record.objects_bytes])
    found = tuple(cards[member.rank].layout for member in record.shard.parity_set.members if member.rank != NOBODY)
    for layout in found:
        layout.layout_id  # noqa: B018 - made here, kept with it
    return found, joined_digests({rank: sorted(card.digests) for rank, card in cards.items()})
