"""The Trainer of transformers over ckptd: ``class T(CkptdTrainerMixin, Trainer)``, ``T(..., client=client).train()``.

Every step is a snapshot, and ``train()`` goes on from the newest recoverable one by itself, amid an epoch and on another number of
processes: model, optimizer, scheduler, scaler, the Trainer's and its callbacks' state, the loss since the last log, the
place in the data, generators. Map-style data is seen once per epoch whatever the number of processes and the batch size become; a
stream is wound forward as the Trainer does it, in a world of the same size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy

from ckptd.core.errors import CkptdError
from ckptd_client.client import Client
from ckptd_client.integrations.accelerate import Followed, check_supported
from ckptd_client.integrations.kept import Kept
from ckptd_client.place import Inside, Place
from ckptd_client.reader import open_job

RESUMES = "ckptd"  # stands for the directory that the Trainer would resume from
# What a run has by now; its limits and intervals are what the arguments say today.
OF_THE_RUN = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step", "best_model_checkpoint",
)  # fmt: skip


class CkptdTrainerMixin:
    """Before ``Trainer`` among the bases. client: of ``Client.connect``. extra: more objects with state_dict(), by name.

    ``train(resume_from_checkpoint=...)`` is for a job that has no step yet. What the Trainer saves by itself (``save_strategy``)
    stays as it is; ``own_saves=False``: where it would, it writes nothing, and that step's snapshot is kept on storage instead, as
    many as ``save_total_limit`` says and the best one, which ``load_best_model_at_end`` brings from there. ``train()`` ends when
    its last step is durable. Raises CkptdError naming an argument that has another owner of the state, or that needs files."""

    def __init__(
        self, *args: Any, client: Client, extra: Mapping[str, Any] | None = None, own_saves: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._ckptd, self._ckptd_extra = client, dict(extra or {})
        self._ckptd_run = _Run(self, client)
        self._ckptd_model: Any = None
        self._ckptd_own_saves = own_saves
        _check_supported(self)
        if not own_saves:
            _check_kept(self)
        self.callback_handler.callbacks.insert(0, _Events(self._ckptd_run))  # type: ignore[attr-defined]

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """The first that hears of the loader, whoever has made it."""
        found = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        if self._ckptd_model is None:
            self._ckptd_run.follow(dataloader)
        return found

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """All that a restore fills is there before the Trainer asks where training stands."""
        if trial is not None or self._ckptd_model is not None:
            raise CkptdError("one train() for each client", hint="a job of its own for each trial: Client.connect(job=...)")
        base: Any = super()
        began: tuple[int, int] = base._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._ckptd_model, _ = base._prepare_for_training(max_steps, None, resume_from_checkpoint)
        run = self._ckptd_run
        self._ckptd.register(model=self._ckptd_model, trainer=run, data=run.place, **_parts(self), **self._ckptd_extra)
        if self._ckptd.restore() is None:
            return began
        run.restored(max_steps)
        return run.epoch, 0

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> tuple[Any, Any]:
        loader = self._ckptd_run.loader
        self.callback_handler.train_dataloader = loader  # type: ignore[attr-defined]
        return self._ckptd_model, loader

    def _run_epoch(self, **how: Any) -> None:
        self._ckptd_run.begins(how)
        super()._run_epoch(**how)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != RESUMES:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        self._ckptd_run.snapshot(keeps=not self._ckptd_own_saves)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._ckptd_own_saves:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        else:
            self.store_flos()  # type: ignore[attr-defined]
            self._ckptd_run.to_keep = True

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Before the best model takes the last step's place."""
        self._ckptd.wait("durable")
        arguments, best = self.args, self.state.best_global_step  # type: ignore[attr-defined]
        if not self._ckptd_own_saves:
            kept = self._ckptd_run.kept
            kept.finish(best if arguments.save_total_limit == 1 and arguments.load_best_model_at_end else None)
            if arguments.load_best_model_at_end and best in kept.steps:
                self._ckptd_load(best)
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _ckptd_load(self, step: int) -> None:
        """The model alone, as it was then. Raises CkptdError."""
        client, model = self._ckptd, self.accelerator.unwrap_model(self._ckptd_model)  # type: ignore[attr-defined]
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        with open_job(client.job, step, socket=client._session.link.path) as found:
            found.read([(f"model.{name}", (0,) * value.ndim, value.shape, value) for name, value in tensors.items()], rank=0)


