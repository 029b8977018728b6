"""The network between daemons: delay, loss, repetition, reordering, partitions; and who notices that a node is gone."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from ckptd.core.events import NodeDown, NodeUp, Received
from ckptd.core.messages import Message

if TYPE_CHECKING:
    from tests.sim.world import World

STRAGGLE_S = 10.0
DETECT_S = 0.8  # until a link's heartbeats fail


class Net:
    def __init__(self, world: World, rng: Random) -> None:
        self.world, self.rng = world, rng
        self.delay_s = rng.choice([0.002, 0.01, 0.05])
        self.loss = rng.choice([0.0, 0.0, 0.01, 0.05])
        self.repeat = rng.choice([0.0, 0.02])
        self.straggle = 0.02 if world.harsh else 0.001  # messages that come once more, much later
        self.side: dict[str, int] = {}  # nodes on different sides do not reach each other
        self.view: dict[tuple[str, str], bool] = {}  # (observer, node) -> what it was told last
        self.sent = 0

    def calm(self) -> None:
        self.loss = self.repeat = self.straggle = 0.0
        self.heal()

    def reaches(self, a: str, b: str) -> bool:
        return a == b or self.side.get(a, 0) == self.side.get(b, 0)

    def latency(self) -> float:
        tail = self.rng.random()
        return self.delay_s * (0.5 + self.rng.random() + (10 * self.rng.random() if tail < 0.05 else 0))

    def send(self, source: str, to: str, message: Message) -> None:
        self.sent += 1
        if to not in self.world.hosts or not self.reaches(source, to) or self.rng.random() < self.loss:
            return
        self.world.clock.after(self.latency(), self._arrive, source, to, message)
        if self.repeat and self.rng.random() < self.repeat:
            self.world.clock.after(10 * self.latency(), self._arrive, source, to, message)

        if self.straggle and self.rng.random() < self.straggle:
            self.world.clock.after(self.rng.uniform(0.5, STRAGGLE_S), self._arrive, source, to, message)

    def _arrive(self, source: str, to: str, message: Message) -> None:
        host = self.world.hosts[to]
        if self.reaches(source, to) and host.alive:
            host.feed(Received(source, message))

    # --- partitions and liveness --------------------------------------------------------------------------------
    def split(self, away: set[str]) -> None:
        self.side = dict.fromkeys(away, 1)
        self.changed()

    def heal(self) -> None:
        self.side = {}
        self.changed()

    def changed(self) -> None:
        """Somebody came, went, stopped, or a cable moved: observers notice after a while."""
        self.world.clock.after(DETECT_S * (0.7 + 0.6 * self.rng.random()), self._look)

    def _look(self) -> None:
        hosts = self.world.hosts
        for a, observer in hosts.items():
            if not observer.alive or observer.paused:
                continue
            for b, other in hosts.items():
                if a == b:
                    continue
                up = other.alive and not other.paused and self.reaches(a, b)
                if self.view.get((a, b), True) != up:
                    self.view[a, b] = up
                    observer.feed(NodeUp(b) if up else NodeDown(b))

    def forget_views(self, node: str) -> None:
        """A daemon that starts has seen nobody go. Half of them learn of dead nodes only by their silence."""
        blind = self.rng.random() < 0.5
        for other, host in self.world.hosts.items():
            gone = not host.alive or host.paused or not self.reaches(node, other)
            self.view[node, other] = not (blind and gone)
