"""P15 for modules that save more than parameters and buffers; and what is refused at register by its name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ckptd_client import CkptdError, Client
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.node import module_zoo
from tests.node.client_training import begun, load, save
from tests.node.module_zoo import Forgetful, Growing, Linear4, Linear8, Metric, Observer, Unsaveable, hooked
from tests.node.rank_daemon_double import RankDaemonDouble


def changed(module: nn.Module, scale: float) -> nn.Module:
    """Other values everywhere, also where only the module itself knows."""
    with torch.no_grad():
        for value in module.parameters():
            value.mul_(scale)
    if isinstance(module, Linear8):
        module.quantise()
    elif not isinstance(module, Observer | Metric):
        module.scale = scale  # type: ignore[assignment]
    for _ in range(int(scale)):
        module(torch.ones(3, 20) * scale)
    return module


@pytest.mark.parametrize(
    "make", [lambda: Linear8(20, 20), lambda: Linear4(20, 20), Observer, Metric, hooked],
    ids=["linear8", "linear4", "observer", "metric", "hooks"],
)  # fmt: skip
@pytest.mark.parametrize("deep", [False, True])
def test_what_a_module_saves_itself_comes_back(
    daemon: RankDaemonDouble, make: Callable[[], nn.Module], deep: bool
) -> None:
    def model(scale: float) -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"at": nn.ModuleList([changed(make(), scale)])}) if deep else changed(make(), scale)

    def answer(model: nn.Module) -> torch.Tensor:
        module = model["at"][0] if isinstance(model, nn.ModuleDict) else model
        return module(torch.linspace(-1, 1, 60).view(3, 20))

    saved, fresh = model(3.0), model(1.0)
    save(daemon, model=saved)
    load(daemon, model=fresh)
    for key, value in saved.state_dict().items():
        found = fresh.state_dict()[key]
        assert torch.equal(value, found) if isinstance(value, torch.Tensor) else value == found, key
    assert torch.equal(answer(fresh), answer(saved))


def test_what_a_module_does_not_take_back_is_an_error_by_name(daemon: RankDaemonDouble) -> None:
    save(daemon, model=nn.Sequential(changed(Forgetful(), 3.0)))
    why = ""
    try:
        load(daemon, model=nn.Sequential(Forgetful()))
    except CkptdError as error:
        why = str(error)
    assert "Forgetful does not take back what it saved: seen" in why, why
    assert "model.0" in why


@pytest.mark.parametrize("make", [module_zoo.Counted, module_zoo.Derived])
def test_what_hooks_and_loading_of_its_own_keep_beside_a_modules_tensors_comes_back(
    daemon: RankDaemonDouble, make: Callable[[], Any]
) -> None:
    """The counter's buffer was saved as it was before the hook, and the table stayed that of the weights before the restore."""
    with begun(daemon, model=(model := make())) as client:
        for step in (1, 2):  # the second time nothing is looked up
            model(torch.ones(1, 20))
            with torch.no_grad():
                model.weight.mul_(2)
            handle = client.snapshot(step, must=True)
            assert client.snapshot(step) is handle, "a hook that writes a counter changes nothing"
            assert handle.wait("sealed", 30) == "durable"
    model.load_state_dict(model.state_dict())
    load(daemon, model=(fresh := make()))
    assert torch.equal(fresh.table, model.table)
    assert vars(fresh).get("batches") == vars(model).get("batches")


# --- tensors that take the shape of what is loaded ----------------------------------------------------------
def quantised_in_training() -> nn.Module:
    fake = FakeQuantize(
        observer=MovingAveragePerChannelMinMaxObserver, ch_axis=1, dtype=torch.qint8, qscheme=torch.per_channel_symmetric,
        quant_min=-128, quant_max=127,
    )  # fmt: skip
    return nn.Sequential(nn.Linear(4, 3), fake)


@pytest.mark.parametrize("make", [quantised_in_training, lambda: nn.Sequential(nn.Linear(4, 3), Growing())], ids=["torch", "own"])
def test_what_grew_in_the_first_batch_grows_at_the_restore(daemon: RankDaemonDouble, make: Callable[[], nn.Module]) -> None:
    saved, fresh = make(), make()
    saved(torch.randn(8, 4))
    save(daemon, model=saved)
    held = dict(fresh.named_parameters())
    why = ""
    try:
        load(daemon, model=fresh)
    except CkptdError as error:
        why = str(error)
    assert not why
    for key, value in saved.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[key]), key
    assert all(parameter is held[name] for name, parameter in fresh.named_parameters())
    assert fresh(torch.ones(2, 4)).shape == (2, 3)


def test_nothing_has_grown_when_another_rank_cannot_load(daemon: RankDaemonDouble) -> None:
    saved, fresh = quantised_in_training(), quantised_in_training()
    saved(torch.randn(8, 4))
    save(daemon, model=saved)
    with pytest.raises(CkptdError, match="not in the snapshot"):
        load(daemon, model=fresh, extra={"n": {"a": 1}})
    assert fresh.get_buffer("1.scale").shape == (1,)


@pytest.mark.parametrize("how", ["stays", "replaces"])
def test_what_does_not_take_another_shape_is_a_mismatch(daemon: RankDaemonDouble, how: str) -> None:
    """Nor what would take the place of the parameter that an optimizer has."""
    saved, fresh = Growing(), Growing(**{how: True})
    saved(torch.randn(8, 4))
    save(daemon, model=saved)
    with pytest.raises(CkptdError) as caught:
        load(daemon, model=fresh)
    assert "model.scale: F32[1] here, F32[4] in the snapshot" in str(caught.value)
    assert (fresh.scale.shape, fresh.mean.shape) == ((1,), (0,))


