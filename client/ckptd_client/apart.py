"""Tensor subclasses that wrap others (quantised weights, 8-bit moments): taken apart by ``__tensor_flatten__`` (P15).

Each inner tensor is captured under its own name. What is no tensor (a block size, a sign) is written down as the *form*: a
restore into a live one of another form puts it together anew, or refuses by name.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptd.core.errors import CkptdError
from ckptd_client.naming import is_dtensor

FORMS = "subclasses"  # object "<name>.subclasses": {key of a tensor: its form}
SHARDED = "sharded"  # the subclass is this rank's part of a DTensor
SUBCLASS = "$subclass"  # marks a form in optimizer state
_AS_THEY_ARE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.Size, Enum)
Form = dict[str, Any]


def is_apart(tensor: Any) -> bool:
    if type(tensor) in (Tensor, torch.nn.Parameter) or not isinstance(tensor, Tensor):
        return False
    if is_dtensor(tensor):
        return is_apart(_local(tensor))
    return is_traceable_wrapper_subclass(tensor)


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def sharded_like(whole: Any, local: Tensor) -> Tensor:
    """``local`` as this rank's part of what is cut as the DTensor ``whole`` is."""
    from torch.distributed.tensor import DTensor

    mesh, placements = whole.device_mesh, whole.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def plain_like(tensor: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """An empty tensor cut and strided as this one, of plain memory."""
    if not is_apart(tensor):
        return torch.empty_like(tensor, dtype=dtype, device=device)
    local = torch.empty(_local(tensor).shape, dtype=dtype, device=device)
    return sharded_like(tensor, local) if is_dtensor(tensor) else local


def inner(tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that it wraps, nested ones by dotted name. Of a DTensor of subclasses (torchao under FSDP2)
    what has the shape of the local part is cut as that is; the rest, such as scales, is this rank's own."""
    if is_dtensor(tensor):
        local = _local(tensor)
        for name, part in inner(local):
            yield name, sharded_like(tensor, part.detach()) if part.shape == local.shape else part
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if is_apart(part):
            yield from ((f"{name}.{below}", leaf) for below, leaf in inner(part))
        else:
            yield name, part


def form_of(tensor: Any, key: str) -> Form:
    """All but the inner tensors. Raises CkptdError when it cannot be written down."""
    if is_dtensor(tensor):
        return {**form_of(_local(tensor), key), "requires_grad": tensor.requires_grad, SHARDED: True}
    names, context = tensor.__tensor_flatten__()
    kind = type(tensor)
    try:
        described = _describe(context)
    except TypeError as error:
        raise CkptdError(
            f"a {kind.__name__} cannot be taken apart: its {error} cannot be written down", where=key,
            hint="leave it out with exclude=",
        ) from error  # fmt: skip
    parts = {name: getattr(tensor, name) for name in names}
    return {
        SUBCLASS: [kind.__module__, kind.__qualname__],
        "context": described,
        "parts": {name: form_of(part, f"{key}.{name}") if is_apart(part) else None for name, part in parts.items()},
        "shape": tensor.shape,
        "stride": tuple(tensor.stride()),
        "requires_grad": tensor.requires_grad,
    }


def _describe(value: Any) -> Any:
    """As a tree can hold it; devices are not part of it, for a restore may be on another."""
    if isinstance(value, torch.device):
        return None
    if type(value) in (list, tuple):
        return type(value)(_describe(item) for item in value)
    if type(value) is dict:
        return {key: _describe(item) for key, item in value.items()}
    if isinstance(value, tuple) and not isinstance(value, _AS_THEY_ARE):  # a NamedTuple
        return {"$class": type(value).__qualname__, "items": [_describe(item) for item in value]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"$class": type(value).__qualname__, "items": fields}
    if isinstance(value, type):
        return {"$class": value.__qualname__}
    if isinstance(value, _AS_THEY_ARE):
        return value
    raise TypeError(type(value).__name__)


def build(form: Form, take: Callable[[str], Tensor], path: str, like: Tensor) -> Tensor:
    """Put together what was taken apart. ``take``: the inner tensor of a dotted name. ``like``: a DTensor cut the same way, of
    what is sharded. Raises CkptdError."""
    kind = check_buildable(form, path)
    parts = {
        name: _local(take(f"{path}.{name}")) if below is None else build(below, take, f"{path}.{name}", like)
        for name, below in form["parts"].items()
    }
    context = form["context"]
    made: Tensor = kind.__tensor_unflatten__(parts, context, torch.Size(form["shape"]), tuple(form["stride"]))
    if form.get(SHARDED) and is_dtensor(like):
        made = sharded_like(like, made)
    return made.requires_grad_(form["requires_grad"]) if made.is_leaf and form["requires_grad"] else made


def check_buildable(form: Form, path: str) -> Any:
    """Its class. Raises CkptdError when the form and the parts are not enough."""
    kind = _class_of(form, path)
    if _has_class(form["context"]):
        raise CkptdError(f"a {kind.__name__} cannot be put together from its parts alone", where=path)
    for name, below in form["parts"].items():
        if below is not None:
            check_buildable(below, f"{path}.{name}")
    return kind


def _class_of(form: Form, path: str) -> Any:
    """Only a tensor class that the program has imported itself: nothing is imported because a file says so (P13)."""
    module, name = form[SUBCLASS]
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not (isinstance(found, type) and issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__")):
        text = f"tensor class {module}.{name} is not found under this name in this program"
        raise CkptdError(text, where=path, hint="define it at the top of a module, and import that before restore()")
    return found


def _has_class(context: Any) -> bool:
    if isinstance(context, dict):
        return "$class" in context or any(map(_has_class, context.values()))
    return isinstance(context, list | tuple) and any(map(_has_class, context))


class Forms:
    """Of the subclasses among one owner's tensors; saved beside them, compared or set at a restore."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name, self._tensors = name, dict(tensors)

    def get(self) -> dict[str, Form]:
        return {key: form_of(tensor, key) for key, tensor in self._tensors.items()}

    def set(self, saved: Mapping[str, Form]) -> None:
        """The inner tensors are written already. Raises CkptdError naming what cannot be given its saved form."""
        for key, tensor in self._tensors.items():
            form, here = saved.get(key), form_of(tensor, key)
            if form is None or form["context"] == here["context"]:
                continue
            parts = dict(inner(tensor))
            try:
                made = build(form, lambda path, parts=parts: parts[path.removeprefix(".")], "", tensor)  # type: ignore[misc]
                torch.utils.swap_tensors(tensor, made.requires_grad_(tensor.requires_grad))  # type: ignore[no-untyped-call]
            except (RuntimeError, CkptdError) as error:
                text = f"was saved as another kind of {type(tensor).__name__}: {form['context']}, here {here['context']}"
                raise CkptdError(f"{key} {text}", where=self.name, hint="make it as it was when it was saved") from error
