"""What capture and restore ask of an accelerator (design D16): torch's neutral calls, the same for every backend. How host
memory is registered, so that copies from and to it run beside the kernels, is each backend's own (``REGISTRATIONS``)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Registration:
    """``register(address, bytes)`` and ``unregister(address)`` raise RuntimeError."""

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]


def _cuda() -> Registration:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def checked(result: Any) -> None:
        if int(result) != 0:
            raise RuntimeError(f"cudaHostRegister: {result}")

    return Registration(
        lambda address, nbytes: checked(runtime.cudaHostRegister(address, nbytes, 0)),
        lambda address: checked(runtime.cudaHostUnregister(address)),
    )


REGISTRATIONS: dict[str, Callable[[], Registration]] = {"cuda": _cuda}  # ROCm calls itself cuda


class Accelerator:
    """One device of this process. Every thread of ours sets it current before it asks anything of it: device 0 would get a
    context of each rank otherwise."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError for a kind whose host memory nobody knows how to register."""
        self.device = device
        self.registration = REGISTRATIONS[device.type]()
        self._side: torch.Stream = torch.Stream(device)

    def training(self) -> torch.Stream:
        """The stream that is current in the caller's thread."""
        return torch.accelerator.current_stream(self.device)

    def event(self) -> torch.Event:
        """Recorded nowhere yet, and so complete."""
        return torch.Event(self.device)

    @contextlib.contextmanager
    def aside(self) -> Iterator[torch.Stream]:
        """Device and side stream are current within: what is done waits for our own copies at most, never for training."""
        with self._side:
            yield self._side


_known: dict[torch.device, Accelerator] = {}
_lock = threading.Lock()


def of(device: torch.device) -> Accelerator:
    """The one for this device. Raises RuntimeError for a kind that is not supported."""
    if device.type not in REGISTRATIONS:
        kinds = " and ".join(sorted(REGISTRATIONS))
        raise RuntimeError(f"tensors on {device}: captures from {kinds} (ROCm too) and the CPU are supported")
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    with _lock:
        if device not in _known:
            _known[device] = Accelerator(device)
        return _known[device]


def aside(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The same for a tensor's device, the CPU among them."""
    return contextlib.nullcontext() if device.type == "cpu" else of(device).aside()
