"""Deaths and stops of a daemon at a critical instant: between two instructions, or with a time that it read long ago."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from tests.sim.host import Host

SPRUNG_WITHIN_S = 15.0  # else it is taken away
AT: tuple[type, ...] = (
    ins.PersistEpoch, ins.ClaimEpoch, ins.PrepareRestore, ins.LoadNow, ins.FinishRestore, ins.GiveSlot, ins.TellLevel,
    ins.WriteFiles, ins.Commit, ins.FreeSlot, ins.Replicate, msg.EpochOpen, msg.RestoreGo, msg.RestoreDone,
    msg.Certificate, msg.Grant, msg.Void, msg.Inventory, msg.Sealed, msg.Held, msg.WriteOrder, msg.Wrote,
)  # fmt: skip


class Trap:
    """Springs just before an instruction of this kind (a message: when it is about to be sent), or just after its like."""

    def __init__(self, host: Host, at: type, strike: Callable[[ins.Instruction], None]) -> None:
        self._host, self._at, self._strike = host, at, strike

    def springs(self, do: ins.Instruction) -> bool:
        """True: the instruction is not carried out now."""
        if type(do) is not self._at and not (isinstance(do, ins.Send) and type(do.message) is self._at):
            return False
        self._host.trap = None
        self._strike(do)
        return True

    def stops_at(self, event: ev.Event) -> bool:
        return False


class OldClock(Trap):
    """Stopped between reading the clock and deciding."""

    def __init__(self, host: Host, stop: Callable[[], None]) -> None:
        self._host, self._stop = host, stop

    def springs(self, do: ins.Instruction) -> bool:
        return False

    def stops_at(self, event: ev.Event) -> bool:
        if isinstance(event, ev.Restarted):
            return False
        self._host.trap = None
        self._stop()
        return True
