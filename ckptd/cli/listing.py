"""`ckptd ls`: what could be restored; of the running daemon, or of a storage root without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckptd.cli.flags import Loaded, with_settings
from ckptd.core.errors import CkptdError

if TYPE_CHECKING:
    from ckptd.observe.report import ListReport, SnapshotReport


@with_settings
def ls(
    loaded: Loaded,
    path: Annotated[
        str | None, typer.Argument(help="a storage root; none: ask this node's daemon; with --tensors a checkpoint")
    ] = None,
    tensors: Annotated[
        str | None, typer.Option(help="the tensors of one checkpoint whose keys fit this shell pattern", metavar="PATTERN")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """List snapshots in memory and on storage, newest first. Exit status 1 when a part could not be read."""
    from ckptd.cli.page import fetch
    from ckptd.cli.show import console, plain, print_json

    if tensors is not None:
        _tensors(path, tensors, as_json)
        return
    report: ListReport = fetch(loaded, "/ls") if path is None else of_storage(path)  # type: ignore[assignment]
    if as_json:
        print_json(report)
    else:
        console().print(_table(report))
        for error in report.get("errors", []):
            print(plain(f"error: {error}"))
    if report.get("errors"):
        raise typer.Exit(1)


def _tensors(path: str | None, pattern: str, as_json: bool) -> None:
    from ckptd.choices import Patterns
    from ckptd.cli.show import console, print_json
    from ckptd.cli.tensors import rows_of, table_of

    if path is None:
        raise CkptdError("--tensors needs a checkpoint's directory", hint="ckptd ls --tensors '*' ROOT/UID/NAME/epoch-.../step-...")
    rows = rows_of(path, Patterns([pattern]))
    if as_json:
        print_json({"tensors": rows})
    else:
        console().print(table_of(rows) if rows else f"no tensor's key fits {pattern!r}", markup=False)


def of_storage(root: str) -> ListReport:
    """Every committed checkpoint below a storage root. Raises CkptdError when it is not there."""
    from ckptd.persist.commits import list_stored
    from ckptd.persist.opening import root_at

    rows, errors = list_stored(root_at(root), lambda job: True)
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
            ("LOSSY", row.get("lossy")),
            ("without optimizer state", row.get("without")), (f"files in {_several(row.get('of', []))}", row.get("of")),
            ("consolidated", row.get("whole")),
            (f"needed by {row.get('needed_by')} newer", row.get("needed_by")),
        ) if on
    )


def _several(of: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(of[:-1]), *of[-1:])))


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
