"""Lightning Fabric over ckptd: ``attach(fabric, client, model=model, optimizer=optimizer, data=loader)`` behind ``fabric.setup()``
and ``fabric.setup_dataloaders()``, then ``client.restore()``, and ``client.snapshot(step)`` after each optimizer step.

A loop over a loader goes on behind the last batch that was trained on, and sees each sample of the epoch once, also on another
number of ranks.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer

from ckptd.core.errors import CkptdError
from ckptd_client.client import Client
from ckptd_client.place import Inside, Place

STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)


def attach(fabric: Fabric, client: Client, **objects: Any) -> None:
    """What ``client.register`` takes, as Fabric has wrapped it. Raises CkptdError for a strategy whose state has another owner."""
    if not isinstance(fabric.strategy, STRATEGIES):
        hint = "single device, DDP, ModelParallel (FSDP2); integrations.deepspeed and integrations.fsdp1 take what these have made"
        raise CkptdError(f"{type(fabric.strategy).__name__} is not supported by attach()", where="Fabric(strategy=)", hint=hint)
    client.register(**{name: _inside(value) for name, value in objects.items()})


def _inside(value: Any) -> Any:
    if isinstance(value, _FabricModule):
        return value._forward_module
    if isinstance(value, _FabricOptimizer):
        return value.optimizer
    if isinstance(value, _FabricDataLoader) and not hasattr(value._dataloader, "state_dict"):
        return Followed(value)
    return value


class Followed(Place):
    """Of a loader that Fabric has wrapped, which tells its sampler by itself what epoch it is."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader._dataloader)
        self._wrapped = loader
        loader._dataloader = Inside(loader._dataloader, self)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"loops": self._wrapped._num_iter_calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The loop over what is left is counted once more."""
        super().load_state_dict(state)
        self._wrapped._num_iter_calls = state["loops"] - self.resumes


__all__ = ["attach"]
