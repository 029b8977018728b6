"""From a model's names in memory to those of its files on the Hub, by the code of the library that the model is of: what it fuses,
permutes or renames when it loads is undone by itself. Asked in groups: the tensors that one conversion needs together."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.export.stored import Stored

CONFIG = "config.json"
SHOWN_MAX = 5  # names in one message
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Group:
    """``names``: of the model's tensors that become, together, the Hub's. ``convert`` None: they are renamed to ``renamed`` and no
    more."""

    names: tuple[str, ...]
    renamed: str = ""
    convert: Callable[[Tensors], Tensors] | None = None


class Names(ABC):
    """``stem``: of the files."""

    stem = "model"

    @abstractmethod
    def groups(self, entries: Mapping[str, Stored]) -> list[Group]: ...

    def configs(self, config_dir: Path, dtype: str) -> dict[str, str]:
        """Texts of files beside the tensors, of which most are of this dtype."""
        return {CONFIG: dtype_in(config_dir, dtype)}


class AsIs(Names):
    """The names are the Hub's already, by the user's word."""

    def groups(self, entries: Mapping[str, Stored]) -> list[Group]:
        return [Group((name,), name) for name in entries]


class Transformers(Names):
    """By the class that the config names, built without memory: its conversions, its tied names, and what it lacks."""

    def __init__(self, config_dir: Path) -> None:
        with torch.device("meta"):
            self.model = model_of(config_dir)
        self._loading = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping")
        # As the library does for a model that did not come from files; kept, so that it is not looked up for each group.
        known = mapping.get_model_conversion_mapping(self.model, add_legacy=False)
        found = [one for one in known if not isinstance(one, self._loading.PrefixChange)]
        self.model._weight_conversions = found or None
        reverse = [one.reverse_transform() for one in found[::-1]]
        self._converters = [one for one in reverse if isinstance(one, self._loading.WeightConverter)]

    def groups(self, entries: Mapping[str, Stored]) -> list[Group]:
        entries = self._without_tied(entries)
        self._check(entries)
        found: dict[str, list[str]] = {}
        plain: list[Group] = []
        for name in entries:
            renamed, pattern = self._loading.apply_converters(name, self._converters)
            if pattern is not None:
                found.setdefault(renamed, []).append(name)
            else:
                (new,) = self._reverted({name: torch.empty(0, device="meta")})
                plain.append(Group((name,), new))
        return plain + [Group(tuple(names), convert=self._reverted) for names in found.values()]

    def _reverted(self, tensors: Tensors) -> Tensors:
        return dict(self._loading.revert_weight_conversion(self.model, tensors))

    def _without_tied(self, entries: Mapping[str, Stored]) -> dict[str, Stored]:
        """What the config ties is saved once, as the library itself does. Raises CkptdError where it holds two values."""
        tied = dict(self.model.all_tied_weights_keys)
        for name, source in tied.items():
            if name in entries and source in entries and entries[name] != entries[source]:
                hint = "tie_word_embeddings=false in the config of --hf-config, if they were trained apart"
                what = f"the config ties {name} to {source}, and the checkpoint has two values"
                raise CkptdError(what, where="--hf-config", hint=hint)
        renamed = {source: name for name, source in tied.items() if source not in entries and name in entries}
        entries = {**entries, **{source: entries[name] for source, name in renamed.items()}}
        return {name: stored for name, stored in entries.items() if name not in tied}

    def _check(self, entries: Mapping[str, Stored]) -> None:
        """Every tensor of the model is there in its shape, and no other."""
        tied = self.model.all_tied_weights_keys
        wanted = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items() if name not in tied}
        reshaped = [name for name in wanted if name in entries and entries[name].shape != wanted[name]]
        told = [
            f"{what}: {few(names)}"
            for what, names in (
                ("missing", [name for name in wanted if name not in entries]),
                ("unexpected", [name for name in entries if name not in wanted]),
                ("of another shape", [f"{name} {list(entries[name].shape)} for {list(wanted[name])}" for name in reshaped]),
            )
            if names
        ]
        if told:
            hint = "--prefix-map OLD=NEW, --only, or the config that the model was trained with"
            raise CkptdError(f"no {type(self.model).__name__}: {'; '.join(told)}", where="--hf-config", hint=hint)


class Titan(Names):
    """By torchtitan's adapter of a model and flavor, such as llama3/8B; each tensor is a group."""

    def __init__(self, flavor: str, config_dir: Path | None) -> None:
        model, _, name = flavor.partition("/")
        if not model.isidentifier():
            raise CkptdError(f"no model of torchtitan: {flavor}", where="--titan", hint="model/flavor, as in llama3/8B")
        imported("torchtitan", "pip install torchtitan")
        try:
            module = importlib.import_module(f"torchtitan.models.{model}")
            spec = module.model_registry(name)
        except (ImportError, AttributeError, KeyError) as error:
            hint = "model/flavor, as in llama3/8B"
            raise CkptdError(f"torchtitan has no {flavor}: {error}", where="--titan", hint=hint) from error
        if spec.state_dict_adapter is None:
            raise CkptdError(f"torchtitan knows no names of the Hub for {model}", where="--titan", hint="--as-is")
        self._adapter = spec.state_dict_adapter(spec.model, str(config_dir) if config_dir is not None else None)

    def groups(self, entries: Mapping[str, Stored]) -> list[Group]:
        return [Group((name,), convert=self._adapter.to_hf) for name in entries]


def model_of(config_dir: Path) -> Any:
    """Of the class of transformers that the config names."""
    transformers = imported("transformers", "pip install transformers, or --as-is where the names are the Hub's already")
    config = transformers.AutoConfig.from_pretrained(config_dir, local_files_only=True, trust_remote_code=False)
    architecture = next(iter(config.architectures or ()), "")
    kind = getattr(transformers, architecture, None)
    if kind is None:
        what = f"no model of transformers {transformers.__version__}: {architecture or 'no architectures'}"
        raise CkptdError(what, where=str(config_dir / CONFIG), hint="--as-is where the names are the Hub's already")
    return kind(config)


def dtype_in(config_dir: Path, dtype: str) -> str:
    """config.json's text with the dtype that was written, wherever it names one."""
    config = json.loads((config_dir / CONFIG).read_text(encoding="utf-8"))
    _set_dtype(config, dtype)
    if "dtype" not in config and "torch_dtype" not in config:
        config["dtype"] = dtype
    return json.dumps(config, indent=2) + "\n"


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for name, value in config.items():
        if name in ("dtype", "torch_dtype"):
            config[name] = dtype
        elif isinstance(value, dict) and name.endswith("_config"):
            _set_dtype(value, dtype)


def imported(name: str, hint: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CkptdError(f"{name} is not installed here, and its names are its own code's to say", hint=hint) from error


def few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN_MAX]) + (f" and {len(names) - SHOWN_MAX} more" if names[SHOWN_MAX:] else "")
