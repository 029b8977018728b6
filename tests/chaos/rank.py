"""A rank of a trial: restores, then trains until it is killed, and writes down what it made and what it was told.

Its record is a file to which each line goes with one ``write``: what is in it when the process is killed, the process knew. It is
all that the oracle believes. Ranks meet in a file store; there is no other communication between them, so only ckptd can hang.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend "fake"
from ckptd_client import CkptdError, Client, Handle

from tests.chaos.state import Parts

STEP_S = 0.02  # of one training step
HANDLES_MAX = 64  # snapshots whose level is followed
WAIT_EVERY = 25  # steps between calls of client.wait
WAIT_S = 2.0
SLOW_S = 0.5  # a wait of training that is written down


class Record:
    """Append-only, one line per fact."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, **facts: Any) -> None:
        os.write(self._fd, (json.dumps({"t": time.monotonic(), "k": kind, **facts}) + "\n").encode())


class Rank:
    def __init__(self, job: str, generation: int) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.record = Record(os.environ["CHAOS_RECORD"])
        store = dist.FileStore(os.environ["CHAOS_STORE"], world)
        dist.init_process_group("fake", store=store, rank=rank, world_size=world)
        self.generation = generation
        self.parts = Parts(rank, world)
        self.pause = threading.Event()
        self.followed: dict[int, tuple[Handle, tuple[Any, ...]]] = {}
        self.client = Client.connect(job=job, timeout_s=10.0, must_timeout_s=WAIT_S)
        self.client.register(
            parts=self.parts.owned, common=self.parts.common, clock=self.parts.clock, replicated=["common.declared"],
            fenced=True,
        )  # fmt: skip

    def restore(self, allow_fresh: bool) -> bool:
        began = time.monotonic()
        try:
            step = self.client.restore(only=["*"], allow_fresh=allow_fresh)
        except CkptdError as error:
            self.record.write("refused", error=str(error), took=time.monotonic() - began)
            return False
        clock, facts = self.parts.clock, self.client.last_restore
        self.record.write(
            "restored", step=step, made=[clock.generation, clock.step], digests=self.parts.digests(),
            took=time.monotonic() - began, mode=facts.get("mode"), bytes=facts.get("bytes"),
        )  # fmt: skip
        return True

    def train(self) -> None:
        step = max(self.parts.clock.step, 0)
        while True:
            step += 1
            self.bounded("fence", step, self.client.fence)
            self.parts.make(self.generation, step)
            self.record.write("made", step=step, digests=self.parts.digests())
            handle = self.bounded("snapshot", step, lambda at=step: self.client.snapshot(at))  # type: ignore[misc]
            self.record.write("called", step=step, status=handle.status)
            if handle.taken:
                self.followed[step] = (handle, ())
            if step % WAIT_EVERY == 0:
                self.record.write("waiting", step=step)
                if handle.status.startswith("skipped"):
                    self.followed[step] = (self.client.snapshot(step, must=True), ())
                status = self.client.wait("protected", WAIT_S)
                self.record.write("waited", step=step, status=status)
            self.pause.wait(STEP_S)
            self.follow()

    def bounded(self, what: str, step: int, call: Any) -> Any:
        began = time.monotonic()
        answer = call()
        took = time.monotonic() - began
        if took > SLOW_S:
            self.record.write("slow", what=what, step=step, took=took)
        return answer

    def follow(self) -> None:
        """Write down every change of what was said of the newest snapshots."""
        while len(self.followed) > HANDLES_MAX:
            del self.followed[min(self.followed)]
        for step, (handle, known) in self.followed.items():
            fact = handle.fact
            now = (
                (handle.status,)
                if fact is None
                else (handle.status, fact.level, fact.wanted, fact.durable, fact.void)
            )
            if now != known:
                self.followed[step] = (handle, now)
                level, wanted, durable, void = (-1, 0, False, "") if fact is None else now[1:]
                self.record.write(
                    "level", step=step, status=now[0], level=level, wanted=wanted, durable=durable, void=void
                )


def main(job: str, kind: str) -> None:
    """``kind``: "GENERATION" or "GENERATION fresh"."""
    generation, *rest = kind.split()
    rank = Rank(job, int(generation))
    if rank.restore("fresh" in rest):
        rank.train()
    else:
        rank.pause.wait()  # the launcher has read why, and ends this process
