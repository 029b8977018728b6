"""The simulated accelerator computes what the CPU does, is as unkind as a real one, and tells what nothing orders."""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import device

pytestmark = device.NEEDED
device.load_first()



@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    device.load()
    device.fresh()
    yield
    device.fresh()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 3))


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}, {"foreach": False, "amsgrad": True}])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_training_is_that_of_the_cpu(kind: Any, settings: dict[str, bool]) -> None:
    settings = {key: value for key, value in settings.items() if kind is torch.optim.AdamW or key != "amsgrad"}
    here = network()
    there = copy.deepcopy(here).to(device.KIND)
    optimizers = [kind(one.parameters(), lr=1e-2, **settings) for one in (here, there)]
    for _ in range(4):
        batch = torch.randn(16, 32)
        for model, optimizer, given in zip((here, there), optimizers, (batch, batch.to(device.KIND)), strict=True):
            optimizer.zero_grad()
            model(given).square().mean().backward()
            optimizer.step()
    for name, value in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name].cpu(), value)  # other fused loops round otherwise
    assert device.races() == []


def test_a_stream_that_is_held_computes_nothing_and_the_host_goes_on() -> None:
    with device.held():
        value = torch.ones(4, device=device.KIND).add_(1)
        event = torch.Event(device.KIND)
        event.record()
        assert not event.query()
    event.synchronize()
    assert value.sum().item() == 8


def test_an_event_that_was_never_recorded_is_complete() -> None:
    assert torch.Event(device.KIND).query()


def test_a_write_beside_a_reader_of_another_stream_is_a_race() -> None:
    source, side = torch.ones(1000, device=device.KIND), torch.Stream(device.KIND)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        source.clone()
    source.add_(1)
    assert [race for race in device.races() if "add" in race and "copy_" in race]


def test_a_write_behind_an_event_of_the_reader_is_none() -> None:
    source, side = torch.ones(1000, device=device.KIND), torch.Stream(device.KIND)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        source.clone()
    torch.accelerator.current_stream().wait_stream(side)
    source.add_(1)
    assert device.races() == []


def test_making_a_sequence_waits_for_nothing() -> None:
    with device.held():
        assert torch.arange(4, device=device.KIND).device.type == device.KIND


def test_memory_that_is_freed_is_written_at_once() -> None:
    source, side = torch.ones(1000, device=device.KIND), torch.Stream(device.KIND)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        source.clone()
    del source
    assert [race for race in device.races() if "freed memory" in race]


def test_memory_that_another_stream_was_told_to_use_is_not() -> None:
    source, side = torch.ones(1000, device=device.KIND), torch.Stream(device.KIND)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        source.clone()
    source.record_stream(side)
    del source
    assert device.races() == []


def test_a_copy_into_pageable_memory_waits_for_all_that_is_queued() -> None:
    source = torch.ones(1000, device=device.KIND)
    pinned = torch.empty(1000).pin_memory()
    with device.held():
        pinned.copy_(source.add_(1), non_blocking=True)  # returns
    assert torch.empty(1000).copy_(source, non_blocking=True).sum().item() == 2000
    assert pinned.sum().item() == 2000


def test_what_the_host_reads_too_early_is_a_race() -> None:
    source, pinned = torch.ones(1000, device=device.KIND), torch.empty(1000).pin_memory()
    event = torch.Event(device.KIND)
    pinned.copy_(source, non_blocking=True)
    event.record()
    device.ops.host_reads(pinned.data_ptr(), pinned.nbytes, "a seal")
    assert len(device.races()) == 1
    device.fresh()
    pinned.copy_(source, non_blocking=True)
    event.record()
    event.synchronize()
    device.ops.host_reads(pinned.data_ptr(), pinned.nbytes, "a seal")
    assert device.races() == []


def test_a_failed_registration_fails_this_threads_next_launch() -> None:
    value, memory = torch.ones(4, device=device.KIND), torch.empty(4096)
    device.tune(registrations=0)
    with pytest.raises(RuntimeError, match="registration"):
        device.ops.register_host(memory.data_ptr(), memory.nbytes)
    with pytest.raises(RuntimeError, match="an earlier registration"):
        value.add_(1)
    value.add_(1)


