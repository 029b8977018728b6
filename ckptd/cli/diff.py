"""`ckptd diff A B`: what two checkpoints have that the other has not, and how far they are apart."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ckptd.persist.diff import Difference
    from ckptd.persist.reader import Checkpoint


def diff(
    a: Annotated[str, typer.Argument(help="a checkpoint's directory", metavar="A")],
    b: Annotated[str, typer.Argument(help="another one's", metavar="B")],
    only: Annotated[list[str] | None, typer.Option(help="names that fit this shell pattern; may be repeated")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, every element bit by bit, and objects. Exit status 1 when they differ."""
    from ckptd.choices import Patterns
    from ckptd.cli.show import print_json
    from ckptd.cli.verify import bar
    from ckptd.persist.diff import differences
    from ckptd.persist.opening import open_at

    with open_at(a) as first, open_at(b) as second, bar("diff", quiet=as_json) as progress:
        total, done = sum(int(found.index.nbytes.sum()) for found in (first, second)), 0

        def tick(nbytes: int) -> None:
            nonlocal done
            progress(done := done + nbytes, total)

        wanted = Patterns(only or ())
        found = list(differences(first, second, wanted, tick))
        wanted.check()
        heads = [_head(checkpoint) for checkpoint in (first, second)]
    if as_json:
        rows = [_row(one) for one in found]
        print_json({"same": not found, "a": heads[0], "b": heads[1], "bytes_compared": done, "differences": rows})
    else:
        _print(found, heads)
    if found:
        raise typer.Exit(1)


def _head(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "path": checkpoint.storage.locate(checkpoint.directory), "job": manifest.job, "epoch": manifest.snapshot.epoch,
        "step": manifest.snapshot.step, "world": manifest.world,
    }  # fmt: skip


def _row(one: Difference) -> dict[str, Any]:
    """JSON has no infinity."""
    row = dataclasses.asdict(one)
    if row["max_difference"] == math.inf:
        row["max_difference"] = "inf"
    return row


def _print(found: list[Difference], heads: list[dict[str, Any]]) -> None:
    from ckptd.cli.show import console, plain, table

    for letter, head in zip("AB", heads, strict=True):
        print(plain(f"{letter}: {head['job']} epoch {head['epoch']} step {head['step']}, world {head['world']}  {head['path']}"))
    if not found:
        print("the same")
        return
    rows = [
        [one.name, "" if one.rank is None else one.rank, one.what, one.a, one.b,
         "" if one.max_difference is None else f"{one.max_difference:.6g}", one.first, one.elements or ""]
        for one in found
    ]  # fmt: skip
    columns = ("name", ">rank", "differs", "A", "B", ">max difference", "first at", ">elements")
    console().print(table("", columns, rows))
