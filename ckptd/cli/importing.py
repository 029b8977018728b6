"""`ckptd import`: a checkpoint of another program becomes the first epoch of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptd.cli.flags import Loaded, with_settings
from ckptd.core.errors import CkptdError

if TYPE_CHECKING:
    from ckptd.choices import Patterns, Share
    from ckptd.config import Config
    from ckptd.imports.optimizers import Named
    from ckptd.imports.sources import Found

KINDS = "torch, hf, dcp, universal, zero, torch_dist"


@with_settings
def import_(
    loaded: Loaded,
    source: Annotated[Path, typer.Argument(help="a file or directory that the other program wrote")],
    kind: Annotated[str, typer.Option("--from", help=f"what wrote it: {KINDS}", metavar="KIND")],
    job: Annotated[str, typer.Option(help="NAME, or UID/NAME for another user; it must not have been started yet")],
    step: Annotated[int | None, typer.Option(help="the training step that it is of; none: as it says, else 0", min=0)] = None,
    prefix_map: Annotated[
        list[str] | None, typer.Option(help="OLD=NEW: keys that begin with OLD, up to a dot, begin with NEW; may be repeated")
    ] = None,
    param_names: Annotated[
        str | None,
        typer.Option(help="where an optimizer only numbers its parameters: a file of their names in its order, or `model`"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="convert floating point tensors, optimizer state excepted: float32, bf16 and their like")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="only tensors whose keys fit this shell pattern; may be repeated")
    ] = None,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="of dcp: under its own names, for CkptdStorageReader; of torch_dist it always is so")
    ] = False,
    part: Annotated[
        str | None,
        typer.Option("--part", help="write one of N parts, others beside it the rest; then once without it", metavar="K/N"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be written")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Write a checkpoint of another program below --storage-root, from where client.restore() of that job takes it.

    Its tensors are read range by range, its pickles by an unpickler that imports nothing: classes that are not known become inert,
    and are named. After a kill the same command goes on.
    """
    from ckptd.choices import Patterns, Share
    from ckptd.cli.show import print_json
    from ckptd.imports.hints import hints
    from ckptd.imports.sources import Kind, load
    from ckptd.imports.write import own_job

    if kind not in {one.value for one in Kind}:
        raise CkptdError(f"--from {kind} is not known", hint=f"one of {KINDS}")
    share = Share.parse(part) if part is not None else None
    if loaded.config.storage_root is None:
        raise CkptdError("no storage root", hint="--storage-root DIR, the one that the daemons have")
    found = load(str(source), Kind(kind), as_is=as_is)
    made = _named(found, prefix_map, param_names, dtype)
    _choose(made, Patterns(only or ()), dtype, found.foreign)
    made.notes += hints(made, first=found.step == 0 and step is None)
    full_job, step = own_job(job), found.step if step is None else step
    report: dict[str, Any] = {"path": "", "part": part, "written": 0, "reused": 0}
    if not dry_run:
        report |= _write(loaded.config, full_job, step, made, share, quiet=as_json)
    report |= {
        "job": full_job, "step": step, "bytes": sum(stored.nbytes for stored, _ in made.tensors.values()),
        "tensors": {key: [stored.dtype, list(stored.shape)] for key, (stored, _) in made.tensors.items()},
        "objects": sorted(made.objects), "aliases": made.aliases, "meta": sorted(made.meta), "foreign": sorted(found.foreign),
        "notes": made.notes,
    }  # fmt: skip
    print_json(report) if as_json else _print(report, dry_run=dry_run)


def _named(found: Found, prefix_map: list[str] | None, param_names: str | None, dtype: str | None) -> Named:
    """Raises CkptdError."""
    from ckptd.choices import PrefixMap
    from ckptd.imports.naming import as_planned, named
    from ckptd.imports.param_order import ParamOrder

    if found.plans is None:
        return named(found.tree, PrefixMap.parse(prefix_map or ()), ParamOrder.parse(param_names), as_is=found.as_is)
    for option, given in {"--prefix-map": prefix_map, "--param-names": param_names, "--dtype": dtype}.items():
        if given:
            raise CkptdError("all of it stays as it is here", where=option, hint="whoever loads it asks for just that")
    return as_planned(found.plans)


def _choose(made: Named, wanted: Patterns, dtype: str | None, foreign: set[str]) -> None:
    """Raises CkptdError: a tensor that cannot be written, or none at all."""
    from ckptd.choices import dtype_named

    had = [*made.tensors]
    made.tensors = {key: found for key, found in made.tensors.items() if wanted(key)}
    made.aliases = {alias: key for alias, key in made.aliases.items() if key in made.tensors}
    if not made.tensors:
        raise CkptdError("no tensor to import", hint=_no_tensor(had, foreign))
    wanted.check()
    if dtype is not None:
        dtype = dtype_named(dtype, "import")
        made.tensors = {
            key: (stored if role == "optim" else stored.as_dtype(dtype), role) for key, (stored, role) in made.tensors.items()
        }
    for key, (stored, _) in made.tensors.items():
        stored.check(key)


def _no_tensor(had: list[str], foreign: set[str]) -> str:
    if had:
        return f"--only is of a whole key, as in {', '.join(sorted(had)[:3])}"
    if foreign:
        return f"what it has is of classes that are not known, and inert: {', '.join(sorted(foreign)[:3])}; save state_dict()s"
    return "the file has none; save state_dict()s"


def _write(config: Config, job: str, step: int, made: Named, share: Share | None, *, quiet: bool) -> dict[str, Any]:
    from ckptd.cli.interrupt import interruptible
    from ckptd.cli.verify import bar
    from ckptd.imports.write import write
    from ckptd.persist.names import step_dir
    from ckptd.persist.storage.factory import storage_at

    with interruptible() as cancelled, bar("import", quiet=quiet) as progress:
        storage = storage_at(str(config.storage_root), create=True)
        done = write(storage, job, step, made, progress, cancelled, share, compress=config.compress)
    path = storage.locate(step_dir(job, done.snapshot)) if share is None else ""
    return {"path": path, "written": done.written, "reused": done.reused}


def _print(report: dict[str, Any], *, dry_run: bool) -> None:
    from ckptd.cli.show import console, plain, size, table

    if dry_run:
        rows = [[key, dtype, shape] for key, (dtype, shape) in report["tensors"].items()]
        console().print(table("", ("key", "dtype", "shape"), rows))
    verb = "would be written" if dry_run else "written"
    what = f"{len(report['tensors'])} tensors, {size(report['bytes'])}, and {len(report['objects'])} objects"
    if report["part"] is not None and not dry_run:
        what = f"part {report['part']}, {size(report['written'] + report['reused'])},"
        verb = "written; when all are there, once without --part"
    there = f" ({size(report['reused'])} were there, and are right)" if report["reused"] else ""
    to = f" to {report['path']}" if report["path"] else ""
    print(plain(f"job {report['job']}, step {report['step']}: {what} {verb}{to}{there}"))
    if report["meta"]:
        print(plain(f"in client.last_restore['meta']: {', '.join(report['meta'])}"))
    if report["foreign"]:
        print(plain(f"not known, and inert: {', '.join(report['foreign'])}"))
    for note in report["notes"]:
        print(plain(f"note: {note}"))
