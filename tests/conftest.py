"""Whatever the tests and their processes write, torch's own files among it, lies in one short folder that goes when
they end (tests/sweeper.py)."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptd.demo.cluster import short_temp
from tests.short import KEEP, kept

if TYPE_CHECKING:
    from tests.object_server import ObjectServer

FOLDER = pytest.StashKey[str]()
END_TIMEOUT_S = 60.0
LONGEST = (  # half a minute and more on two quiet cores; and the house's, of which each process would parse all files anew
    "tests/sim/test_sim.py", "tests/cluster/test_retention_beside_restore.py", "tests/cluster/test_readme.py",
    "tests/cluster/test_client_parallel.py", "tests/test_house.py",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)  # pytest's own tmp_path looks at the option next
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a worker of xdist has our environment, and its tmp_path from us
    folder = config.stash[FOLDER] = tempfile.mkdtemp(prefix="ckptd-t-", dir=short_temp())
    os.chmod(folder, 0o1777)  # like /tmp: some tests have processes of other users
    _sweep_at_the_end(config, folder)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    config.option.basetemp = config.option.basetemp or f"{folder}/p"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest begin first: where they began last, the other workers would wait for them."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """What was imported and collected lives on: no look for garbage goes through it, nor do forked children copy it."""
    gc.collect()
    gc.freeze()


def _sweep_at_the_end(config: pytest.Config, folder: str) -> None:
    """By a process of its own, so that it happens also when this one is killed."""
    command = [sys.executable, "-m", "tests.sweeper", folder]
    sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd=ROOT)

    def sweep() -> None:
        sweeper.communicate(timeout=END_TIMEOUT_S)

    config.add_cleanup(sweep)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if kept():
        terminalreporter.write_line(f"what the tests wrote is in {config.stash[FOLDER]}")
    elif any(terminalreporter.stats.get(outcome) for outcome in ("failed", "error")):
        terminalreporter.write_line(f"what the tests wrote is removed; {KEEP}=1 keeps it, daemons' and trainers' logs included")


@pytest.fixture(scope="session")
def objects() -> Iterator[ObjectServer]:
    """An S3 server, which takes two seconds to come up."""
    from tests.object_server import ObjectServer

    server = ObjectServer()
    yield server
    server.close()


@pytest.fixture
def bucket(objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The storage root in a new bucket; whoever is started from here finds its way there."""
    name = objects.new_bucket()
    for key, value in objects.environment().items():
        monkeypatch.setenv(key, value)
    return f"{objects.scheme}{name}/some/prefix"
