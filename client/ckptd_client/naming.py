"""Canonical names: wrappers are recognised by their type, never by a piece of a name (design D7)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor, nn

from ckptd.core.errors import CkptdError
from ckptd_client import _switches, modules
from ckptd_client.entries import Copies, Owner
from ckptd_client.modules import ExtraState, SavedState
from ckptd_client.quiet import NoCollectives

FSDP1 = "ckptd_client.integrations.fsdp1.attach(model, optimizer, client), or shard with fully_shard (FSDP2)"

# (module that defines it, class, attribute that holds the wrapped module)
_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)

PLAIN = (Tensor, nn.Parameter)

ModuleState = ExtraState | SavedState


class Spot(NamedTuple):
    """A parameter or buffer where it hangs in the unwrapped tree."""

    name: str
    tensor: Tensor
    role: str  # param | buffer
    copies: Copies | None


@dataclass(frozen=True, slots=True)
class _Wrapping:
    """The DistributedDataParallel above a module: what it keeps equal, and what it was told to ignore."""

    params: Copies | None = None
    buffers: Copies | None = None
    ignored: frozenset[int] = frozenset()


def loaded(module: str, name: str) -> type | None:
    """A class of torch, if the program has imported it: what nobody imported, nobody uses, and importing costs seconds."""
    found = sys.modules.get(module)
    return cast("type | None", getattr(found, name, None)) if found is not None else None


def walk(module: nn.Module) -> tuple[list[Spot], list[ModuleState]]:
    """All parameters and persistent buffers by canonical name, and what modules have to save beside them."""
    spots: list[Spot] = []
    extras: list[ModuleState] = []
    _walk(module, "", _Wrapping(), spots, extras)
    return spots, extras


def _walk(
    module: nn.Module, prefix: str, above: _Wrapping, spots: list[Spot], extras: list[ModuleState],
    covered: bool = False,
) -> None:  # fmt: skip
    """``covered``: a module above is asked for whatever else there is here."""
    inner = unwrap_once(module)
    if inner is not None:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            above = _wrapping(module)
        _walk(inner, prefix, above, spots, extras, covered)
        return
    start = len(spots)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            copies = None if id(parameter) in above.ignored else above.params
            spots.append(Spot(prefix + name, parameter, "param", copies))
    if module._buffers:
        _buffers(module, prefix, above, spots)
    if modules.has_extra_state(module):
        extras.append(modules.ExtraState(prefix + modules.EXTRA, module))
    whole = not covered and modules.saves_the_whole(module)
    own = len(spots)
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, f"{prefix}{name}.", above, spots, extras, covered or whole)
    if whole or (not covered and modules.saves_itself(module)):
        known = spots[start:] if whole else spots[start:own]
        pairs = [(spot.name.removeprefix(prefix), spot.tensor) for spot in known]
        extras.append(modules.SavedState(prefix + modules.SAVED, module, whole=whole, known=pairs))


def named(owner: Owner, extras: list[ModuleState]) -> dict[str, ModuleState]:
    """By the names under which this owner's are saved, those that it takes."""
    for extra in extras:
        extra.name = owner.rename(f"{owner.name}.{extra.name}")
    return {extra.name: extra for extra in extras if owner.takes(extra.name)}


def _buffers(module: nn.Module, prefix: str, above: _Wrapping, spots: list[Spot]) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            copies = None if id(buffer) in above.ignored else above.buffers
            spots.append(Spot(prefix + name, buffer, "buffer", copies))


def unwrap_once(module: nn.Module) -> nn.Module | None:
    """The module inside, None when this is no wrapper. Raises CkptdError for FSDP1's flat parameters."""
    attribute = _wrapped_attribute(cast(Any, type(module)), len(sys.modules))
    if attribute == "":
        return None
    return cast(nn.Module, getattr(module, attribute))


@lru_cache(maxsize=4096)
def _wrapped_attribute(kind: Any, _imports: int) -> str:
    for where, name, attribute in _WRAPPERS:
        wrapper = loaded(where, name)
        if wrapper is not None and issubclass(kind, wrapper):
            return attribute
    fsdp1 = loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    if fsdp1 is not None and issubclass(kind, fsdp1):
        raise CkptdError("FSDP1's flat parameters need an adapter", where=kind.__name__, hint=FSDP1)
    return ""


def _wrapping(ddp: nn.parallel.DistributedDataParallel) -> _Wrapping:
    """Raises CkptdError for replicas that are not equal between two averagings: each tensor is captured by one rank alone."""
    for _, state in getattr(ddp, "_comm_hooks", ()):
        if any(kind.__name__ == "PostLocalSGDState" for kind in type(state).__mro__):
            raise CkptdError(
                "the replicas of this DistributedDataParallel differ: it averages now and then (post_localSGD_hook)",
                hint="register its .module: each rank's own is kept, and comes back to as many ranks",
            )
    ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
    names: set[str] = set(getattr(ddp, "parameters_to_ignore", ()))
    ignored: frozenset[int] = frozenset()
    if names:
        named = [*ddp.module.named_parameters(), *ddp.module.named_buffers()]
        ignored = frozenset(id(tensor) for name, tensor in named if name in names)
    broadcast = getattr(ddp, "forward_sync_buffers", None)  # its name since torch 2.13
    if broadcast is None:
        broadcast = bool(ddp.broadcast_buffers)
    return _Wrapping(Copies(ranks), Copies(ranks, first_only=True) if broadcast else None, ignored)


def reshard(module: nn.Module) -> None:
    """After a forward without backward, FSDP2 modules hold plain full parameters: writes to them are lost, and they are not
    the optimizer's. The hooks of state_dict() bring the shards back (D6)."""
    fsdp = loaded("torch.distributed.fsdp", "FSDPModule")
    if fsdp is None or not _switches.RESHARD:
        return
    if any(isinstance(part, fsdp) for part in module.modules()):
        with NoCollectives(type(module).__name__):
            module.state_dict(keep_vars=True)


def is_dtensor(tensor: Tensor) -> bool:
    if type(tensor) in PLAIN:
        return False
    kind = loaded("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def root_mesh(mesh: Any) -> Any:
    """The mesh that this one was cut from, or itself. torch has no public name for it."""
    find = getattr(mesh, "_get_root_mesh", None)  # its place since torch 2.10
    if find is None:
        find = partial(loaded("torch.distributed.device_mesh", "_mesh_resources").get_root_mesh, mesh)  # type: ignore[union-attr]
    return find()


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part: the DTensor's local tensor, or the tensor itself. Detached: it keeps the storage alive even when
    ``.data`` is replaced meanwhile."""
    if type(tensor) in PLAIN:
        return tensor.detach()
    inner: Any = getattr(tensor, "_local_tensor", None) if is_dtensor(tensor) else tensor
    return cast(Tensor, inner).detach()


def uncounted(tensor: Tensor) -> bool:
    """Inference tensors have no version counter, so nobody could tell that they were written."""
    return (tensor if type(tensor) in PLAIN else local_of(tensor)).is_inference()