class _Run:
    """What belongs to the Trainer and to nothing that it prepares, as one registered object."""

    def __init__(self, trainer: Any, client: Client) -> None:
        limit = trainer.args.save_total_limit
        self.trainer, self._client = trainer, client
        self.kept, self.to_keep = Kept(client, limit if limit is not None and limit > 0 else None), False
        self.place: Any = None
        self.loader: Any = None
        self.epoch = 0
        self.loss = 0.0  # _tr_loss, read before the optimizer is enqueued: the clipping has waited for it
        self.taken = 0  # the step of the newest snapshot
        self._last = 0  # step of the epoch
        self._stopped = False  # by something else than max_steps
        self._steps = (0, 1, 1)  # batches before this run of the epoch, of this run, of an epoch
        self._log: list[str] = []
        self._losses: list[float] | None = None
        self._logged = 0

    def snapshot(self, *, keeps: bool) -> None:
        """Of this step, once. keeps: what the Trainer would have saved, ``to_keep``, or will when the epoch ends, is kept."""
        state, arguments, control = self.trainer.state, self.trainer.args, self.trainer.control
        step, wanted, self.to_keep = state.global_step, self.to_keep, False
        ends = step in (self._last, state.max_steps) or control.should_epoch_stop or control.should_training_stop
        wanted |= keeps and arguments.save_strategy == SaveStrategy.EPOCH and ends
        if step > self.taken:
            self.taken = step
            if wanted:
                self.kept.save(step, {state.best_global_step})
            else:
                self.kept.look()
                self._client.snapshot(step, must=step == state.max_steps or control.should_training_stop)
        elif wanted and step not in self.kept.steps:
            self._client.snapshot(step, keep=True)  # too late, as its words say

    def follow(self, loader: Any) -> None:
        if hasattr(loader, "base_dataloader"):
            self.loader, self.place = loader, Followed(loader)
        else:  # of a subclass that does not have it prepared
            self.loader, self.place = Inside(loader, place := Place(loader)), place

    def state_dict(self) -> dict[str, Any]:
        """``log`` grows for the whole run: what was encoded once is not encoded again."""
        trainer, state = self.trainer, self.trainer.state
        history = state.log_history
        self._log = self._log[: len(history)]
        self._log += map(json.dumps, history[len(self._log) :])
        logged = getattr(trainer, "_globalstep_last_logged", 0)
        since = 0.0 if logged == state.global_step else self.loss
        return {
            "run": json.dumps({name: getattr(state, name) for name in OF_THE_RUN}),
            "log": "\n".join(self._log),
            "callbacks": json.dumps([[type(callback).__name__, callback.state()] for callback in self._callbacks()]),
            "losses": [since, float(trainer.current_flos)],
            "logged": logged,
            "stopped": trainer.control.should_training_stop and state.global_step < state.max_steps,
            "epoch": self.epoch,
            **self.kept.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        run, there = self.trainer.state, json.loads(state["run"])
        for name in OF_THE_RUN:
            setattr(run, name, there[name])
        if run.best_model_checkpoint is not None and not os.path.isdir(run.best_model_checkpoint):
            run.best_model_checkpoint = None
        self._log = state["log"].splitlines()
        run.log_history = list(map(json.loads, self._log))
        kept = json.loads(state["callbacks"])
        for callback in self._callbacks():
            found = next((pair for pair in kept if pair[0] == type(callback).__name__), None)
            if found is not None:
                kept.remove(found)
                for name, value in found[1].get("attributes", {}).items():
                    setattr(callback, name, value)
        self.kept.load_state_dict(state)
        self._losses, self._logged, self._stopped, self.epoch = (state[name] for name in ("losses", "logged", "stopped", "epoch"))

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """What is logged next is the mean over all ranks, and so is what comes here; operations are added up."""
        since, flos = (sum(column) for column in zip(*(state["losses"] for state in states), strict=True))
        return states[0] | {"losses": [since / len(states), flos / world]}

    def restored(self, max_steps: int) -> None:
        self.taken = self.trainer.state.global_step
        self._stopped |= self.taken >= max_steps

    def begins(self, how: dict[str, Any]) -> None:
        """An epoch does. ``how``: the arguments of _run_epoch, made to end where the epoch ends."""
        self.epoch, place, loader = how["epoch"], self.place, how["train_dataloader"]
        place.begins(self.epoch)
        state, arguments = self.trainer.state, self.trainer.args
        whole, batches = how["num_update_steps_per_epoch"], how["steps_in_epoch"]
        self._steps, self._last = (0, batches, batches), state.global_step + whole
        if how["resume_from_checkpoint"] is not None and not place.resumes and self.epoch == how["epochs_trained"]:
            place.skip(how["steps_trained_in_current_epoch"])  # the Trainer's own checkpoint
            self._last -= how["steps_trained_in_current_epoch"] // arguments.gradient_accumulation_steps
            self.trainer._load_rng_state(how["resume_from_checkpoint"])
        how["resume_from_checkpoint"] = None
        if arguments.ignore_data_skip and not place.nothing_left():
            place.over()
        if not place.resumes:
            return
        if self._stopped or place.nothing_left():  # what comes at an epoch's end comes still
            place.over()
            how["resume_from_checkpoint"], how["epochs_trained"], left = RESUMES, self.epoch, 0
            how["steps_trained_in_current_epoch"] = batches
        else:
            before = round((state.epoch - self.epoch) * batches)
            if place.size is not None:
                how["steps_in_epoch"] = here = place.batches_left(loader)
                how["num_update_steps_per_epoch"] = -(-here // arguments.gradient_accumulation_steps)
                before = batches - here
            self._steps, left = (before, how["steps_in_epoch"], batches), how["num_update_steps_per_epoch"]
        self._last = state.global_step + left
        if arguments.max_steps <= 0:  # all epochs are trained, also where each has another number of steps now
            state.max_steps = state.global_step + left + (state.num_train_epochs - self.epoch - 1) * whole

    def began(self) -> bool:
        """The Trainer has set its counters to nothing. True: there is nothing more to do."""
        if self._losses is not None:
            since, self.trainer.current_flos = self._losses
            self.trainer._tr_loss.fill_(since)
            self.trainer._total_loss_scalar = -since  # the mean that train() returns is of its own steps
            self.trainer._globalstep_last_logged = self._logged
        return self._stopped

    def so_far(self, epoch: float) -> float:
        """Epochs, of what the Trainer counts from where this run of the epoch began."""
        before, counted, whole = self._steps
        return self.epoch + (before + round((epoch - self.epoch) * counted)) / whole

    def _callbacks(self) -> list[Any]:
        return [callback for callback in self.trainer.callback_handler.callbacks if isinstance(callback, ExportableState)]


class _Events(TrainerCallback):
    def __init__(self, run: _Run) -> None:
        self._run = run

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        control.should_training_stop = self._run.began() or control.should_training_stop
        return control

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._run.loss = float(self._run.trainer._tr_loss)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.epoch = self._run.so_far(state.epoch)


def _parts(trainer: Any) -> dict[str, Any]:
    optimizer = trainer.optimizer
    parts = {"optimizer": getattr(optimizer, "optimizer", optimizer), "scheduler": trainer.lr_scheduler}
    scaler = getattr(trainer.accelerator, "scaler", None)
    return parts if scaler is None else parts | {"scaler": scaler}


def _check_supported(trainer: Any) -> None:
    """Raises CkptdError."""
    if not isinstance(trainer, Trainer):
        raise CkptdError("CkptdTrainerMixin comes before Trainer among the bases of a class")
    check_supported(trainer.accelerator)
    if trainer.args.auto_find_batch_size:
        raise CkptdError("auto_find_batch_size is not supported by CkptdTrainerMixin", where="TrainingArguments")


def _check_kept(trainer: Any) -> None:
    """Raises CkptdError for what needs the Trainer's own files, or decides when its step is captured already."""
    arguments, remedy = trainer.args, "own_saves=True"
    refused = {
        "save_only_model": arguments.save_only_model,
        f"hub_strategy={arguments.hub_strategy.value!r}": arguments.push_to_hub and arguments.hub_strategy != HubStrategy.END,
        "load_best_model_at_end with FSDP": arguments.load_best_model_at_end and trainer.is_fsdp_enabled,
    }
    for name in (name for name, is_set in refused.items() if is_set):
        raise CkptdError(f"{name} needs files, and own_saves=False writes none", where="TrainingArguments", hint=remedy)
    if arguments.save_strategy == SaveStrategy.BEST and arguments.eval_strategy == IntervalStrategy.EPOCH:
        what = "whether an epoch's last step is the best is known when its snapshot has been taken"
        hint = f'eval_strategy="steps", save_strategy="epoch", or {remedy}'
        raise CkptdError(what, where='save_strategy="best" with own_saves=False', hint=hint)


__all__ = ["CkptdTrainerMixin"]
