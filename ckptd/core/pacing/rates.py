"""How fast this job's bytes move on this node, from what was measured; what was not is said to be unknown, never guessed.

A restore's own times count first. Before the first one stands what moves the same bytes in the same way: the sums of a seal for
those of own memory, a replica for a slice from a peer, making parity for solving it, a capture for loading. Storage has no such
stand-in: writing says little of reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

WINDOW = 16  # newest measurements of each kind that count
PACE_WINDOW = 32  # newest steps

SEAL, REPLICA, ENCODING, CAPTURE = "seal", "replica", "encoding", "capture"
LOAD, DECIDE, TRANSFER = "load", "decide", "transfer"
_STANDS_IN = {"own": SEAL, "peer": REPLICA, "parity": ENCODING, LOAD: CAPTURE}


@dataclass(frozen=True)
class Estimate:
    """seconds: None when something was not measured, ``missing`` then names it. phases: those that are known. basis: what each
    comes from, in words ("peer: 3 restores")."""

    seconds: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    basis: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class Rates:
    def __init__(self) -> None:
        self._moved: dict[str, deque[tuple[int, float]]] = {}
        self._decided: deque[float] = deque(maxlen=WINDOW)
        self._loaded: deque[int] = deque(maxlen=WINDOW)

    # --- what was measured --------------------------------------------------------------------------------------
    def moved(self, kind: str, nbytes: int, seconds: float) -> None:
        """One rank's bytes; what took no time or moved nothing says nothing."""
        if nbytes > 0 and seconds > 0:
            self._moved.setdefault(kind, deque(maxlen=WINDOW)).append((nbytes, seconds))

    def decided(self, seconds: float) -> None:
        """From the first local rank's restore() to the decision."""
        self._decided.append(max(0.0, seconds))

    def restored(self, nbytes: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """One rank's restore: bytes by source, seconds by phase. Of a mixture the far source takes the time; two far ones are not
        told apart and say nothing."""
        total = sum(nbytes.values())
        far = [source for source, count in nbytes.items() if count > 0 and source != "own"]
        if len(far) <= 1:
            source = far[0] if far else "own"
            self.moved(source, nbytes.get(source, 0), seconds.get(TRANSFER, 0.0))
        self.moved(LOAD, total, seconds.get(LOAD, 0.0))
        self._loaded.append(total)

    # --- what follows -------------------------------------------------------------------------------------------
    @property
    def loaded_bytes(self) -> int:
        """The most that a rank loaded; 0: no restore yet. More than its slot where ranks share what they capture."""
        return max(self._loaded, default=0)

    def rate(self, kind: str) -> tuple[float, str] | None:
        """(bytes per second of one rank, from what); None: not measured."""
        for name, word in ((kind, "restore"), (_STANDS_IN.get(kind, ""), _STANDS_IN.get(kind, ""))):
            found = self._moved.get(name)
            if found:
                per_second = sum(nbytes for nbytes, _ in found) / sum(seconds for _, seconds in found)
                return per_second, _counted(len(found), word)
        return None

    def estimate(self, nbytes: int, sources: Collection[str]) -> Estimate:
        """For a rank with ``nbytes`` from the slowest of these sources ("" among them: nothing is left)."""
        if "" in sources:
            return Estimate(missing=("nothing to restore",))
        phases: dict[str, float] = {}
        basis: list[str] = []
        missing: list[str] = []
        if self._decided:
            phases[DECIDE] = median(self._decided)
            basis.append(f"{DECIDE}: {_counted(len(self._decided), 'start')}")
        else:
            missing.append(DECIDE)
        for kind in (*sorted(sources), LOAD):
            found, phase = self.rate(kind), LOAD if kind == LOAD else TRANSFER
            if found is None or nbytes <= 0:
                missing.append(phase if kind == LOAD else f"{phase} from {kind}")
                continue
            phases[phase] = max(nbytes / found[0], phases.get(phase, 0.0))
            basis.append(f"{kind}: {found[1]}")
        return Estimate(None if missing else sum(phases.values()), phases, tuple(basis), tuple(missing))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("s" if count > 1 else "")


class Pace:
    """Seconds of one training step: the median of the newest, so that an evaluation now and then does not count."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._took: deque[float] = deque(maxlen=PACE_WINDOW)

    def stepped(self, step: int, now: float) -> None:
        """The first rank called this step, which is more than the last one since the epoch began."""
        if self._last is not None:
            before, then = self._last
            assert step > before
            self._took.append((now - then) / (step - before))
        self._last = step, now

    def restart(self) -> None:
        """A new epoch: what lies between is no step. How long steps took still stands."""
        self._last = None

    @property
    def seconds(self) -> float | None:
        """None: not two steps yet."""
        return median(self._took) if self._took else None
