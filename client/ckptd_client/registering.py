"""Naming what a snapshot holds: what torch has cut is found out, what an engine has cut is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptd_client import rules_file
from ckptd_client.boxes import Boxes, Provider
from ckptd_client.entries import KeyMap
from ckptd_client.registry import Patterns, Registry
from ckptd_client.rules_file import Rules


class Registering:
    """A client's part of it."""

    _registry: Registry

    def register(
        self,
        *,
        include: Patterns = (),
        exclude: Patterns = (),
        replicated: Patterns = (),
        fenced: bool = False,
        key_map: KeyMap | None = None,
        without: Patterns = (),
        gradients: bool = False,
        rules: Rules | None = None,
        mesh: Any = None,
        **objects: Any,
    ) -> None:
        """Name what a snapshot holds: modules, optimizers, anything with state_dict/load_state_dict, tensors, plain nested
        values, and dicts or lists of these, which are looked into anew at each snapshot and filled at a restore: a tensor or
        a plain value that came into one later is put there again.

        include, exclude: shell patterns on keys like ``model.head.*``. replicated: keys that are equal by your word on all
        ranks that have them; of what is sharded over a sub-mesh, equal on all sub-meshes like it. Buffers that DDP broadcasts
        are its first rank's whatever a pattern says; only its own whole key declares such a buffer. fenced: you call
        ``client.fence()`` before you write these tensors by hand, so they may be copied in the background. key_map: renames
        keys, {old prefix: new prefix} or a function. without: keys of parameters whose optimizer state is meant to be absent;
        any other parameter that an unregistered optimizer steps fails its snapshots, once it has state or its groups' values
        (``lr``) change; "scheduler", "scaler": nobody is told that these are not registered. gradients: of modules, for snapshots
        in the middle of an accumulation.

        rules: {pattern: rule, or list of rules, outermost first} for tensors that the program has cut itself (``shard``,
        ``copied``, ``padded``), and their optimizer states of the same shape, or for values that each rank has for itself
        (``own``); or the path of a TOML file that says these. mesh: the DeviceMesh whose dimensions they name.

        Raises TypeError naming the path of a value that cannot be saved without pickle, or that no restore could write into (a
        number by itself), and its remedy; CkptdError for a rule or pattern that does not fit, or a file of rules that is none.
        """
        self._registry.register(
            objects, include=include, exclude=exclude, replicated=replicated, fenced=fenced, key_map=key_map, without=without,
            gradients=gradients, rules=rules_file.given(rules), mesh=mesh,
        )  # fmt: skip

    def register_boxes(
        self, name: str, provider: Provider, restored: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """What an engine has cut by itself. ``provider(loading)`` gives ``Box`` and ``Blob``: what this rank holds, or, for a
        restore, what is to be filled; then it may create state. It is asked once as long as no tensor's storage, shape or dtype
        changes, and communicates with nobody. What an optimizer steps that was seen stepping is copied in the background, all
        else before ``snapshot()`` returns. ``restored(blobs)`` is called when all boxes are written, with {key: bytes} of the
        blobs: {key: {rank: bytes}} of a ``per_rank`` one in another world. Raises CkptdError naming the key of a box that cannot
        be one.
        """
        self._registry.register_boxes(Boxes(name, provider, restored))
