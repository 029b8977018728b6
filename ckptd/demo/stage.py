"""What the five events share: the running job, restarting it after a failure, and reading what the restore cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ckptd.demo import claims
from ckptd.demo.claims import Chapter
from ckptd.demo.cluster import Cluster
from ckptd.demo.job import Job
from ckptd.demo.node import Node

JOB_NAME = "char-gpt"
STEPS_UNBOUNDED = 1_000_000  # the failure comes first
START_TIMEOUT_S = 90.0  # torch is imported twice per node, on two cores
STEPS_TIMEOUT_S = 120.0
DETECT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How many steps each part trains."""

    first: int = 22  # before the first failure
    ahead: int = 3  # protected but not durable at the first failure
    onward: int = 50  # on the survivors
    little: int = 8  # after each of the other events


QUICK = Pace(first=12, ahead=2, onward=12, little=4)


@dataclass
class Stage:
    cluster: Cluster
    pace: Pace
    console: Console
    chapters: list[Chapter] = field(default_factory=list)
    began: float = field(default_factory=time.time)
    nodes: list[Node] = field(default_factory=list)  # those that train now
    jobs: list[Job] = field(default_factory=list)  # protected runs in their order; the last one may be alive
    reduced_start: int = 0  # the step from which the survivors of event 1 went on

    @property
    def job(self) -> Job:
        return self.jobs[-1]

    @property
    def reference_start(self) -> Path:
        """The plain torch.save of the step ``reduced_start``."""
        return self.cluster.root / "reference.pt"

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.time() - self.began:6.1f} s[/]  {text}", highlight=False)

    def chapter(self, number: int, title: str) -> Chapter:
        chapter = Chapter(number, title)
        self.chapters.append(chapter)
        self.say(f"[bold]{number}. {title}[/]")
        return chapter

    # --- the job ------------------------------------------------------------------------------------------------
    def train(self, name: str, nodes: Sequence[Node], *more: str, steps: int = STEPS_UNBOUNDED) -> Job:
        """Start the protected job; returns at once."""
        job = self.cluster.job(name, nodes, ["--job", JOB_NAME, "--steps", str(steps), *more])
        self.jobs.append(job)
        return job

    def until_step(self, job: Job, step: int, timeout: float = STEPS_TIMEOUT_S) -> None:
        """Every rank has finished ``step``."""

        def reached() -> bool:
            self.cluster.sampled(job)
            job.pages.refresh()
            return all(job.pages.last(rank) >= step for rank in range(job.world))

        self.cluster.wait(reached, timeout, f"step {step} of {job.name}", job)

    def until_levels(self, job: Job, what: str, **at_least: int) -> dict[str, int]:
        """Newest steps, once each named level is at least that. One sample per look."""

        def reached() -> dict[str, int]:
            newest = self.cluster.sample(job)
            return newest if all(newest[level] >= step for level, step in at_least.items()) else {}

        found: dict[str, int] = self.cluster.wait(reached, STEPS_TIMEOUT_S, what, job)
        return found

    def sync(self, job: Job) -> dict[str, int]:
        """Newest steps, once what is trained now is protected."""
        return self.until_levels(job, "the newest step's protection", protected=job.pages.refresh().last_step())

    # --- after a failure ----------------------------------------------------------------------------------------
    def detected(self, chapter: Chapter, job: Job, survivors: Sequence[Node]) -> None:
        """The launcher sees a torchrun of a surviving node end with an error; then it kills what is left of the job."""
        names = {node.name for node in survivors}
        self.cluster.wait(lambda: names & {*job.failed()}, DETECT_TIMEOUT_S, "the launcher to notice")
        chapter.seconds["detect"] = time.time() - chapter.at
        job.stop()
        job.pages.refresh()
        chapter.trained_step = job.pages.last_step()

    def restart(self, chapter: Chapter, name: str, steps: int = STEPS_UNBOUNDED) -> Job:
        """A new start of the job on the nodes there are, up to its first step; fills in what the restore cost."""
        launched = time.time()
        job = self.train(name, self.nodes, steps=steps)
        began = self.cluster.wait(lambda: self._restored(job), START_TIMEOUT_S, f"restore() of {name}", job)
        chapter.world = job.world
        chapter.seconds["launch"] = began - launched
        self._read_restore(chapter, job)
        self.until_step(job, (chapter.restored_step or 0) + 1)
        chapter.back = min(f["time"] for f in job.pages.of("step"))
        return job

    def _restored(self, job: Job) -> float:
        """When the last rank called restore(), once all have come back from it."""
        found = job.pages.refresh().of("restored")
        recorded = job.pages.of("restored_digests", 0)
        return max(f["began"] for f in found) if len(found) == job.world and recorded else 0.0

    def _read_restore(self, chapter: Chapter, job: Job) -> None:
        found = {f["rank"]: f for f in job.pages.of("restored")}
        chapter.check(claims.one_step({rank: f["step"] for rank, f in found.items()}, job.world))
        chapter.restored_step = min(f["step"] for f in found.values())
        infos = [f["info"] or {} for f in found.values()]
        for source in claims.SOURCES:
            chapter.bytes[source] = sum(int(info.get("bytes", {}).get(source, 0)) for info in infos)
        for phase in ("decide", "transfer", "load"):
            chapter.seconds[phase] = max((float(i.get("seconds", {}).get(phase, 0.0)) for i in infos), default=0.0)

    def check_digests(self, chapter: Chapter) -> None:
        """Against what the trainers themselves had written down for that step, in whichever run trained it last."""
        step, earlier = chapter.restored_step or 0, reversed(self.jobs[:-1])
        recorded = next((d for job in earlier if (d := job.pages.refresh().digests_at(step))), None)
        restored = self.job.pages.of("restored_digests", 0)
        chapter.check(claims.digests_equal(recorded, restored[-1]["digests"] if restored else None))
