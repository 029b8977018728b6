"""`ckptd export SOURCE DEST --to FORM`: a checkpoint as the files that others read, without a daemon; or (--live) a running job."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ckptd.export.export import Report


def export(
    source: Annotated[str, typer.Argument(help="a checkpoint, as `ckptd ls STORAGE_ROOT` names it; with --live a job")],
    dest: Annotated[str, typer.Argument(help="what is to be made; it must not exist (of ckptd: the step there)")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="torch (one .pt), dcp (torch.distributed.checkpoint), hf (from_pretrained), deepspeed, megatron; "
            "ckptd: a copy, DEST is a storage root",
        ),
    ],
    layout: Annotated[
        str | None, typer.Option("--layout", help="of dcp: state_dict (default), flat (optimizer by name), torchtitan")
    ] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="keys that fit this pattern (model.*); may be repeated")] = None,
    prefix_map: Annotated[
        list[str] | None, typer.Option("--prefix-map", help="OLD=NEW: how the model's names begin; may be repeated")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="of the model's floating tensors: bfloat16, ...")] = None,
    hf_config: Annotated[
        str | None,
        typer.Option("--hf-config", help="hf: a folder with config.json, whose class says the names, or adapter_config.json"),
    ] = None,
    titan: Annotated[
        str | None, typer.Option("--titan", help="hf: MODEL/FLAVOR of torchtitan, whose adapter says the names")
    ] = None,
    as_is: Annotated[bool, typer.Option("--as-is", help="hf: the names are the Hub's already")] = False,
    shard_size: Annotated[str | None, typer.Option("--shard-size", help="hf: of a file at most (5GB)")] = None,
    zero: Annotated[int | None, typer.Option("--zero", help="deepspeed: the stage that is to load it (any)")] = None,
    quantize: Annotated[
        list[str] | None,
        typer.Option(
            "--quantize", help="ckptd: PATTERN=BITS, tensors to be written in 8, 4, 3 or 2 bits per value, LOSSY; may be repeated"
        ),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="SOURCE is a running job: from its memory, beside its training")] = False,
    step: Annotated[int | None, typer.Option("--step", help="live: this one, not the newest")] = None,
    socket: Annotated[str | None, typer.Option("--socket", help="live: of the daemon that is asked (CKPTD_SOCKET)")] = None,
    part: Annotated[
        str | None,
        typer.Option("--part", help="write one of N parts, others beside it the rest; then once without it", metavar="K/N"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be written, and write nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Write a checkpoint as files that others read. What was killed goes on where it stopped."""
    from ckptd.cli.interrupt import interruptible
    from ckptd.cli.show import print_json
    from ckptd.cli.verify import bar
    from ckptd.export.export import OWN, Request
    from ckptd.export.export import export as written

    request = Request(
        source, dest, to, tuple(only or ()), tuple(prefix_map or ()), dtype, layout, hf_config, titan, as_is, shard_size, zero,
        live, step, socket, part, tuple(quantize or ()),
    )  # fmt: skip
    interrupts = interruptible() if to == OWN else nullcontext(None)
    with interrupts as cancelled, bar(Path(source).name, quiet=as_json) as progress:
        report = written(request, progress, dry=dry_run, cancelled=cancelled)
    if as_json:
        print_json({"ok": True, "dry_run": dry_run, **dataclasses.asdict(report)})
    else:
        _print(report, dry=dry_run)


def _print(report: Report, *, dry: bool) -> None:
    from ckptd.cli.show import plain
    from ckptd.units import format_bytes

    for note in report.notes:
        print(plain(f"note: {note}"), file=sys.stderr)
    less = f", which take some {format_bytes(report.stored)} there" if report.stored is not None else ""
    what = f"{report.tensors} tensors, {format_bytes(report.nbytes)}{less}"
    if dry:
        print(plain(f"would write {report.dest}: {what}"))
        return
    if report.part is not None:
        done = f"wrote part {report.part} of {report.dest}: {format_bytes(report.written)}"
        print(plain(f"{done}; when all are there, once without --part"))
        return
    again = f", of which {format_bytes(report.reused)} were there already" if report.reused else ""
    files = f", {report.files} files" if report.files else ""
    print(plain(f"wrote {report.dest}: {what}{files}{again}"))
