"""An adapter's files, as the library peft writes and names them: what of the state is the adapter's, its own code says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptd.core.errors import CkptdError
from ckptd.export.hub_names import CONFIG, Group, Names, Tensors, few, imported, model_of
from ckptd.export.stored import Stored

ADAPTER_CONFIG = "adapter_config.json"
DEFAULT = "default"  # what peft calls an adapter that nobody named


class Peft(Names):
    """By ``adapter_config.json`` of a folder and the base model's config: beside it, or where it says that the base model lies. The
    model is built without memory."""

    stem = "adapter_model"

    def __init__(self, config_dir: Path) -> None:
        self._peft = imported("peft", "pip install peft")
        self._where = str(config_dir)
        self._config = self._peft.PeftConfig.from_pretrained(config_dir)
        places = (config_dir, Path(self._config.base_model_name_or_path or config_dir))
        self._base = next((place for place in places if (place / CONFIG).is_file()), None)
        if self._base is None:
            hint = f"put the base model's {CONFIG} beside {ADAPTER_CONFIG}"
            raise CkptdError("nothing says what the base model is", where=self._where, hint=hint)

    def configs(self, config_dir: Path, dtype: str) -> dict[str, str]:
        return {ADAPTER_CONFIG: (config_dir / ADAPTER_CONFIG).read_text(encoding="utf-8")}

    def groups(self, entries: Mapping[str, Stored]) -> list[Group]:
        model = self._built(DEFAULT)
        adapter = adapter_of(model.state_dict(), entries)
        model = self._built(adapter) if adapter != DEFAULT else model
        state = dict(model.state_dict())
        files = self._files(model, state, adapter)
        came = {id(tensor): name for name, tensor in state.items()}
        wanted = {came[id(tensor)]: new for new, tensor in files.items() if id(tensor) in came}
        if len(wanted) < len(files):
            raise CkptdError(f"peft computes what it writes of {self._config.peft_type}", where=self._where, hint="--to torch")
        self._check(wanted, state, entries)
        return [Group((name,), new) for name, new in wanted.items()]

    def _built(self, adapter: str) -> Any:
        assert self._base is not None, "was looked for"
        with torch.device("meta"):
            return self._peft.get_peft_model(model_of(self._base), self._config, adapter_name=adapter)

    def _files(self, model: Any, state: Tensors, adapter: str) -> Tensors:
        """New name -> tensor. What peft would look up on the Hub (was the vocabulary changed?) it is not asked."""
        targets = self._config.target_modules if hasattr(self._config, "target_modules") else None
        embeds = bool({*(targets or ())} & {*self._peft.utils.other.EMBEDDING_LAYER_NAMES}) and not isinstance(targets, str)
        found = self._peft.get_peft_model_state_dict(model, state, adapter_name=adapter, save_embedding_layers=embeds)
        return dict(found)

    def _check(self, wanted: Mapping[str, str], state: Tensors, entries: Mapping[str, Stored]) -> None:
        missing = [name for name in wanted if name not in entries]
        shapes = {name: tuple(state[name].shape) for name in wanted}
        there = [name for name in wanted if name in entries and entries[name].shape != shapes[name]]
        reshaped = [f"{name} {list(entries[name].shape)} for {list(shapes[name])}" for name in there]
        told = [f"{what}: {few(names)}" for what, names in (("missing", missing), ("of another shape", reshaped)) if names]
        if told:
            hint = f"--prefix-map OLD=NEW, or the {ADAPTER_CONFIG} that the adapter was trained with"
            raise CkptdError(f"no such adapter: {'; '.join(told)}", where="--hf-config", hint=hint)


def adapter_of(state: Iterable[str], entries: Mapping[str, Stored]) -> str:
    """What the checkpoint calls the adapter that is DEFAULT in ``state``. Raises CkptdError: it has several."""
    named = next(filter(None, (re.fullmatch(rf"(.*\.){DEFAULT}((?:\..*)?)", name) for name in state)), None)
    before, after = named.groups() if named is not None else ("", "")
    found = {name[len(before) : len(name) - len(after)] for name in entries if name.startswith(before) and name.endswith(after)}
    found = {name for name in found if named is not None and name and "." not in name}
    if len(found) > 1:
        hint = f"--only '*.{min(found)}.*' picks one"
        raise CkptdError(f"several adapters: {', '.join(sorted(found))}", where="--to hf", hint=hint)
    return next(iter(found), DEFAULT)