def test_a_failed_copy_sticks_to_all_later_calls() -> None:
    value, pinned = torch.ones(4, device=device.KIND), torch.empty(4).pin_memory()
    device.tune(copies=0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a copy failed"):
            pinned.copy_(value, non_blocking=True)


def test_what_is_not_contiguous_takes_memory_on_its_way() -> None:
    value = torch.ones(512, 512, device=device.KIND)
    pinned = torch.empty(512, 512).pin_memory()
    device.ops.forget_peak(0)
    before = device.ops.peak(0)
    pinned.copy_(value, non_blocking=True)
    assert device.ops.peak(0) == before
    pinned.copy_(value.t(), non_blocking=True)
    assert device.ops.peak(0) == before + value.nbytes


def test_pinned_memory_is_nobody_elses_until_the_copies_into_it_are_done() -> None:
    """As torch's caching allocator has it, which records an event for each copy: the copy below wrote into whoever came next."""
    value = torch.ones(1 << 20, device=device.KIND)
    torch.accelerator.synchronize()
    with device.held():
        pinned = torch.empty(1 << 20).pin_memory()
        address = pinned.data_ptr()
        pinned.copy_(value, non_blocking=True)
        del pinned
        others = [torch.zeros(1 << 20).pin_memory() for _ in range(4)]
        assert address not in [other.data_ptr() for other in others]
    torch.accelerator.synchronize()
    assert all(not other.any() for other in others)


def test_a_device_has_random_numbers_of_its_own_and_draws_them_without_waiting() -> None:
    generator, here = device.generator(0), torch.get_rng_state()
    torch.manual_seed(3)
    first = torch.randn(8, device=device.KIND).cpu()
    state = generator.get_state()
    with device.held():
        second = torch.randn(8, device=device.KIND)
    generator.set_state(state)
    assert torch.equal(torch.randn(8, device=device.KIND).cpu(), second.cpu())
    torch.manual_seed(3)
    assert torch.equal(torch.randn(8, device=device.KIND).cpu(), first)
    torch.set_rng_state(here)


def test_the_current_device_is_each_threads_own() -> None:
    assert torch.ones(1, device=device.KIND).device.index == 0
    with torch.Stream(torch.device(device.KIND, 1)):
        assert torch.ones(1, device=device.KIND).device.index == 1
    assert torch.accelerator.current_device_index() == 0


def test_registered_memory_that_is_let_go_on_any_thread_asks_nothing_of_its_device() -> None:
    """Whoever runs the garbage collection lets it go; torch's own keeps it for the next one."""
    with torch.Stream(torch.device(device.KIND, 1)):
        pinned = [torch.empty(1000).pin_memory()]
        device.fresh()
        other = threading.Thread(target=pinned.clear)
        other.start()
        other.join()
        assert device.ops.contexts() == []


def test_a_graph_is_replayed_on_the_device_that_it_was_captured_on() -> None:
    value = torch.ones(4, device=f"{device.KIND}:1")
    graph, stream = torch.accelerator.Graph(), torch.Stream(value.device)  # type: ignore[attr-defined]
    torch.accelerator.synchronize(1)
    with stream, graph:
        value.add_(1)
    assert torch.accelerator.current_device_index() == 0
    graph.replay()
    value.mul_(2)
    assert torch.equal(value.cpu(), torch.full((4,), 4.0))
    assert device.races() == []


def test_a_kernel_is_given_the_hosts_values_and_keeps_none_of_pythons_tensors() -> None:
    """The last one to drop a tensor of Python's wants the interpreter's lock. Who looks at a mask without dimensions waits for the
    kernel with that lock held, so it hung (Rprop, and torch's own average of weights)."""
    device.tune(kernel_us=100_000)
    value, by = torch.ones((), device=device.KIND), torch.tensor(2.0)
    value.mul_(by)
    by.fill_(9)
    del by
    value[value.gt(5)] = 1.0
    assert value.item() == 2.0


def test_what_torch_averages_of_weights_is_what_the_cpu_averages() -> None:
    means = []
    for place in ("cpu", device.KIND):
        model = network().to(place)
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            average.update_parameters(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        means.append([parameter.cpu() for parameter in average.parameters()])
    assert all(map(torch.allclose, *means)), "other kernels than on the CPU, of other rounding"


def test_a_devices_memory_is_nothing_that_the_host_can_read() -> None:
    """A test of ours copied from there as from the host's own: on a real device it would have died."""
    value = torch.ones(4, device=device.KIND)
    reader, writer = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.write(writer, ctypes.c_void_p(value.data_ptr()), 16) == -1
    assert ctypes.get_errno() == errno.EFAULT
    os.close(reader)
    os.close(writer)
    assert value.sum().item() == 4


def test_an_embedding_with_sparse_gradients_is_trained_as_on_the_cpu() -> None:
    found = []
    for place in ("cpu", device.KIND):
        torch.manual_seed(1)
        model = nn.Embedding(30, 4, sparse=True).to(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            model(torch.tensor([1, 2, 2], device=place)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)
        found.append(model.weight.detach().cpu())
    torch.testing.assert_close(*found)
    assert device.races() == []


def test_kernels_run_in_their_callers_inference_mode() -> None:
    with torch.inference_mode():
        value = torch.ones(3, device=device.KIND)
        value.add_(1)
        assert value.cpu().tolist() == [2.0] * 3
