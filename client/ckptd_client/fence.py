"""The optimizer waits, not the loop (design D6): one global hook before every optimizer's step."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptd_client import _switches, accelerator, collectives, graphs, hyper, watch
from ckptd_client.interrupts import by_a_signal

log = logging.getLogger("ckptd")
LAST = "ckptd"  # the key of our hook behind an optimizer's own


class Fenced(Protocol):
    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins. It has written nothing yet; ``hold`` is called before it does."""

    def not_fenced(self, optimizer: Optimizer) -> None:
        """This optimizer's steps escape the hook (a graph replays them)."""

    def counters(self) -> object:
        """What a write to something fenced moves, to be compared."""

    def hold(self) -> None:
        """Wait, bounded, until nothing that training may write is still being read."""

    def reads(self, written: Sequence[Tensor | UntypedStorage]) -> bool:
        """Is one of these, or another one of its storage, still being read?"""


class _Clients:
    def __init__(self) -> None:
        self.live: weakref.WeakSet[Fenced] = weakref.WeakSet()
        self.steps = 0  # optimizer steps of this process so far
        self.installed = False
        self.lock = threading.Lock()


_clients = _Clients()


def steps() -> int:
    """How many optimizer steps this process has begun."""
    return _clients.steps


def count_step() -> None:
    """One that no hook saw."""
    _clients.steps += 1


def join(client: Fenced) -> None:
    """From now on optimizers wait for this client's captures."""
    with _clients.lock:
        _clients.live.add(client)
        if _clients.installed:
            return
        _clients.installed = True
        register_optimizer_step_pre_hook(torch._disable_dynamo(_before_step))  # type: ignore[attr-defined]
        _wrap_averaged_model()
        _wrap_swap()
        graphs.install(_fence_for_graph, _counters)
        collectives.install(_before_write)
        _wrap_storage()


def leave(client: Fenced) -> None:
    with _clients.lock:
        _clients.live.discard(client)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Called by torch; what it returns takes the place of the step's arguments, of which the first is the optimizer."""
    _clients.steps += 1
    _safely(hyper.begins, optimizer)
    _safely(watch.begins, optimizer)
    if not _switches.FENCE:
        return None
    capturing = accelerator.capturing()
    if capturing:
        graphs.writes()
    for client in list(_clients.live):
        _safely(client.not_fenced if capturing else client.before_step, optimizer)
    if capturing:
        return None
    if _others(optimizer):
        _safely(_fence_last, optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure) or not _evaluates_first(optimizer):
        _fence_all()
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": _fencing(closure)}
    return (args[0], _fencing(closure), *args[2:]), kwargs


def _evaluates_first(optimizer: Optimizer) -> bool:
    """Does this optimizer write nothing before its closure has returned? All of torch's own do so: forward and backward pass
    run in the closure and need not wait. Another class may write first (SAM does), and so may a hook that runs after ours."""
    return type(optimizer).step.__module__.startswith("torch.optim.") and not _others(optimizer)


def _others(optimizer: Optimizer) -> bool:
    """Are there hooks that run after ours?"""
    own = optimizer._optimizer_step_pre_hooks.keys() - {LAST}
    return len(torch_optimizer._global_optimizer_pre_hooks) > 1 or bool(own)


def _fence_last(optimizer: Optimizer) -> None:
    """One of the hooks between ours and the step may take a snapshot, which no fence would follow: a fused step moves no counter
    either. The optimizer's own hooks have not begun yet, so one more can be put behind them."""
    hooks: OrderedDict[Any, Any] = optimizer._optimizer_step_pre_hooks  # type: ignore[assignment]
    hooks[LAST] = _behind_hooks
    hooks.move_to_end(LAST)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _behind_hooks(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _switches.FENCE and not accelerator.capturing():
        _fence_all()


def _fencing(closure: Callable[..., Any]) -> Callable[..., Any]:
    """The same closure; nothing is written after it has returned while a capture still reads. LBFGS calls it many times."""

    @functools.wraps(closure)
    def fencing(*args: Any, **kwargs: Any) -> Any:
        value = closure(*args, **kwargs)
        _fence_all()
        return value

    return fencing


def _fence_for_graph() -> None:
    if _switches.FENCE:
        _fence_all()


def _before_write(written: Sequence[Tensor | UntypedStorage]) -> None:
    def hold(client: Fenced) -> None:
        if client.reads(written):
            client.hold()

    for client in list(_clients.live) if _switches.FENCE else ():
        _safely(hold, client)


def _counters() -> object:
    try:
        return [client.counters() for client in list(_clients.live)]
    except Exception:
        log.exception("ckptd client: counters")
        return object()  # another one each time: nobody can say what was written


def _fence_all() -> None:
    for client in list(_clients.live):
        _safely(client.hold)


def _safely(call: Callable[..., None], *args: Any) -> None:
    try:
        call(*args)
    except Exception as error:
        if by_a_signal(error):
            raise
        log.exception("ckptd client: fence")  # never the trainer's problem (P5)


def _wrap_swap() -> None:
    """A swap takes a parameter's content away and its version counter with it (``model.cpu()`` under FSDP2): whether somebody had
    written it past the fence could not be told any more. So it waits, as an optimizer's step does."""
    swap = torch.utils.swap_tensors

    @functools.wraps(swap)
    def fenced(t1: Any, t2: Any) -> Any:
        if _switches.FENCE:
            _fence_all()
        return swap(t1, t2)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = torch._disable_dynamo(fenced)  # type: ignore[attr-defined]


def _wrap_storage() -> None:
    """A storage of another size lets its memory go, however many refer to it, and so does one that moves into shared memory (a
    model sent through a queue): who still copies from there would die (P5)."""
    for name in ("resize_", "_share_fd_cpu_", "_share_filename_cpu_"):
        _wrap_letting_go(UntypedStorage, name)


def _wrap_letting_go(storage: Any, name: str) -> None:
    inner = getattr(storage, name)

    @functools.wraps(inner)
    def fenced(self: UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if name == "resize_" or not self.is_shared():
            _before_write([self])
        return inner(self, *args, **kwargs)

    setattr(storage, name, torch._disable_dynamo(fenced))  # type: ignore[attr-defined]


def _wrap_averaged_model() -> None:
    """EMA weights are written outside of any optimizer: their own update fences, so they need not be copied at once."""
    model = torch.optim.swa_utils.AveragedModel
    update = model.update_parameters

    @functools.wraps(update)
    def fenced(self: Any, *args: Any, **kwargs: Any) -> None:
        if _switches.FENCE:
            _fence_all()
        update(self, *args, **kwargs)

    model.update_parameters = fenced  # type: ignore[method-assign]
