"""Two runs without ckptd, made afterwards so that they take no time from the training they are compared with."""

from __future__ import annotations

from ckptd.demo import claims
from ckptd.demo.stage import START_TIMEOUT_S, STEPS_TIMEOUT_S, Stage

Losses = dict[int, float]


def control_runs(stage: Stage) -> None:
    """The unbroken run, and the survivors' run as plain ``torch.save`` would have resumed it."""
    reduced, two = stage.jobs[1:-1], stage.jobs[-1]
    world, newest = reduced[0].world, max(job.pages.last_step() for job in reduced)
    stage.say(f"control: the unbroken run on {stage.jobs[0].world} ranks, without ckptd")
    unbroken = _run(stage, "unbroken", stage.jobs[0].world, max(newest, two.pages.last_step()))
    stage.say(f"control: {world} ranks resumed from a plain torch.save of step {stage.reduced_start}, without ckptd")
    reference = _run(stage, "reference", world, newest, "--load", str(stage.reference_start))
    _compare(stage, unbroken, reference)


def _run(stage: Stage, name: str, world: int, steps: int, *more: str) -> Losses:
    cluster = stage.cluster
    job = cluster.job(name, cluster.plain_hosts(world), ["--steps", str(steps), *more])
    cluster.wait(job.finished, START_TIMEOUT_S + STEPS_TIMEOUT_S, f"the control run {name}", job)
    return job.pages.refresh().losses()


def _compare(stage: Stage, unbroken: Losses, reference: Losses) -> None:
    chapters = {chapter.number: chapter for chapter in stage.chapters}
    four, three, again, two = (job.pages.refresh().losses() for job in stage.jobs)
    name = "until the kill, snapshots changed no loss of the unbroken run"
    chapters[1].check(claims.losses_bit_equal(name, four, unbroken, sorted(four)))
    enough = len(three) >= stage.pace.onward
    chapters[2].claim(f"at least {stage.pace.onward} steps", enough, f"{len(three)} steps on {stage.jobs[1].world} ranks")
    name = "losses are bit-equal to a run resumed from a plain torch.save of that step"
    chapters[2].check(claims.losses_bit_equal(name, three, reference, sorted(three)))
    name = "losses agree with the unbroken run"
    chapters[2].check(claims.losses_close(name, three, unbroken, sorted(three)))
    chapters[3].check(claims.losses_close(name, two, unbroken, sorted(two)))
    name = "losses afterwards are bit-equal to that reference run"
    for number in (4, 5):
        after = [step for step in sorted(again) if step > (chapters[number].restored_step or 0)]
        chapters[number].check(claims.losses_bit_equal(name, again, reference, after))
