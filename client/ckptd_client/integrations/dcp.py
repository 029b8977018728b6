"""torch.distributed.checkpoint over ckptd: ``dcp.async_save(state, storage_writer=CkptdStorageWriter(client, step))`` and
``dcp.load(state, storage_reader=CkptdStorageReader(client))``.

What a plan names is saved, and nothing else: its tensors as boxes, its objects as the bytes that the planner makes of them. A
save ends at ``level``: by default when it is on durable storage; ``level="protected"`` when it lies in the memory of other nodes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckptd.core.errors import CkptdError
from ckptd_client import tree
from ckptd_client.boxes import Blob, Box
from ckptd_client.client import Client
from ckptd_client.explicit import SAVING_TIMEOUT_S, Opened, Saving
from ckptd_client.integrations.dcp_names import PLANNER_DATA, PREFIX


class _Numbered:
    """Of a step, which ``checkpoint_id`` may say, of each save or load anew."""

    def __init__(self, step: int | None) -> None:
        self._given = self._step = step

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _step_in(checkpoint_id) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and self._given is None:
            self._step = _step_in(checkpoint_id)


class CkptdStorageWriter(_Numbered, StorageWriter):
    """step: None: the number that ``checkpoint_id`` ends with. level, name, timeout: as of ``Client.saving``."""

    def __init__(
        self, client: Client, step: int | None = None, *, level: str = "durable", name: str | None = None,
        timeout: float = SAVING_TIMEOUT_S,
    ) -> None:  # fmt: skip
        super().__init__(step)
        self._client, self._level, self._name, self._timeout = client, level, name, timeout
        self._coordinates = False

    def __getstate__(self) -> Any:
        raise no_process()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises CkptdError: ranks that do not speak to each other would save a step of each one's own."""
        self._coordinates = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise CkptdError("use_collectives=False is not supported", hint="a step is complete when all ranks have saved it")
        if self._step is None:
            raise CkptdError("no step", hint="CkptdStorageWriter(client, step), or a checkpoint_id that ends with a number")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Raises CkptdError, on all ranks as DCP has it."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if len(plans) != world:
            raise CkptdError(
                f"{len(plans)} of {world} ranks save", hint="process_group= with all ranks of the job, and no no_dist=True in it"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        with self._saving() as save:
            for item in self._items(plan, planner, results):
                save.add(item)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _saving(self, sealed: Callable[[], None] | None = None) -> AbstractContextManager[Saving]:
        assert self._step is not None, "set_up_storage_writer has looked"
        return self._client.saving(self._step, self._level, self._name, self._timeout, sealed)

    def _items(self, plan: SavePlan, planner: SavePlanner, results: list[WriteResult]) -> Iterator[Box | Blob]:
        for item in plan.items:
            data = planner.resolve_data(item)
            key = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO), "what a planner gives for bytes"
                found = data.getvalue()
                yield Blob(key, found)
                results.append(WriteResult(item.index, len(found), None))
                continue
            assert isinstance(data, torch.Tensor) and item.tensor_data is not None, "what a planner gives for tensors"
            chunk = item.tensor_data.chunk
            yield Box(key, data.detach(), tuple(item.tensor_data.size), tuple(chunk.offsets), role="extra")
            results.append(WriteResult(item.index, data.nbytes, None))
        if self._coordinates:
            metadata = getattr(planner, "metadata", None)
            yield Blob(PLANNER_DATA, tree.encode(getattr(metadata, "planner_data", None), PLANNER_DATA))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The step is complete since ``write_data`` ended on all ranks."""


class CkptdStorageReader(_Numbered, StorageReader):
    """step: None: the newest recoverable one, or the number that ``checkpoint_id`` ends with. ``found``: which one it was."""

    def __init__(
        self, client: Client, step: int | None = None, *, source: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(step)
        self._client, self._source, self._name = client, source, name
        self._opened: Opened | None = None

    @property
    def found(self) -> int | None:
        return self._opened.step if self._opened is not None else None

    def read_metadata(self) -> Metadata:
        """Raises CkptdError: there is nothing to be loaded."""
        opened = self._opened = self._client.open(self._step, self._source, self._name)
        if opened is None:
            raise CkptdError("this job has saved nothing", where=self._client.job, hint="ask before load(): client.open() is None")
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in opened.blobs if not name.startswith(PREFIX)}
        for key, (dtype, shape) in opened.tensors.items():
            size = torch.Size(shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
            found[key] = TensorStorageMetadata(TensorProperties(dtype), size, [chunk])
        packed = opened.blobs.get(PLANNER_DATA)
        planner_data = None if packed is None else tree.decode(packed, _no_tensor)
        return Metadata(found, planner_data=planner_data)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._opened is not None, "read_metadata comes first"
        try:
            tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            targets = [(item, planner.resolve_tensor(item).detach()) for item in tensors]
        except Exception:
            self._opened.read([])  # the other ranks are not left alone
            raise
        self._opened.read(
            (item.storage_index.fqn, tuple(item.storage_offsets), tuple(item.lengths), target) for item, target in targets
        )
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._opened.blobs[item.storage_index.fqn]))
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def no_process() -> CkptdError:
    return CkptdError(
        "AsyncCheckpointerType.PROCESS is not supported: the process that saves is no rank of the job",
        hint="the default, THREAD; the bytes leave the process through the daemon's memory in any case",
    )


def _step_in(checkpoint_id: str | os.PathLike[str]) -> int | None:
    """The number that it ends with: "run/step-500"."""
    name = os.fspath(checkpoint_id).rstrip("/")
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else None


def _no_tensor(key: str) -> torch.Tensor:
    raise CkptdError("a tensor in a planner's data", where=key)
