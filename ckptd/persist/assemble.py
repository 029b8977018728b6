"""From the writers' reports to the manifest: proves that every slice of every layout was written (D13). Pure."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence

import msgspec

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.state_map.box import Box, disjoint, uncovered
from ckptd.core.state_map.fragments import Fragment
from ckptd.core.state_map.layout import BLOCK_BYTES, MAYBE, Layout
from ckptd.persist import manifest as m
from ckptd.persist.index import ROWS, Chunk, Index, Tensor
from ckptd.persist.names import header_name
from ckptd.persist.report import Report, WrittenChunk, WrittenObject

VERSION_TEXT = "ckptd/1"
_Key = tuple[str, int | None]  # (tensor key, rank whose own value it is)


def assemble(
    job: str,
    snapshot: SnapshotId,
    attempt: str,
    record: EpochRecord,
    reports: Sequence[Report],
    layouts: Mapping[int, Layout],
    per_rank: Collection[str],
    keep: bool,
) -> m.Contents:
    """Raises CkptdError naming what is missing or contradictory; nothing may be committed then."""
    worlds = {layout.world for layout in layouts.values()}
    if worlds != {len(layouts)} or set(layouts) != set(range(len(layouts))):
        raise CkptdError(
            f"layouts of ranks {sorted(layouts)} for worlds {sorted(worlds)}", where=f"{job} {snapshot}"
        )
    files: list[m.DataFile] = []
    sides: list[m.SideFile] = []
    rows: dict[_Key, list[Chunk]] = {}
    facts = _tensors(layouts, per_rank)
    for report in reports:
        _add_files(report, files, sides, facts, rows)
    _add_kept(reports, files, sides, facts, rows)
    aliases: dict[str, str] = {}
    for layout in layouts.values():
        aliases.update(layout.aliases)
    ordered = sorted(facts.items(), key=_order)
    proven = [(_tensor(key, known[0]), _proven(key, known, rows.get(key, []))) for key, known in ordered]
    manifest = m.Manifest(
        format=m.FORMAT,
        version=m.VERSION,
        xxh3_128="",
        created_by=VERSION_TEXT,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        job=job,
        attempt=attempt,
        snapshot=snapshot,
        keep=keep,
        world=len(layouts),
        epoch=record,
        block_bytes=BLOCK_BYTES,
        per_rank=sorted(per_rank),
        aliases=aliases,
        objects=_objects(reports, layouts, per_rank),
        files=files,
        sides=sides,
        without=sorted({pattern for layout in layouts.values() for pattern in layout.without}),
        rows=_rows(reports),
    )
    try:
        return m.Contents(manifest, Index.of(proven))
    except ValueError as error:
        raise CkptdError(f"this cannot be written as one checkpoint: {error}", where=f"{job} {snapshot}") from error


def copied(source: m.Contents, reports: Sequence[Report], attempt: str, lossy: Collection[str]) -> m.Contents:
    """Of a checkpoint that was written anew somewhere else: what its reports amount to. Raises CkptdError as ``assemble``."""
    manifest, index = source.manifest, source.index
    files: list[m.DataFile] = []
    sides: list[m.SideFile] = []
    rows: dict[_Key, list[Chunk]] = {}
    facts: dict[_Key, list[Fragment]] = {}
    for at, tensor in enumerate(index.tensors()):
        known = tensor.dtype, tensor.shape
        boxes = [chunk.box for chunk in index.chunks_at(at)]
        facts[tensor.key, tensor.rank] = [Fragment(tensor.key, *known, box, 0, 0, tensor.role) for box in boxes]
    for report in reports:
        _add_files(report, files, sides, facts, rows)
    proven = [(_tensor(key, known[0]), _proven(key, known, rows.get(key, []))) for key, known in facts.items()]
    objects = _refs(reports, manifest.world, manifest.per_rank)
    said = {(ref.name, ref.sum) for ref in manifest.objects}
    if {(ref.name, ref.sum) for ref in objects} != said:
        raise CkptdError("the objects that were written are not those of the source", where=f"{manifest.job} {manifest.snapshot}")
    lossy = sorted({*manifest.lossy, *lossy})
    here = {"attempt": attempt, "objects": objects, "files": files, "sides": sides}
    made = msgspec.structs.replace(manifest, version=m.VERSION, lossy=lossy, rows=None, **here)
    return m.Contents(made, Index.of(proven))


def _rows(reports: Sequence[Report]) -> m.Rows | None:
    """None also where the writers do not agree: then nothing builds on it."""
    told = [report.rows for report in reports if report.rows is not None]
    if not told or any(rows.mixed for rows in told) or len({rows.base for rows in told}) > 1:
        return None
    if told[0].base is None:
        return m.Rows(None, 0)
    chunks = (chunk for report in reports for file in report.files for chunk in file.chunks)
    return m.Rows(told[0].base, max(rows.since for rows in told) + sum(chunk.nbytes for chunk in chunks if chunk.codec == ROWS))


def _order(item: tuple[_Key, list[Fragment]]) -> tuple[str, int]:
    (key, rank), _ = item
    return key, -1 if rank is None else rank


def _tensors(layouts: Mapping[int, Layout], per_rank: Collection[str]) -> dict[_Key, list[Fragment]]:
    """Every tensor that must be there, with the fragments it is known by."""
    found: dict[_Key, list[Fragment]] = {}
    for rank, layout in layouts.items():
        for fragment in layout.fragments:
            own = fragment.sharing == MAYBE and f"t:{fragment.key}" in per_rank
            found.setdefault((fragment.key, rank if own else None), []).append(fragment)
    return found


def _add_files(
    report: Report,
    files: list[m.DataFile],
    sides: list[m.SideFile],
    facts: Mapping[_Key, list[Fragment]],
    rows: dict[_Key, list[Chunk]],
) -> None:
    if report.side is None:
        return
    sides.append(m.SideFile(report.side.path, report.side.size, report.side.sum.hex()))
    for file in report.files:
        _add_chunks(f"{report.node}: {file.path}", file.chunks, len(files), facts, rows)
        header_sum, sums_sum = file.header_sum.hex(), file.sums_sum.hex()
        side = len(sides) - 1
        files.append(
            m.DataFile(
                file.path, file.size, file.data_start, header_sum, file.blocks, side, file.sums_at, sums_sum
            )
        )


def _add_kept(
    reports: Sequence[Report],
    files: list[m.DataFile],
    sides: list[m.SideFile],
    facts: Mapping[_Key, list[Fragment]],
    rows: dict[_Key, list[Chunk]],
) -> None:
    """What lies in older checkpoints, behind all that was written. Several writers may need the same file."""
    of_files: dict[m.DataFile, int] = {}
    of_sides: dict[m.SideFile, int] = {}
    for report in reports:
        for kept in report.kept:
            side = msgspec.structs.replace(kept.side, of=kept.of)
            if side not in of_sides:
                of_sides[side] = len(sides)
                sides.append(side)
            file = msgspec.structs.replace(kept.file, of=kept.of, side=of_sides[side])
            if file not in of_files:
                of_files[file] = len(files)
                files.append(file)
            _add_chunks(f"{report.node}: {file.path} of {kept.of}", kept.chunks, of_files[file], facts, rows)


def _add_chunks(
    where: str, chunks: Sequence[WrittenChunk], index: int, facts: Mapping[_Key, list[Fragment]], rows: dict[_Key, list[Chunk]]
) -> None:
    for chunk in chunks:
        key = chunk.key, chunk.rank
        fragments = facts.get(key)
        if fragments is None or chunk.name != header_name(*key):
            own = "one value" if chunk.rank is None else f"rank {chunk.rank}'s own"
            text = f"{chunk.key} was written as {own}, which this snapshot does not have"
            raise CkptdError(text, where=where)
        if (chunk.dtype, chunk.shape) != (fragments[0].dtype, fragments[0].shape):
            text = f"{chunk.key} was written as {chunk.dtype}{list(chunk.shape)}"
            raise CkptdError(text, where=where, hint="the ranks' layouts disagree")
        row = Chunk(index, chunk.at, chunk.nbytes, chunk.block, chunk.offsets, chunk.sizes, chunk.codec)
        rows.setdefault(key, []).append(row)


def _tensor(key: _Key, known: Fragment) -> Tensor:
    return Tensor(key[0], known.dtype, known.shape, known.role, key[1])


def _proven(key: _Key, fragments: list[Fragment], chunks: list[Chunk]) -> list[Chunk]:
    """Sorted by offsets. Raises CkptdError unless the chunks are exactly what the fragments promise: the coverage proof."""
    first, name = fragments[0], header_name(*key)
    for other in fragments[1:]:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CkptdError(f"ranks disagree about dtype or shape of {key[0]}")
    boxes = [chunk.box for chunk in chunks]
    promised = [Box.whole(first.shape)] if key[1] is None else [fragment.box for fragment in fragments]
    for box in promised:
        gaps = uncovered(box, boxes)
        if gaps:
            text = f"{name}: {gaps[0]} of shape {first.shape} was not written"
            raise CkptdError(text, hint="a writer's report is missing, or no rank holds that slice")
    if not disjoint(boxes):
        raise CkptdError(f"{name}: two files hold the same elements")
    return sorted(chunks, key=lambda chunk: chunk.offsets)


def _objects(
    reports: Sequence[Report], layouts: Mapping[int, Layout], per_rank: Collection[str]
) -> list[m.ObjectRef]:
    """One entry for each distinct value of each name."""
    missing = {rank for rank, layout in layouts.items() if layout.objects_capacity}
    missing -= {rank for report in reports for rank in report.ranks}
    if missing:
        raise CkptdError(f"the objects of ranks {sorted(missing)} were not written")
    return _refs(reports, len(layouts), per_rank)


def _refs(reports: Sequence[Report], world: int, per_rank: Collection[str]) -> list[m.ObjectRef]:
    values: dict[str, dict[bytes, tuple[int, WrittenObject, set[int]]]] = {}
    side = 0
    for report in reports:
        if report.side is None:
            continue
        for row in report.side.objects:
            values.setdefault(row.name, {}).setdefault(row.sum, (side, row, set()))[2].add(row.rank)
        side += 1
    refs: list[m.ObjectRef] = []
    for name, distinct in sorted(values.items()):
        if len(distinct) > 1 and f"o:{name}" not in per_rank:
            raise CkptdError(f"object {name} differs between ranks, although they agreed on it")
        for at, row, ranks in distinct.values():
            everyone = len(ranks) == world
            refs.append(
                m.ObjectRef(name, None if everyone else sorted(ranks), at, row.at, row.nbytes, row.sum.hex())
            )
    return refs