# --- refused at register ------------------------------------------------------------------------------------
def refusal(daemon: RankDaemonDouble, **objects: Any) -> str:
    """What register() says; "" when it takes them."""
    with Client.connect("job", socket=daemon.path) as client:
        try:
            client.register(**objects)
        except (CkptdError, TypeError) as error:
            assert not client._registry.owners
            return str(error)
    return ""


def test_a_module_that_cannot_save_itself_is_refused(daemon: RankDaemonDouble) -> None:
    model = nn.Sequential(Unsaveable())
    why = refusal(daemon, model=model)
    assert "Unsaveable cannot save itself: NotImplementedError: Saving is not implemented" in why, why
    assert "model.0." in why
    assert not refusal(daemon, model=model, exclude="model.0.*")


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is to drop them
        return torch.quantize_per_tensor(torch.ones(3, device="cpu"), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(3, 1).expand(3, 4), "clone()"),  # its objects were dirty after a restore, and no key was named
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj()"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "resolve_neg()"),
        (lambda: torch.ones(3, dtype=torch.complex128), "dtype torch.complex128 cannot be saved"),
        (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8), "dtype torch.bits8 cannot be saved"),
        (quantised, "dtype torch.qint8 cannot be saved"),
    ],
)
def test_tensors_that_cannot_be_written_back_are_refused(
    daemon: RankDaemonDouble, make: Callable[[], torch.Tensor], words: str
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("b", make())
    for why in (refusal(daemon, model=model), refusal(daemon, extra={"b": make()})):
        assert words in why, why
        assert ".b]" in why
    assert not refusal(daemon, model=model, exclude="model.b")


def test_an_expanded_tensor_whose_elements_are_apart_is_taken(daemon: RankDaemonDouble) -> None:
    assert not refusal(daemon, extra={"x": torch.ones(1, 3).expand(1, 3)})


def test_placeholders_of_zero_3_are_refused(daemon: RankDaemonDouble) -> None:
    model = nn.Linear(4, 4)
    shape, model.weight.data = model.weight.shape, torch.empty(0)
    model.weight.ds_id, model.weight.ds_status, model.weight.ds_shape = 0, "NOT_AVAILABLE", shape
    why = refusal(daemon, model=model)
    assert "ZeRO-3 (shape [0] of [4, 4]) is not supported [model.weight]" in why, why
    assert "integrations.deepspeed.attach" in why


def test_parameters_that_become_placeholders_after_they_were_registered_fail_the_snapshot(
    daemon: RankDaemonDouble,
) -> None:
    """deepspeed.initialize() comes after register() as well as before."""
    model = nn.Linear(4, 4)
    with begun(daemon, model=model) as client:
        model.weight.data = torch.empty(0)
        model.weight.ds_id, model.weight.ds_shape = 0, (4, 4)
        status = client.snapshot(1, must=True).wait("sealed", 30)
        assert status.startswith("failed: a placeholder of DeepSpeed's ZeRO-3"), status


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.on_host("what is refused is a class, wherever it lies")
@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore")
def test_flat_parameters_of_fsdp1_are_refused(daemon: RankDaemonDouble) -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    why = refusal(daemon, model=model)
    assert "FSDP1's flat parameters need an adapter" in why, why
    holder = nn.Module()
    holder.weight = next(model.parameters())
    why = refusal(daemon, model=holder)
    assert "FSDP1's flat parameters need an adapter [model.weight]" in why, why


def published(module: str, name: str, *bases: type, **of_class: Any) -> Any:
    """A class of the name, and the place, under which a library publishes it."""
    return type(name, bases, {"__module__": module, **of_class})


def saving(self: Any, *_: Any) -> dict[str, Any]:
    return {"param_groups": [{"lr": 1.0}]}


PLAIN = {"state_dict": saving, "load_state_dict": saving, "zero_grad": saving, "step": saving}
MEGATRON = published("megatron.core.optimizer.optimizer", "MixedPrecisionOptimizer", **PLAIN)
DISTRIBUTED = published("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer", MEGATRON)
CHAINED = published("megatron.core.optimizer.optimizer", "ChainedOptimizer", MEGATRON)
ZERO = published("deepspeed.runtime.base_optimizer", "ZeROOptimizer", **PLAIN)
STAGE_1 = published("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", ZERO)


@pytest.mark.parametrize(
    ("kind", "name", "instead"),
    [(DISTRIBUTED, "DistributedOptimizer", "Megatron's own checkpoints"), (STAGE_1, "ZeROOptimizer", "deepspeed.attach")],
)
def test_optimizers_with_flat_buffers_are_refused(daemon: RankDaemonDouble, kind: Any, name: str, instead: str) -> None:
    why = refusal(daemon, optimizer=kind())
    assert f"{name} is not supported" in why, why
    assert instead in why


def test_one_in_a_chain_is_refused_too(daemon: RankDaemonDouble) -> None:
    chain = CHAINED()
    chain.chained_optimizers = [MEGATRON()]
    assert not refusal(daemon, optimizer=chain)
    chain.chained_optimizers += [DISTRIBUTED()]
    assert "DistributedOptimizer is not supported" in refusal(daemon, optimizer=chain)
