"""Values that turned out to be each rank's own while no rule speaks of them: told while the job runs, as a restore into a world of
another size would be refused for them (design D7, D18)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from ckptd.core.protocol.machine.waiting import shown
from ckptd_client import naming
from ckptd_client.entries import Owner, matches
from ckptd_client.pooled import FIRST, MEAN
from ckptd_client.registry import Registry
from ckptd_client.rules import Own
from ckptd_client.tree import REF_MARK
from ckptd_client.troubles import Troubles


class OwnValues:
    """Its daemon tells one rank of a job, the lowest on the steward's node."""

    def __init__(self, registry: Registry, troubles: Troubles) -> None:
        self._registry, self._troubles = registry, troubles
        self._keys: dict[str, None] = {}  # in the order in which they came
        self._warned = False

    def differ(self, keys: Sequence[str]) -> None:
        """These tensors differ between ranks, says the daemon, and again when it was started again. Warns of the first ones that no
        rule covers, once. Tensors in an object (the state of a generator) are that object's, and take no rule."""
        self._keys.update((key, None) for key in keys if REF_MARK not in key)
        found = self.without_rule if keys and not self._warned else []
        if found:
            self._warned = True
            self._troubles.pass_on(_told(found, self._counted()), "")

    @property
    def without_rule(self) -> list[str]:
        """Those that a restore into a world of another size would be refused for, by what is registered now."""
        counted = self._counted() if self._keys else frozenset()
        return [key for key in list(self._keys) if not self._has_rule(key, key in counted)]

    def _has_rule(self, key: str, counted: bool) -> bool:
        for owner in list(self._registry.owners.values()):
            theirs = owner.key_map is not None or f"{key}.".startswith(f"{owner.name}.")
            fitting = (rule for pattern, rule in owner.rules.items() if theirs and matches(key, [pattern]))
            if any(isinstance(rule, Own) and not (counted and rule.how == MEAN) for rule in fitting):
                return True
        return False

    def _counted(self) -> frozenset[str]:
        """Keys of whole numbers, of which there is no mean."""
        found = set[str]()
        for owner in self._registry.of_kind("module", "tensor"):
            tensors = [(owner.name, owner.value)] if owner.kind == "tensor" else _tensors_of(owner)
            found.update(owner.rename(name) for name, tensor in tensors if not tensor.is_floating_point())
        return frozenset(found)


def _tensors_of(owner: Owner) -> list[tuple[str, Tensor]]:
    return [(f"{owner.name}.{spot.name}", spot.tensor) for spot in naming.walk(owner.value)[0]]


def _told(keys: Sequence[str], counted: Collection[str]) -> str:
    what = "1 tensor differs" if len(keys) == 1 else f"{len(keys)} tensors differ"
    floats = [key for key in keys if key not in counted]
    rule = f'"{_pattern(floats or keys)}": own("{MEAN if floats else FIRST}")'
    return (
        f"{what} between ranks: {shown(keys)}. As many ranks each get their own back; a restore into another number of ranks is"
        f' refused without a rule, as register(rules={{{rule}}}) is one, or "sum", "max", "first" ("mean"'
        " is of floats); what has one name and is another thing on each rank takes key_map="
    )


def _pattern(keys: Sequence[str]) -> str:
    """Of a rule for the first of these, and those of its kind."""
    last = f".{keys[0].rpartition('.')[2]}"
    return f"*{last}" if sum(key.endswith(last) for key in keys) > 1 else keys[0]
