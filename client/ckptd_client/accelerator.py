"""What capture and restore ask of an accelerator (design D16): torch's neutral calls, the same for every backend. How host
memory is registered, so that copies from and to it run beside the kernels, is each backend's own (``REGISTRATIONS``)."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd_client import graphs
from ckptd_client.bounce import Ring


@dataclass(frozen=True)
class Registration:
    """``register(address, bytes)`` and ``unregister(address)`` raise RuntimeError. One copy lies within one registered range."""

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]


def _cuda() -> Registration:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def checked(call: str, result: Any) -> None:
        if int(result) != 0:
            raise RuntimeError(f"{call}: {result}")

    return Registration(
        lambda address, nbytes: checked("cudaHostRegister", runtime.cudaHostRegister(address, nbytes, 0)),
        lambda address: checked("cudaHostUnregister", runtime.cudaHostUnregister(address)),
    )


REGISTRATIONS: dict[str, Callable[[], Registration]] = {"cuda": _cuda}  # ROCm calls itself cuda, too
OURS = "ckptd-"  # how the names of our own threads begin
WITHOUT_MEMORY = frozenset({"cpu", "meta"})  # kinds of tensors that are no accelerator's


def known() -> list[tuple[str, Any]]:
    """Kinds that could be captured here, with torch's module of each."""
    return [(kind, getattr(torch, kind)) for kind in REGISTRATIONS if hasattr(torch, kind)]


def in_use() -> list[tuple[str, Any]]:
    """Those of which this process has a context. Never makes one."""
    return [(kind, module) for kind, module in known() if module.is_initialized()]


def capturing() -> bool:
    """Does the caller's current stream only record into a graph what it is asked for?"""
    return any(module.is_current_stream_capturing() for _, module in in_use())


class Accelerator:
    """One device of this process. Each thread of ours makes it current before it asks anything of it (``aside``): else device 0
    would hold a context of every rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.registration = REGISTRATIONS[device.type]()
        self._side = torch.Stream(device)
        self._held_back: deque[tuple[torch.Event, torch.Event]] = deque()  # before and behind each wait for copies
        self._stalled_s = 0.0
        self._stalls = threading.Lock()  # of these two
        self._ring: Ring | None = None
        self._no_ring = False

    def training(self) -> torch.Stream:
        """The stream that is current in the caller's thread."""
        return torch.accelerator.current_stream(self.device)

    def event(self) -> torch.Event:
        """Recorded nowhere yet, and so complete."""
        return torch.Event(self.device)

    def hold_back(self, copies: torch.Event) -> None:
        """The training stream waits for them, the host does not. How long is known later (``stalled_s``)."""
        self.stalled_s()  # events of waits that are over are kept for nobody
        before, behind = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        training = self.training()
        before.record(training)
        training.wait_event(copies)
        behind.record(training)
        self._held_back.append((before, behind))

    def stalled_s(self) -> float:
        """Seconds that the training stream has stood still for copies, as far as they are over. A thread on another device hears
        what was known: to ask makes a context of that device."""
        here = torch.accelerator.current_device_index() == self.device.index
        with graphs.unless_captured() as may, self._stalls, contextlib.suppress(RuntimeError):
            while may and here and self._held_back and self._held_back[0][1].query():
                before, behind = self._held_back.popleft()
                self._stalled_s += before.elapsed_time(behind) / 1000
        return self._stalled_s

    @contextlib.contextmanager
    def aside(self) -> Iterator[torch.Stream]:
        """Device and side stream are current within: what is done waits for our own copies at most, never for training. A thread of
        ours waits for the end of a graph's capture first."""
        ours = threading.current_thread().name.startswith(OURS)
        with graphs.away() if ours else contextlib.nullcontext():
            if ours and torch.accelerator.current_device_index() != self.device.index:
                torch.accelerator.set_device_index(self.device)  # for good: to make the one before current makes a context there
            with self._aside() as side:
                yield side

    def _aside(self) -> torch.Stream:
        """The side stream, to be made current. Another object each time: torch keeps in it which stream to come back to, and two
        threads would each come back to that of the other."""
        side = self._side
        return torch.Stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)

    def register(self, address: int, nbytes: int) -> str:
        """Host memory, for copies that nobody waits for. Why it cannot be; "" when it is."""
        with self.aside():
            try:
                self.registration.register(address, nbytes)
            except RuntimeError as error:
                self._forgets()
                return str(error)
        return ""

    def _forgets(self) -> None:
        """A registration that fails leaves an error which this thread's next launch raises: let that be none of the trainer's."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def ring(self) -> Ring | None:
        """For slots that could not be registered; None where no memory can: copies are right, and slow."""
        with _lock:
            if self._ring is None and not self._no_ring:
                try:
                    self._ring = Ring(self.device.type)
                except RuntimeError:
                    self._no_ring = True
                    self._forgets()
            return self._ring

    @contextlib.contextmanager
    def bringing(self) -> Iterator[Callable[[Tensor, Tensor], object]]:
        """Copies of host memory to tensors here. Whatever stream used them before is done, and whatever stream uses them next sees
        them. Takes no memory on the device but what a piece needs whose place is not contiguous."""
        torch.accelerator.synchronize(self.device)
        ring = self.ring()
        yield ring.into if ring is not None else lambda source, dest: dest.copy_(source)
        torch.accelerator.synchronize(self.device)

    def unregister(self, address: int) -> None:
        with self.aside():
            self.registration.unregister(address)


_known: dict[torch.device, Accelerator] = {}
_lock = threading.Lock()


def of(device: torch.device) -> Accelerator:
    """The one for this device, which ``check`` has let pass."""
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    with _lock:
        if device not in _known:
            _known[device] = Accelerator(device)
        return _known[device]


def stalled_s() -> float:
    """Seconds that training streams of this process have stood still for copies."""
    with _lock:
        found = list(_known.values())
    return sum(one.stalled_s() for one in found)


def check(key: str, device: torch.device) -> None:
    """Raises CkptdError for a kind of which nobody has told how host memory is registered."""
    if device.type not in WITHOUT_MEMORY and device.type not in REGISTRATIONS:
        kinds = ", ".join(sorted({"cpu", *REGISTRATIONS}))
        raise CkptdError(f"tensors on {device.type} cannot be captured", where=key, hint=f"supported: {kinds} (ROCm is cuda)")


def of_all(devices: Iterable[torch.device]) -> Accelerator | None:
    """The one that these tensors lie on; None where all are the host's. Raises CkptdError for several."""
    found = sorted({device for device in devices if device.type not in WITHOUT_MEMORY}, key=str)
    if len(found) > 1:
        names = " and ".join(map(str, found))
        raise CkptdError(f"tensors on {names}: one device per rank is supported", hint="start one rank per device")
    return of(found[0]) if found else None


def aside(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The same for a tensor's device, the host among them."""
    return contextlib.nullcontext() if device.type in WITHOUT_MEMORY else of(device).aside()
