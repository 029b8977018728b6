"""`ckptd export`: from a checkpoint on storage to the files that others read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from ckptd.core.errors import CkptdError
from ckptd.core.storage_root import local_root
from ckptd.export.contents import Contents
from ckptd.export.selection import Selection
from ckptd.export.source import open_source
from ckptd.export.staging import Staging, check

FORMS = ("torch", "dcp")
LAYOUTS = ("state_dict", "flat", "torchtitan")  # of dcp
Shown = Callable[[int, int], None]  # bytes that are there, bytes in all


@dataclass(frozen=True)
class Request:
    source: str
    dest: str
    to: str
    only: tuple[str, ...] = ()
    prefix_map: tuple[str, ...] = ()
    dtype: str | None = None
    layout: str | None = None


@dataclass
class Report:
    """nbytes: of all tensors as they are to be written; dcp has tied ones twice, as torch has them there. reused: of those, what an
    earlier try had written right."""

    source: str
    dest: str
    to: str
    tensors: int = 0
    nbytes: int = 0
    written: int = 0
    reused: int = 0
    files: int = 0
    notes: list[str] = field(default_factory=list)


def export(request: Request, shown: Shown = lambda done, total: None, *, dry: bool = False) -> Report:
    """dry: nothing is written. Raises CkptdError."""
    if request.to not in FORMS:
        raise CkptdError(f"no form to export to: {request.to}", where="--to", hint=f"one of {', '.join(FORMS)}")
    layout = _layout(request)
    selection = Selection.of(request.only, request.prefix_map, request.dtype)
    dest = Path(local_root(request.dest)).absolute()
    check(dest)
    with open_source(request.source) as checkpoint:
        contents = Contents(checkpoint, selection)
        tensors = [*contents.tensors.values()] if request.to == "dcp" else [*dict.fromkeys(contents.tensors.values())]
        nbytes = sum(stored.nbytes for stored in tensors)
        report = Report(checkpoint.where, str(dest), request.to, len(tensors), nbytes)
        if not contents.tensors and not contents.objects:
            raise CkptdError("nothing to export", where=checkpoint.where, hint="the checkpoint has no tensors and no objects")
        if dry:
            _tree(contents, request.to, layout)
            report.notes = contents.notes
            return report
        _write(contents, request.to, layout, _staging(contents, request, dest, nbytes, shown), report)
    return report


def _layout(request: Request) -> str:
    if request.layout is not None and request.to != "dcp":
        raise CkptdError(f"--to {request.to} has no layouts", where="--layout", hint="it is for --to dcp")
    layout = request.layout or LAYOUTS[0]
    if layout not in LAYOUTS:
        raise CkptdError(f"no layout: {layout}", where="--layout", hint=f"one of {', '.join(LAYOUTS)}")
    return layout


def _tree(contents: Contents, to: str, layout: str) -> None:
    """What would be refused is refused now."""
    from ckptd.export import dcp, torch_file

    _ = torch_file.tree_of(contents) if to == "torch" else dcp.tree_of(contents, layout)


def _staging(contents: Contents, request: Request, dest: Path, nbytes: int, shown: Shown) -> Staging:
    """What decides the bytes is the checkpoint, whatever its path, and how it is to be exported."""
    how = msgspec.json.encode([contents.checkpoint.manifest.xxh3_128, dataclasses.replace(request, source="", dest="")])
    done = 0

    def more(count: int) -> None:
        nonlocal done
        done += count
        shown(done, nbytes)

    return Staging(dest, xxhash.xxh3_128_hexdigest(how), nbytes, more)


def _write(contents: Contents, to: str, layout: str, staging: Staging, report: Report) -> None:
    from ckptd.export import dcp, torch_file

    with staging:
        if to == "torch":
            torch_file.write(contents, staging)
        else:
            dcp.write(contents, staging, layout)
        staging.finish()
    report.written, report.reused, report.notes = staging.written, staging.reused, contents.notes
    report.files = sum(len(names) for _, _, names in os.walk(report.dest)) or 1


__all__ = ["Report", "Request", "export"]
