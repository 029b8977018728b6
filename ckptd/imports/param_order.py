"""Which parameter is which, where an optimizer's state only numbers them: the user's word, or what nothing but one order fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptd.core.errors import CkptdError
from ckptd.imports.stored import Stored
from ckptd.imports.wrappers import unwrapped

if TYPE_CHECKING:
    from ckptd.imports.optimizers import Named

MODEL = "model"
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # torch's own, which no optimizer has
NAMES_BYTES_MAX = 64 << 20
NAMES_TXT = (
    "--param-names names.txt, which its program writes:"
    " names = {p: n for n, p in model.named_parameters()};"
    ' open("names.txt", "w").write("\\n".join(names[p] for g in optimizer.param_groups for p in g["params"]))'
)
SAY = f"--param-names model, if it was made of model.parameters(); else {NAMES_TXT}"


@dataclass
class ParamOrder:
    """``--param-names``: of the parameters of all groups, one after the other, of one optimizer after the other. said: there is a
    word of it. names: those of a file that are not taken yet. of_model: the model's own order."""

    said: bool = False
    names: list[str] = field(default_factory=list)
    of_model: bool = False

    @staticmethod
    def parse(text: str | None) -> ParamOrder:
        """Raises CkptdError."""
        if text is None or text == MODEL:
            return ParamOrder(text is not None, of_model=text is not None)
        try:
            with Path(text).open(encoding="utf-8") as file:
                lines = file.read(NAMES_BYTES_MAX).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CkptdError(f"cannot be read: {error}", where=f"--param-names {text}", hint="model, or a file of names") from error
        names = [name for name, _ in unwrapped((line, None) for line in lines if line.strip())]
        if not names:
            raise CkptdError("it has no names", where=f"--param-names {text}", hint="one name of a parameter per line")
        return ParamOrder(True, names)

    def keys(
        self, made: Named, owner: str, numbers: Sequence[Any], states: Mapping[Any, Any], key_of: Callable[[str], str]
    ) -> dict[Any, str]:
        """Of each number, the parameter's key. Raises CkptdError: it is not known, or does not fit."""
        if not self.said:
            return _by_shape(made, owner, numbers, states)
        names, self.names = self.names[: len(numbers)], self.names[len(numbers) :]
        keys = _of_model(made, owner) if self.of_model else [key_of(name) for name in names]
        hint = NAMES_TXT if self.of_model else SAY
        what = "tensors of the model" if self.of_model else "names"
        if len(keys) != len(numbers) or len(set(keys)) != len(keys):
            text = f"{len(set(keys))} {what} for the {len(numbers)} parameters that it numbers"
            raise CkptdError(f"which parameter is which cannot be told: {text}", where=owner, hint=hint)
        flat = (sum(math.prod(made.tensors[key][0].shape) for key in keys),)  # LBFGS has the first parameter's state for all
        for one, key in zip(numbers, keys, strict=True):
            shapes, shape = _shapes(states, one), made.tensors[key][0].shape
            if shapes and shape not in shapes and shapes != {flat} and not _is_factored(shapes, shape):
                raise CkptdError(f"state of shape {min(shapes)} does not fit {key}", where=owner, hint=hint)
        return dict(zip(numbers, keys, strict=True))

    def check(self) -> None:
        """Raises CkptdError: more names than there are parameters."""
        if self.names:
            text = f"{len(self.names)} names more than there are numbered parameters, {self.names[0]} among them"
            raise CkptdError(text, where="--param-names", hint=SAY)


def _shapes(states: Mapping[Any, Any], one: Any) -> set[tuple[int, ...]]:
    return {value.shape for value in states.get(one, {}).values() if isinstance(value, Stored) and value.shape}


def _is_factored(shapes: set[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Adafactor's: rows and columns, each without one dimension, or with one element of it."""
    without = {(*shape[:dim], *rest, *shape[dim + 1 :]) for dim in range(len(shape)) for rest in ((), (1,))}
    return len(shapes) > 1 and shapes <= without


def _tensors(made: Named) -> dict[Any, str]:
    """Keys of what may be parameters: a tied one is there once."""
    found: dict[Any, str] = {}
    for key, (stored, role) in made.tensors.items():
        if role != "optim":
            found.setdefault(key if stored.same is None else stored.same, key)
    return found


def _of_model(made: Named, owner: str) -> list[str]:
    """In the order of ``model.parameters()``, which is the file's. Raises CkptdError where somebody has sorted that by name: the
    state of equal shapes would be another parameter's."""
    keys = [key for key in _tensors(made).values() if key.rpartition(".")[2] not in BUFFERS]
    keys = [key for key in keys if key.startswith("model.")] or keys
    if keys == sorted(keys) and _is_no_models(keys):
        text = "its tensors stand in the order of their names, which is not the model's: which parameter is which cannot be told"
        raise CkptdError(text, where=owner, hint=NAMES_TXT)
    return keys


def _is_no_models(keys: Sequence[str]) -> bool:
    """Layer 10 before layer 2, or a bias before its weight."""
    known = {*keys}
    layers = [[(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in key.split(".")] for key in keys]
    return layers != sorted(layers) or any(f"{key.removesuffix('bias')}weight" in known for key in keys if key.endswith("bias"))


def _by_shape(made: Named, owner: str, numbers: Sequence[Any], states: Mapping[Any, Any]) -> dict[Any, str]:
    """Each parameter's state has one shape, which one tensor of the file has, and no other parameter's state."""
    of_shape: dict[tuple[int, ...], list[str]] = {}
    for key in _tensors(made).values():
        of_shape.setdefault(made.tensors[key][0].shape, []).append(key)
    fitting = {one: [key for shape in _shapes(states, one) for key in of_shape.get(shape, [])] for one in numbers}
    found = {one: keys[0] for one, keys in fitting.items() if len(keys) == 1 and len(_shapes(states, one)) == 1}
    if len(set(found.values())) < len(numbers):
        text = f"which parameter is which cannot be told: it only numbers {len(numbers)} of them"
        raise CkptdError(text, where=owner, hint=SAY)
    return found
