"""What `ckptd preflight` and `ckptd plan` ask of a job's state, in the same words."""

from __future__ import annotations

from typing import Annotated

import typer

StateBytes = Annotated[
    str | None, typer.Option(help="one snapshot of the whole job, each tensor once: 12GiB", metavar="SIZE")
]
FrozenBytes = Annotated[
    str | None,
    typer.Option(help="what of it is frozen (requires_grad=False), as an adapter's base model", metavar="SIZE"),
]
Ddp = Annotated[bool, typer.Option("--ddp/--sharded", help="every rank holds all of it, or its shard")]
