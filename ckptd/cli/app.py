"""All commands in one place; each lives in a file of its name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptd.cli.check import preflight
from ckptd.cli.diff import diff
from ckptd.cli.drain import drain
from ckptd.cli.export import export
from ckptd.cli.forget import forget
from ckptd.cli.gc import gc
from ckptd.cli.importing import import_
from ckptd.cli.listing import ls
from ckptd.cli.node import run
from ckptd.cli.plan import plan
from ckptd.cli.settings import config
from ckptd.cli.status import status
from ckptd.cli.verify import verify

app = typer.Typer(
    name="ckptd",
    help="Asynchronous in-memory checkpointing for distributed PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, config, preflight, plan, status, ls, drain, forget, verify, diff, gc, export):
    app.command()(command)
app.command("import")(import_)


@app.command()
def keygen(path: Annotated[Path, typer.Argument(help="new file, mode 0600; never overwritten")]) -> None:
    """Make the cluster key: one file, the same on every node."""
    from ckptd.wire.keys import ClusterKey

    key = ClusterKey.generate()
    key.save(path)
    print(f"wrote {path} (fingerprint {key.fingerprint})")
    print("copy it to every node, mode 0600; whoever can read it is a member of the cluster")


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option("--dir", help="where the report, the picture and the logs go")
    ] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="fewer steps between the failures")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="the report to stdout, the story to stderr")
    ] = False,
) -> None:
    """Four nodes on this machine, five failures; every claim is checked, exit status 1 when one fails."""
    try:
        from ckptd.demo.main import run as run_demo
    except ModuleNotFoundError as error:
        from ckptd.core.errors import CkptdError

        raise CkptdError(f"the demo needs {error.name}", hint="pip install 'ckptd[demo]'") from error
    raise typer.Exit(run_demo(folder, quick=quick, json=as_json))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as version_of

    print(version_of("ckptd"))


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def ckptd(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Asynchronous in-memory checkpointing for distributed PyTorch training."""
