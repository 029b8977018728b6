"""Megatron-Core's distributed checkpoints over ckptd:

    dist_checkpointing.save(state, directory, sharded_strategy=CkptdSaveStrategy(client, step))
    with loading(client) as (directory, strategy):
        state = dist_checkpointing.load(targets, directory, strategy)

What Megatron's plan names is saved, its objects as the bytes that Megatron makes of them. ``directory`` takes what Megatron writes
by itself (common.pt, metadata.json), any empty one does; its bytes go with the step, and are laid out again for a load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import __version__ as version
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from ckptd.core.errors import CkptdError
from ckptd_client.boxes import Blob, Box
from ckptd_client.client import Client
from ckptd_client.explicit import SAVING_TIMEOUT_S
from ckptd_client.integrations.dcp import CkptdStorageReader, CkptdStorageWriter
from ckptd_client.integrations.dcp_names import COMMON

BACKEND = ("torch_dist", 1)
KNOWN = "0.16."  # of Megatron-Core; later ones replace a strategy that they do not know by one of their own, without a word

if not version.startswith(KNOWN):
    raise CkptdError(f"Megatron-Core {version} is not supported by this adapter", where="megatron", hint=f"tested with {KNOWN}1")


class CkptdSaveStrategy(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """step: None: the number that the directory's name ends with. level, name, timeout: as of ``Client.saving``."""

    def __init__(
        self, client: Client, step: int | None = None, *, level: str = "durable", name: str | None = None,
        timeout: float = SAVING_TIMEOUT_S,
    ) -> None:  # fmt: skip
        super().__init__(*BACKEND)
        self._client, self._step = client, step
        self._how: dict[str, Any] = {"level": level, "name": name, "timeout": timeout}

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Returns when the step is at ``level``; raises CkptdError with the reason on all ranks."""
        flat, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        writer = _Writer(self._client, self._step, directory=Path(checkpoint_dir), **self._how)
        planner = torch_dist.MCoreSavePlanner(flatten_state_dict=False)
        tensors = torch_dist.mcore_to_pyt_state_dict(flat, False)
        save(tensors, checkpoint_id=str(checkpoint_dir), storage_writer=writer, planner=planner)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Raises CkptdError: Megatron would save from another process, which is no rank of the job."""
        hint = "save() in a thread of your own, or with level='sealed', which does not wait for storage or peers"
        raise CkptdError("async_sharded_save=True is not supported", where="CkptdSaveStrategy", hint=hint)


class CkptdLoadStrategy(torch_dist.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Of one step; ``loading()`` makes it."""

    def __init__(self, reader: CkptdStorageReader) -> None:
        super().__init__()
        self._reader = reader

    @property
    def found(self) -> int | None:
        """The step."""
        return self._reader.found

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        wanted = [one for one in nested_values(sharded_state_dict) if isinstance(one, ShardedTensor)]
        padded = {one.key: one for one in wanted if one.allow_shape_mismatch}
        flat, paths, names = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        tensors = torch_dist.mcore_to_pyt_state_dict(flat, True)
        planner = torch_dist.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in wanted if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors=padded,
        )
        load(tensors, storage_reader=self._reader, planner=planner)
        loaded = {key: torch_dist._unwrap_pyt_sharded_tensor(value) for key, value in tensors.items()}
        found = torch_dist._replace_sharded_keys_with_state_dict_keys(loaded, paths, names)
        torch_dist._restore_dict_types(found, sharded_state_dict)
        return found

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Metadata | None = None) -> Any:
        return super().load_tensors_metadata(checkpoint_dir, metadata or self._reader.read_metadata())

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        metadata = self._reader.read_metadata()
        objects = (key for key, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata))
        found = {key: ShardedObject.empty_from_unique_key(key) for key in objects}
        return found | self.load_tensors_metadata(checkpoint_dir, metadata)


@contextmanager
def loading(
    client: Client, step: int | None = None, *, source: str | None = None, name: str | None = None
) -> Iterator[tuple[str, CkptdLoadStrategy]]:
    """All ranks: a directory of this rank's own and the strategy for ``dist_checkpointing.load``. step, source, name: as of
    ``Client.open``. Raises CkptdError: there is nothing to be loaded."""
    opened = client.open(step, source, name)
    if opened is None:
        raise CkptdError("this job has saved nothing", where=client.job, hint="ask before: client.open() is None")
    common = opened.blobs.get(COMMON)
    if common is None:
        raise CkptdError(f"step {opened.step} was not saved through Megatron", where=client.job)
    with tempfile.TemporaryDirectory(prefix="ckptd-megatron-") as directory:
        (Path(directory) / COMMON_STATE_FNAME).write_bytes(common)
        save_config(CheckpointingConfig(*BACKEND), directory)
        yield directory, CkptdLoadStrategy(CkptdStorageReader(client, opened.step, source=source, name=name))


class _Writer(CkptdStorageWriter):
    def __init__(self, *args: Any, directory: Path, **how: Any) -> None:
        super().__init__(*args, **how)
        self._directory = directory

    def _items(self, plan: SavePlan, planner: SavePlanner, results: list[WriteResult]) -> Iterator[Box | Blob]:
        yield from super()._items(plan, planner, results)
        if self._coordinates:
            yield Blob(COMMON, (self._directory / COMMON_STATE_FNAME).read_bytes())


__all__ = ["CkptdLoadStrategy", "CkptdSaveStrategy", "loading"]
