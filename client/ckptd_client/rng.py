"""Random number generators: captured per rank; a new world reseeds from (seed, step, rank) and says so, and lets those go on that
were the same on all ranks (design D11)."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ckptd_client import accelerator, tree
from ckptd_client.same import same

NAME = "rng"  # of the object
OWN = -1  # stands for the device that a rank has


def capture() -> dict[str, Any]:
    """No device is waited for: the state of a device's generator (seed, offset) lives on the host."""
    state: dict[str, Any] = {
        "seed": torch.initial_seed(),
        "torch": tree.tensor_bytes(torch.get_rng_state()),
        "python": random.getstate(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    for kind, module in accelerator.in_use():
        states = {device: tree.tensor_bytes(module.get_rng_state(device)) for device in range(module.device_count())}
        state[kind] = {"current": module.current_device(), "states": states}
    return state


def alike(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The generators that several ranks had in one and the same state: they draw together what must be equal on all (one
    permutation, the masks of a tensor-parallel group). A device's is that of each rank's own device."""
    first, *others = map(_of_rank, states)
    return {kind: value for kind, value in first.items() if others and all(same(value, other.get(kind)) for other in others)}


def _of_rank(state: dict[str, Any]) -> dict[str, Any]:
    own = {kind: value for kind, value in state.items() if kind != "seed"}
    devices = {kind: value for kind, value in own.items() if isinstance(value, dict) and "current" in value}
    return own | {kind: {"current": OWN, "states": {OWN: value["states"][value["current"]]}} for kind, value in devices.items()}


def restore(state: dict[str, Any]) -> None:
    """Those that are in it."""
    if "torch" in state:
        torch.set_rng_state(_bytes(state["torch"]))
    if "python" in state:
        random.setstate(state["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    for kind, module in accelerator.known():
        if kind in state and module.is_available():
            _restore_devices(module, **state[kind])


def _restore_devices(module: Any, current: int, states: dict[int, bytes]) -> None:
    """What the rank's device had goes to the device that the rank has now; the others' only where that is the same one."""
    here = module.current_device()
    wanted = states if here == current else {here: states[current]}
    for device, value in wanted.items():
        if device < module.device_count():
            module.set_rng_state(_bytes(value), device)


def _bytes(data: bytes) -> torch.Tensor:
    return tree.tensor_from_bytes("U8", [len(data)], data)


def reseed(seed: int, step: int, rank: int) -> int:
    """All generators, from a seed that every (seed, step, rank) has for itself. Returns it."""
    text = f"ckptd {seed} {step} {rank}".encode()
    fresh = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1  # torch takes 63 bits
    torch.manual_seed(fresh)  # the devices' too
    random.seed(fresh)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(fresh & 0xFFFFFFFF)
    return fresh
