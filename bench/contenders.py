"""The systems of bench.peers, each used as its documents tell its users to. One that is not installed has a reason instead."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from ckptd_client import Client
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from bench.rig import daemon, room
from bench.training import Training

STORED_TIMEOUT_S = 600.0
POLL_S = 0.002
SAVER_START_S = 1.0
KEEP_ALL = 1_000_000


class Contender(ABC):
    """Saves one training into ``directory``. It is made before the training's state is, so that a process which it forks for
    itself shares no memory with it; begin() follows."""

    name = ""
    aside = False  # the copy goes on beside forward and backward; fence() waits for its end

    def __init__(self, directory: Path) -> None:
        """Raises ImportError where it is not installed."""
        self.directory = directory

    def begin(self, training: Training) -> None:
        self.training = training

    @abstractmethod
    def save(self, step: int) -> bool:
        """The call that training makes. False: nothing is saved this time."""

    def fence(self) -> None:
        """Returns when the optimizer may write."""
        return

    @abstractmethod
    def stored(self) -> Path:
        """Returns when it says that all is stored: the directory."""

    @abstractmethod
    def load(self, where: Path) -> None:
        """What lies there, back into the training's model and optimizer."""

    def clean(self) -> None:
        """Nothing of the last save is left on storage."""
        shutil.rmtree(self.directory / "save", ignore_errors=True)

    def close(self) -> None:
        """Its processes and memory go."""
        return


class Ckptd(Contender):
    name, aside = "ckptd", True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._open = ExitStack()

    def begin(self, training: Training) -> None:
        super().begin(training)
        settings: dict[str, object] = {"storage_root": self.directory, "keep_last": KEEP_ALL, "flush_every_s": 0}
        node = self._open.enter_context(daemon(memory_budget=room(training.nbytes), **settings))
        self._client = Client.connect(job="bench", socket=str(node.socket), required=True)
        self._open.callback(self._client.close)
        self._client.register(model=training.model, optimizer=training.optimizer)
        assert self._client.restore() is None

    def save(self, step: int) -> bool:
        self._step = step
        return not self._client.snapshot(step).status.startswith("skipped")

    def fence(self) -> None:
        self._client.fence()

    def stored(self) -> Path:
        status = self._client.wait("durable", STORED_TIMEOUT_S)
        assert status == "durable", status
        (where,) = self.directory.glob(f"*/bench/epoch-*/step-*{self._step}")
        return where

    def load(self, where: Path) -> None:
        assert self._client.restore(step=self._step) == self._step

    def clean(self) -> None:
        for where in self.directory.glob("*/bench/epoch-*/step-*"):
            while where.exists():
                shutil.rmtree(where, ignore_errors=True)  # the daemon may be putting a mark there

    def close(self) -> None:
        self._open.close()


class DcpSave(Contender):
    name = "DCP save"

    def _state(self) -> dict[str, Any]:
        optimizer = self.training.optimizer.state_dict()["state"]
        return {"model": self.training.model.state_dict(), "optim": {str(at): held for at, held in optimizer.items()}}

    def save(self, step: int) -> bool:
        save(self._state(), checkpoint_id=self.directory / "save", no_dist=True)
        return True

    def stored(self) -> Path:
        return self.directory / "save"

    def load(self, where: Path) -> None:
        load(self._state(), checkpoint_id=where, no_dist=True)


class DcpAsync(DcpSave):
    name = "DCP async_save"

    def save(self, step: int) -> bool:
        self._future: Any = async_save(self._state(), checkpoint_id=self.directory / "save", no_dist=True)
        return True

    def stored(self) -> Path:
        self._future.result()
        return super().stored()


class DcpStaged(DcpSave):
    """With a stager that keeps its memory and copies in a thread; what is written waits for it as ckptd's fence does."""

    name, aside = "DCP async_save, staged in a thread", True
    _stager: DefaultStager | None = None

    def begin(self, training: Training) -> None:
        super().begin(training)
        self._stager = DefaultStager(StagingOptions(False, False, True, False))

    def save(self, step: int) -> bool:
        self._said: Any = async_save(
            self._state(), checkpoint_id=self.directory / "save", no_dist=True, async_stager=self._stager
        )
        return True

    def fence(self) -> None:
        self._said.staging_completion.result()

    def stored(self) -> Path:
        self._said.upload_completion.result()
        return super().stored()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class TorchSnapshot(Contender):
    name = "torchsnapshot async_take"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from torchsnapshot import Snapshot

        logging.getLogger("torchsnapshot").setLevel(logging.WARNING)
        self._kind = Snapshot

    def _objects(self) -> dict[str, Any]:
        return {"model": self.training.model, "optim": self.training.optimizer}

    def save(self, step: int) -> bool:
        self._pending = self._kind.async_take(str(self.directory / "save"), self._objects())
        return True

    def stored(self) -> Path:
        self._pending.wait()
        return self.directory / "save"

    def load(self, where: Path) -> None:
        self._kind(str(where)).restore(self._objects())


class DLRover(Contender):
    """Flash Checkpoint without its launcher: a saver process of the trainer's own writes what the trainer copies into memory."""

    name = "DLRover Flash Checkpoint"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        os.environ.setdefault("DLROVER_LOG_LEVEL", "ERROR")
        from dlrover.python.common.constants import CheckpointConstant
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
        from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine, start_saver_process

        self._disk = StorageType.DISK
        os.environ["TORCHELASTIC_RUN_ID"] = run = f"ckptd-bench-{os.getpid()}"  # its sockets and its memory carry the name
        self._sockets = Path("/tmp/ckpt_sock") / run
        try:
            # Its engine would start the process and write to it at once; a word that comes early is lost.
            CheckpointEngine.saver_proc = self._saver = start_saver_process()
            time.sleep(SAVER_START_S)
            self._checkpointer = DdpCheckpointer(str(directory / "save"))
        finally:
            del os.environ["TORCHELASTIC_RUN_ID"]
        self._done = directory / "save" / CheckpointConstant.TRACER_FILE_NAME

    def save(self, step: int) -> bool:
        self._step = step
        state = {"model": self.training.model.state_dict(), "optim": self.training.optimizer.state_dict()}
        self._checkpointer.save_checkpoint(step, state, storage_type=self._disk)
        return bool(self._checkpointer._engine.latest_step == step)

    def stored(self) -> Path:
        deadline = time.monotonic() + STORED_TIMEOUT_S
        while not (self._done.exists() and self._done.read_text() == str(self._step)):
            assert time.monotonic() < deadline, "its saver has not stored the step"
            time.sleep(POLL_S)
        return self.directory / "save"

    def load(self, where: Path) -> None:
        state = torch.load(where / str(self._step) / "rank_0.pt", weights_only=True)
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optim"])

    def close(self) -> None:
        self._checkpointer._engine._shm_handler.unlink()
        self._saver.kill()
        self._saver.join()
        shutil.rmtree(self._sockets, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run's
            self._sockets.parent.rmdir()


CONTENDERS: tuple[type[Contender], ...] = (Ckptd, DcpSave, DcpAsync, DcpStaged, TorchSnapshot, DLRover)
