"""Jobs that this daemon has forgotten (D19): a tombstone each, and nothing else. Bounded, in one file of the state directory."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.life import NO_TOMBSTONE, Tombstone, revives
from ckptd.core.protocol.messages import Inventory, Message
from ckptd.daemon.services import log
from ckptd.daemon.state import StateDir
from ckptd.observe.health import Health

RETRY_S = 5.0  # a list that could not be written
WHICH = "tombstones"  # of health's "state"


class Graveyard:
    """``stones``: by job, the newest last. ``has_record(job)``: it began anew, and its file is not the old one's any more.
    ``nodes``: by job, where it was when this daemon forgot it, for an order that is repeated; not written down."""

    def __init__(self, state: StateDir, health: Health, has_record: Callable[[str], bool]) -> None:
        self._state, self._health, self._has_record = state, health, has_record
        self.stones = state.tombstones()
        self.nodes: dict[str, tuple[NodeInfo, ...]] = {}
        self._unwritten: set[str] = set()
        self._not_before = 0.0

    def of(self, job: str) -> Tombstone:
        return self.stones.get(job, NO_TOMBSTONE)

    def add(self, job: str, tombstone: Tombstone, record: EpochRecord | None = None) -> None:
        """The job's memory is gone; ``write`` follows. ``record``: its last epoch, where it still was known."""
        if tombstone == NO_TOMBSTONE:
            return  # nobody ever opened an epoch of it here
        if record is not None:
            self.nodes[job] = (*record.nodes, *record.holders)
        self.stones.pop(job, None)
        self.stones[job] = tombstone
        self._unwritten.add(job)
        how = "forgotten by order" if tombstone.ordered == tombstone.epoch else "forgotten: no memory of it is left here"
        log.info("job=%s epoch=%d %s", job, tombstone.epoch, how)

    def tick(self, now: float) -> None:
        if self._unwritten and now >= self._not_before:
            self._not_before = 0.0 if self.write() else now + RETRY_S

    def write(self) -> bool:
        """The tombstones first, then their jobs' files go: a crash between the two leaves a job that is forgotten once more."""
        try:
            self._state.bury(self.stones)
            self.nodes = {job: nodes for job, nodes in self.nodes.items() if job in self.stones}
            for job in self._unwritten:
                if not self._has_record(job):
                    self._state.forget(job)
        except OSError as error:
            self._health.report("state", f"forgotten jobs are not written down: {error} [{self._state.path}]", which=WHICH)
            return False
        self._health.clear("state", which=WHICH)
        self._unwritten.clear()
        return True

    def answer(self, job: str, message: Message) -> Inventory | None:
        """To a word about an epoch that was forgotten by order, from a node that was away: it forgets as well."""
        stone = self.of(job)
        if not stone.ordered or (isinstance(message, msg.Inventory) and message.forgotten):
            return None
        return Inventory("", None, (), buried=stone.epoch, forgotten=stone.ordered)

    def keeps_out(self, job: str, message: Message) -> bool:
        """A repeated word about what is forgotten brings nothing back."""
        return not revives(message, self.of(job))
