"""The one decision of a restore: which snapshot, from where, or why none (design D11). Pure."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId, parallel_groups
from ckptd.core.policy import ONE_COPY
from ckptd.core.protocol.candidates import NOTHING_OF_IT, Candidate, Candidates, find_candidates
from ckptd.core.protocol.machine.steward.gather import Gather
from ckptd.core.protocol.messages import Inventory, RestoreAsk
from ckptd.core.redundancy.parity_groups import parity_members
from ckptd.core.redundancy.placement import positions
from ckptd.core.redundancy.policies import Parity, Redundancy, attainable

CLAIM_GAP = 8  # numbers left out when storage could not tell which ones are claimed ...
CLAIM_SPREAD = 65_521  # ... and then by chance up to this: two starts that know nothing of each other take different ones
NOTHING = SnapshotId(-1, -1)
ERRORS_MAX = 16  # reasons told to the ranks
NOTHING_SEALED = "nothing was ever sealed"
BEGINS_ANEW = "this start begins anew"
ELSEWHERE = "copied below another job's name, with those that hold files of it (`ckptd ls`), it can be continued there"
ALARMS = {NOTHING_SEALED: "nothing_sealed", BEGINS_ANEW: "begins_anew"}  # first words of what a decision says -> their kind


@dataclass(frozen=True)
class Decision:
    """Either a refusal (code, reason) or a record to open with its candidate (None: nothing to restore)."""

    record: EpochRecord | None = None
    candidate: Candidate | None = None
    code: str = ""
    reason: str = ""
    errors: tuple[str, ...] = ()
    proven_fresh: bool = False  # storage said so, too: the next one's proof is this one's claim


class Verdict(Enum):
    """Why nothing is decided yet."""

    WAIT = "somebody who is missing is worth waiting for"
    LOOK_AGAIN = "the answers are of different moments"


def all_there_is(gather: Gather, down: set[str]) -> bool:
    """Has everybody answered but who may have something and will not? Down: nodes that are known not to answer."""
    missing = gather.waited_for()
    return gather.durable is not None and missing <= down and not any(node.node in missing for node in gather.nodes)


def judge(
    gather: Gather,
    patient: bool,
    floor: int,
    excluded: Collection[SnapshotId],
    damaged: Mapping[SnapshotId, str],
    redundancy: Redundancy,
) -> Decision | Verdict:
    """patient: who is missing is waited for where there is nothing without him, or something newer."""
    if patient and gather.waited_for():
        found = _find(gather, next(iter(gather.joined.values()), None))
        if found.best is None or _lost_newer(found):
            return Verdict.WAIT
    if looks_torn(gather):
        return Verdict.LOOK_AGAIN
    return decide(gather, floor, excluded, damaged, redundancy)


def looks_torn(gather: Gather) -> bool:
    """Something that someone was told of lies beyond what the answers add up to, or all that there is does not add up to
    anything: it is lost, or they are of different moments."""
    ask = next(iter(gather.joined.values()), None)
    if ask is None or gather.looked_twice:
        return False
    found = _find(gather, ask)
    return _lost_newer(found) or (found.best is None and bool(found.passed_over))


def _lost_newer(found: Candidates) -> bool:
    return any(passed.certified >= 0 for passed in found.passed_over)


def decide(
    gather: Gather,
    floor: int,
    excluded: Collection[SnapshotId],
    damaged: Mapping[SnapshotId, str],
    redundancy: Redundancy = ONE_COPY,
) -> Decision:
    """floor: the record's number lies above it. redundancy: for which members are seated. excluded: not to be tried again.
    damaged: what was found when a snapshot was tried (some are worth another try, without the damaged copies)."""
    ask = next(iter(gather.joined.values()), None)
    if ask is None:  # restore() was never called: a new lineage
        said = _left_by_it(gather, "without restore()") or _unheard(gather)
        said += _buried(gather, f"{BEGINS_ANEW}: ")
        return Decision(_record(gather, None, floor, redundancy), errors=said)
    found = _find(gather, ask, excluded)
    errors = _errors(gather, found, damaged)
    if found.best is not None:
        errors += _passed_by(gather, ask, found.best.snapshot, excluded) + _buried(gather, above=found.best.snapshot)
        return Decision(_record(gather, found.best, floor, redundancy), found.best, errors=errors)
    if ask.allow_fresh or (ask.step is None and _proven_fresh(gather)):
        said = errors + (_left_by_it(gather, "by allow_fresh=True") or _unsealed(gather)) + _buried(gather, f"{BEGINS_ANEW}: ")
        return Decision(_record(gather, None, floor, redundancy), errors=said, proven_fresh=not ask.allow_fresh)
    complete = not gather.missing() and gather.durable is not None and gather.durable.ok
    code = "unrecoverable" if complete or excluded else "unreachable"
    why = errors or _nothing(gather, ask)
    return Decision(code=code, reason="; ".join(why + (_remedy(gather, ask) if code == "unrecoverable" else ())))


def _left_by_it(gather: Gather, how: str) -> tuple[str, ...]:
    """A script that forgot restore(), or asked for a step that is not there, must not lose the run that it was to go on with
    without a word."""
    found = _find(gather, RestoreAsk())
    left = [found.best.snapshot] if found.best is not None else []
    then = "what storage has of that line goes once this one has keep_last checkpoints of its own"
    if not left:
        left = sorted(passed.snapshot for passed in found.passed_over if passed.certified >= 0)[-1:]
        then = f"those who answered do not have it ({'; '.join(_errors(gather, found, {}))})"
    return tuple(f"{BEGINS_ANEW} {how}, and {s} is left behind; {then}" for s in left)


def _unheard(gather: Gather) -> tuple[str, ...]:
    """Nothing is known that it would leave behind, and not everybody was heard."""
    missed = "; ".join(_errors(gather, Candidates(None, ()), {}))
    return (f"{BEGINS_ANEW} without restore(), and nobody can say what is left behind: {missed}",) if missed else ()


def _nothing(gather: Gather, ask: RestoreAsk) -> tuple[str, ...]:
    """Why there is nothing to be looked at."""
    left = _abandoned(gather, ask)
    told = (_left_behind(gather, left),) if left > NOTHING else ()
    wanted = [f"of step {ask.step}"] if ask.step is not None else []
    wanted += ["on storage" if ask.source == "durable" else "in memory"] if ask.source else []
    if wanted:
        return told or (f"there is no checkpoint {' '.join(wanted)}",)
    if told and gather.sealed() <= left.epoch:
        return told
    return (_what_became(gather, left), *told)


def _remedy(gather: Gather, ask: RestoreAsk) -> tuple[str, ...]:
    """Who mistook the number of a step is not told how to lose the others."""
    if ask.step is None and not ask.source:
        return ("allow_fresh=True begins anew",)
    best = _find(gather, RestoreAsk()).best
    return (f"restore() takes {best.snapshot}",) if best is not None else ()


def _passed_by(gather: Gather, ask: RestoreAsk, taken: SnapshotId, excluded: Collection[SnapshotId]) -> tuple[str, ...]:
    """A newer one that this start leaves behind, or that one before it did which has taken nothing since: as a rule a program that
    was only to look at an older step."""
    if ask.step is None and not ask.source:
        record, left = gather.lineage(), _abandoned(gather, ask)
        anew = record is not None and taken.epoch < record.number
        return (_left_behind(gather, left),) if anew and left > taken else ()
    best = _find(gather, RestoreAsk(), excluded).best
    if best is None or best.snapshot <= taken:
        return ()
    fate = "is deleted, unless kept, when it has a checkpoint of its own"
    return (f"{best.snapshot} is left behind by this start, and {fate}; {ELSEWHERE}",)


def _what_became(gather: Gather, left: SnapshotId = NOTHING) -> str:
    """Of the snapshots of a job that has run before; storage may have one of a line that was left."""
    epoch, record = gather.sealed(), gather.lineage()
    let_go = sorted(node for node, answer in gather.answers.items() if answer.buried >= max(epoch, 1))
    nodes = record.nodes if record is not None else ()
    anew = sorted(n.node for n in nodes if n.node in gather.answers and gather.answers[n.node].incarnation != n.incarnation)
    stored = gather.durable is not None and gather.durable.ok
    where = "by nobody who answered" if gather.missing() else "nowhere any more"
    said = [f"its snapshots of epoch {epoch} are held {where}"] if epoch else []
    said += [f"{', '.join(let_go)} let go of the job when it was over and nothing of it was left"] if let_go else []
    said += [f"{', '.join(anew)} started anew since it ran and may have lost some"] if anew and not let_go else []
    lacks = "storage has none" + (" of that line" if left > NOTHING else "")
    said += ["there is no storage" if not gather.claims else lacks] if said and stored else []
    return "this job has run before, and " + (", ".join(said) or "nobody can say that it has no checkpoint")


def _buried(gather: Gather, prefix: str = "", above: SnapshotId = NOTHING) -> tuple[str, ...]:
    """Where ranks lived, the job went on with the order unheard: what they have taken since is not passed over without a word."""
    return tuple(
        f"{prefix}{snapshot}, which {node} holds, was forgotten by the operator's order"
        for node, snapshot in sorted(gather.buried.items())
        if snapshot > above
    )


def _unsealed(gather: Gather) -> tuple[str, ...]:
    """A fresh start after one that ran: proven, and yet nothing to be quiet about."""
    before, ordered, left = gather.lineage(), gather.tombstone.ordered, max(gather.heard_of(), default=NOTHING)
    if gather.sealed() > max(left.epoch, 0):  # declared by allow_fresh=True
        return (_what_became(gather),)
    if before is None:  # Nobody has its record any more.
        let_go = ", ".join(sorted(node for node, answer in gather.answers.items() if answer.buried > ordered))
        return (f"{NOTHING_SEALED}: {let_go} let go of a start that ended before a first snapshot was complete",) if let_go else ()
    if before.number <= ordered:
        return ()
    where = " on " + ", ".join(node.node for node in before.nodes) if before.nodes else ""
    after = f" after {left}, which an earlier start left behind" if left > NOTHING else ""
    return (f"{NOTHING_SEALED}{after}: epoch {before.number} ran{where} and ended before a first snapshot was complete",)


def _abandoned(gather: Gather, ask: RestoreAsk) -> SnapshotId:
    """The newest on storage that fits and is of a line that was left behind."""
    record, commits = gather.lineage(), gather.durable.commits if gather.durable is not None else ()
    left = (commit for commit in commits if record is not None and record.abandons(commit) and ask.step in (None, commit.step))
    return max(left, default=NOTHING)


def _left_behind(gather: Gather, left: SnapshotId) -> str:
    """It is listed, and yet refused: whoever asks for it must be told why."""
    record = gather.lineage()
    ancestry = record.ancestry if record is not None else ()
    passed = next((fork for fork in ancestry if fork.epoch <= left.epoch), None)  # the one that passed it by
    fork = f"went back to {passed}" if passed else "started anew"
    return f"{left} was left behind when the job {fork}; {ELSEWHERE}"


def spread(attempt: str, number: int) -> int:
    """How far an epoch's number goes up when nobody can vouch that it is free. Two such numbers of one attempt are no
    neighbours either: the claims of later starts count up from the one, and would meet the other."""
    return CLAIM_GAP + zlib.crc32(f"{attempt}/{number}".encode()) % CLAIM_SPREAD


def _find(gather: Gather, ask: RestoreAsk | None, excluded: Collection[SnapshotId] = ()) -> Candidates:
    holdings = {node: answer.holdings for node, answer in gather.answers.items()}
    certified = [fact for answer in gather.answers.values() for fact in answer.certified]
    commits = gather.durable.commits if gather.durable is not None else ()
    return find_candidates(gather.lineage(), holdings, gather.layouts(), commits, certified, ask, excluded)


def _proven_fresh(gather: Gather) -> bool:
    """Everyone answered, storage too, nobody ever heard of a snapshot. When there was an earlier start of the job,
    one of its members with ranks must still know that it took none: it has not been restarted since."""
    durable = gather.durable
    if gather.missing() or durable is None or not durable.ok or gather.heard_of() or gather.sealed():
        return False
    if gather.tombstone.ordered and max((r.number for r in gather.records), default=0) <= gather.tombstone.ordered:
        return True  # all there was, the operator had forgotten
    last = gather.lineage(proven=True)
    if last is None:
        return all(record.before[0] < 0 or _left_nothing(gather, record) for record in gather.records)
    return not last.ancestry and _remembers_nothing(gather, last)


def _left_nothing(gather: Gather, record: EpochRecord) -> bool:
    """It never ran, and neither did what it was decided upon; or who did remembers that it took none."""
    if not gather.never_ran(record, proven=True):
        return not record.ancestry and _remembers_nothing(gather, record)
    before = gather.record_of(record.before[0])
    return record.before[0] < 0 or (before is not None and _left_nothing(gather, before))


def _remembers_nothing(gather: Gather, record: EpochRecord) -> bool:
    """A fresh start that was only declared left an older lineage behind, unless it never ran: then the witness must know that
    it did, also when it has entered a later one since. Who let go of the job since remembers only in which epoch it last sealed.
    Of the one before it somebody may remember that as well."""
    before = gather.record_of(record.before[0])
    nothing_before = record.before[0] < 0 or (before is not None and not before.ancestry and _remembers_nothing(gather, before))

    def witness(answer: Inventory) -> bool:
        if answer.buried >= record.number:
            return nothing_before and answer.sealed < record.number
        return answer.done or answer.ran == record or nothing_before

    return any(answer.incarnation and witness(answer) for answer in gather.lived_through(record))


def _errors(gather: Gather, found: Candidates, damaged: Mapping[SnapshotId, str]) -> tuple[str, ...]:
    errors = [f"no answer from {', '.join(sorted(gather.missing()))}"] if gather.missing() else []
    if gather.durable is None or not gather.durable.ok:
        errors.append(f"storage did not answer: {gather.durable.reason if gather.durable is not None else 'timeout'}")
    errors += [
        f"two starts of the job have the number {number}, on {_on(kept)} and on {_on(other)}: what the second holds is left out"
        for number, (kept, other) in sorted(gather.left_out.items())
    ]
    newest = found.best.snapshot if found.best is not None else SnapshotId(-1, -1)
    passed = {over.snapshot: over.reason for over in found.passed_over} | dict(damaged)
    anywhere = not any(ask and ask.source for ask in gather.joined.values())
    if anywhere and gather.claims and gather.durable is not None and gather.durable.ok:
        passed |= {snapshot: f"{why}, nor does storage" for snapshot, why in passed.items() if why == NOTHING_OF_IT}
    errors += [
        f"{snapshot}: {passed[snapshot]}"
        for snapshot in sorted(passed, reverse=True)
        if snapshot > newest
    ]
    return tuple(errors[:ERRORS_MAX])


def _on(record: EpochRecord) -> str:
    return ", ".join(dict.fromkeys(record.ranks))


def _record(gather: Gather, candidate: Candidate | None, floor: int, redundancy: Redundancy) -> EpochRecord:
    number = 1 + max(floor, gather.highest())
    if gather.durable is None or not gather.durable.ok or (gather.missing() and not gather.claims):
        number += spread(gather.attempt, number)
    ancestry: tuple[SnapshotId, ...] = ()
    lineage = gather.lineage()
    if candidate is not None:
        ancestry = _ancestry(lineage, candidate.snapshot)
    before = (lineage.number, lineage.ancestry) if lineage is not None else (0, ())
    if candidate is None and _proven_fresh(gather):
        last = gather.newest()
        before = (last.number, last.ancestry) if last is not None and _may_go_on(gather, last) else (-1, ())
    seated, holders = _seated(gather, redundancy), _holders(gather, redundancy)
    return EpochRecord(number, gather.attempt, gather.ranks, seated, ancestry, holders, before)


def _may_go_on(gather: Gather, record: EpochRecord) -> bool:
    """It trains or is about to, and has sealed nothing yet: it may until the new one opens, which may be never. Not where a rank of
    ours stands in the place of one of its own."""
    replaced = any(old == new for old, new in zip(record.ranks, gather.ranks, strict=False))
    return record.number > gather.tombstone.ordered and record.world > 0 and not replaced


def _seated(gather: Gather, redundancy: Redundancy) -> tuple[NodeInfo, ...]:
    """The members such that copies and parity move as little as can be from where the epoch before had placed them."""
    last = gather.lineage()
    before = last.nodes if last is not None else ()
    if isinstance(redundancy, Parity):
        return parity_members(before, gather.nodes)
    return positions(before, gather.nodes, redundancy.tolerates, parallel_groups(gather.nodes))


def _ancestry(lineage: EpochRecord | None, snapshot: SnapshotId) -> tuple[SnapshotId, ...]:
    """The forks, newest first, as seen from an epoch that begins with ``snapshot``."""
    if lineage is None or snapshot.epoch == lineage.number:
        return (snapshot, *(lineage.ancestry if lineage is not None else ()))
    for at, fork in enumerate(lineage.ancestry):
        if snapshot.epoch == fork.epoch and snapshot.step <= fork.step:
            return (snapshot, *lineage.ancestry[at + 1 :])
    return (snapshot,)


def _holders(gather: Gather, redundancy: Redundancy) -> tuple[NodeInfo, ...]:
    """Outsiders that hold something, did not answer although they may hold what is continued, or have ranks in an epoch
    that goes on until this one opens, which may be never: what it takes until then is known to them alone. It may have been
    claimed and not begun yet: not even they have heard of it, or their ranks are still loading."""
    members = {node.node for node in gather.nodes}
    last, needed = gather.newest(), _may_be_needed(gather, redundancy)
    return tuple(
        info
        for node, info in sorted(gather.asked.items())
        if node not in members
        and (_holds_or_trains(node, gather.answers[node], last) if node in gather.answers else node in needed)
    )


def _may_be_needed(gather: Gather, redundancy: Redundancy) -> set[str]:
    """Members of the last epoch in which something became as safe as it can be, and of those after it, with the holders of these:
    until then what an epoch continued is not outdone, however often it is tried again. Whoever is gone for good is not asked for
    ever."""
    wanted = {record.number: attainable(redundancy.tolerates, (node.domain for node in record.nodes)) for record in gather.records}
    told = (said for answer in gather.answers.values() for said in answer.certified)
    safe = max((s.epoch for s, level, durable in told if durable or level >= wanted.get(s.epoch, redundancy.tolerates)), default=-1)
    since = [record for record in gather.records if record.number >= safe]
    return {node.node for record in since for node in (*record.nodes, *(record.holders if record.number > safe else ()))}


def _holds_or_trains(node: str, answer: Inventory, last: EpochRecord | None) -> bool:
    return bool(answer.holdings) or any(record is not None and node in record.ranks for record in (answer.known, last))
