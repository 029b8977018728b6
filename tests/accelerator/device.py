"""The simulated accelerator in this process: ``load()`` once, ``fresh()`` before each test."""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from ckptd_client.accelerator import REGISTRATIONS, Registration

from tests.accelerator.build import NEEDS, compiler, has_graphs, library

KIND = "sim"
COUNT = 2  # devices
# Not where memory was let go, nor where the host looks before a copy has come.
WRITTEN_WHILE_READ = re.compile(r"(copy to the host|copy_|aten::\S+) on stream \d+ (reads|writes) what (?!reuse of freed memory)")
HELD_S = 20.0  # a stream that the host waits for is let go then


def available() -> bool:
    return compiler() is not None and has_graphs()


NEEDED = pytest.mark.skipif(not available(), reason=f"the simulated accelerator needs {NEEDS}")
ops: Any = torch.ops.sim


@cache
def load() -> None:
    """From now on torch knows the device, as it knows one whose driver is installed."""
    known: Any = torch  # of which none of these is typed in every version
    known.ops.load_library(str(library()))
    known._register_device_module(KIND, _module())
    known.utils.generate_methods_for_privateuse1_backend()


def load_first() -> None:
    """At import of a test file: autograd makes its queues, one of each kind of device, at the first backward of the process."""
    if available():
        load()


def _module() -> types.ModuleType:
    """What torch asks of ``torch.sim`` where it has no neutral call."""
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: COUNT
    module.current_device = torch.accelerator.current_device_index
    module.is_current_stream_capturing = ops.capturing
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: [generator(device).manual_seed(seed) for device in range(COUNT)]
    module.get_rng_state = lambda device=None: generator(device).get_state()
    module.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.Stream, module.Event = torch.Stream, torch.Event
    return module  # type: ignore[no-any-return]


def generator(device: int | str | torch.device | None = None) -> torch.Generator:
    """A device's own."""
    index = torch.device(device).index if isinstance(device, str | torch.device) else device
    return ops.generator(torch.accelerator.current_device_index() if index is None else index)  # type: ignore[no-any-return]


def fresh() -> None:
    """Nothing is under way, nothing fails, no race is known."""
    ops.reset()


def tune(**values: float) -> None:
    """``kernel_us``, ``copy_us_per_mib``, ``register_us_per_mib``; ``registrations``, ``copies``: how many succeed (-1: all);
    ``memory``: bytes of each device; ``poison``: is freed memory written at once?"""
    for what, value in values.items():
        ops.tune(what, float(value))


def races() -> list[str]:
    """Accesses of which nothing orders one behind the other."""
    return list(ops.races())


@contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """The stream (the default one of device 0) begins nothing until this is over. Whoever waits for it meanwhile fails."""
    number = stream.stream_id if stream is not None else 0
    waited = threading.Event()

    def release() -> None:
        waited.set()
        ops.hold(number, False)

    ops.hold(number, True)
    timer = threading.Timer(HELD_S, release)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        ops.hold(number, False)
    assert not waited.is_set(), f"the host waited for stream {number}"


def use() -> None:
    """For the rest of the process; captures know it."""
    load()
    fresh()
    REGISTRATIONS[KIND] = lambda: Registration(ops.register_host, ops.unregister_host)


@contextmanager
def simulated(test: pytest.Item | None = None) -> Iterator[str]:
    """A device's kind, for captures. What nothing orders fails the test, unless that says itself that it writes what is read."""
    writes = test is not None and test.get_closest_marker("writes_what_is_read") is not None
    use()
    try:
        yield KIND
        found = [race for race in races() if not (writes and WRITTEN_WHILE_READ.match(race))]
    finally:
        fresh()
    assert found == [], found
