"""What engines with flat parameters have in common: ranges of tensors and of their optimizer states as boxes, state that is made to
be filled, the settings of an optimizer's groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd_client.boxes import Box

PARAMS, STEP = "params", "step"
State = Mapping[str, Any]
States = dict[Tensor, dict[str, Any]]  # by parameter


def ranges(key: str, shape: Sequence[int], start: int, piece: Tensor, state: State, within: slice | None = None) -> Iterator[Box]:
    """Of a parameter its elements from ``start`` on, and the same of each of its states; ``within``: where they lie in these.
    Raises CkptdError for a state that is neither like the parameter nor one number."""
    if not piece.numel():
        return
    whole, flat = (0,) * len(shape), (start, start + piece.numel())
    yield Box(key, piece.detach(), shape, whole, shape, flat)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if value.ndim == 0:
            yield Box("", value, (), (), of=(key, name))
            continue
        part = value.flatten() if within is None else value[within]
        if part.shape != piece.shape:
            raise CkptdError(f"optimizer state {name!r} of shape {list(value.shape)} is not supported", where=key)
        yield Box("", part, shape, whole, shape, flat, of=(key, name))


def buffers(module: torch.nn.Module, called: Callable[[str], str] = str) -> Iterator[Box]:
    """All that a state dict has of them. ``called``: by their names in the module."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                key = called(f"{prefix}.{name}" if prefix else name)
                yield Box(f"model.{key}", buffer, buffer.shape, (0,) * buffer.dim(), role="buffer")


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group all but its parameters."""
    return [{name: value for name, value in group.items() if name != PARAMS} for group in optimizer.param_groups]


def set_again(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Raises CkptdError for another number of groups."""
    groups = optimizer.param_groups
    if len(groups) != len(saved):
        text = f"{len(saved)} groups of parameters were saved, and this optimizer has {len(groups)}"
        raise CkptdError(text, where="optimizer", hint="restore into the same groups")
    for group, values in zip(groups, saved, strict=True):
        for name in set(group) - set(values) - {PARAMS}:
            del group[name]
        group.update(values)


def born(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], step: Callable[[], object]) -> States:
    """State as a step of zeros at a rate of zero bears it, which torch.distributed.checkpoint makes, too. The optimizer is as it
    was: a start that finds nothing to restore trains as if nobody had asked. step: the optimizer's, over all of them."""
    parameters, before = list(parameters), settings(optimizer)
    gradients = [parameter.grad for parameter in parameters]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    set_again(optimizer, before)
    states = {parameter: optimizer.state.pop(parameter) for parameter in parameters if parameter in optimizer.state}
    for state in states.values():
        state |= {STEP: torch.zeros_like(state[STEP]) if isinstance(state[STEP], Tensor) else 0} if STEP in state else {}
    return states


def numbers(states: Iterable[State]) -> dict[str, Any]:
    """What is no tensor in the state of each parameter: a step that is counted by an int. Raises CkptdError where it is not the
    same for all."""
    found = [{name: value for name, value in state.items() if not isinstance(value, Tensor)} for state in states if state]
    if any(one != found[0] for one in found[1:]):
        raise CkptdError("numbers in an optimizer's state that differ between parameters are not supported", where="optimizer")
    return found[0] if found else {}
