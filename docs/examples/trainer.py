"""The Trainer of transformers over ckptd: a GPT-2 of two layers learns the bytes of this file.

On each node `ckptd run` (alone on one machine: `ckptd run --plain-loopback`), then
    torchrun --nproc-per-node 2 docs/examples/trainer.py 200
Kill it whenever you like, and start it again with as many processes as you like.
"""

import os
import sys
from pathlib import Path

import torch
from ckptd_client import Client
from ckptd_client.integrations.transformers import CkptdTrainerMixin
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

WINDOW, BATCH = 16, 12


class CkptdTrainer(CkptdTrainerMixin, Trainer):
    pass


class Windows(Dataset):
    def __init__(self):
        self.text = torch.tensor(list(Path(__file__).read_bytes()))

    def __len__(self):
        return 10 * BATCH

    def __getitem__(self, index):
        window = self.text[4 * index : 4 * index + WINDOW]
        return {"input_ids": window, "labels": window}


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.4f}", flush=True)


def main(steps):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=WINDOW, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=os.environ.get("OUTPUT", "trainer-example"), max_steps=steps, learning_rate=1e-2, logging_steps=1,
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),  # the same steps in any world
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    with Client.connect(job=os.environ.get("JOB", "trainer-example")) as client:
        CkptdTrainer(
            model=GPT2LMHeadModel(config), args=arguments, train_dataset=Windows(), callbacks=[Printed()], client=client
        ).train()


if __name__ == "__main__":
    main(int(sys.argv[1]))
