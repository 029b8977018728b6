"""`ckptd ls`: what could be restored; of the running daemon, or of a storage root without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptd.cli.flags import Loaded, with_settings
from ckptd.core.errors import CkptdError
from ckptd.core.storage_root import in_bucket, storage_root

if TYPE_CHECKING:
    from ckptd.observe.report import ListReport, SnapshotReport


@with_settings
def ls(
    loaded: Loaded,
    path: Annotated[str | None, typer.Argument(help="a storage root; none: ask this node's daemon")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """List snapshots in memory and on storage, newest first. Exit status 1 when a part could not be read."""
    from ckptd.cli.page import fetch
    from ckptd.cli.show import console, plain, print_json

    report: ListReport = fetch(loaded, "/ls") if path is None else of_storage(path)  # type: ignore[assignment]
    if as_json:
        print_json(report)
    else:
        console().print(_table(report))
        for error in report.get("errors", []):
            print(plain(f"error: {error}"))
    if report.get("errors"):
        raise typer.Exit(1)


def of_storage(root: str) -> ListReport:
    """Every committed checkpoint below a storage root. Raises CkptdError when it is not there."""
    from ckptd.persist.commits import list_stored
    from ckptd.persist.storage.factory import storage_at

    root = storage_root(root)
    if not in_bucket(root) and not Path(root).is_dir():
        raise CkptdError("no such directory", where=root, hint="name a storage root")
    rows, errors = list_stored(storage_at(root), lambda job: True)
    return {"rows": rows, "errors": errors}


def _table(report: ListReport) -> object:
    from ckptd.cli.show import table
    from ckptd.core.protocol.machine.waiting import shown

    rows = [
        [row.get("job", ""), row.get("epoch", ""), row.get("step", ""), _level(row), " + ".join(row.get("where", [])),
         _marks(row), shown(row.get("per_rank", [])), row.get("life", "")]
        for row in report.get("rows", [])
    ]  # fmt: skip
    if not rows:
        return "nothing here" if report.get("errors") else "nothing yet: no snapshot that you may see"
    return table("", ("job", ">epoch", ">step", "level", "where", "", "per rank", "life"), rows)


def _marks(row: SnapshotReport) -> str:
    return ", ".join(
        word for word, on in (
            ("DAMAGED", row.get("damaged")), ("keep", row.get("keep")), ("left behind", row.get("abandoned")),
            ("without optimizer state", row.get("without")),
        ) if on
    )


def _level(row: SnapshotReport) -> str:
    level, wanted = row.get("level"), row.get("wanted", 0)
    words = []
    if level is not None and level >= 0:
        words.append(
            f"protected({level})" + (" degraded" if level < wanted else "") if level or wanted else "sealed"
        )
    elif level is not None and not row.get("durable"):
        words.append("incomplete")
    if row.get("durable"):
        words.append("durable")
    return ", ".join(words)
