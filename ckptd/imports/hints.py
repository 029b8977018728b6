"""What a user may want to know of what went into the meta: the step that it says, a scheduler that nothing restores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptd.imports.naming import SCHEDULER

if TYPE_CHECKING:
    from ckptd.imports.optimizers import Named

STEPS = ("step", "global_step", "global_steps", "iteration")


def hints(made: Named, *, first: bool) -> Iterator[str]:
    """first: neither the file nor the user has said the step."""
    said = {name: step for name in (*STEPS, "epoch") if type(step := made.meta.get(name)) is int and step > 0}
    if first and said:
        name, step = next(iter(said.items()))
        begins = f"--step {step} begins there" if name in STEPS else "--step begins at another step"
        yield f"step 0; the file says {name}={step}: {begins}"
    for name in made.meta:
        if SCHEDULER in name.lower():
            owner = name.rpartition(".")[2]
            yield (
                f"{name} is in the meta only; --prefix-map {name}={owner} is for register({owner}=...),"
                f" --prefix-map {name}=extra.{owner} for register(extra={{\"{owner}\": ...}})"
            )
