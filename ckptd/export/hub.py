"""A model as a folder that from_pretrained() opens: safetensors files whose tensors are whole, their index, the config."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from ckptd_client.dtypes import NAME, TORCH
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import FLOATS
from ckptd.export.contents import Contents
from ckptd.export.hub_names import CONFIG, AsIs, Group, Names, Titan, Transformers
from ckptd.export.peft_names import ADAPTER_CONFIG, Peft
from ckptd.export.staging import Staging
from ckptd.export.stored import Stored, bytes_of
from ckptd.persist.whole_file import INDEX, STEM, Whole, files_of, header, index_of

# Beside weights and config; no code, which a reader would have to trust.
COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "chat_template*", "*processor_config.json",
)  # fmt: skip


def names_of(titan: str | None, as_is: bool, config_dir: Path | None) -> Names:
    """Raises CkptdError where nothing says what the Hub's names are."""
    if config_dir is not None and (config_dir / ADAPTER_CONFIG).is_file() and titan is None and not as_is:
        return Peft(config_dir)
    if config_dir is not None and not (config_dir / CONFIG).is_file():
        hint = f"the folder of a model of the same architecture, or of an adapter ({ADAPTER_CONFIG})"
        raise CkptdError(f"no {CONFIG} there", where=str(config_dir), hint=hint)
    if titan is not None:
        return Titan(titan, config_dir)
    if as_is:
        return AsIs()
    if config_dir is None:
        hint = "--hf-config DIR (a model of transformers), --titan MODEL/FLAVOR, or --as-is where the names are the Hub's already"
        raise CkptdError("nothing says what the tensors are called on the Hub", where="--to hf", hint=hint)
    return Transformers(config_dir)


class Folder:
    """What is to be written, before anything is read. ``dtype``: of most of it."""

    def __init__(self, contents: Contents, names: Names, config_dir: Path | None, shard_bytes: int) -> None:
        self._checkpoint, self._config_dir = contents.checkpoint, config_dir
        _, entries = contents.model()
        self._entries = {name: value for name, value in entries.items() if isinstance(value, Stored)}
        dropped = sorted(entries.keys() - self._entries.keys())
        if dropped:
            contents.notes.append(f"no tensors, and left out: {', '.join(dropped)}")
        if isinstance(names, AsIs):
            self._entries = _once(self._entries, contents)
        self.groups, self._names = names.groups(self._entries), names
        if isinstance(names, Peft):
            base = len(self._entries) - len(self.groups)
            contents.notes.append(f"the adapter alone: {base} tensors of the base model are left out")
        wholes = [whole for group in self.groups for whole in self._made_of(group)]
        twice = [name for name, count in Counter(whole.name for whole in wholes).items() if count > 1]
        if twice:
            raise CkptdError(f"two tensors would be {', '.join(twice[:5])}", where="--to hf", hint="--only leaves one of them out")
        self.shards = files_of(wholes, shard_bytes, names.stem)
        if len(self.shards) > 1 and names.stem != STEM:
            raise CkptdError("an adapter is one file", where="--shard-size", hint="more, or none")
        self.nbytes = sum(whole.nbytes for whole in wholes)
        self.tensors = len(wholes)
        sizes = Counter[str]()
        for whole in wholes:
            sizes[whole.dtype] += whole.nbytes if whole.dtype in FLOATS else 0
        widest = max(sizes, key=lambda name: sizes[name], default="F32")
        self.dtype = str(TORCH[widest]).removeprefix("torch.")

    def _made_of(self, group: Group) -> Iterator[Whole[Group]]:
        if group.convert is None:
            stored = self._entries[group.names[0]]
            yield Whole(group.renamed, stored.to, stored.shape, group)
            return
        found = group.convert({name: torch.empty(s.shape, dtype=s.torch_dtype, device="meta") for name, s in self._of(group)})
        for name, tensor in found.items():
            yield Whole(name, NAME[tensor.dtype], tuple(tensor.shape), group)

    def _of(self, group: Group) -> list[tuple[str, Stored]]:
        return [(name, self._entries[name]) for name in group.names]

    def write(self, staging: Staging) -> None:
        """File by file the frames, then group by group what is in them: a group is read once, and held alone."""
        places: dict[Group, list[tuple[Path, str, int, Whole[Group]]]] = {}
        for file, wholes in self.shards.items():
            head = header(wholes)
            path = staging.file(file, partial(_frame, head=head, wholes=wholes))
            at = len(head)
            for whole in wholes:
                places.setdefault(whole.of, []).append((path, file, at, whole))
                at += whole.nbytes
        for group in self.groups:
            converted = cache(partial(self._converted, group))
            for path, file, at, whole in places.get(group, ()):
                staging.region(path, file, at, whole.nbytes, partial(self._pieces, whole, converted))
        if len(self.shards) > 1:
            (staging.content / INDEX).write_bytes(index_of(self.shards))
        if self._config_dir is not None:
            self._copy_config(staging.content, self._config_dir)

    def _copy_config(self, folder: Path, config_dir: Path) -> None:
        for name, text in self._names.configs(config_dir, self.dtype).items():
            (folder / name).write_text(text, encoding="utf-8")
        for pattern in COPIED:
            for path in config_dir.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)

    def _pieces(self, whole: Whole[Group], converted: Any) -> Iterator[memoryview]:
        if whole.of.convert is None:
            yield from self._entries[whole.of.names[0]].pieces(self._checkpoint)
        elif whole.nbytes:
            yield bytes_of(converted()[whole.name])

    def _converted(self, group: Group) -> dict[str, Tensor]:
        assert group.convert is not None
        return group.convert({name: s.read(self._checkpoint, Box.whole(s.shape)) for name, s in self._of(group)})


def _once(entries: Mapping[str, Stored], contents: Contents) -> dict[str, Stored]:
    """What is tied stands there once, under the first of its names: a config says whether it is tied again."""
    found: dict[Stored, str] = {}
    for name, stored in entries.items():
        found.setdefault(stored, name)
    left_out = sorted(entries.keys() - found.values())
    if left_out:
        contents.notes.append(f"tied, and left out: {', '.join(left_out)}")
    return {name: stored for stored, name in found.items()}


def _frame(path: Path, head: bytes, wholes: Sequence[Whole[Group]]) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + sum(whole.nbytes for whole in wholes))
