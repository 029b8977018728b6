"""A checkpoint on storage, as a source of exports."""

from __future__ import annotations

from ckptd.core.state_map.box import Box
from ckptd.export.source import Entry
from ckptd.persist.reader import Checkpoint


class Durable:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        manifest = checkpoint.manifest
        self.notes = [f"it is lossy: {', '.join(manifest.lossy)}"] if manifest.lossy else []
        self.where, self.step, self.identity = checkpoint.where, manifest.snapshot.step, manifest.xxh3_128
        self.objects, self.aliases = {ref.name for ref in manifest.objects}, manifest.aliases

    def tensors(self) -> list[Entry]:
        found = self._checkpoint.index.once().values()
        return [Entry(tensor.key, tensor.dtype, tensor.shape, tensor.role, tensor.rank, whole) for tensor, whole in found]

    def blobs(self, name: str) -> bytes | dict[int, bytes]:
        manifest, files = self._checkpoint.manifest, self._checkpoint.files
        refs = [ref for ref in manifest.objects if ref.name == name]
        if f"o:{name}" not in manifest.per_rank:
            return files.blob(refs[0])
        found = [(ref.ranks if ref.ranks is not None else range(manifest.world), files.blob(ref)) for ref in refs]
        return {rank: blob for ranks, blob in found for rank in ranks}

    def read(self, key: str, box: Box, dest: memoryview, rank: int | None = None) -> None:
        self._checkpoint.read(key, box, dest, rank)
