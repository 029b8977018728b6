"""`ckptd export`: from a checkpoint on storage, or a running job, to the files that others read."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash
from ckptd_client.integrations.dcp_names import PLANNER_DATA

from ckptd.choices import Share
from ckptd.core.errors import CkptdError
from ckptd.core.storage_root import in_bucket, local_root, storage_root
from ckptd.export.contents import Contents
from ckptd.export.durable import Durable
from ckptd.export.selection import Selection
from ckptd.export.source import Source
from ckptd.export.staging import Staging, check
from ckptd.persist.opening import open_at
from ckptd.persist.storage.factory import storage_at
from ckptd.units import parse_bytes

FORMS = ("torch", "dcp", "hf", "deepspeed", "megatron", "ckptd")
OWN = "ckptd"  # a copy below another storage root
BY_PLANS = ("dcp", "megatron")  # the forms of what was saved through torch.distributed.checkpoint
LAYOUTS = ("state_dict", "flat", "torchtitan")  # of dcp
OF_LIVE = ("step", "socket")  # options
OF_A_FORM = {"layout": "dcp", "hf_config": "hf", "titan": "hf", "as_is": "hf", "shard_size": "hf", "zero": "deepspeed"}  # options
OF_A_FORM |= {"quantize": OWN}
NOT_OF_OWN = ("only", "prefix_map", "dtype", "live")  # a copy is of all of it, under its names
Shown = Callable[[int, int], None]  # bytes that are there, bytes in all


@dataclass(frozen=True)
class Request:
    """As the command line has it. live: the source is the name of a job, of which ``step`` or the newest is read."""

    source: str
    dest: str
    to: str
    only: tuple[str, ...] = ()
    prefix_map: tuple[str, ...] = ()
    dtype: str | None = None
    layout: str | None = None
    hf_config: str | None = None
    titan: str | None = None
    as_is: bool = False
    shard_size: str | None = None
    zero: int | None = None
    live: bool = False
    step: int | None = None
    socket: str | None = None
    part: str | None = None
    quantize: tuple[str, ...] = ()


@dataclass
class Report:
    """nbytes: of all tensors as they are to be written. reused: of those, what an earlier try had written right. part: of several
    processes' this one's; the destination is not there yet. stored: about what they take there, where that is less."""

    source: str
    dest: str
    to: str
    tensors: int = 0
    nbytes: int = 0
    written: int = 0
    reused: int = 0
    files: int = 0
    part: str | None = None
    stored: int | None = None
    notes: list[str] = field(default_factory=list)


class Form(Protocol):
    """What is to be written, before anything is read. Whoever makes it raises CkptdError for what cannot be."""

    tensors: int
    nbytes: int

    def write(self, staging: Staging) -> None: ...


def export(
    request: Request, shown: Shown = lambda done, total: None, *, dry: bool = False, cancelled: threading.Event | None = None
) -> Report:
    """dry: nothing is written. cancelled: calls off a copy. Raises CkptdError."""
    _check(request)
    share = Share.parse(request.part) if request.part is not None else None
    if request.to == OWN:
        return _copy(request, share, shown, cancelled or threading.Event(), dry=dry)
    selection = Selection.of(request.only, request.prefix_map, request.dtype)
    dest = Path(local_root(request.dest)).absolute()
    check(dest)
    with _opened(request) as source:
        _check_saved(source, request)
        contents = Contents(source, selection)
        form = _form(contents, request)
        report = Report(source.where, str(dest), request.to, form.tensors, form.nbytes, part=request.part, notes=contents.notes)
        if not dry:
            progress = _counted(form.nbytes // (share.of if share is not None else 1), shown)
            goes_on = source.identity is not None
            _write(form, Staging(dest, _plan(source, request), form.nbytes, progress, goes_on=goes_on, share=share), report)
    return report


def _copy(request: Request, share: Share | None, shown: Shown, cancelled: threading.Event, *, dry: bool) -> Report:
    from ckptd.export.copy import Copy
    from ckptd.persist.quantized import Quantizer

    with open_at(request.source) as checkpoint:
        copy = Copy(checkpoint, Quantizer.parse(request.quantize))
        source = Durable(checkpoint)
        report = Report(source.where, request.dest, OWN, copy.tensors, copy.nbytes, part=request.part, notes=source.notes)
        report.stored = copy.stored if request.quantize else None
        root, dest = checkpoint.storage.locate(""), storage_root(request.dest)
        dest = dest if in_bucket(dest) else os.path.abspath(dest)
        if dest.startswith(f"{root}/"):
            hint = "retention there would know nothing of it: name a directory beside it"
            raise CkptdError(f"it is inside of the source's storage root, {root}", where=dest, hint=hint)
        if not dry:
            done = copy.write(storage_at(dest, create=True), share, shown, cancelled)
            report.dest, report.written, report.reused = done.path, done.written, done.reused
            report.notes += done.notes
    return report


@contextmanager
def _opened(request: Request) -> Iterator[Source]:
    if request.live:
        from ckptd.export.live import Live

        with Live(request.source, request.step, request.socket) as live:
            yield live
    else:
        with open_at(request.source) as checkpoint:
            yield Durable(checkpoint)


def _check_saved(source: Source, request: Request) -> None:
    """Raises CkptdError: it went through torch.distributed.checkpoint, whose plans alone know what is what, and whose objects are
    bytes that ckptd does not look into."""
    if PLANNER_DATA not in source.objects:
        return
    if request.to not in BY_PLANS:
        hint = "--to dcp, and torch's dcp_to_torch_save() of that"
        raise CkptdError("it was saved through torch.distributed.checkpoint", where=f"--to {request.to}", hint=hint)
    for option, given in {"--layout": request.layout, "--dtype": request.dtype, "--prefix-map": request.prefix_map}.items():
        if given:
            hint = "leave it out: names and layout are those of the plans, and nothing says which tensors are a model's"
            raise CkptdError("it was saved through torch.distributed.checkpoint", where=option, hint=hint)


def _check(request: Request) -> None:
    if request.to not in FORMS:
        raise CkptdError(f"no form to export to: {request.to}", where="--to", hint=f"one of {', '.join(FORMS)}")
    for option, form in OF_A_FORM.items():
        if getattr(request, option) and form != request.to:
            name = option.replace("_", "-")
            raise CkptdError(f"--to {request.to} has no --{name}", where=f"--{name}", hint=f"it is for --to {form}")
    for option in NOT_OF_OWN if request.to == OWN else ():
        if getattr(request, option):
            raise CkptdError(f"--to {OWN} has no --{option.replace('_', '-')}", hint="it copies a checkpoint as it is")
    for option in OF_LIVE:
        if getattr(request, option) is not None and not request.live:
            raise CkptdError(f"a checkpoint has no --{option}", where=f"--{option}", hint="it is for --live JOB")
    if request.live and request.part is not None:
        raise CkptdError("several processes would read several steps", where="--part", hint="it is for a checkpoint")
    if (request.layout or LAYOUTS[0]) not in LAYOUTS:
        raise CkptdError(f"no layout: {request.layout}", where="--layout", hint=f"one of {', '.join(LAYOUTS)}")


def _form(contents: Contents, request: Request) -> Form:
    """What torch's parts take to import, only their own form takes."""
    if request.to == "torch":
        from ckptd.export.torch_file import TorchFile

        return TorchFile(contents)
    if request.to == "dcp":
        from ckptd.export.dcp import DcpFolder

        return DcpFolder(contents, request.layout or LAYOUTS[0])
    if request.to == "megatron":
        from ckptd.export.dcp import MegatronFolder

        return MegatronFolder(contents)
    if request.to == "deepspeed":
        from ckptd.export.deepspeed import UniversalTree

        return UniversalTree(contents, request.zero)
    from ckptd.export.hub import Folder, names_of
    from ckptd.persist.whole_file import FILE_BYTES

    config_dir = Path(local_root(request.hf_config)).absolute() if request.hf_config is not None else None
    try:
        shard_bytes = parse_bytes(request.shard_size) if request.shard_size is not None else FILE_BYTES
    except ValueError as error:
        raise CkptdError(str(error), where="--shard-size") from error
    return Folder(contents, names_of(request.titan, request.as_is, config_dir), config_dir, shard_bytes)


def _plan(source: Source, request: Request) -> str:
    """What decides the bytes is the checkpoint, whatever its path, and how it is to be exported."""
    how = [source.identity or secrets.token_hex(16), dataclasses.replace(request, source="", dest="", part=None)]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(how))


def _counted(nbytes: int, shown: Shown) -> Callable[[int], None]:
    done = 0

    def more(count: int) -> None:
        nonlocal done
        done += count
        shown(done, nbytes)

    return more


def _write(form: Form, staging: Staging, report: Report) -> None:
    with staging:
        form.write(staging)
        staging.finish()
    report.written, report.reused = staging.written, staging.reused
    if report.part is None:
        report.files = sum(len(names) for _, _, names in os.walk(report.dest)) or 1
