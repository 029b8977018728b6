"""Which process is which node: two daemons that claim one node id are found out (design D3). Pure; time is handed in.

A node id belongs to the incarnation that used it first, for as long as that one is heard. When it is gone (its last
connection broke, or silence) the id is free for the next: a restarted daemon.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Claim:
    incarnation: str
    heard: float
    paths: int = 0  # connections on which it is alive


class Claims:
    def __init__(self, node: str, incarnation: str, silence_s: float) -> None:
        self._own = (node, incarnation)
        self._silence_s = silence_s
        self._by_node: dict[str, Claim] = {}

    def refusal(self, node: str, incarnation: str, now: float) -> str:
        """Why this claim is not believed, "": it is."""
        if node == self._own[0]:
            return f"node id {node!r} is already taken by {self._own[1]}"
        claim = self._by_node.get(node)
        if claim is None or claim.incarnation == incarnation or now - claim.heard > self._silence_s:
            return ""
        return f"node id {node!r} is already taken by {claim.incarnation}"

    def open(self, node: str, incarnation: str, now: float) -> None:
        """A connection of a believed claim is up. It may replace a silent one."""
        claim = self._by_node.get(node)
        if claim is None or claim.incarnation != incarnation:
            claim = self._by_node[node] = Claim(incarnation, now)
        claim.paths += 1
        claim.heard = now

    def heard(self, node: str, incarnation: str, now: float) -> bool:
        """False: the id went to another incarnation meanwhile."""
        claim = self._by_node.get(node)
        if claim is None or claim.incarnation != incarnation:
            return False
        claim.heard = now
        return True

    def close(self, node: str, incarnation: str) -> None:
        """A connection is gone; with the last one, the claim."""
        claim = self._by_node.get(node)
        if claim is None or claim.incarnation != incarnation:
            return
        claim.paths -= 1
        if claim.paths <= 0:
            del self._by_node[node]
