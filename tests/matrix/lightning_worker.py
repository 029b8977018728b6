"""Lightning's Trainer over ckptd."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from ckptd_client import Client
from ckptd_client.integrations.lightning import CkptdCallback
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from tests.matrix.worker import SETTINGS, Stream, Windows, maybe_die, wrote


class Bytes(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(256, 16), nn.Dropout(SETTINGS.get("dropout", 0.0)), nn.Linear(16, 256))
        self.marks: list[int] = []

    def configure_model(self) -> None:
        if SETTINGS.get("strategy") == "fsdp2" and not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.layers(batch["tokens"])
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss(batch)
        step = self.trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        wrote("seen", step=step, epoch=self.current_epoch, index=index, samples=batch["number"].tolist(), loss=loss.item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.marks.append(self.trainer.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["marks"] = self.marks

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.marks = list(checkpoint["marks"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Last(CkptdCallback):
    """It dies at once."""

    def _snapshot(self, step: int, **how: Any) -> None:
        super()._snapshot(step, **how)
        maybe_die(self._client, self._taken)


class Told(Callback):
    def __init__(self, client: Client) -> None:
        self.client = client

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        wrote("begins", step=self.client.last_restore["step"] or 0)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        wrote("ends", step=trainer.fit_loop.epoch_loop._batches_that_stepped, marks=module.marks)


def main() -> None:
    seed_everything(SETTINGS.get("seed", 5))
    batch = SETTINGS.get("batch", 4)
    data = Stream() if SETTINGS.get("stream") else Windows()
    loader = DataLoader(data, batch_size=batch, shuffle=not SETTINGS.get("stream"))
    with Client.connect(job=SETTINGS["job"], required=True) as client:
        callbacks: list[Callback] = [Last(client), Told(client)]
        if "patience" in SETTINGS:
            callbacks.append(EarlyStopping("val", min_delta=10.0, patience=SETTINGS["patience"]))
        if SETTINGS.get("averaged"):
            callbacks.append(EMAWeightAveraging())
        strategy: Any = ModelParallelStrategy() if SETTINGS.get("strategy") == "fsdp2" else "auto"
        make = partial(
            Trainer, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy,
            callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=SETTINGS["folder"], **SETTINGS.get("arguments", {}),
        )  # fmt: skip
        for _ in range(SETTINGS.get("fits", 1)):
            make().fit(Bytes(), loader, DataLoader(Windows(), batch_size=16))


if __name__ == "__main__":
    main()
