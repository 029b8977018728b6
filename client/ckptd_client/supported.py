"""What cannot be captured yet is refused at ``register`` by name (P15): placeholders, flat parameters, sharded optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd_client import accelerator, apart, dtypes
from ckptd_client.naming import FSDP1, PLAIN, local_of
from ckptd_client.tree import UNBIND

_FSDP2 = "shard with fully_shard (FSDP2) instead"
_DEEPSPEED = "ckptd_client.integrations.deepspeed.attach(engine, client)"
_OWN = "its state lies in flat buffers of its own, each rank with other cuts"

# (package, class, why, what to do) of optimizers; by name, so that nothing is imported
_OPTIMIZERS = (
    ("torch.distributed.optim", "ZeroRedundancyOptimizer", "its state lies on other ranks", _FSDP2),
    ("megatron.core", "DistributedOptimizer", _OWN, "use_distributed_optimizer=False, or Megatron's own checkpoints"),
    ("megatron.core", "LayerWiseDistributedOptimizer", "its state lies on other ranks", "Megatron's own checkpoints"),
    ("deepspeed", "ZeROOptimizer", _OWN, _DEEPSPEED),
)


def check_optimizer(value: Any) -> None:
    """Raises CkptdError for one whose state cannot be told by parameter, also when it stands in a chain of others."""
    for kind in type(value).__mro__:
        for package, name, why, remedy in _OPTIMIZERS:
            if kind.__name__ == name and f"{kind.__module__}.".startswith(f"{package}."):
                raise CkptdError(f"{name} is not supported: {why}", where=kind.__module__, hint=remedy)
    for part in getattr(value, "chained_optimizers", ()):  # Megatron's ChainedOptimizer
        check_optimizer(part)


def check_stand_in(key: str, tensor: Tensor) -> None:
    """Raises CkptdError for a parameter that stands for another one's memory; also at each look-up, for it may become one after
    ``register``."""
    if hasattr(tensor, "ds_id") or hasattr(tensor, "ds_status"):
        shape = list(getattr(tensor, "ds_shape", ()))
        raise CkptdError(
            f"a placeholder of DeepSpeed's ZeRO-3 (shape {list(tensor.shape)} of {shape}) is not supported", where=key,
            hint=_DEEPSPEED,
        )  # fmt: skip
    if getattr(tensor, "_is_flat_param", False):  # all that isinstance(tensor, FlatParameter) asks, ten times as slowly
        raise CkptdError("FSDP1's flat parameters need an adapter", where=key, hint=FSDP1)


def check_tensor(key: str, tensor: Tensor) -> None:
    """Raises CkptdError for a parameter or buffer that is a stand-in, or no memory."""
    check_stand_in(key, tensor)
    if apart.is_apart(tensor):
        apart.form_of(tensor, key)
        for name, part in apart.inner(tensor):
            check_tensor(f"{key}.{name}", part)
    elif not torch.nn.parameter.is_lazy(tensor):
        check_memory(key, tensor)


def check_made(key: str, tensor: Tensor) -> None:
    """Raises CkptdError for a parameter without a shape yet; at each look-up, as ``register`` may come before the first batch."""
    if torch.nn.parameter.is_lazy(tensor):
        hint = "run a batch through the model before restore() and snapshot()"
        raise CkptdError("not initialised yet: it belongs to a lazy module", where=key, hint=hint)


def check_memory(key: str, tensor: Tensor) -> None:
    """Raises CkptdError for what cannot be copied as bytes."""
    if _is_usual(tensor) and tensor.dtype in dtypes.NAME:
        return
    local = local_of(tensor)
    accelerator.check(key, local.device)
    if local.is_nested:
        raise CkptdError("a nested tensor cannot be copied as memory", where=key, hint=f"register a list of its {UNBIND}")
    if local.layout != torch.strided:
        kind = f"{type(local).__name__} ({local.layout})"
        raise CkptdError(f"a {kind} cannot be copied as memory", where=key, hint="leave it out with exclude=")
    if type(local) is not Tensor:
        kind = type(local).__name__
        raise CkptdError(
            f"a {kind} cannot be saved: of a subclass without __tensor_flatten__ nobody knows what else belongs to it", where=key,
            hint="give the class __tensor_flatten__ and __tensor_unflatten__, register as_subclass(torch.Tensor) of it, or leave it"
            " out with exclude=",
        )  # fmt: skip
    if local.is_conj() or local.is_neg():
        call = "resolve_conj()" if local.is_conj() else "resolve_neg()"
        text = "a view that shows other values than its memory holds"
        raise CkptdError(text, where=key, hint=f"register what {call} makes of it, or leave it out with exclude=")
    dtypes.name_of(tensor.dtype, key)
    if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
        text = f"expanded: several of its elements are one in memory (strides {list(local.stride())}), so none can be written back"
        raise CkptdError(text, where=key, hint="register what clone() or contiguous() makes of it, or leave it out with exclude=")


def _is_usual(tensor: Tensor) -> bool:
    """As nearly all are, of thousands: plain memory of the host in the order of its indices."""
    return (
        type(tensor) in PLAIN and tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_nested
        and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    )  # fmt: skip
