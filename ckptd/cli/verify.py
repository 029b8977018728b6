"""`ckptd verify PATH`: re-reads every byte of durable checkpoints, without a daemon."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptd.core.errors import CkptdError
from ckptd.core.storage_root import in_bucket, storage_root

if TYPE_CHECKING:
    from ckptd.persist.verify import Progress, VerifyReport


def verify(
    path: Annotated[str, typer.Argument(help="a checkpoint, or a directory, s3:// or az:// root with checkpoints below it")],
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Re-read every byte, check sums and coverage, name what is damaged. Exit status 1 when anything is."""
    from ckptd.cli.show import print_json

    reports = [_verified(where, quiet=as_json) for where in _checkpoints(path)]
    if as_json:
        body = [{"ok": report.ok, **dataclasses.asdict(report)} for report in reports]
        print_json({"ok": all(report.ok for report in reports), "checkpoints": body})
    else:
        for report in reports:
            _print(report)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _checkpoints(path: str) -> list[str]:
    from ckptd.persist.opening import find_checkpoints

    path, hint = storage_root(path), "`ckptd ls STORAGE_ROOT` shows what there is"
    if not in_bucket(path):
        path = str(Path(path))
        if not os.path.isdir(path):
            raise CkptdError("no such directory", where=path, hint=hint)
    found = find_checkpoints(path)
    if not found:
        raise CkptdError("no checkpoint here", where=path, hint=hint)
    return found


def _verified(where: str, *, quiet: bool) -> VerifyReport:
    from ckptd.persist.opening import verify as read_back

    with bar(where, quiet=quiet) as progress:
        return read_back(where, progress)


@contextmanager
def bar(where: str, *, quiet: bool) -> Iterator[Progress]:
    """A bar on stderr while a person waits; gone when done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    hidden = quiet or not sys.stderr.isatty()
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as shown:
        task = shown.add_task(Path(where).name, total=None)
        yield lambda read, total: shown.update(task, completed=read, total=total)


def _print(report: VerifyReport) -> None:
    from ckptd.cli.show import plain
    from ckptd.units import format_bytes

    if report.ok:
        what = f"{report.tensors} tensors, {report.files} files, {format_bytes(report.bytes_read)} read back"
        print(plain(f"ok       {report.path}: {what}" + (f"; its files are below {report.place}/" if report.place else "")))
        return
    print(plain(f"DAMAGED  {report.path}"))
    for problem in report.problems:
        print(plain("    " + problem.replace("\n", "\n    ")))
