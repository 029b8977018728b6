"""DeepSpeed's own checkpoints with ZeRO: fp32 weights and optimizer state as flat partitions of each data parallel rank."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.imports import flat, torch_file
from ckptd.imports.deepspeed import CONVERT, ModelStates, by_group, partitioned, tree
from ckptd.imports.stored import Place, Stored, joined

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
_Flats = dict[str, list[list[Stored]]]  # name of the state -> by rank, the flat buffers; fp32 among them
FP32 = "fp32"


def load(path: str, foreign: set[str]) -> tuple[dict[str, Any], int]:
    """(state, step). Raises CkptdError."""
    folder = Path(path)
    if (folder / "latest").is_file():
        folder = folder / (folder / "latest").read_text().strip()
    if not folder.is_dir():
        raise CkptdError("no such directory", where=str(folder), hint="name the directory of one tag, as global_step100")
    states = ModelStates(folder, foreign)
    try:
        ranks = _ranks(folder, foreign)
        stage3 = "fp32_flat_groups" in ranks[0]
        if not stage3 and "single_partition_of_fp32_groups" not in ranks[0]:
            raise CkptdError("a stage of ZeRO, or an optimizer, that is not known", where=str(folder), hint=CONVERT)
        found = _stage_3(states, ranks) if stage3 else _stage_2(states, ranks)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise CkptdError(f"these are no files that DeepSpeed writes: {error!r}", where=str(folder), hint=CONVERT) from error
    return found, states.step()


def _ranks(folder: Path, foreign: set[str]) -> list[dict[str, Any]]:
    """The optimizer's state of each. Raises CkptdError: torn."""
    found = {int(match[1]): file for file in folder.iterdir() if (match := _OPTIM.fullmatch(file.name))}
    if not found:
        raise CkptdError("no *optim_states.pt here", where=str(folder), hint="only what ZeRO wrote is read")
    ranks = {number: torch_file.load(str(file), foreign)["optimizer_state_dict"] for number, file in found.items()}
    told = next(iter(ranks.values()))["partition_count"]
    count = max(told) if isinstance(told, list) else told
    missing = sorted(set(range(count)) - ranks.keys())
    if missing:
        raise CkptdError(f"torn: the files of ranks {missing} of {count} are not there", where=str(folder))
    return [ranks[number] for number in range(count)]


def _stage_2(states: ModelStates, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Each rank's flat partition of each group, in which ranges are told by name."""
    base = ranks[0]["base_optimizer_state"]
    groups = by_group(states.where, base["param_groups"], states.groups)
    weights: dict[str, Stored] = {}
    of: dict[str, dict[str, Any]] = {}
    for number, shapes in enumerate(states.groups):
        buffers = [
            {FP32: rank["single_partition_of_fp32_groups"][number], **rank["base_optimizer_state"]["state"].get(number, {})}
            for rank in ranks
        ]
        names = [name for name, value in buffers[0].items() if isinstance(value, Stored) and len(value.shape) == 1]
        scalars = {name: value for name, value in buffers[0].items() if name not in names}
        for key, shape in shapes.items():
            cuts = [rank["param_slice_mappings"][number].get(key) for rank in ranks]
            made = {name: _joined(shape, cuts, [one.get(name) for one in buffers]) for name in names}
            weights[key] = made.pop(FP32)
            if made or scalars:
                of[key] = {**scalars, **made}
    return tree(states, weights, {"state": of, "param_groups": groups})


def _joined(shape: tuple[int, ...], cuts: list[Any], buffers: list[Any]) -> Stored:
    """cuts: by rank, where its part lies in its buffer; the parts follow each other in the flattened tensor."""
    found: list[Place] = []
    start = 0
    for cut, buffer in zip(cuts, buffers, strict=True):
        if cut is not None:
            found += flat.places(shape, start, cut.field("numel"), buffer, cut.field("start"))
            start += cut.field("numel")
    return joined(buffers[0].dtype, shape, found)


def _stage_3(states: ModelStates, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Each parameter in equal ranges over all ranks; one after the other in the ranks' flat buffers, one for each sub-group."""
    base = ranks[0]["optimizer_state_dict"]
    groups = by_group(states.where, base["param_groups"], states.groups)
    weights: dict[str, Stored] = {}
    of: dict[str, dict[str, Any]] = {}
    number = at = 0
    for key, shape in states.shapes.items():
        each = -(-math.prod(shape) // len(ranks))
        if at + each > ranks[0]["fp32_flat_groups"][number].shape[0]:  # the sub-group is over
            number, at = number + 1, 0
        weights[key] = partitioned(shape, [(rank["fp32_flat_groups"][number], at) for rank in ranks])
        states_of = [rank["optimizer_state_dict"]["state"] for rank in ranks]
        if len(states_of[0]) not in (0, len(ranks[0]["fp32_flat_groups"])):
            text = f"state of {len(states_of[0])} sub-groups, of {len(ranks[0]['fp32_flat_groups'])} that there are"
            raise CkptdError(text, where=states.where, hint="train with one sub-group (sub_group_size), or save it in stage 1")
        for name, value in states_of[0].get(number, {}).items():
            is_flat = isinstance(value, Stored) and len(value.shape) == 1
            parts = [(one[number][name], at) for one in states_of] if is_flat else []
            of.setdefault(key, {})[name] = partitioned(shape, parts) if is_flat else value
        at += each
    return tree(states, weights, {"state": of, "param_groups": groups})
