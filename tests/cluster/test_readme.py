"""The README is true: its loop runs as printed, its commands and files exist; and a list names only what can be had (P2)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from ckptd.cli.app import app
from tests.cluster.nodes import REPO, Cluster, Node, TrainerError
from tests.waiting import until

RUN_TIMEOUT_S = 90.0
DOCUMENTS = ("README.md", "docs/OPERATIONS.md", "docs/TESTING.md", "bench/README.md", "deploy/torchrun/README.md")

# The names that the loop takes from the program around it.
AROUND = """
import sys, torch
from torch import nn

class Loader:
    at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]

torch.manual_seed(int(sys.argv[1]))
steps, began = int(sys.argv[2]), None
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
loader = Loader()

def train_one(_):
    global began
    began = loader.at if began is None else began
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad(); scheduler.step()
    loader.at += 1
"""
AFTER = """
print("began", began, "ended", loader.at, "sum", model.weight.double().sum().item())
"""


def loop() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1, "the README has one program"
    assert len(blocks[0].splitlines()) <= 15
    return str(blocks[0])


def run(node: Node, folder: Path, *, seed: int, steps: int) -> list[str]:
    return ran(node, folder, seed=seed, steps=steps).stdout.split()


def ran(node: Node, folder: Path, *, seed: int, steps: int) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(AROUND + loop() + AFTER)
    env = {"PATH": "/usr/bin:/bin", "CKPTD_SOCKET": str(node.socket), "OMP_NUM_THREADS": "1", "TMPDIR": str(node.root)}
    done = subprocess.run(
        [sys.executable, script, str(seed), str(steps)],
        env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.chaos
def test_one_goes_back_to_an_older_step_and_keeps_the_newer_as_another_job(nodes: Cluster) -> None:
    """With the commands of docs/OPERATIONS.md, "Going back to an older step" (P12)."""
    storage = nodes.root / "storage"
    node = nodes.node(storage_root=storage, replicas=0, flush_every_steps=10, keep_last=9)
    (trainer,) = nodes.world([node], "gpt")
    assert trainer.do("restore") is None
    digests = {}
    for _ in range(7):
        step = trainer.do("train", steps=10)["step"]
        digests[step] = trainer.do("digest")
        assert trainer.do("wait", level="durable") == "durable"
    assert trainer.do("restore", step=50) == 50
    assert trainer.do("digest") == digests[50]
    left = [60, 70]
    assert sorted(row["step"] for row in trainer.do("steps") if row["abandoned"]) == left
    for shown in (node.cli("ls").stdout, node.cli("ls", storage).stdout):
        assert [int(step) for step in re.findall(r"(\d+) +durable +storage +(?:running +)?left behind", shown)] == left[::-1], shown
    with pytest.raises(TrainerError, match="step 70 of epoch 1 was left behind when the job went back to step 50 of epoch 1"):
        trainer.do("restore", step=70)
    (script,) = re.findall(r"```\n(cd /mnt/checkpoints/.*?)```", (REPO / "docs/OPERATIONS.md").read_text(), re.DOTALL)
    script = script.replace("/mnt/checkpoints/$UID", str(storage / str(os.getuid())))
    subprocess.run(["bash", "-ec", script], check=True)
    assert trainer.do("restore") == 50
    trainer.do("train", steps=10)
    assert trainer.do("wait", level="durable") == "durable"
    until(lambda: not any(row["abandoned"] for row in trainer.do("steps")), 45, "retention to delete what was left behind")
    trainer.do("again", job="gpt-b", kind="plain")
    assert trainer.do("restore") == 70
    assert trainer.do("digest") == digests[70]


def test_the_loop_runs_and_goes_on(nodes: Cluster, tmp_path: Path) -> None:
    storage = tmp_path / "checkpoints"
    node = nodes.node(storage_root=storage)
    first = run(node, tmp_path, seed=1, steps=20)
    assert first[:4] == ["began", "0", "ended", "20"]
    assert run(node, tmp_path, seed=3, steps=30)[:4] == ["began", "20", "ended", "30"]
    held = [row for row in node.get("/ls")["rows"] if "memory" in row["where"]]
    assert 1 <= len(held) <= int(node.settings.get("own_slots", 3)), "a list names what memory holds, no more (P2)"
    assert node.cli("verify", storage).returncode == 0
    assert node.cli("ls", storage).returncode == 0


@pytest.mark.chaos
def test_a_loop_that_has_ended_has_nothing_left_to_do(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.node(storage_root=tmp_path / "checkpoints")
    first = run(node, tmp_path, seed=1, steps=20)
    again = run(node, tmp_path, seed=2, steps=20)
    assert again[:4] == ["began", "None", "ended", "20"]
    assert again[5] == first[5], "another seed, the same weights: they were restored"


@pytest.mark.chaos
def test_without_storage_the_loop_ends_all_the_same(nodes: Cluster, tmp_path: Path) -> None:
    """Its last line does not wait ten minutes for what cannot come."""
    done = ran(nodes.node(), tmp_path, seed=1, steps=3)
    assert "ended 3" in done.stdout
    assert done.stderr.count("nothing becomes durable: the daemon has no storage root") == 1


def commands() -> Iterator[tuple[str, str]]:
    """(document, line) of every ckptd command in a code block."""
    for name in DOCUMENTS:
        for block in re.findall(r"```(?:sh|bash|text)?\n(.*?)```", (REPO / name).read_text(), re.DOTALL):
            joined = block.replace("\\\n", " ")
            yield from ((name, line.split("#")[0].strip()) for line in joined.splitlines() if line.startswith("ckptd "))


@pytest.mark.parametrize(("name", "line"), list(commands()))
def test_commands_in_the_documents_exist(name: str, line: str) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    words = line.split()
    assert words[1] in known, f"{name}: {line}"
    options = {option for each in known[words[1]].params for option in (*each.opts, *each.secondary_opts)}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= options, f"{name}: {line}"


@pytest.mark.parametrize("name", [*DOCUMENTS, "docs/ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_named_in_the_documents_exist(name: str) -> None:
    text = (REPO / name).read_text()
    named = set(re.findall(r"`((?:tests|bench|ckptd|client|deploy|docs)/[\w./-]*\w/?)`", text))
    named |= {f"{Path(name).parent}/{link}" for link in re.findall(r"\]\(([\w./-]+?\.\w+)(?:#[\w-]*)?\)", text)}
    missing = {path for path in named if not (REPO / path).exists() and not path.startswith("bench/results")}
    assert not missing, f"{name} names {sorted(missing)}"


def test_tests_of_the_track_record_exist() -> None:
    """The last column names files below tests/."""
    text = (REPO / "docs/TESTING.md").read_text()
    rows = [line.rsplit(" | ", 1)[1] for line in text[text.index("| bug | found by") :].splitlines()[2:] if line.startswith("| ")]
    named = {path.removeprefix("tests/") for row in rows for path in re.findall(r"`([\w/]*test_\w+\.py)", row)}
    assert len(rows) > 100 and named
    assert not {path for path in named if not (REPO / "tests" / path).exists()}
