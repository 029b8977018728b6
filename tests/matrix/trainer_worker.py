"""A real Trainer over ckptd."""

from __future__ import annotations

from typing import Any

import torch
from ckptd_client import Client
from ckptd_client.integrations.transformers import CkptdTrainerMixin
from torch.utils.data import DataLoader
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.matrix.worker import SETTINGS, Stream, Windows, maybe_die, wrote


class Recorded(CkptdTrainerMixin, Trainer):
    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        numbers = inputs.pop("number")
        if model.training:
            wrote("seen", step=self.state.global_step + 1, epoch=self._ckptd_run.epoch, samples=numbers.tolist())
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        wrote("weights", step=self.state.global_step, total=total(self.model), best=self.state.best_global_step)
        maybe_die(self._ckptd, self.state.global_step)


class Plain(Trainer):
    def get_train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(self.train_dataset, 4, shuffle=True, generator=generator, collate_fn=collated)


class RecordedPlain(Recorded, Plain):
    """Of somebody who has no loader prepared: for one process."""


class Told(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wrote("begins", step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wrote("ends", step=state.global_step, log=state.log_history)


def total(model: torch.nn.Module) -> float:
    return sum(value.detach().double().abs().sum().item() for value in model.parameters())


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"input_ids": found["tokens"], "labels": found["tokens"], "number": found["number"]}


def main() -> None:
    options = dict(SETTINGS.get("arguments", {}))
    patience = SETTINGS.get("patience")
    arguments = TrainingArguments(
        output_dir=SETTINGS["folder"], use_cpu=True, seed=7, report_to=[], disable_tqdm=True, remove_unused_columns=False,
        save_strategy=options.pop("save_strategy", "no"), learning_rate=1e-2, logging_steps=options.pop("logging_steps", 2),
        dataloader_drop_last=False, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    drop = SETTINGS.get("dropout", 0.0)
    config = GPT2Config(
        vocab_size=256, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with Client.connect(job=SETTINGS["job"], required=True) as client:
        callbacks: list[Any] = [Told()]
        if patience is not None:
            callbacks.append(EarlyStoppingCallback(patience, early_stopping_threshold=SETTINGS.get("threshold", 0.0)))
        kind = RecordedPlain if SETTINGS.get("plain") else Recorded
        trainer = kind(
            model=GPT2LMHeadModel(config), args=arguments, callbacks=callbacks, client=client,
            data_collator=collated, train_dataset=Stream() if SETTINGS.get("stream") else Windows(), eval_dataset=Windows(),
            own_saves=SETTINGS.get("own_saves", True),
        )  # fmt: skip
        trainer.train()
        wrote("trained", step=trainer.state.global_step, total=total(trainer.model), kept=trainer._ckptd_run.kept.steps)


if __name__ == "__main__":
    main()
