"""`ckptd gc`: what a storage root has that nobody needs; deletes what no daemon has to be asked about."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ckptd.cli.flags import Loaded, with_settings
from ckptd.core.errors import CkptdError

if TYPE_CHECKING:
    from ckptd.persist.leftovers import Leftover
    from ckptd.persist.storage.base import Storage


@with_settings
def gc(
    loaded: Loaded,
    path: Annotated[str | None, typer.Argument(help="a storage root; none: the configured one")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what is there")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Delete what is left of attempts that nobody wrote to for an hour, and of checkpoints whose deletion was cut short.

    --dry-run also names the checkpoints that retention may delete by the settings in force here (--keep-last and so on). Those are
    the daemons' to delete: only they know who still needs them. Exit status 1 when a job could not be read.
    """
    from ckptd.cli.show import console, plain, print_json, size, table

    root = path or loaded.config.storage_root or ""
    if not root:
        raise CkptdError("no storage root", hint="name one: ckptd gc STORAGE_ROOT")
    found, errors = _gone_through(loaded, root, dry_run)
    deleted = [one.path for one in found if one.goes and not dry_run]
    if as_json:
        rows = [{**dataclasses.asdict(one), "goes": one.goes} for one in found]
        print_json({"dry_run": dry_run, "left": rows, "deleted": deleted, "errors": errors})
    else:
        shown = [one for one in found if dry_run or one.goes]
        rows_ = [[one.job, one.kind, size(one.nbytes), one.path] for one in shown]
        console().print(table("", ("job", "what", ">size", "where"), rows_) if shown else "nothing is left over", markup=False)
        if not dry_run:
            print(f"{len(deleted)} deleted")
        for error in errors:
            print(plain(f"error: {error}"))
    if errors:
        raise typer.Exit(1)


def _gone_through(loaded: Loaded, root: str, dry_run: bool) -> tuple[list[Leftover], list[str]]:
    from ckptd.persist.commits import list_jobs
    from ckptd.persist.leftovers import leftovers
    from ckptd.persist.opening import root_at
    from ckptd.persist.retention import ATTEMPT_STALE_S, sweep

    found: list[Leftover] = []
    errors: list[str] = []
    storage, policy = root_at(root), loaded.config.policy()
    for job in list_jobs(storage):
        try:
            now_s = _now(storage, job, dry_run)
            found += leftovers(storage, job, policy, now_s, ATTEMPT_STALE_S)
            if not dry_run:
                sweep(storage, job, now_s - ATTEMPT_STALE_S)
        except (CkptdError, OSError) as error:
            errors.append(f"{job}: {error}")
    return found, errors


def _now(storage: Storage, job: str, dry_run: bool) -> float:
    """Whoever only looks may have no right to ask the storage for its clock."""
    try:
        return storage.clock_s(job)
    except CkptdError:
        if not dry_run:
            raise
        return time.time()
