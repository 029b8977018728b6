"""What one seed is made of: nodes and their failure domains, the policy, the speeds. A policy's fields are drawn here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from ckptd.core.policy import Policy
from ckptd.core.redundancy.policies import Parity, Replicas

LARGE_EVERY = 50  # seeds
MEDIUM_OF = 0.04  # of the others

LINGERS_S = 600.0  # what is known of a job with nothing in memory stays for so long: longer than a world lives
FORGETS_S = 3.0  # ... or not


@dataclass(frozen=True)
class Shape:
    size: int  # nodes
    domains: tuple[str, ...]  # of each node
    harsh: bool  # many faults of the kinds that are usually survived
    policy: Policy
    capture_s: float
    replicate_s: float
    flush_s: float
    stride: int  # steps between calls of snapshot()
    jobs: int
    handler_s: float  # what a daemon's event loop usually takes for one event
    line_bytes_s: float  # of a link, for messages
    slot_s: float  # that touching the memory of one slot takes; they come one after another

    @property
    def large(self) -> bool:
        return self.size > 8


def draw(seed: int, rng: Random, step_s: float) -> Shape:
    size = draw_size(seed, rng)
    harsh = seed % 4 == 3 and size <= 8
    domains = draw_domains(size, rng)
    policy = replace(draw_policy(size, rng), job_linger_s=FORGETS_S if seed % 4 == 1 else LINGERS_S)
    capture_s, replicate_s, flush_s = (step_s * float(10 ** rng.uniform(-1, 1)) for _ in range(3))
    jobs = 2 if size <= 4 and rng.random() < 0.08 else 1
    stride = rng.choice([1, 1, 1, 5])
    apart = Random(f"costs {seed}")
    handler_s = apart.choice([0.0, 0.0001, 0.0001, 0.001, 0.003] if size <= 8 else [0.0, 0.0001])
    line_bytes_s = apart.choice([2e6, 2e7, 2e8])
    slot_s = apart.choice([0.0, 0.0, 0.3, 0.6])
    return Shape(
        size, domains, harsh, policy, capture_s, replicate_s, flush_s, stride, jobs, handler_s, line_bytes_s, slot_s
    )


def draw_size(seed: int, rng: Random) -> int:
    if seed % LARGE_EVERY == 0:
        return rng.choice([12, 24, 48, 64])
    if rng.random() < MEDIUM_OF:
        return rng.randint(7, 11)
    return rng.choice([2, 2, 3, 3, 3, 4, 4, 4, 5, 6])


def draw_domains(size: int, rng: Random) -> tuple[str, ...]:
    """Usually each node is one of its own; else some share a rack, evenly or not."""
    kind = rng.random()
    if kind < 0.7:
        return tuple(f"d{at}" for at in range(size))
    if kind < 0.85:
        count = max(2, size // 2)
        return tuple(f"d{at % count}" for at in range(size))
    count = rng.randint(2, max(2, size - 1))
    first = [f"d{at}" for at in range(min(count, size))]  # each has a node
    drawn = [f"d{min(rng.randrange(count), rng.randrange(count))}" for _ in range(size - len(first))]
    return tuple(first + drawn)


def draw_policy(size: int, rng: Random) -> Policy:
    copies = Replicas(rng.choice([0, 1, 1, 1, 1, 2]) if size > 2 else 1)
    parity = rng.choice([None, None, None, Parity(1, 1), Parity(2, 1), Parity(3, 1), Parity(2, 2)])
    return Policy(
        redundancy=(parity if size > 2 else None) or copies,
        own_slots=rng.choice([2, 2, 3, 3, 4]),
        peer_sets=rng.choice([2, 2, 2, 3]),
        flush_every_steps=rng.choice([0, 5, 20]),
        flush_every_s=rng.choice([0.0, 0.0, 0.0, 4.0]),
        inventory_timeout_s=1.0,
        join_timeout_s=8.0,
        restore_timeout_s=8.0,
        breakpoint_grace_s=1.5,
        steward_timeout_s=2.0,
        replicate_retry_s=0.5,
        write_timeout_s=8.0,
        keep_last=2,
        durable=rng.random() > 0.03,
    )
