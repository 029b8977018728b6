"""Every number ckptd exports, in one registry of its own (docs/OPERATIONS.md lists them; a test compares).

Names end in their unit. ``job`` is ``{uid}/{name}``; label values that come from ranks are bounded in number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ckptd.core.pacing.slowdown import STATES
from ckptd.observe.report import OutlookReport, PacingReport
from ckptd.observe.sight import ALL, Sight

# From a copy of a few megabytes (1 ms) to a state of terabytes on a slow disk (10 min).
SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 600.0)
REASONS_MAX = (
    32  # distinct reasons kept per counter; a rank's free text must not grow the registry without bound
)
REASON_CHARS_MAX = 64
OTHER = "other"
LEVELS = ("sealed", "protected", "durable")

disable_created_metrics()  # type: ignore[no-untyped-call]


class _Seen(Collector):
    """The registry as one caller may see it: series of other users' jobs are left out (P13)."""

    def __init__(self, registry: CollectorRegistry, sight: Sight) -> None:
        self._registry, self._sight = registry, sight

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if self._sight.sees(s.labels.get("job", ""))]
            yield family


class Metrics:
    """Verbs for the daemon; Prometheus text for the page. Called from any thread (the client library locks)."""

    def __init__(self, node: str, version: str, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._points: dict[str, float] = {}
        self._reasons: dict[str, set[str]] = {}
        self._by_job: list[Counter | Gauge | Histogram] = []
        ProcessCollector(namespace="ckptd", registry=self.registry)
        self._gauge("ckptd_info", "Always 1; who this daemon is", "node", "version").labels(
            node, version
        ).set(1)
        self._make_pipeline()
        self._make_losses()
        self._make_restore()
        self._make_outlook()
        self._make_node()

    # --- making -------------------------------------------------------------------------------------------------
    def _keep(self, metric: Counter | Gauge | Histogram, labels: tuple[str, ...]) -> None:
        if "job" in labels:
            self._by_job.append(metric)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        made = Gauge(name, text, labels, registry=self.registry)
        self._keep(made, labels)
        return made

    def _count(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, labels, registry=self.registry)
        self._keep(made, labels)
        return made

    def _time(self, name: str, text: str, *labels: str) -> Histogram:
        made = Histogram(name, text, labels, registry=self.registry, buckets=SECONDS_BUCKETS)
        self._keep(made, labels)
        return made

    def _make_pipeline(self) -> None:
        self._age = self._gauge(
            "ckptd_recovery_point_age_seconds",
            "Age of the newest snapshot that a death of processes would fall back to; of a node: lag_steps of protected, durable",
            "job",
        )
        self._lag = self._gauge(
            "ckptd_lag_steps", "Steps of training past the newest snapshot of a level; before the first one, all of them",
            "job", "level",
        )
        self._levels = self._count("ckptd_snapshots_total", "Snapshots that reached a level", "job", "level")
        self._capture_s = self._time(
            "ckptd_capture_seconds", "A rank's copy into its slot, reported by it", "job"
        )
        self._blocked_s = self._time(
            "ckptd_blocked_seconds", "Training held by snapshot() and fence, per snapshot", "job"
        )
        self._seal_s = self._time(
            "ckptd_seal_seconds", "Sums and segment header of one slot after its capture", "job"
        )
        self._seal_bytes = self._count(
            "ckptd_sealed_bytes_total", "Bytes of slots sealed on this node", "job"
        )
        self._protect_s = self._time(
            "ckptd_protect_seconds", "One replica: offer to verified on the peer", "job"
        )
        self._protect_bytes = self._count(
            "ckptd_protected_bytes_total", "Bytes of replicas verified on peers", "job"
        )
        self._parity_s = self._time("ckptd_parity_seconds", "One shard of a parity set, order to sealed", "job")
        self._parity_bytes = self._count(
            "ckptd_parity_bytes_total", "Bytes of parity made here, or of slots made from parity", "job", "kind"
        )
        self._flush_s = self._time(
            "ckptd_flush_seconds", "This node's part of one durable snapshot, order to fsync", "job"
        )
        self._flush_bytes = self._count(
            "ckptd_flushed_bytes_total", "Bytes of state made durable by this node", "job"
        )
        self._flush_written = self._count(
            "ckptd_written_bytes_total", "Bytes written and fsynced for that: fewer with `dedup`", "job"
        )

    def _make_losses(self) -> None:
        self._skips = self._count(
            "ckptd_skips_total", "snapshot() calls that captured nothing", "job", "reason"
        )
        self._voids = self._count(
            "ckptd_voids_total", "Snapshots given up job-wide after capture began", "job", "reason"
        )
        self._quarantines = self._count(
            "ckptd_quarantines_total",
            "Copies set aside for wrong sums: in memory, on disk, or (wire) refused as they arrived",
            "job",
            "where",
        )
        self._degradation = self._gauge(
            "ckptd_degradation_level", "Steps that protection stands below its policy for want of memory", "job"
        )
        self._alarms = self._count("ckptd_alarms_total", "Alarms raised by the daemon", "job", "kind")

    def _make_restore(self) -> None:
        self._restores = self._count(
            "ckptd_restores_total", "Restores on this node by outcome", "job", "outcome"
        )
        self._restore_s = self._time("ckptd_restore_seconds", "Seconds of a restore by phase", "job", "phase")
        self._restore_bytes = self._count(
            "ckptd_restore_bytes_total", "Bytes loaded by source", "job", "source"
        )

    def _make_outlook(self) -> None:
        labels = "job", "failure"
        self._lost_steps = self._gauge(
            "ckptd_outlook_lost_steps", "Steps of training lost if such a failure happened now", *labels
        )
        self._lost_s = self._gauge("ckptd_outlook_lost_seconds", "The same in seconds of training", *labels)
        self._restore_in = self._gauge(
            "ckptd_outlook_restore_seconds", "Seconds of the restore then, from measured rates", *labels
        )
        self._unprotected = self._gauge(
            "ckptd_unprotected_seconds", "For how long nothing has had the protection that is wanted", "job"
        )
        self._protection_s = self._time(
            "ckptd_time_to_protection_seconds", "From complete, or from a loss, to fully protected", "job", "cause"
        )

    def _make_node(self) -> None:
        self._budget = self._gauge(
            "ckptd_memory_budget_bytes", "Memory ckptd may use for snapshots on this node"
        )
        self._used = self._gauge("ckptd_memory_used_bytes", "Memory in slots: own, peer, scratch", "kind")
        self._peers_up = self._gauge(
            "ckptd_peers_up", "Nodes of this node's jobs that answer on the control link"
        )
        self._peers = self._gauge("ckptd_peers", "Nodes of this node's jobs")
        self._pace_rate = self._gauge(
            "ckptd_pacing_rate_bytes", "Bytes per second that copies and flushes may send now; -1: no limit"
        )
        self._pace_slowdown = self._gauge(
            "ckptd_pacing_slowdown_ratio",
            "Steps with our traffic beside steps without, less 1; -1: not known",
        )
        self._pace_baseline = self._gauge(
            "ckptd_pacing_step_seconds", "Median step without our traffic; 0: not known"
        )
        self._pace_state = self._gauge("ckptd_pacing_state", "1 for the state pacing is in", "state")
        self._throttled = self._gauge(
            "ckptd_pacing_throttled_seconds",
            "Time that sends have waited for their turn, all together",
            "kind",
        )
        self._ranks = self._gauge("ckptd_ranks", "Ranks connected to this daemon", "job")
        self._jobs = self._gauge("ckptd_jobs", "Jobs that this node knows, by their life", "life")
        self._reclaimed = self._count(
            "ckptd_reclaimed_bytes_total", "Memory of jobs that are over, released on this node", "why"
        )

    # --- telling: the journey of a snapshot ---------------------------------------------------------------------
    def captured(self, job: str, capture_s: float, blocked_s: float) -> None:
        self._capture_s.labels(job).observe(capture_s)
        self._blocked_s.labels(job).observe(blocked_s)

    def sealed(self, job: str, seconds: float, nbytes: int) -> None:
        self._seal_s.labels(job).observe(seconds)
        self._seal_bytes.labels(job).inc(nbytes)

    def replicated(self, job: str, seconds: float, nbytes: int) -> None:
        """One replica of one slot was verified by a peer."""
        self._protect_s.labels(job).observe(seconds)
        self._protect_bytes.labels(job).inc(nbytes)

    def encoded(self, job: str, seconds: float, nbytes: int, *, data: bool) -> None:
        """A shard of a parity set was made here; with ``data`` its member's slot (lost, or moved)."""
        self._parity_s.labels(job).observe(seconds)
        self._parity_bytes.labels(job, "data" if data else "parity").inc(nbytes)

    def flushed(self, job: str, seconds: float, nbytes: int, written: int) -> None:
        self._flush_s.labels(job).observe(seconds)
        self._flush_bytes.labels(job).inc(nbytes)
        self._flush_written.labels(job).inc(written)

    def reached(self, job: str, level: str) -> None:
        """A snapshot reached ``level``, one of LEVELS."""
        assert level in LEVELS, level
        self._levels.labels(job, level).inc()

    def recovery_point(self, job: str, captured_at: float) -> None:
        """The snapshot to fall back to now was captured at this unix time; its age is computed at each scrape."""
        if job not in self._points:
            self._age.labels(job).set_function(lambda: self._clock() - self._points.get(job, self._clock()))
        self._points[job] = captured_at

    def lag(self, job: str, steps: Mapping[str, int]) -> None:
        for level, behind in steps.items():
            self._lag.labels(job, level).set(behind)

    # --- telling: what went wrong -------------------------------------------------------------------------------
    def skipped(self, job: str, reason: str) -> None:
        self._skips.labels(job, self._bounded("skips", reason)).inc()

    def voided(self, job: str, reason: str) -> None:
        self._voids.labels(job, self._bounded("voids", reason)).inc()

    def quarantined(self, job: str, where: str) -> None:
        """``where``: memory, disk, or wire: refused by whoever received it, so not used there. A holder whose memory was at
        fault counts that too."""
        self._quarantines.labels(job, where).inc()

    def alarm(self, job: str, kind: str) -> None:
        self._alarms.labels(job, self._bounded("alarms", kind)).inc()

    # --- telling: restore, node ---------------------------------------------------------------------------------
    def restored(
        self, job: str, outcome: str, nbytes: Mapping[str, int], seconds: Mapping[str, float]
    ) -> None:
        """``nbytes`` by source (own, peer, parity, durable); ``seconds`` by phase (decide, transfer, load)."""
        self._restores.labels(job, self._bounded("outcomes", outcome)).inc()
        for source, count in nbytes.items():
            self._restore_bytes.labels(job, source).inc(count)
        for phase, value in seconds.items():
            self._restore_s.labels(job, phase).observe(value)

    def memory(self, budget_bytes: int, used_bytes: Mapping[str, int]) -> None:
        self._budget.set(budget_bytes)
        for kind, used in used_bytes.items():
            self._used.labels(kind).set(used)

    def pacing(self, report: PacingReport) -> None:
        rate, slowdown = report.get("rate_bytes_s"), report.get("slowdown")
        self._pace_rate.set(-1 if rate is None else rate)
        self._pace_slowdown.set(-1 if slowdown is None else slowdown)
        self._pace_baseline.set(report.get("step_s") or 0)
        for state in STATES:
            self._pace_state.labels(state).set(state == report.get("state"))
        for kind, seconds in report.get("throttled_s", {}).items():
            self._throttled.labels(kind).set(seconds)

    def peers(self, up: int, known: int) -> None:
        self._peers_up.set(up)
        self._peers.set(known)

    def jobs(self, lives: Mapping[str, int]) -> None:
        """``lives``: of core.protocol.life.Life, how many jobs are in each."""
        for life, count in lives.items():
            self._jobs.labels(life).set(count)

    def reclaimed(self, why: str, nbytes: int) -> None:
        self._reclaimed.labels(why).inc(nbytes)

    def ranks(self, job: str, connected: int) -> None:
        self._ranks.labels(job).set(connected)

    def degradation(self, job: str, steps: int) -> None:
        """0: protection is what the policy wants."""
        self._degradation.labels(job).set(steps)

    def outlook(self, job: str, rows: Iterable[OutlookReport], unprotected_s: float) -> None:
        """What was not measured has no series."""
        self._unprotected.labels(job).set(unprotected_s)
        for row in rows:
            failure = row["failure"]
            self._lost_steps.labels(job, failure).set(row["lost_steps"])
            self._set_or_drop(self._lost_s, row.get("lost_s"), job, failure)
            self._set_or_drop(self._restore_in, row.get("restore_s"), job, failure)

    def _set_or_drop(self, gauge: Gauge, value: float | None, job: str, failure: str) -> None:
        if value is None:
            gauge.remove_by_labels({"job": job, "failure": failure})
        else:
            gauge.labels(job, failure).set(value)

    def protected_after(self, job: str, cause: str, seconds: float) -> None:
        """``cause``: one of core.redundancy.exposure.CAUSES."""
        self._protection_s.labels(job, cause).observe(seconds)

    def forget(self, job: str) -> None:
        """The job's memory is gone: so are its series."""
        self._points.pop(job, None)
        for metric in self._by_job:
            metric.remove_by_labels({"job": job})

    # --- reading ------------------------------------------------------------------------------------------------
    def render(self, sight: Sight = ALL) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(_Seen(self.registry, sight))

    def _bounded(self, family: str, reason: str) -> str:
        """The part before a colon (details follow it), and at most REASONS_MAX different ones per family."""
        short = reason.split(":", 1)[0].strip()[:REASON_CHARS_MAX] or OTHER
        known = self._reasons.setdefault(family, set())
        if short not in known and len(known) >= REASONS_MAX:
            return OTHER
        known.add(short)
        return short
