"""Accelerate over ckptd: ``saves = attach(accelerator, client)`` after ``prepare()``, then ``client.restore()``, and
``client.snapshot(step)`` after each optimizer step; ``saves.save(step)`` instead where that step is to be kept.

Registers what ``accelerator.save_state()`` would write, and where each prepared loader stands in its epoch, on all ranks: a loop
over a loader goes on behind the last batch that was trained on, and sees each sample of the epoch once, also on another number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset

from ckptd.core.errors import CkptdError
from ckptd_client.client import Client
from ckptd_client.integrations import named
from ckptd_client.integrations.kept import Kept
from ckptd_client.place import Inside, Place


def attach(accelerator: Accelerator, client: Client, **objects: Any) -> Kept:
    """``objects``: more for ``client.register``. Names: model, optimizer, scheduler, data, custom; the second of a kind is model_1.
    ``save(step)`` of what is returned is a snapshot that is kept on storage, of which ``ProjectConfiguration(total_limit=)`` stay.
    Raises CkptdError for an accelerator whose state has another owner (DeepSpeed, Megatron-LM, FSDP version 1), and for map-style
    data that rank 0 dispatches."""
    check_supported(accelerator)
    found = {
        "model": accelerator._models,
        "optimizer": [prepared.optimizer for prepared in accelerator._optimizers],
        "scheduler": accelerator._schedulers,
        "data": [loader if _knows_itself(loader) else Followed(loader) for loader in accelerator._dataloaders],
        "custom": accelerator._custom_objects,
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
    }
    objects |= {name: value for kind, values in found.items() for name, value in named(kind, values).items()}
    kept = Kept(client, accelerator.project_configuration.total_limit)
    client.register(accelerator=_Accumulated(accelerator, kept), **objects)
    return kept


def check_supported(accelerator: Accelerator) -> None:
    """Raises CkptdError."""
    state = accelerator.state
    whose = {DistributedType.DEEPSPEED: "DeepSpeed", DistributedType.MEGATRON_LM: "Megatron-LM", DistributedType.XLA: "XLA"}
    if state.distributed_type in whose:
        raise CkptdError(f"{whose[state.distributed_type]} is not supported by this adapter", where="Accelerator")
    if state.distributed_type == DistributedType.FSDP and getattr(state.fsdp_plugin, "fsdp_version", 1) != 2:
        hint = "FullyShardedDataParallelPlugin(fsdp_version=2)"
        raise CkptdError("FSDP version 1 is not supported", where="Accelerator", hint=hint)


class Followed(Place):
    """Of a loader that accelerate has prepared. It fetches one batch ahead, to know the last one."""

    def __init__(self, loader: Any) -> None:
        dispatches = isinstance(loader, DataLoaderDispatcher)
        if dispatches and not isinstance(loader.dataset, IterableDataset):
            hint = "DataLoaderConfiguration(dispatch_batches=False)"
            raise CkptdError("map-style data that rank 0 dispatches is not supported", where="dispatch_batches", hint=hint)
        ahead = loader.state.num_processes if dispatches and not loader.split_batches else 1
        super().__init__(loader, ahead, None if dispatches else loader.total_batch_size)
        self._loader, self._iteration = loader, loader.iteration
        loader.base_dataloader = Inside(loader.base_dataloader, self)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"iteration": self._loader.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loader.iteration = self._iteration = state["iteration"]

    @property
    def done(self) -> int:
        """The loop over it has ended when it counts the next epoch."""
        return super().done if self._loader.iteration == self._iteration else 0

    def begins(self, epoch: int) -> None:
        """Its samplers draw the order of this epoch, also behind wrappers that hand no epoch on."""
        self._loader.set_epoch(epoch)
        super().begins(epoch)

    def batches(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self._iteration = self._loader.iteration
        empty = self.nothing_left()
        yield from super().batches(iterate)
        if empty:  # the loop over it ends without having begun, and accelerate counts no epoch for that
            self._loader.iteration += 1


class _Accumulated:
    """How many batches the accelerator has accumulated, and what it has kept."""

    def __init__(self, accelerator: Accelerator, kept: Kept) -> None:
        self._accelerator, self._kept = accelerator, kept

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, **self._kept.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self._kept.load_state_dict(state)


def _knows_itself(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


__all__ = ["attach"]
