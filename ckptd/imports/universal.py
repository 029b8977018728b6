"""DeepSpeed's universal checkpoints: a directory per parameter with its whole fp32 weight and each state of its optimizer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.imports import flat, torch_file
from ckptd.imports.deepspeed import ModelStates, by_group, tree
from ckptd.imports.stored import Stored, joined
from ckptd.imports.zero import FP32

STEP = "step"


def load(path: str, foreign: set[str]) -> tuple[dict[str, Any], int]:
    """(state, step). Raises CkptdError."""
    folder = Path(path)
    if (folder / "latest_universal").is_file():
        folder = folder / (folder / "latest_universal").read_text().strip()
    if not (folder / "zero" / "optimizer_state.pt").is_file():
        hint = "name the directory that `zero` lies in; one without optimizer_state.pt was not written to its end"
        raise CkptdError("torn, or no universal checkpoint: no zero/optimizer_state.pt", where=str(folder), hint=hint)
    states = ModelStates(folder, foreign)
    try:
        return _read(folder / "zero", states, foreign), states.step()
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise CkptdError(f"these are no files that DeepSpeed writes: {error!r}", where=str(folder)) from error


def _read(folder: Path, states: ModelStates, foreign: set[str]) -> dict[str, Any]:
    common = torch_file.load(str(folder / "optimizer_state.pt"), foreign)
    inner = common.get("optimizer_state_dict") or {}
    groups = by_group(str(folder), common.get("param_groups") or inner["param_groups"], states.groups)
    states_of: list[dict[str, Any]] = [*(inner.get("state") or {}).values()]
    step = states_of[0].get(STEP) if states_of else None  # of all parameters, in stage 3
    weights: dict[str, Stored] = {}
    of: dict[str, dict[str, Any]] = {}
    for place in sorted(one for one in folder.iterdir() if one.is_dir()):
        found = {file.stem: torch_file.load(str(file), foreign) for file in sorted(place.glob("*.pt"))}
        if place.name in states.shapes and step is not None:
            found.setdefault(STEP, step)
        for name, value in found.items():
            whole = value if name == STEP else _whole(value, states.shapes.get(place.name), str(place / f"{name}.pt"))
            if name == FP32:
                weights[place.name] = whole
            else:
                of.setdefault(place.name, {})[name] = whole
    missing = sorted(states.shapes.keys() - weights.keys())
    if missing:
        raise CkptdError(f"torn: {len(missing)} parameters have no fp32.pt, {missing[0]} among them", where=str(folder))
    return tree(states, weights, {"state": of, "param_groups": groups})


def _whole(value: Any, shape: tuple[int, ...] | None, where: str) -> Stored:
    """A dict with the tensor as ``param``, or of stage 3 the flattened tensor alone."""
    found = value["param"] if isinstance(value, dict) else value
    if not isinstance(found, Stored):
        raise CkptdError("it holds no tensor", where=where)
    if shape is None or found.shape == shape:
        return found
    if found.shape != (math.prod(shape),):
        raise CkptdError(f"shape {found.shape} where the model has {shape}", where=where)
    return joined(found.dtype, shape, list(flat.places(shape, 0, math.prod(shape), found, 0)))
