"""A rank for tests: trains a small model for real, one command per line on stdin, one answer per line on stdout.

Kinds: plain, ddp, fsdp; statistics (fsdp, and each rank sees data of its own: so are its BatchNorm's statistics), ruled (the same,
and a rule says what becomes of these); other (another shape than plain), double (another dtype), head (one module more), model (no
optimizer registered); wide (tensors that are copied in the background, small ones are not), wide_fsdp (the same, sharded; 3.2 MB);
stages (equal names, other values on each rank), shapes (equal names, another shape on each rank); adapters (16 MB of frozen
parameters and a small trained layer), adapters_fsdp; many (600 small parameters, plain on each rank); zero (an engine of its own
that hands over boxes, zero.py); explicit (registers nothing: saving() and open()).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
from ckptd_client import Blob, Box, CkptdError, Client, own
from ckptd_client.integrations.kept import Kept
from torch import nn

from ckptd.core import failpoint
from tests.cluster.zero import Zero

WIDTH = 64
ROWS = 40_000  # of a table: 10 MiB, and two moments
FROZEN = 1024
STEP_S = 0.002
MANY = 600
OWN_DATA = ("statistics", "ruled")


class Loader:
    """Plain Python state: where the next batch comes from."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Many(nn.Module):
    """``count`` parameters of 16 numbers each; all of them train."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.full((16,), float(i)) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer.mean() for layer in self.layers]).sum() * x


class Table(nn.Module):
    """An embedding, of which each step looks up a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows((x[:, 0].abs() * 1e6).long() % ROWS)


