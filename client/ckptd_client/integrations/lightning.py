"""Lightning over ckptd: ``Trainer(callbacks=[CkptdCallback(client)])``.

Every optimized batch is a snapshot, and ``fit()`` goes on from the newest recoverable one by itself: modules, optimizers,
schedulers, the gradient scaler, loops, callbacks, the datamodule, generators, and where the training loaders stand in their epoch,
on all ranks, also another number of them. Metrics that are averaged over an epoch begin anew, as Lightning itself has it.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from ckptd.core.errors import CkptdError
from ckptd_client.client import Client
from ckptd_client.handles import Handle
from ckptd_client.integrations import named
from ckptd_client.place import Inside, Place

UNTRUE = "You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable"
STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)


class CkptdCallback(Callback):
    """client: of ``Client.connect``. extra: more objects with state_dict(), by name. A ``ckpt_path`` is for a job that has no step
    yet. ``fit()`` ends when its last step is durable. A step is an optimized batch; ``global_step`` counts each optimizer's.

    Raises CkptdError naming a strategy that owns the state, and ``reload_dataloaders_every_n_epochs``."""

    def __init__(self, client: Client, **extra: Any) -> None:
        self._client, self._extra = client, extra
        self._taken = 0
        self._newest: Handle | None = None
        self._run: _Run | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            raise CkptdError("one fit() for each client", hint="a job of its own for each: Client.connect(job=...)")
        _check_supported(trainer)
        loop = trainer.fit_loop
        loop.setup_data()
        loaders = _follow(trainer)
        run = self._run = _Run(trainer)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._client.register(
            model=trainer.strategy.model, lightning=run, **named("optimizer", trainer.optimizers),
            **named("scheduler", schedulers), **named("scaler", [] if scaler is None else [scaler]),
            **named("data", [loader.place for loader in loaders]), **self._extra,
        )  # fmt: skip
        if self._client.restore() is not None:
            run.apply()
            self._taken = loop.epoch_loop._batches_that_stepped
            trainer._checkpoint_connector._loaded_checkpoint = {}
            _into_todays_batches(trainer, loaders)
            if len(loaders) == len(loop._combined_loader.flattened):
                warnings.filterwarnings("ignore", message=UNTRUE)
            loop._load_combined_loader_states()
        if loop._data_fetcher is not None:
            iter(loop._data_fetcher)  # over what is followed, from where it stands

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Behind all other callbacks: what they have counted belongs to the step."""
        trainer.callbacks = [other for other in trainer.callbacks if other is not self] + [self]

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """A validation that follows belongs to its step, and so does the end of an epoch, where the loops can go on behind it."""
        loop = trainer.fit_loop.epoch_loop
        if loop._should_accumulate() or loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            return
        if not loop._num_ready_batches_reached() or trainer.fit_loop._iteration_based_training():
            self._snapshot(loop._batches_that_stepped + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and self._run is not None:
            self._run.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._snapshot(trainer.fit_loop.epoch_loop._batches_that_stepped + 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step is captured now, also where its snapshot had been skipped: averaged weights may take their place later."""
        loop = trainer.fit_loop
        ends = loop.epoch_progress.current.processed == loop.max_epochs or loop.epoch_loop.global_step == loop.max_steps
        self._snapshot(loop.epoch_loop._batches_that_stepped, must=ends or trainer.should_stop)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._client.wait("durable")

    def _snapshot(self, step: int, *, must: bool = False) -> None:
        lost = self._newest is not None and not self._newest.taken
        if step > self._taken or (must and lost):
            self._taken = step
            self._newest = self._client.snapshot(step, must=must)


class _Run:
    """What belongs to the Trainer and its callbacks, as one registered object."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._found: dict[str, Any] | None = None
        self.metrics: dict[str, float] = {}  # of the last validation, which callbacks may look at when the epoch ends

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        checkpoint: dict[str, Any] = {"state_dict": {}, "epoch": trainer.current_epoch, "global_step": trainer.global_step}
        if is_overridden("on_save_checkpoint", trainer.lightning_module):
            call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
        data = trainer.datamodule
        return {
            "fit_loop": trainer.fit_loop.state_dict(),
            "callbacks": call._call_callbacks_state_dict(trainer),
            "datamodule": {} if data is None else call._call_lightning_datamodule_hook(trainer, "state_dict"),
            "module": checkpoint,
            "metrics": self.metrics,
            "should_stop": trainer.should_stop,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found = state

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        return states[0]

    def apply(self) -> None:
        """When tensors and all other objects are restored."""
        trainer, state = self._trainer, self._found
        assert state is not None, "it was registered"
        trainer.fit_loop.load_state_dict(state["fit_loop"])
        call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
        if trainer.datamodule is not None and state["datamodule"]:
            call._call_lightning_datamodule_hook(trainer, "load_state_dict", state["datamodule"])
        if is_overridden("on_load_checkpoint", trainer.lightning_module):
            call._call_lightning_module_hook(trainer, "on_load_checkpoint", state["module"])
        self.metrics = state["metrics"]
        trainer._logger_connector._callback_metrics.update({name: torch.tensor(value) for name, value in self.metrics.items()})
        trainer.should_stop = state["should_stop"]


def _follow(trainer: Trainer) -> list[Inside]:
    """The loaders that are no state themselves."""
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        return []
    ahead = 0 if trainer.fit_loop.max_batches != math.inf else 1
    plain = (hasattr(loader, "batch_sampler") and not hasattr(loader, "state_dict") for loader in combined.flattened)
    found = zip(combined.flattened, plain, strict=True)
    loaders = [Inside(loader, Place(loader, ahead)) if is_plain else loader for loader, is_plain in found]
    combined.flattened = loaders
    return [loader for loader in loaders if type(loader) is Inside]


def _into_todays_batches(trainer: Trainer, loaders: list[Inside]) -> None:
    """The loops count batches of the world that was. Behind an epoch's last sample the next epoch comes."""
    loop = trainer.fit_loop
    amid = [loader for loader in loaders if loader.place.resumes and loader.place.size is not None]
    for loader in amid:
        if loader.place.nothing_left():
            loader.place.over()
    done = [loader.place.batches_done(loader, int(loop.max_batches)) for loader in amid if loader.place.resumes]
    if done:
        counted = loop.epoch_loop.batch_progress.current
        late = counted.processed - counted.completed  # of a batch whose last hooks are still to come
        counted.ready = counted.started = counted.processed = max(done)
        counted.completed = max(done) - late


def _check_supported(trainer: Trainer) -> None:
    """Raises CkptdError."""
    if not isinstance(trainer.strategy, STRATEGIES):
        hint = "single device, DDP, ModelParallel (FSDP2)"
        what = f"{type(trainer.strategy).__name__} is not supported by CkptdCallback"
        raise CkptdError(what, where="Trainer(strategy=)", hint=hint)
    for callback in trainer.callbacks:
        kind = type(callback)
        if isinstance(callback, BaseFinetuning):
            raise CkptdError(f"{kind.__name__} is not supported: it gives the optimizer parameters while fit() begins")
        if kind.on_save_checkpoint is not Callback.on_save_checkpoint:
            hint = "state_dict() and load_state_dict() of the callback; or CkptdCallback(client, name=object with these)"
            raise CkptdError(f"{kind.__name__} keeps state in on_save_checkpoint(), which no snapshot calls", hint=hint)
    if trainer.reload_dataloaders_every_n_epochs:
        raise CkptdError("loaders that are made anew cannot be followed", where="Trainer(reload_dataloaders_every_n_epochs=)")


__all__ = ["CkptdCallback"]
