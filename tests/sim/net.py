"""The network between daemons: delay, loss, repetition, reordering; and who notices that a node is gone.

What is said to a process its successor does not hear, and once a successor was heard nobody hears its predecessor: connections
end with their processes (wire/control.py; tests/node/test_control.py, test_control_security.py).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from ckptd.core.protocol.events import NodeDown, NodeUp, Received
from ckptd.core.protocol.messages import Message
from tests.sim.links import Links
from tests.sim.wire import Wire

if TYPE_CHECKING:
    from tests.sim.world import World

STRAGGLE_S = 10.0
LATE_OF = (0.0, 0.0, 0.05, 0.6)  # how often a node's event loop is so busy that it hears itself late
SLOW_LOOP_S = 0.3
DETECT_S = 0.8  # until a link's heartbeats fail


class Net:
    def __init__(self, world: World, rng: Random, links: Links) -> None:
        self.world, self.rng, self.links = world, rng, links
        self.delay_s = rng.choice([0.002, 0.01, 0.05])
        self.loss = rng.choice([0.0, 0.0, 0.01, 0.05])
        self.repeat = rng.choice([0.0, 0.02])
        self.straggle = 0.02 if world.harsh else 0.001  # messages that come once more, much later
        self.view: dict[tuple[str, str], bool] = {}  # (observer, node) -> what it was told last
        self._blind: set[tuple[str, str]] = set()  # (observer, node) that was gone when the observer started, which was not told so
        self._heard: dict[tuple[str, str], tuple[int, int]] = {}  # (hearer, node) -> their newest lives that spoke
        self._busy = Random(f"busy {world.seed}")
        self._late = self._busy.choice(LATE_OF)
        self.wire = Wire(world.shape.line_bytes_s)
        self._turn: dict[str, float] = {}  # node -> until when what it said to itself waits for its event loop

    def calm(self) -> None:
        self.loss = self.repeat = self.straggle = self._late = 0.0
        self.links.calm()
        self.changed()

    @property
    def side(self) -> dict[str, int]:
        return self.links.side

    def reaches(self, a: str, b: str) -> bool:
        return self.links.reaches(a, b)

    def latency(self) -> float:
        tail = self.rng.random()
        return self.delay_s * (0.5 + self.rng.random() + (10 * self.rng.random() if tail < 0.05 else 0))

    def bulk(self, a: str, b: str, nbytes: int) -> float:
        """Seconds that so much of a slot takes from a to b."""
        held = self.links.wait(a, b, self.world.clock.now)
        slow = self.links.slow.get((a, b), 1.0) if self.links.slow else 1.0
        return held + slow * self.world.replicate_s * (0.5 + self.rng.random()) * self.world.load(nbytes)

    def to_itself(self, node: str) -> float:
        """Seconds until a node hears its own word: a busy event loop comes to it later than fast peers answer. In order."""
        now = self.world.clock.now
        late = self._busy.uniform(0.0, SLOW_LOOP_S) if self._busy.random() < self._late else 0.0
        self._turn[node] = max(self._turn.get(node, 0.0), now + late)
        return self._turn[node] - now

    def send(self, source: str, to: str, message: Message) -> None:
        if to not in self.world.hosts or not self.links.carries(source, to) or self.rng.random() < self.loss:
            return
        now = self.world.clock.now
        sent = self.wire.seconds(source, to, message, now)
        if sent is None:
            return
        held = self.links.wait(source, to, now) + sent
        lives = self.world.hosts[to].life, self.world.hosts[source].life
        self.world.clock.after(held + self.latency(), self._arrive, source, to, lives, message)
        if self.repeat and self.rng.random() < self.repeat:
            self.world.clock.after(10 * self.latency(), self._arrive, source, to, lives, message)
        if self.straggle and self.rng.random() < self.straggle:
            self.world.clock.after(self.rng.uniform(0.5, STRAGGLE_S), self._arrive, source, to, lives, message)

    def _arrive(self, source: str, to: str, lives: tuple[int, int], message: Message) -> None:
        host = self.world.hosts[to]
        if not self.links.carries(source, to) or not host.alive or host.life != lives[0]:
            return
        if lives >= self._heard.get((to, source), lives):
            self._heard[to, source] = lives
            if (to, source) in self._blind:  # it is heard: when it falls silent, or has by now, that is told
                self._blind.discard((to, source))
                self.view.pop((to, source), None)
                self.changed()
            host.feed(Received(source, message))

    # --- partitions and liveness --------------------------------------------------------------------------------
    def split(self, away: set[str]) -> None:
        self.links.side = dict.fromkeys(away, 1)
        self.changed()

    def heal(self) -> None:
        self.links.heal()
        self.changed()

    def changed(self) -> None:
        """Somebody came, went, stopped, or a cable moved: observers notice after a while."""
        for world in self.world.everyone:
            world.clock.after(DETECT_S * (0.7 + 0.6 * self.rng.random()), world.net._look)

    def _look(self) -> None:
        hosts, links, now, view = self.world.hosts, self.links, self.world.clock.now, self.view
        silent = {name for name, host in hosts.items() if not host.alive or (host.paused and not host.unseen)}
        quiet = not (links.side or links.deaf or links.clogged)
        told_down = {node for (_, node), up in view.items() if not up}
        others = [name for name in hosts if not quiet or name in silent or name in told_down]
        for a, observer in hosts.items():
            if a in silent:
                continue
            for b in others:
                if a == b:
                    continue
                up = b not in silent and (quiet or links.beats(a, b, now))
                if view.get((a, b), True) != up:
                    view[a, b] = up
                    self._blind.discard((a, b))
                    observer.feed(NodeUp(b) if up else NodeDown(b))

    def told_gone(self, observer: str) -> list[str]:
        """Only of these is it told when they are back."""
        return [b for (a, b), up in self.view.items() if a == observer and not up and (a, b) not in self._blind]

    def forget_views(self, node: str) -> None:
        """A daemon that starts has seen nobody go. Half of them learn of dead nodes only by their silence."""
        blind = self.rng.random() < 0.5
        now = self.world.clock.now
        for other, host in self.world.hosts.items():
            gone = not host.alive or host.paused or not self.links.beats(node, other, now)
            self._blind.discard((node, other))
            if blind and gone:
                self.view[node, other] = False
                self._blind.add((node, other))
            else:
                self.view.pop((node, other), None)
