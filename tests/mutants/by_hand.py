"""Mistakes that somebody might make, written down as an edit of the source. ``old`` must be there exactly once."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tests.mutants.generate import Mutant
from tests.mutants.targets import source_of
from tests.sim.mutants import FIRST, MUTANTS, RARE

BY_HAND = "by hand"
SIMULATED = "tests/sim"


@dataclass(frozen=True)
class Edit:
    """``old`` and ``new`` have the same number of lines."""

    name: str
    path: str  # below ckptd/
    old: str
    new: str


EDITS = (
    # --- what is durable (P4, P11, P12)
    Edit(
        "the directories above a checkpoint are not synced",
        "persist/storage/tree.py",
        "            while path:\n",
        "            while False:\n",
    ),
    Edit(
        "only the first writer's files are checked",
        "persist/commit.py",
        "            for report in decoded:\n                check_report",
        "            for report in decoded[:1]:\n                check_report",
    ),
    Edit(
        "the manifest is not synced before the directory appears",
        "persist/storage/tree.py",
        '        failpoint(_of_a_checkpoint(pointer, "persist.commit.manifest"))\n        self.sync_dir(attempt)',
        '        failpoint(_of_a_checkpoint(pointer, "persist.commit.manifest"))\n        pass',
    ),
    Edit(
        "a file is durable before its entry in the directory is",
        "persist/storage/tree.py",
        "        self._tree.sync_dir(self._directory)",
        "        pass",
    ),
    Edit(
        "strangers' files appear with the checkpoint",
        "persist/storage/tree.py",
        "            if entry.name not in {*names, *beside} and not entry.is_dir:",
        "            if False:",
    ),
    Edit(
        "an unread commit counts as restorable",
        "core/retention.py",
        " for commit in restorable if commit.verified]",
        " for commit in restorable]",
    ),
    Edit(
        "a stale daemon deletes",
        "core/retention.py",
        "any(commit.snapshot.epoch > record.number for commit in commits)",
        "False",
    ),
    Edit(
        "a checkpoint is deleted under its readers",
        "core/retention.py",
        " - self.leased",
        "",
    ),
    Edit(
        "retention does not look again after it hid",
        "persist/retention.py",
        "            stays = not self._may_go(snapshot)",
        "            stays = False",
    ),
    Edit(
        "a superseded epoch retains",
        "persist/retention.py",
        "        if _name(record) != _name(self._epoch):",
        "        if False:",
    ),
    Edit(
        "what a newer epoch revealed is deleted",
        "persist/storage/tree.py",
        "                return False\n        self._delete_renamed",
        "                pass\n        self._delete_renamed",
    ),
    Edit(
        "what was hidden in error stays hidden",
        "persist/retention.py",
        " if self._storage.reveal(step_dir(self._job, s))]",
        " if False]",
    ),
    Edit(
        "a restore does not find what was hidden in error",
        "persist/commits.py",
        "    if any(info.hidden for info in commits):",
        "    if False:",
    ),
    Edit(
        "a number that another start claimed is taken for ours",
        "persist/lineage.py",
        "        ours = _read(storage, path).nonce == nonce",
        "        ours = bool(_read(storage, path))",
    ),
    Edit(
        "a lower number than the highest is claimed",
        "persist/lineage.py",
        "    if taken > record.number:",
        "    if False:",
    ),
    Edit(
        "one node's report is enough for a commit",
        "core/protocol/machine/steward/flush.py",
        "        if len(flush.reports) == len(flush.orders):",
        "        if flush.reports:",
    ),
    Edit(
        "files of two tries are mixed",
        "core/protocol/machine/steward/flush.py",
        "flush is None or message.attempt != flush.attempt or",
        "flush is None or",
    ),
    # --- what is promised (P2, P3)
    Edit(
        "nodes are counted, not failure domains",
        "core/protocol/machine/steward/table.py",
        "{node: self._ctx.domain(node) for",
        "{node: node for",
    ),
    Edit(
        "nodes that are gone still count",
        "core/protocol/machine/steward/table.py",
        "for node in holding if counts(node)}",
        "for node in holding}",
    ),
    Edit(
        "a snapshot is whole although a rank is missing",
        "core/redundancy/protection.py",
        "len(worlds) == 1 and sorted(alone) == list(range(max(worlds)))",
        "len(worlds) == 1",
    ),
    Edit(
        "a void snapshot is certified",
        "core/protocol/machine/steward/certify.py",
        "level = -1 if void else min(",
        "level = min(",
    ),
    Edit(
        "an older one is released by one that survives less",
        "core/protocol/machine/steward/guards.py",
        "return 0 <= best >= self.worth(state) and",
        "return 0 <= best and",
    ),
    Edit(
        "two copies in one failure domain",
        "core/protocol/machine/replicate.py",
        "(n for n in found if ctx.is_up(n) and n not in ctx.leaving and ctx.domain(n) not in stays)",
        "(n for n in found if ctx.is_up(n) and n not in ctx.leaving and n not in used)",
    ),
    Edit(
        "a substitute in a domain that has a copy",
        "core/redundancy/placement.py",
        "[other for other in ahead if other.domain not in taken]",
        "[other for other in ahead if other not in picked]",
    ),
    Edit(
        "an earlier certificate that comes late is believed",
        "core/protocol/machine/levels.py",
        "message.serial < before.serial",
        "False",
    ),
    # --- what is read (P1, P9, P10)
    Edit(
        "a quarantined copy is served",
        "core/protocol/machine/slots.py",
        "s.fact is not None and not s.damaged]",
        "s.fact is not None]",
    ),
    Edit(
        "pins are ignored on release",
        "core/protocol/machine/slots.py",
        "        if not self.pinned(snapshot):",
        "        if True:",
    ),
    Edit(
        "boxes that overlap are taken for the whole",
        "core/state_map/recovery.py",
        "whole = (shared & (found == volumes) & apart).tolist()",
        "whole = (shared & (found == volumes)).tolist()",
    ),
    Edit(
        "two ranks at one place of a cut are taken for apart",
        "core/state_map/apart.py",
        "    return len(set(places)) == len(places)",
        "    return True",
    ),
    Edit(
        "other cuts of one tensor are taken for apart",
        "core/state_map/apart.py",
        " or len({table.rules[rule - 1] for table, rule in found}) > 1",
        "",
    ),
    Edit(
        "another rank's own values are restored",
        "core/state_map/recovery.py",
        "for copy in copies if copy.rank == whose]",
        "for copy in copies]",
    ),
    Edit(
        "a prefix is taken for the whole slot",
        "core/state_map/source_index.py",
        "in holders if least == 0 or tier >= least]\n",
        "in holders]\n",
    ),
    Edit(
        "what a prefix lacks is written from it",
        "core/state_map/writes.py",
        "if t <= has[at][2] or not nbytes]",
        "if t >= 0]",
    ),
    # --- which steps, which epoch (P12, P14)
    Edit(
        "a fact of an old session is accepted",
        "core/protocol/machine/steward/sessions.py",
        "session.id != fact.session or ",
        "",
    ),
    Edit(
        "the fork is forgotten",
        "core/protocol/candidates.py",
        "    return record is None or record.is_candidate(snapshot)",
        "    return True",
    ),
    Edit(
        "another epoch of the same number is entered",
        "core/protocol/machine/opening.py",
        "record.number == known.number and record != known",
        "False",
    ),
    Edit(
        "ranks load before all have fetched",
        "core/protocol/machine/steward/restore.py",
        "        elif len(restore.fetched) == restore.record.world and not restore.loaded:",
        "        elif not restore.loaded:",
    ),
    Edit(
        "a vote against is ignored",
        "core/protocol/machine/steward/restore.py",
        "        if not vote.ok:\n            self._against(restore, vote)\n",
        "        if not vote.ok:\n            pass\n",
    ),
    Edit(
        "a slot is promised to two grants",
        "core/protocol/machine/steward/grants.py",
        "state.free_slots - waiting[rank] for",
        "state.free_slots - 0 for",
    ),
    Edit(
        "a fresh start is proven although somebody is silent",
        "core/protocol/machine/steward/decide.py",
        "    if gather.missing() or durable is None or not durable.ok or gather.heard_of() or gather.sealed():",
        "    if durable is None or not durable.ok or gather.heard_of() or gather.sealed():",
    ),
    # --- parity and degradation (D8, P8)
    Edit(
        "parity that is gone with its data counts",
        "core/redundancy/parity_sets.py",
        "        if lacking and len(lacking) + len(rows & no_parity) > parity:",
        "        if lacking and len(lacking) > parity:",
    ),
    Edit(
        "two positions of a parity set in one domain",
        "core/protocol/machine/steward/parity.py",
        "            if node not in taken and (node in own or domain(node) not in others):",
        "            if True:",
    ),
    Edit(
        "parity of a node that is gone counts",
        "core/protocol/machine/steward/table.py",
        "{self._ctx.domain(n) for n in nodes if counts(n)} for at, nodes in shards.items()",
        "{self._ctx.domain(n) for n in nodes} for at, nodes in shards.items()",
    ),
    Edit(
        "a holding of a later tier counts as its position's data",
        "core/protocol/machine/steward/table.py",
        "{d for d, tier in holders.get(rank, ()) if tier <= 1} for rank",
        "{d for d, tier in holders.get(rank, ())} for rank",
    ),
    Edit(
        "parity is made of what is void",
        "core/protocol/machine/encoding.py",
        "            if held or snapshot in self._slots.void or snapshot in self._levels.released:",
        "            if held:",
    ),
    Edit(
        "a slow copy is evicted for a newer snapshot that has none",
        "core/protocol/machine/steward/certify.py",
        "        protecting = self.protecting.choose(certified, guards.wanted())",
        "        protecting = None",
    ),
    Edit(
        "a level is in force when everybody has heard of it, and not before",
        "core/protocol/machine/steward/degradation.py",
        "            self._ctx.in_force = self._degradation.redundancy",
        "            pass",
    ),
    # --- readers that are no ranks (P5, P14)
    Edit(
        "a reader keeps a rank's last slots",
        "core/protocol/machine/slots.py",
        "        return not slot.own or sum(1 for _ in left) >= TO_GO_ON_WITH",
        "        return True",
    ),
    Edit(
        "what stays for readers takes a new copy's place",
        "core/protocol/machine/holdings.py",
        "            if not self._slots.for_readers(slot)",
        "            if True",
    ),
)


def place(edit: Edit) -> int:
    """The line that it begins at. ValueError: the source has changed, so the edit must, too."""
    source = source_of(edit.path)
    if source.count(edit.old) != 1 or edit.old.count("\n") != edit.new.count("\n"):
        raise ValueError(f"{edit.name!r}: {edit.old!r} is {source.count(edit.old)} times in {edit.path}")
    return source[: source.index(edit.old)].count("\n") + 1


def edited(edit: Edit) -> ast.Module:
    return ast.parse(source_of(edit.path).replace(edit.old, edit.new))


def mutants_by_hand() -> list[Mutant]:
    """And those that the simulator knows: they exchange a method of a machine, or of the simulated shell around it."""
    found = [
        Mutant(f"{SIMULATED}:{BY_HAND}:{name}", SIMULATED, BY_HAND, 0, 0, f"{name!r}", number)
        for number, name in enumerate(MUTANTS)
    ]
    for number, edit in enumerate(EDITS):
        line = place(edit)
        lines = edit.old.rstrip("\n").count("\n")
        found.append(
            Mutant(
                f"{edit.path}:{BY_HAND}:{edit.name}",
                edit.path,
                BY_HAND,
                line,
                line + lines,
                edit.name,
                number,
            )
        )
    return found


def first_seed(mutant: Mutant) -> int:
    """Of those that a simulated mistake is looked for in: where it is rare, the first that is known to show it."""
    return FIRST.get(mutant.text.strip("'"), 0)


def rare() -> dict[str, str]:
    """Those of the simulator that need more seeds than there is time for: id -> what is believed to be the reason."""
    return {f"{SIMULATED}:{BY_HAND}:{name}": why for name, why in RARE.items()}
