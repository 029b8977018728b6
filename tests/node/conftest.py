"""Fixtures of several files here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ckptd_client import accelerator, resolve

from ckptd.cli import main
from tests.accelerator import device
from tests.node.commands import Cli, Ran
from tests.node.rank_daemon_double import RankDaemonDouble

device.load_first()
# Captures, tears, fences, audits, frozen parameters and restores: on the host, on the simulated device (design D16), and on a
# real one where there is one.
DEVICES = ("cpu", device.KIND, *(["cuda"] if torch.cuda.is_available() else []))
ON_BOTH = frozenset(
    f"tests.node.test_client_{name}"
    for name in (
        "snapshot", "tear", "closure", "written", "swapped", "frozen", "samples", "unseen", "histories", "restore", "again",
        "recall", "threads", "gradients", "modules", "complete",
    )
)  # fmt: skip


# On the simulated device these are for `make chaos`: some are held up at each capture, of the others the host's run says most.
LONG = frozenset(
    f"tests.node.test_client_{name}"
    for name in (
        "tear", "written", "unseen", "histories", "closure", "swapped", "samples", "again", "recall", "threads", "gradients",
        "modules", "complete",
    )
)  # fmt: skip
LONG_DEVICES = tuple(pytest.param(kind, marks=pytest.mark.chaos) if kind == device.KIND else kind for kind in DEVICES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in ON_BOTH:
        on_host = metafunc.definition.get_closest_marker("on_host") is not None
        devices = LONG_DEVICES if metafunc.module.__name__ in LONG else DEVICES
        metafunc.parametrize("default_device", DEVICES[:1] if on_host else devices, indirect=True)


def pytest_runtest_call(item: pytest.Item) -> None:
    """pytest makes no fixture that only a hook names: all these tests ran on the host once, under three names."""
    asked_for = item.callspec.params.get("default_device", "cpu") if hasattr(item, "callspec") else "cpu"
    assert torch.empty(0).device.type == torch.device(asked_for).type, f"not on {asked_for}"


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the test's tensors lie unless it says otherwise."""
    if not hasattr(request, "param"):
        yield "cpu"
        return
    if request.param != device.KIND:
        with torch.device(request.param):
            yield request.param
        return
    if not device.available():
        pytest.skip(f"the simulated accelerator needs {device.NEEDS}")
    accelerator._known.clear()
    with device.simulated(request.node), torch.device(device.KIND):
        yield device.KIND
    accelerator._known.clear()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RankDaemonDouble]:
    """The scripted one; no rank's copies may differ."""
    with RankDaemonDouble(tmp_path / "d.sock") as double:
        yield double
    assert double.corruptions == []


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that everything was looked up by name."""
    found: list[int] = []
    tensors = resolve.tensors
    monkeypatch.setattr(resolve, "tensors", lambda *given, **how: (found.append(1), tensors(*given, **how))[1])
    return found


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """`ckptd ARGUMENTS` in this process, with none of this machine's settings."""
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("ckptd.config_sources.SYSTEM_FILE", tmp_path / "no-such.toml")

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["ckptd", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        out, err = capsys.readouterr()
        return Ran(code if isinstance(code, int) else 1 if code else 0, out, err)

    return call
