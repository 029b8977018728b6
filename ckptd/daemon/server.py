"""The daemon: wires the rooms together, lives, and stops. Reads top-down: start, run, stop."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ckptd.arena.arena import Arena
from ckptd.arena.fdstore import Keeper
from ckptd.arena.slot import frozen_first
from ckptd.config import Config, loopback_key_file
from ckptd.core.errors import CkptdError
from ckptd.core.ids import NodeInfo, SnapshotId
from ckptd.core.pacing.slowdown import Pacing
from ckptd.core.protocol import events as ev
from ckptd.core.protocol.life import NO_TOMBSTONE, Tombstone
from ckptd.core.protocol.machine.holdings import STALE
from ckptd.core.protocol.messages import Message
from ckptd.daemon import ports
from ckptd.daemon.drain import Drain
from ckptd.daemon.forget import Forget
from ckptd.daemon.graveyard import Graveyard
from ckptd.daemon.job import JobShell
from ckptd.daemon.rank_listener import RankListener
from ckptd.daemon.reclaim import Reclaim
from ckptd.daemon.services import Services, log
from ckptd.daemon.state import StateDir
from ckptd.daemon.status import Status
from ckptd.daemon.storage import SharedCheck, open_cache, open_storage
from ckptd.observe.health import EVENT_TTL_S, Health
from ckptd.observe.http import HttpServer
from ckptd.observe.metrics import Metrics
from ckptd.protect import erasure
from ckptd.protect.cards import Cards
from ckptd.protect.fetch import Fetcher
from ckptd.protect.frozen import FrozenParts
from ckptd.protect.holdings import Holdings
from ckptd.protect.map_parts import MapParts
from ckptd.protect.pacer import Pacer
from ckptd.protect.parity import ParityMaker
from ckptd.protect.replicate import Replicator
from ckptd.recover.passing import Passings
from ckptd.thread_pool import ThreadPool
from ckptd.units import format_bytes
from ckptd.wire.control import ControlLink
from ckptd.wire.keys import ClusterKey
from ckptd.wire.tcp import TcpTransport

TICK_S = 0.1
WORK_THREADS_MAX = 4
SIZING_THREADS_MAX = 2  # ranks' slots, whose memory is touched for the first time
DISK_THREADS_MAX = 4  # short words with storage; a restore reads with threads of its own
FLUSH_THREADS_MAX = 4  # flushes and commits at once, over all jobs
STOP_TIMEOUT_S = 5.0
LEAVE_S = STOP_TIMEOUT_S + 2.0  # how long one that ends is waited for by the next
STRANGERS_TTL_S = 30.0  # what is refused tries again within seconds: who has not come for so long has gone
UNPROVEN_SHOWN_MAX = 8  # nodes that have never been up, by their names in health
GARBAGE_SEARCHED_AFTER = 100_000  # objects made; a layout of 20,000 tensors makes a million that live on
OVER_BUDGET = "over_budget"  # of health
STATE_LOOK_S = 5.0  # a state directory that was full at the start is tried again


class Daemon:
    """One node's daemon. ``run()`` returns the exit status."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.jobs: dict[str, JobShell] = {}
        self.peers_up: dict[str, bool] = {}
        self._unproven: set[str] = set()  # nodes with a problem that have never been up
        self.state = StateDir(Path(config.state_dir))
        self.health = Health()
        self.metrics = Metrics(config.node_id, version("ckptd"))
        self.graveyard = Graveyard(self.state, self.health, self._has_record)
        self.keeper = Keeper.from_env()
        self.incarnation = secrets.token_hex(8)
        self.secret = _load_key(config)
        self.arena = Arena(
            config.memory_budget_bytes(),
            self.keeper,
            incarnation=self.incarnation,
            uid_budget_bytes=config.user_budget_bytes(),
        )
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()  # asked to stop once more
        self._open = False
        self._state_look_at = 0.0

    async def run(self) -> int:
        os.nice(self.config.nice)
        gc.freeze()  # what was imported lives on
        gc.set_threshold(GARBAGE_SEARCHED_AFTER)
        for number in (signal.SIGTERM, signal.SIGINT):  # before anybody can know that we are up
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        await self._start()
        try:
            await self._live(self._stopping)
            await self._drain_first()
        finally:
            await self._stop()
        return 0

    def _on_signal(self) -> None:
        (self._hurry if self._stopping.is_set() else self._stopping).set()

    async def _drain_first(self) -> None:
        """What others need of this node, they get before it stops: for at most drain_on_stop_s, or until asked to stop again."""
        if self.config.drain_on_stop_s > 0:
            self.drain.begin("stop")
            await self._live(self._hurry, self.config.drain_on_stop_s)
            self.drain.tell_end()

    # --- start --------------------------------------------------------------------------------------------------
    async def _start(self) -> None:
        config = self.config
        await self._alone()
        self.arena.ready()
        adopted = self.arena.adopt(self.keeper.taken())
        last = ports.kept(self.state, config.node_id, config.bind_address)
        self.transport = ports.listen(self._make_transport, config.bulk_port, last.bulk)
        self.control = await ports.start(self._make_control, config.control_port, last.control)
        ports.keep(self.state, self.control.address, self.transport.address)
        node = NodeInfo(
            config.node_id, self.control.address, self.transport.address, config.domain or config.node_id,
            self.incarnation, config.parallel_group,
        )  # fmt: skip
        root = str(config.storage_root or "")
        storage, token = open_storage(root, config.node_id, self.health, self.state, fresh=not adopted)
        work = _pool(WORK_THREADS_MAX, "work")
        pacer = self._make_pacer()
        fetcher = Fetcher(self.transport, self._send, work, config.bulk_streams, pacer)
        fetcher.within_s = config.pacing_deadline_s
        frozen = FrozenParts(self.arena, fetcher, work)
        cards, map_parts = Cards(config.node_id, self._send, work), MapParts(self._send, work)
        self.services = Services(
            config=config,
            node=node,
            policy=config.policy(),
            state=self.state,
            arena=self.arena,
            replicator=Replicator(
                self.transport, self.arena, self._send, work, frozen, config.bulk_streams, pacer
            ),
            fetcher=fetcher,
            pacer=pacer,
            cards=cards, map_parts=map_parts, holdings=Holdings(self._send), passings=Passings(self.transport, self._send),
            parity=ParityMaker(config.node_id, self.arena, fetcher, cards, work),
            storage=storage, cache=open_cache(config, self.health),
            health=self.health,
            metrics=self.metrics,
            send=self._send,
            connect=self.control.connect, down=self.control.down,
            release=self._release,
            work=work,
            sizing=_pool(SIZING_THREADS_MAX, "sizing"),
            disk=_pool(DISK_THREADS_MAX, "disk"), rereading=_pool(1, "read-back"),
            flush=_pool(FLUSH_THREADS_MAX, "flush"), consolidating=_pool(1, "consolidate"),
            forget_job=self._forget_job,
            forget_if_empty=self._forget_if_empty,
        )
        self._introduce(frozen, cards)
        if slow := erasure.slow_for(self.services.policy.redundancy):
            log.warning("%s; hint: %s", slow, erasure.HINT)
        self.shared = SharedCheck(self.services, token)
        self._open = True
        self._take_up_jobs(adopted)
        self.drain = Drain(self.services, self.jobs)
        self.reclaim = Reclaim(self.services, self.jobs)
        self.arena.on_short(self.reclaim.short)
        self.forget = Forget(self.services, self.jobs, self.graveyard)
        self.rank_listener = RankListener(self.services, self.jobs, self.job, self.drain, self.forget)
        self.arena.on_users(self.rank_listener.users)
        self.rank_listener.start(Path(config.socket))
        self.status = Status(self.services, self.jobs, lambda: self.peers_up)
        self.http = HttpServer(
            config.http_address, config.http_port, self.status.routes(), announce=config.http_file(),
            trusted=config.http_uids(),
        )  # fmt: skip
        await self.http.start()
        self.keeper.ready()
        host, port = self.http.address
        page = f"http://{host}:{port}"
        log.info("ready socket=%s control=%s bulk=%s page=%s", config.socket, node.control, node.bulk, page)

    async def _alone(self) -> None:
        """A daemon at its end holds the directory, and its ports, for a while after its socket is gone."""
        deadline = time.monotonic() + LEAVE_S
        while True:
            try:
                return self.state.alone()
            except CkptdError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(TICK_S)

    def _introduce(self, frozen: FrozenParts, cards: Cards) -> None:
        """The rooms that look after copies find the jobs' memory, and tell the jobs what came."""
        frozen.find = lambda job, content: self.job(job).frozen.find(content)
        frozen.on_arrived = lambda job, slot: self.job(job).frozen.add(slot)
        self.services.replicator.on_arrived = lambda job, slot: self.job(job).arrived(slot)
        self.services.replicator.on_refused = self.services.fetcher.on_refused = self._refused_bytes
        cards.held = self.services.fetcher.held = lambda job, snapshot, rank: self.job(job).held(snapshot, rank)
        self.services.map_parts.held = lambda job: self.job(job).machine.slots.layouts()
        self.services.holdings.reads = lambda job: self.jobs[job].reads if job in self.jobs else None
        self.services.parity.find_frozen = frozen.find
        self.services.parity.add_frozen = frozen.on_arrived
        self.services.fetcher.on_damage = lambda job, slot, reason: self.job(job).damaged(
            slot, slot.record, reason
        )
        self.services.replicator.refusal = self._refusal

    def _make_transport(self, port: int) -> TcpTransport:
        config = self.config
        return TcpTransport(
            config.bind_address, port, mode=config.bulk_mode_in_force(), secret=self.secret,
            advertise=config.advertise(), connections_max=config.connections_max,
        )  # fmt: skip

    def _make_pacer(self) -> Pacer:
        config = self.config
        pacer = Pacer(config.pacing, Pacing(config.overhead_max, config.pacing_floor_bytes_s))
        pacer.on_state = lambda before, now: log.debug("pacing: %s -> %s", before, now)
        self.transport.on_bytes(pacer.received)
        return pacer

    def _make_control(self, port: int) -> ControlLink:
        config = self.config
        return ControlLink(
            config.node_id, f"tcp://{config.bind_address}:{port or '*'}", self.secret,
            self._on_message, self._on_peer, incarnation=self.incarnation, advertise=config.advertise(),
            on_problem=self._on_problem,
        )  # fmt: skip

    def _take_up_jobs(self, adopted: list[Any]) -> None:
        for job, kept in self.state.jobs().items():
            if kept.record.number <= self.graveyard.of(job).epoch:
                self.state.forget(job)  # it was forgotten in the moment in which we ended
            else:
                self.jobs[job] = JobShell(self.services, job, kept, self.graveyard.of(job))
        for slot in frozen_first(adopted):
            self.job(slot.tenant.job).adopt(slot)
        if adopted:
            log.info("adopted %d slots, %s, nothing copied", len(adopted), format_bytes(self.arena.used_bytes))
        if self.arena.used_bytes > self.arena.budget_bytes:
            used, budget = format_bytes(self.arena.used_bytes), format_bytes(self.arena.budget_bytes)
            text = f"memory of before the restart is {used}, memory_budget is {budget} now: it stays until its jobs let go of it"
            log.warning("%s", text)
            self.health.report(OVER_BUDGET, text)

    def job(self, job: str) -> JobShell:
        shell = self.jobs.get(job)
        if shell is None:
            shell = self.jobs[job] = JobShell(self.services, job, tombstone=self.graveyard.of(job))
        return shell

    def _has_record(self, job: str) -> bool:
        return job in self.jobs and self.jobs[job].record is not None

    def _refusal(self, job: str, snapshot: SnapshotId, rank: int) -> str:
        """Why a peer may not send us this now; "": it may."""
        shell = self.jobs.get(job)
        if snapshot.epoch <= self.graveyard.of(job).ordered:
            return STALE
        return shell.machine.admits_replica(snapshot, rank) if shell is not None else ""

    def _refused_bytes(self, job: str, node: str) -> None:
        log.warning("job=%s peer=%s sent bytes that do not match their sums", job, node)
        self.metrics.quarantined(job, "wire")

    def _forget_if_empty(self, job: str) -> None:
        shell = self.jobs.get(job)
        if (
            shell is not None
            and shell.record is None
            and not shell.all_slots()
            and not shell.busy()
            and not shell.local_slots.sizing()
        ):
            self._forget_job(job)

    def _forget_job(self, job: str, tombstone: Tombstone = NO_TOMBSTONE) -> None:
        shell = self.jobs.pop(job, None)
        if shell is not None:
            shell.drop()
            self._release(job)
            self.graveyard.add(job, tombstone, shell.record)
            self.metrics.forget(job)
            self.health.forget(job)

    def _release(self, job: str) -> None:
        for node in self.control.release(job):
            self.peers_up.pop(node, None)
            self._unproven.discard(node)

    # --- live ---------------------------------------------------------------------------------------------------
    async def _live(self, until: asyncio.Event, limit_s: float | None = None) -> None:
        """limit_s: of a drain, which also ends when there is nothing left to hand away."""
        ends = self.services.now() + limit_s if limit_s is not None else None
        ending = asyncio.ensure_future(until.wait())
        while not until.is_set() and (ends is None or (self.services.now() < ends and not self.drain.done())):
            self.tick_jobs()
            self.drain.tick()
            self._tell_memory()
            self.services.pacer.look()
            self._look_at_state()
            self.keeper.watchdog()
            await asyncio.wait([ending], timeout=TICK_S)
        ending.cancel()

    def tick_jobs(self) -> None:
        for shell in list(self.jobs.values()):
            shell.tick()
        self.reclaim.tick()
        self.graveyard.tick(self.services.now())

    def _tell_memory(self) -> None:
        memory = self.status.memory()
        used = {kind: memory[f"{kind}_bytes"] for kind in ("own", "peer", "scratch")}  # type: ignore[literal-required]
        self.metrics.memory(self.arena.budget_bytes, used)
        if memory["used_bytes"] <= memory["budget_bytes"]:
            self.health.clear(OVER_BUDGET)

    def _look_at_state(self) -> None:
        """It was full when we started, with memory that is worth more than what cannot be written down."""
        now = self.services.now()
        if not self.state.trouble or now < self._state_look_at:
            return
        self._state_look_at = now + STATE_LOOK_S
        if self.state.look():
            self.health.clear("state")
        else:
            text = f"the state directory cannot be written: {self.state.trouble} [{self.state.path}]"
            self.health.report("state", text)

    def _send(self, node: str, job: str, message: object) -> bool:
        return self.control.send(node, job, message)

    def _on_problem(self, text: str, node: str) -> None:
        """Of a node until it is up. Of those that were never up, which any local user can name, some by name."""
        if node and node not in self.peers_up and node not in self._unproven:
            if len(self._unproven) < UNPROVEN_SHOWN_MAX:
                self._unproven.add(node)
            else:
                node = "others"
        self.health.event("control", text, which=node, ttl_s=EVENT_TTL_S if node else STRANGERS_TTL_S)

    def _on_message(self, node: str, job: str, message: object) -> None:
        if not self._open:
            return  # still starting; whatever matters is said again
        services = self.services
        if isinstance(message, Message):
            self._to_job(node, job, message)
        elif self.shared.on_message(node, message) or self.drain.on_message(node, message):
            return
        elif not (
            services.replicator.on_message(node, job, message)
            or services.fetcher.on_message(node, job, message)
            or services.cards.on_message(node, job, message)
            or services.map_parts.on_message(node, job, message)
            or services.holdings.on_message(node, job, message)
            or services.passings.on_message(node, job, message)
            or self.forget.on_message(node, job, message)
        ):
            self.status.on_message(node, job, message)

    def _to_job(self, node: str, job: str, message: Message) -> None:
        if job in self.jobs or not self.graveyard.keeps_out(job, message):
            self.job(job).inbound.deliver(node, message)
        elif (answer := self.graveyard.answer(job, message)) is not None:
            self._send(node, job, answer)

    def _on_peer(self, node: str, up: bool) -> None:
        if up or node in self.peers_up:  # any local user can name one that never was
            log.info("peer=%s %s", node, "up" if up else "down")
            self.peers_up[node] = up
        if up:
            self.health.clear("control", which=node)
            self.shared.peer_up(node)
        for shell in list(self.jobs.values()):
            shell.feed(ev.NodeUp(node) if up else ev.NodeDown(node))

    # --- stop ---------------------------------------------------------------------------------------------------
    async def _stop(self) -> None:
        log.info("stopping")
        self.keeper.stopping()
        self.rank_listener.stop()
        for shell in self.jobs.values():
            shell.durable.cancel_all()
        for task in list(self.services.tasks):
            task.cancel()
        try:
            await asyncio.wait_for(self.http.stop(), STOP_TIMEOUT_S)
        except asyncio.TimeoutError:
            log.warning("a caller of the status page is left without an answer")
        await self.control.stop()
        self.services.replicator.close()
        self.services.fetcher.close()
        self.services.passings.close()
        self.transport.close()
        services = self.services
        for pool in (
            services.work, services.sizing, services.disk, services.flush, services.rereading, services.consolidating
        ):  # fmt: skip
            pool.shutdown(wait=False, cancel_futures=True)
        self.state.leave()


def _pool(threads: int, name: str) -> ThreadPool:
    """All its threads begin now, while there is memory."""
    return ThreadPool(threads, name, ready=threads)


def _load_key(config: Config) -> ClusterKey:
    """systemd's credentials are readable by a group that is only ours; other key files must be our own alone."""
    if config.key_file is None and config.plain_loopback:
        return ClusterKey.kept_at(loopback_key_file())
    if config.key_file is None:
        raise CkptdError(
            "no cluster key", where="key_file",
            hint="make one with `ckptd keygen`, or pass --plain-loopback on a single machine",
        )  # fmt: skip
    credentials = os.environ.get("CREDENTIALS_DIRECTORY", "")
    given_by_systemd = bool(credentials) and Path(credentials) in config.key_file.parents
    return ClusterKey.load(config.key_file, group_readable=given_by_systemd)