class Run:
    def __init__(self, job: str, kind: str) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.world > 1:
            dist.init_process_group("gloo")
        self._begin(job, kind)

    def _begin(self, job: str, kind: str) -> None:
        torch.manual_seed(1)
        wide = 32 * WIDTH
        widths = {"other": 2 * WIDTH, "wide": wide, "wide_fsdp": wide, "wide_ddp": 4 * wide, "shapes": (1 + self.rank) * WIDTH}
        width = widths.get(kind, WIDTH)
        out = FROZEN if kind.startswith("adapters") else WIDTH
        self.bare: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, width), nn.BatchNorm1d(width), nn.Linear(width, out)
        )
        if kind == "double":
            self.bare.double()
        if kind.startswith("adapters"):
            self.bare[2].requires_grad_(False)
            self.bare.append(nn.Sequential(*(nn.Linear(FROZEN, FROZEN) for _ in range(4))).requires_grad_(False))
            self.bare.append(nn.Linear(FROZEN, WIDTH))
        if kind == "many":
            self.bare = Many(MANY)
        if kind == "table":
            self.bare = Table()
        self.model = self._wrap(kind)
        self.optimizer: Any = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        if kind == "table":
            self.optimizer = torch.optim.SparseAdam(self.model.parameters(), lr=1e-3)
        self.loader = Loader()
        self.kind = kind
        self.step = 0
        self.kept: Kept | None = None
        registered: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "extra": {"loader": self.loader}}
        if kind == "head":
            registered["head"] = nn.Linear(3, 5)
        if kind == "model":
            del registered["optimizer"], registered["extra"]
        self.client = Client.connect(job=job)
        if kind == "zero":
            self.optimizer = Zero(self.bare, self.rank, self.world)
            self.optimizer.register(self.client)
            registered = registered["extra"]
        if kind == "explicit":
            return
        self.client.register(**registered, rules={"*.running_*": own("mean")} if kind == "ruled" else None)

    def again(self, job: str, kind: str) -> None:
        """A new start in the same process: another client, model and optimizer."""
        self.client.close(finished=False)
        self._begin(job, kind)

    def _wrap(self, kind: str) -> nn.Module:
        if self.world == 1 or kind not in ("ddp", "wide_ddp", "fsdp", "wide_fsdp", "adapters_fsdp", *OWN_DATA):
            return self.bare
        if kind.endswith("ddp"):
            return nn.parallel.DistributedDataParallel(self.bare)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.world,))
        fully_shard(self.bare[0], mesh=mesh)
        return fully_shard(self.bare, mesh=mesh)

    def arm(self, failpoints: str) -> None:
        failpoint.arm(failpoints)

    def train(self, steps: int = 1, snapshot: bool = True) -> dict[str, Any]:
        statuses = []
        for _ in range(steps):
            seed = self.step * 1000 + (self.rank if self.kind in ("stages", *OWN_DATA) else 0)
            generator = torch.Generator().manual_seed(seed)
            loss = self.model(torch.randn(8, WIDTH, generator=generator)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loader.at += 8
            self.step += 1
            if snapshot:
                statuses.append(self.client.snapshot(self.step).status)
        return {"step": self.step, "loss": float(loss.detach()), "statuses": statuses}

    def snapshot(self, **how: Any) -> str:
        return str(self.client.snapshot(how.pop("step", self.step), **how).status)

    def restore(self, rules: dict[str, str] | None = None, **how: Any) -> int | None:
        if rules is not None:
            how["rules"] = {pattern: own(what) for pattern, what in rules.items()}
        found = self.client.restore(**how)
        self.step = found or 0
        return found

    def last_restore(self) -> Any:
        return self.client.last_restore

    def wait(self, level: str, timeout: float = 30.0) -> str:
        """Of a step that was skipped: it is captured now."""
        if self.client.wait(level=level, timeout=0.0).startswith("skipped"):
            self.client._must_timeout_s = timeout
            self.client.snapshot(self.step, must=True)
        return str(self.client.wait(level=level, timeout=timeout))

    def steps(self) -> Any:
        return list(self.client.steps())

    def release(self, step: int) -> str:
        """By another thread than the one that trains."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.client.release, step).result()

    def keep(self, limit: int, stays: Sequence[int] = ()) -> list[int]:
        """Trains a step and saves it as a library's retention does. What that has kept by then."""
        self.kept = self.kept or Kept(self.client, limit)
        self.train(snapshot=False)
        self.kept.save(self.step, stays)
        return self.kept.steps

    def look(self) -> None:
        assert self.kept is not None
        self.kept.look()

    def health(self) -> Any:
        health = self.client.health()
        return {"ok": health.ok, "problems": list(health.problems)}

    def write(self, ranks: list[int], whole: bool = False) -> None:
        """By hand, past every fence: these ranks change a weight, or its local part (two counters)."""
        weight: Any = self.bare[0].weight
        if self.rank in ranks:
            with torch.no_grad():
                (weight if whole else weight.to_local()).mul_(1.1)

    def save(self, step: int, level: str = "protected", name: str | None = None, fails: int = -1, leaves: int = -1) -> None:
        """Rows of a [3 * world, 40] tensor that are each rank's, something all have, and bytes; by a thread of its own while this
        one makes steps."""
        rows, common = torch.arange(120.0).view(3, 40) + 1000 * self.rank + step, torch.full((500, 40), float(step))

        def items() -> Iterator[Box | Blob]:
            if fails == self.rank:
                raise RuntimeError("no such key")
            yield Box("rows", rows, (3 * self.world, 40), (3 * self.rank + (leaves == self.rank), 0))
            yield Box("common", common, (500, 40), (0, 0), copy=self.rank)
            yield Blob("plan", f"of {step}".encode())
            yield Blob("own", f"rank {self.rank}".encode(), per_rank=True)

        def run() -> None:
            with self.client.saving(step, level, name) as save:
                for item in items():
                    save.add(item)

        training = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
        with ThreadPoolExecutor(1) as pool:
            saved = pool.submit(run)
            while not saved.done():
                training.step()
                wait([saved], STEP_S)
            saved.result()

    def load(self, step: int | None = None, name: str | None = None) -> Any:
        """Two columns of all rows, this rank's own, as double; and the bytes."""
        with self.client.open(step, name=name) as found:  # type: ignore[union-attr]
            (rows, width), out = found.tensors["rows"][1], torch.empty(0)
            out = torch.empty(rows, 2, dtype=torch.float64)
            found.read([("rows", (0, 2 * self.rank), (rows, 2), out)] if self.rank < width // 2 else [])
            blobs = {name: value if isinstance(value, dict) else value.decode() for name, value in found.blobs.items()}
            own = blobs["own"]
            return {
                "step": found.step, "columns": out.tolist(), "plan": blobs["plan"], "tensors": sorted(found.tensors),
                "own": {rank: value.decode() for rank, value in own.items()} if isinstance(own, dict) else own,
            }  # fmt: skip

    def read_twice(self, fails: int) -> Any:
        """The first time this rank asks for what is not there."""
        missed, out = False, torch.empty(3 * self.world, 2)
        with self.client.open() as found:  # type: ignore[union-attr]
            rows = [("rows", (0, 2 * self.rank), (3 * self.world, 2), out)]
            try:
                found.read([("nope", (0,), (1,), torch.empty(1))] if fails == self.rank else rows)
            except CkptdError:
                missed = True
            found.read(rows)
        return {"missed": missed, "columns": out.tolist()}

    def dcp_save(self, **how: Any) -> None:
        from tests.cluster import dcp

        dcp.save(self.client, **how)

    def dcp_load(self, **how: Any) -> Any:
        from tests.cluster import dcp

        return dcp.load(self.client, **how)

    def dcp_own(self, what: str, **how: Any) -> Any:
        from tests.cluster import dcp_own

        return getattr(dcp_own, what)(self.client, **how)

    def dcp_cost(self, **how: Any) -> Any:
        from tests.cluster import dcp

        return dcp.cost(self.client, **how)

    def spoil(self) -> None:
        """One bit of a copy, as failing memory would."""
        next(self.bare.parameters()).data.view(torch.int32).view(-1)[7] ^= 1

    def lost(self) -> Any:
        return self.client.health().facts.get("lost", {})

    def own(self) -> Any:
        return self.client.health().facts["own"]

    def thaw(self) -> None:
        """Other weights under the same names, as a new base model has."""
        with torch.no_grad():
            self.bare[3][0].weight.mul_(2)

    def bytes_of(self, name: str) -> str:
        """The first bytes of this rank's own part of a parameter, as hexadecimal digits: what lies in its slot."""
        value = dict(self.bare.named_parameters())[name].detach()
        local = value.to_local() if hasattr(value, "to_local") else value
        return bytes(local.contiguous().view(-1).view(torch.uint8)[:64].tolist()).hex()

    def digest(self) -> str:
        """Of everything a restore must bring back, made without ckptd."""
        found = hashlib.sha256()
        tensors = dict(self.model.state_dict())
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
        for name in sorted(tensors):
            value = tensors[name]
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(name.removeprefix("module.").encode())
            found.update(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found.update(str(self.loader.at).encode())
        return found.hexdigest()

    def statistics(self) -> Any:
        """Of the BatchNorm, in full precision."""
        norm: Any = self.bare[1]
        return [norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)]

    def close(self) -> None:
        self.client.close()


def main(job: str, kind: str) -> None:
    run = Run(job, kind)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            reply = {"ok": getattr(run, order.pop("do"))(**order)}
        except Exception as error:  # told to the test, which decides
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply, default=str), flush=True)
