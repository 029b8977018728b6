"""What is to be captured or restored, by name: one entry per tensor, as its owner holds it (design D6, D7)."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.protocol.machine.waiting import shown
from ckptd.core.state_map.box import Box

if TYPE_CHECKING:
    from ckptd_client.slices import Slice

KeyMap = Mapping[str, str] | Callable[[str], str]


class Mode(enum.IntEnum):
    """When a tensor's bytes are copied."""

    SMALL = 0  # before snapshot() returns, many in one call
    SYNC = 1  # before snapshot() returns: buffers and what the user writes by hand
    FENCED = 2  # in the background; the optimizer's next step waits
    STATIC = 3  # frozen: in the background into a slot of its own, again when pointer, version, sample or audit says so


@dataclass(eq=False)
class Owner:
    """One registered object under one name. What is known to be written past the fence is copied before snapshot() returns
    from then on: the tensors ``written``, or all of it (``writes_unfenced``)."""

    name: str
    kind: str  # module | optimizer | stateful | tensor | value | boxes
    value: Any
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    fenced: bool = False
    key_map: KeyMap | None = None
    writes_unfenced: bool = False
    captured: bool = False  # by a graph, which replays it without any hook
    replayed: bool = False  # that may be so
    written: set[str] = field(default_factory=set)  # keys
    written_in: int = -1  # the grant whose snapshot was void for the newest of them
    thawed: bool = False  # its frozen parameters change too often to be kept apart
    gradients: bool = False  # are its parameters' gradients captured, too?
    since: int = 0  # when it was registered (watch.now)
    place: tuple[Any, Any] | None = None  # the dict or list that it was found in, and its key there
    late: bool = False  # it came there after a restore
    rules: Mapping[str, Any] = field(default_factory=dict)  # pattern -> how the program has cut what it fits (rules.py)
    axes: Any = None  # what ``over`` means in them

    @property
    def replaceable(self) -> bool:
        """Whoever holds the container sees what takes its place."""
        return self.place is not None and isinstance(self.place[0], dict | list)

    def replace(self, value: Any) -> None:
        """A value that has no inside to be filled."""
        self.value = value
        if self.place is not None and self.replaceable:
            self.place[0][self.place[1]] = value

    def takes(self, key: str) -> bool:
        """Patterns are shell patterns on whole keys (``model.head.*``)."""
        if not (self.include or self.exclude):  # of 20,000 keys each call counts
            return True
        return not (self.include and not matches(key, self.include)) and not matches(key, self.exclude)

    @property
    def unfenced(self) -> bool:
        """Is all of it written past the fence?"""
        return self.writes_unfenced or self.captured or self.replayed

    @property
    def synchronous(self) -> str:
        """Why it, or a part of it, is copied before snapshot() returns. "": it is not."""
        if self.captured or self.replayed:
            return "a graph replays its steps"
        if self.writes_unfenced:
            return "it is written past the fence"
        return f"written past the fence: {shown(sorted(self.written))}" if self.written else ""

    def escapes(self, key: str) -> bool:
        """Is this tensor?"""
        return self.unfenced or key in self.written

    def was_written(self, keys: Collection[str], grant: int) -> None:
        """The snapshot under this grant is void, as these were written past the fence; all of it where none is named. The second
        time there is no end to be expected of such writes."""
        new = set(keys) - self.written
        again = bool(self.written) and self.written_in != grant
        self.writes_unfenced |= not keys or (bool(new) and again)
        self.written |= new
        if new:
            self.written_in = grant

    def rename(self, key: str) -> str:
        """key_map: a function, or {old prefix: new prefix} at dots, the longest that fits."""
        if self.key_map is None:
            return key
        if callable(self.key_map):
            return self.key_map(key)
        fitting = [old for old in self.key_map if key == old or key.startswith(old + ".")]
        if not fitting:
            return key
        old = max(fitting, key=len)
        return self.key_map[old] + key[len(old) :]


def matches(key: str, patterns: Sequence[str]) -> bool:
    return bool(patterns) and any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def check_fits(
    what: str, patterns: Sequence[str], keys: Collection[str], fits: Callable[[str, Sequence[str]], bool] = matches
) -> None:
    """Raises CkptdError naming those that fit none: what they ask for would be missing, and nobody told (P15)."""
    idle = [pattern for pattern in patterns if not any(fits(key, [pattern]) for key in keys)]
    if idle:
        named = sorted(key for key in keys if not key.startswith("$"))
        raise CkptdError(
            f"{what}={idle!r} fits none of {len(named)} keys: {shown(named)}",
            hint="a pattern is of a whole key: model.* for all of model",
        )


@dataclass(frozen=True, slots=True)
class Copies:
    """Structure that says who else holds this plain tensor. ``ranks``: global ranks of the group.

    first_only: the value is by definition that of the group's first rank (DDP's broadcast buffers).
    """

    ranks: tuple[int, ...]
    first_only: bool = False


class Placed(NamedTuple):
    """Where a tensor that the program has cut itself lies in the logical one, whose shape is ``shape``: its boxes, each with its
    offsets in the tensor. ``flat``: the tensor has one dimension, and holds them one after the other in C order. ``ranks``: over so
    many it is cut or copied, by a rule; 0: nobody knows. ``alone``: no two of them hold the same. ``padding``: (dimension, start,
    length) in the tensor of what lies behind the logical one."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]
    flat: bool = False
    ranks: int = 0
    alone: bool = False
    padding: tuple[tuple[int, int, int], ...] = ()


class Entry(NamedTuple):
    key: str
    tensor: Tensor  # plain or DTensor
    role: str  # param | buffer | optim | extra
    owner: Owner
    mode: Mode
    copies: Copies | None = None
    placed: Placed | None = None

    @property
    def is_born(self) -> bool:
        """It is there from the beginning; state of an optimizer that ckptd reads itself comes with the first step."""
        return self.role != "optim" or self.owner.kind == "boxes"

    def placed_like(self, tensor: Tensor) -> Placed | None:
        """Of a state or gradient of this parameter: it is cut as that is, if it has its shape."""
        return self.placed if self.placed is not None and tensor.shape == self.tensor.shape else None


class Extra(Protocol):
    """State beside an owner's tensors, asked for at each capture."""

    def get(self) -> Any: ...

    def set(self, value: Any) -> None:
        """After the owner's tensors are written. Raises CkptdError when it cannot be taken back."""


@dataclass
class State:
    """Everything registered, at one moment. ``objects``: name -> encoded tree, filled at a capture. ``odd``: optimizer
    name -> its state that is not a tensor. ``params``: id(parameter) -> its entry, also of those not captured. ``groups``:
    optimizer name -> {parameter key: index of its group}. ``extras``: owner name -> {object: what gives and takes it}.
    ``beside``: optimizer name -> what its own state_dict() has more. ``slices``: of the entries, once the job's world is known.
    """

    entries: list[Entry] = field(default_factory=list)
    aliases: list[tuple[str, str]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    params: dict[int, Entry] = field(default_factory=dict)
    odd: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    extras: dict[str, dict[str, Extra]] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # patterns of parameters whose optimizer state is left out on purpose
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    slices: list[list[Slice]] = field(default_factory=list)
