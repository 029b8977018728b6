"""torch.distributed.checkpoint's own format, written by its own FileSystemWriter: of a plan whose tensors are read when their turn
comes, a chunk at a time."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ckptd_client.integrations.dcp_names import (
    BACKEND,
    COMMON,
    COMMON_FILE,
    CONFIG_FILE,
    PLANNER_DATA,
    PREFIX,
)
from ckptd_client.tree import decode
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (  # its name stands in every .metadata there is
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.export.contents import MODEL, Contents, leaves
from ckptd.export.optimizer import state_of
from ckptd.export.source import Source
from ckptd.export.staging import Staging
from ckptd.export.stored import Stored

CHUNK_BYTES = 64 << 20  # of a tensor: readers of this format take a whole chunk for any part of it
FILE_BYTES = 256 << 20  # the writer keeps a chunk of each tensor of a file in memory until that is written
BACKENDS = {"sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
Rows = list[list[Any]]  # key, offsets, place in the file, length: a file's items


def tree_of(contents: Contents, layout: str) -> dict[str, Any]:
    """The state that a dcp.load() of this layout asks for. Raises CkptdError where a name would be two things."""
    titan = layout == "torchtitan"
    modules, optimizers = contents.modules, contents.optimizers
    tree: dict[str, Any] = {}
    for owner, entries in modules.items():
        alone = owner == MODEL or len(modules) == 1
        _add(tree, entries if titan and alone else {MODEL if alone else owner: entries})
    for owner in optimizers:
        state = state_of(contents, owner)
        name = ("optimizer" if titan else "optim") if len(optimizers) == 1 else owner
        _add(tree, {name: state.by_name() if layout == "state_dict" else state.flat()})
    _add(tree, contents.extras())
    return tree


class _Raw(bytes):
    """An object as torch.distributed.checkpoint had packed it when it was saved through it."""


def as_saved(contents: Contents) -> dict[str, Any]:
    """What was saved through torch.distributed.checkpoint, by the names that its plans had. Raises CkptdError."""
    found: dict[str, Any] = dict(contents.tensors)
    for name in contents.objects:
        if not name.startswith(PREFIX):
            found[name] = _Raw(_kept(contents, name))
    return found


def _kept(contents: Contents, name: str) -> bytes:
    """Raises CkptdError: it is no bytes, which the adapters keep."""
    found = contents.object(name)
    if not isinstance(found, bytes):
        raise CkptdError(f"a {type(found).__name__} among what was saved through torch.distributed.checkpoint", where=name)
    return found


def _add(tree: dict[str, Any], more: dict[str, Any]) -> None:
    if twice := tree.keys() & more.keys():
        hint = "--only leaves one of them out"
        raise CkptdError(f"two things of one name: {', '.join(sorted(twice))}", where="--layout", hint=hint)
    tree.update(more)


def _check_names(tree: dict[str, Any]) -> None:
    """Raises CkptdError where torch would find one name for two values: it makes one text of the keys of nested dicts."""
    try:
        flatten_state_dict(_placeholders(tree))
    except ValueError as error:
        hint = "--only takes patterns of what is to be there (model.*), and --to torch keeps dicts as they are"
        raise CkptdError(f"torch.distributed.checkpoint has no place for it: {error}", where="--to dcp", hint=hint) from error


class DcpFolder:
    """What is to be written, before anything is read. Tied tensors are there twice, as torch has them there. What was saved through
    torch.distributed.checkpoint is written as its plans had it; layout: of anything else."""

    def __init__(self, contents: Contents, layout: str = "") -> None:
        self._checkpoint, self._paths = contents.checkpoint, None
        self._as_saved = PLANNER_DATA in contents.checkpoint.objects
        if self._as_saved:
            self._tree = as_saved(contents)
            self._paths = decode(_kept(contents, PLANNER_DATA), _no_tensor)
        else:
            self._tree = tree_of(contents, layout)
            _check_names(self._tree)
        found = [*leaves(self._tree)]
        self.tensors, self.nbytes = len(found), sum(stored.nbytes for stored in found)

    def write(self, staging: Staging) -> None:
        """As dcp.save() does it with no_dist=True, which would hide errors in one of its own."""
        planner, writer = _Planner(self._checkpoint, nested=not self._as_saved), _Writer(staging)
        planner.set_up_planner(_placeholders(self._tree), writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        if self._as_saved:
            metadata = dataclasses.replace(metadata, planner_data=self._paths)
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        results = writer.write_data(plan, planner).value()
        if staging.share is None:
            writer.finish(metadata, [results])


class MegatronFolder(DcpFolder):
    """A `torch_dist` checkpoint of Megatron-Core: the same files, and the two that it writes by itself."""

    def __init__(self, contents: Contents) -> None:
        """Raises CkptdError for what was not saved through its adapter."""
        if COMMON not in contents.checkpoint.objects:
            hint = "--to dcp, or hf: of a model's own names Megatron-Core would not know how it had stacked and padded them"
            raise CkptdError("it was not saved through Megatron-Core", where="--to megatron", hint=hint)
        super().__init__(contents)
        self._common = _kept(contents, COMMON)

    def write(self, staging: Staging) -> None:
        super().write(staging)
        for name, data in {COMMON_FILE: self._common, CONFIG_FILE: json.dumps(BACKENDS).encode()}.items():
            (staging.content / name).write_bytes(data)


def _no_tensor(key: str) -> Any:
    raise ValueError(f"a tensor, {key}, in a planner's data")


def _placeholders(value: Any) -> Any:
    if isinstance(value, Stored):
        made = torch.empty(value.shape, dtype=value.torch_dtype, device="meta")
        made.ckptd_stored = value  # type: ignore[attr-defined]
        return made
    if isinstance(value, dict):
        return {name: _placeholders(item) for name, item in value.items()}
    return type(value)(map(_placeholders, value)) if type(value) in (list, tuple) else value


class _Planner(DefaultSavePlanner):
    def __init__(self, checkpoint: Source, *, nested: bool) -> None:
        super().__init__(flatten_state_dict=nested)
        self._checkpoint = checkpoint

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[part for item in plan.items for part in self._cut(item)])
        return self.plan

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        stored = self._stored(item)
        boxes = stored.boxes(CHUNK_BYTES) if stored is not None else []
        if item.tensor_data is None or len(boxes) < 2:
            yield item
            return
        for box in boxes:
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            yield WriteItem(MetadataIndex(item.index.fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Any:
        stored = self._stored(write_item)
        value = self.state_dict[write_item.index.fqn]
        if isinstance(value, _Raw):
            return io.BytesIO(value)
        if stored is None or write_item.tensor_data is None:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        return stored.read(self._checkpoint, Box(tuple(chunk.offsets), tuple(chunk.sizes)))

    def _stored(self, item: WriteItem) -> Stored | None:
        return getattr(self.state_dict[item.index.fqn], "ckptd_stored", None)


class _Writer(FileSystemWriter):
    """File by file, so that what is written need not be again."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        super().__init__(staging.content, per_thread_copy_ahead=0)  # one after the other; nothing comes from a device

    def storage_meta(self) -> StorageMeta | None:
        """Not the name that it has until it is whole, and the same each time."""
        return StorageMeta(checkpoint_id=str(self._staging.dest), save_id=self._staging.dest.name)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_files(plan.items)):
            name = f"__{number}_0.distcp"
            prefix = dataclasses.replace(plan.storage_data, prefix=f"__{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)

            def make(path: Path, part: SavePlan = part) -> Rows:
                done = super(_Writer, self).write_data(part, planner).wait()
                return [[r.index.fqn, r.index.offset, r.storage_data.offset, r.storage_data.length] for r in done]

            rows = self._staging.whole(name, sum(map(_nbytes, items)), make)
            of = {(item.index.fqn, tuple(item.index.offset or ())): item.index for item in items}
            for key, offsets, at, length in rows or ():
                results.append(WriteResult(of[key, tuple(offsets or ())], length, _StorageInfo(name, at, length)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _files(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """At least one: a checkpoint of nothing is one, too."""
    file: list[WriteItem] = []
    nbytes = 0
    for item in items:
        if file and nbytes + _nbytes(item) > FILE_BYTES:
            yield file
            file, nbytes = [], 0
        file.append(item)
        nbytes += _nbytes(item)
    yield file


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
