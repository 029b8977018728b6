"""torchtitan over ckptd: one line of config, ``checkpoint=CkptdCheckpointManager.Config(enable=True, interval=1, job="llama3")``.

Every ``interval`` steps are a snapshot, and ``load()`` gives the newest recoverable one, to any number of ranks. What is not there
is torchtitan's own: seed and initial checkpoints, ``exclude_from_loading``, the final export (``last_save_model_only``, Hugging
Face's format), which lies in ``folder`` as before. How many steps stay on storage is the daemon's to say (`--keep-last`); beside
these, with ``keep_interval``, the last ``keep_latest_k`` of every so many steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, CheckpointManager

from ckptd.core.errors import CkptdError
from ckptd_client.client import Client
from ckptd_client.handles import LEVELS
from ckptd_client.integrations import named
from ckptd_client.integrations.kept import Kept

MODES = ("disabled",)  # of torchtitan's own saves, of which only the last one is left


class CkptdCheckpointManager(CheckpointManager):
    """A ``load_step`` goes back to that step. Raises CkptdError on all ranks where ``Client.restore`` does, and for a last step
    that does not become as safe as the daemon can make it."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        job: str = "torchtitan"
        """Name of the run: what a restart is to find."""

        interval: int = 1
        """Steps from one snapshot to the next. torchtitan's loader keeps its place as often."""

        keep_interval: int = 0
        """Steps, a multiple of ``interval``, from one snapshot that is kept on storage to the next; of these the last
        ``keep_latest_k`` stay. 0: none is kept, and the daemon says which stay."""

    def __init__(self, config: Config, *, model_parts: Iterable[Any], **built: Any) -> None:
        if config.async_mode not in MODES:
            hint = "ckptd's are asynchronous, and the last one is waited for"
            raise CkptdError(f"async_mode={config.async_mode!r} is of torchtitan's own saves", where="checkpoint", hint=hint)
        if config.keep_interval % config.interval:
            what = f"keep_interval={config.keep_interval} is no multiple of interval={config.interval}"
            raise CkptdError(what, where="checkpoint", hint="what is kept is a snapshot first")
        parts = list(model_parts)
        super().__init__(config, model_parts=parts, **built)
        if not self.enable or self.load_only:
            return
        self._finished = False
        self._client = Client.connect(job=config.job)
        self._keep_interval, self._kept = config.keep_interval, Kept(self._client, config.keep_latest_k or None)
        modules = named(MODEL, parts)
        others: dict[str, Any] = {name: value for name, value in self.states.items() if name not in (MODEL, OPTIMIZER, DATALOADER)}
        loader = self.states[DATALOADER]
        if loader is not None:
            others[DATALOADER] = _Loader(loader)
        others[OPTIMIZER] = list(self.states[OPTIMIZER].optimizers)
        self._names = [MODEL, *others]
        self._client.register(key_map=dict.fromkeys(modules, MODEL), **modules)  # one model, whatever its stages
        self._client.register(**others)

    def _load(self, step: int = -1) -> bool:
        """False: nothing was loaded, and training begins."""
        if self.load_only:
            return bool(super()._load(step))
        for name in self.exclude_from_loading:
            if name not in self._names:
                raise ValueError(f"{name} not found in state_dict.")
        kept = [f"{name}*" for name in self._names if name not in self.exclude_from_loading]
        only = kept if self.exclude_from_loading else None
        found = self._client.restore(step=None if step == -1 else step, only=only)
        if found is None:
            return bool(super()._load(-1))
        self._find_kept()
        return True

    def _find_kept(self) -> None:
        """Who was started again goes on from what the run before had kept, or was about to; what cannot be found out stays."""
        if not self._keep_interval or dist.get_rank() != 0:
            return
        try:
            there = [row for row in self._client.steps() if row["keep"] or not row["durable"]]
        except CkptdError as error:
            self._client._troubles.pass_on(f"what was kept stays: {error}", "")
            return
        self._kept.steps = sorted({row["step"] for row in there if self._is_kept(row["step"]) and not row["abandoned"]})

    def _is_kept(self, step: int) -> bool:
        return self._keep_interval > 0 and step % self._keep_interval == 0

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if curr_step == 0:  # a seed checkpoint
            return bool(super()._save(curr_step, last_step))
        if not self._should_save(curr_step, last_step):
            return False
        if self._is_kept(curr_step):
            self._kept.save(curr_step)
        else:
            self._kept.look()
            self._client.snapshot(curr_step, must=last_step)
        if last_step:
            self._finish(curr_step)
        return True

    def _finish(self, step: int) -> None:
        status = self._client.wait("durable")
        if status not in LEVELS:  # one that is less than the daemon offers is told by wait()
            raise CkptdError(f"the last step was not saved: {status}", where=f"step {step}")
        self._kept.finish()
        if self.last_save_model_only:
            self._save_last_step(step)
        self._finished = True

    def _maybe_wait_for_staging(self) -> None:
        """The optimizer's own hook waits, and only for what it is about to write."""

    def _wait_for_saving(self) -> None:
        """There is nothing that training has to wait for."""

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "_client"):
            self._client.close(finished=self._finished)


class _Loader:
    """Each rank's loader holds its data-parallel rank's place: a world with as many of these finds each of them again."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return dict(self._loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        return {name: value for state in states for name, value in state.items()}


__all__ = ["CkptdCheckpointManager"]
