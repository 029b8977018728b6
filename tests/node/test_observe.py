"""Metrics, health, log, and the page they are read from."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptd.arena import keeper
from ckptd.core.errors import CkptdError
from ckptd.observe import http as observed
from ckptd.observe import log
from ckptd.observe.health import PROBLEMS_MAX, Health
from ckptd.observe.http import HttpServer, Routes
from ckptd.observe.metrics import OTHER, REASONS_MAX, Metrics
from ckptd.observe.sight import ALL, NOBODY, Sight, caller_uid
from tests.node.links import eventually

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "OPERATIONS.md"
MINE, THEIRS = "1000/gpt", "2000/bert"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def samples(metrics: Metrics, sight: Sight = ALL) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.render(sight).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, sight: Sight = ALL, **labels: str) -> float | None:
    return samples(metrics, sight).get((name, tuple(sorted(labels.items()))))


# --- metrics --------------------------------------------------------------------------------------------------------
def test_the_journey_of_a_snapshot_is_counted() -> None:
    metrics = Metrics("n0", "1")
    metrics.captured(MINE, capture_s=0.2, blocked_s=0.004)
    metrics.sealed(MINE, 0.05, 1000)
    metrics.replicated(MINE, 0.4, 1000)
    metrics.flushed(MINE, 2.0, 900, 90)
    metrics.reached(MINE, "protected")
    metrics.lag(MINE, {"sealed": 0, "durable": 12})
    assert value(metrics, "ckptd_blocked_seconds_sum", job=MINE) == pytest.approx(0.004)
    assert value(metrics, "ckptd_capture_seconds_count", job=MINE) == 1
    assert value(metrics, "ckptd_sealed_bytes_total", job=MINE) == 1000
    assert value(metrics, "ckptd_protected_bytes_total", job=MINE) == 1000
    assert value(metrics, "ckptd_flush_seconds_bucket", job=MINE, le="3.0") == 1
    assert value(metrics, "ckptd_flushed_bytes_total", job=MINE) == 900
    assert value(metrics, "ckptd_written_bytes_total", job=MINE) == 90
    assert value(metrics, "ckptd_snapshots_total", job=MINE, level="protected") == 1
    assert value(metrics, "ckptd_lag_steps", job=MINE, level="durable") == 12


def test_the_recovery_point_ages_by_itself() -> None:
    clock = Clock()
    metrics = Metrics("n0", "1", clock)
    metrics.recovery_point(MINE, clock.now)
    clock.now += 30
    assert value(metrics, "ckptd_recovery_point_age_seconds", job=MINE) == 30
    metrics.recovery_point(MINE, clock.now - 1)
    assert value(metrics, "ckptd_recovery_point_age_seconds", job=MINE) == 1


def test_restores_by_source_and_phase() -> None:
    metrics = Metrics("n0", "1")
    metrics.restored(MINE, "ok", {"own": 10, "peer": 20, "durable": 0}, {"transfer": 1.5, "load": 0.5})
    assert value(metrics, "ckptd_restore_bytes_total", job=MINE, source="peer") == 20
    assert value(metrics, "ckptd_restore_seconds_sum", job=MINE, phase="transfer") == 1.5
    assert value(metrics, "ckptd_restores_total", job=MINE, outcome="ok") == 1


def test_free_text_from_ranks_cannot_grow_the_registry() -> None:
    """P13: a trainer sends what it likes as a reason."""
    metrics = Metrics("n0", "1")
    metrics.skipped(MINE, "no memory: 3 GiB wanted")
    for number in range(REASONS_MAX * 3):
        metrics.skipped(MINE, f"reason {number}" + "x" * 1000)
    reasons = [dict(labels)["reason"] for name, labels in samples(metrics) if name == "ckptd_skips_total"]
    assert "no memory" in reasons
    assert OTHER in reasons
    assert len(reasons) == REASONS_MAX + 1
    assert max(map(len, reasons)) <= 64


def test_what_a_failure_would_cost() -> None:
    """What is not measured any more has no series: an old number would be taken for a new one."""
    metrics = Metrics("n0", "1")
    metrics.outlook(MINE, [{"failure": "node", "lost_steps": 3, "lost_s": 1.5, "restore_s": 0.5}], 2.0)
    assert value(metrics, "ckptd_outlook_lost_steps", job=MINE, failure="node") == 3
    assert value(metrics, "ckptd_outlook_lost_seconds", job=MINE, failure="node") == 1.5
    assert value(metrics, "ckptd_outlook_restore_seconds", job=MINE, failure="node") == 0.5
    assert value(metrics, "ckptd_unprotected_seconds", job=MINE) == 2
    metrics.outlook(MINE, [{"failure": "node", "lost_steps": 9}], 0.0)
    assert value(metrics, "ckptd_outlook_lost_steps", job=MINE, failure="node") == 9
    assert value(metrics, "ckptd_outlook_restore_seconds", job=MINE, failure="node") is None
    metrics.protected_after(MINE, "repair", 4.0)
    assert value(metrics, "ckptd_time_to_protection_seconds_count", job=MINE, cause="repair") == 1


def test_one_users_series_are_invisible_to_another() -> None:
    """P13."""
    metrics = Metrics("n0", "1")
    metrics.skipped(MINE, "no memory")
    metrics.skipped(THEIRS, "no memory")
    metrics.memory(100, {"own": 40})
    for sight, jobs in ((ALL, {MINE, THEIRS}), (Sight(uid=1000), {MINE}), (NOBODY, set())):
        seen = samples(metrics, sight)
        assert {dict(labels)["job"] for _, labels in seen if "job" in dict(labels)} == jobs
        assert seen[("ckptd_memory_used_bytes", (("kind", "own"),))] == 40


def test_a_forgotten_job_leaves_no_series() -> None:
    metrics = Metrics("n0", "1")
    metrics.recovery_point(MINE, 1.0)
    metrics.skipped(MINE, "no memory")
    metrics.ranks(MINE, 2)
    metrics.forget(MINE)
    assert MINE not in metrics.render().decode()


def test_every_metric_is_in_the_manual_and_the_manual_names_no_other() -> None:
    here = {family.name: family.type for family in Metrics("n0", "1").registry.collect()}
    rows = re.findall(r"^\| `(ckptd_[a-z_]+)` \| (\w+) \|", OPERATIONS.read_text(), re.MULTILINE)
    assert {name.removesuffix("_total") if kind == "counter" else name: kind for name, kind in rows} == here


# --- health ---------------------------------------------------------------------------------------------------------
def test_problems_have_a_beginning_an_end_and_a_count() -> None:
    clock = Clock()
    health = Health(clock)
    assert health.ok
    assert health.report("storage", "disk full")
    clock.now += 5
    assert not health.report("storage", "still full")
    problem = health.to_dict()["problems"][0]
    assert (problem["first"], problem["last"], problem["count"], problem["text"]) == (
        1000,
        1005,
        2,
        "still full",
    )
    assert not health.ok
    assert health.has("storage")
    assert health.clear("storage")
    assert not health.clear("storage")
    assert health.ok


def test_two_of_a_kind_are_told_apart() -> None:
    health = Health(Clock())
    health.report("peer", "n1 is down", which="n1")
    health.report("peer", "n2 is down", which="n2")
    health.clear("peer", which="n1")
    assert [problem.text for problem in health.problems()] == ["n2 is down"]


def test_events_fade() -> None:
    clock = Clock()
    health = Health(clock)
    health.event("damage", "slot 3", job=MINE, ttl_s=60)
    clock.now += 59
    health.event("damage", "slot 4", job=MINE, ttl_s=60)
    clock.now += 59
    assert not health.ok
    clock.now += 1
    assert health.ok


def test_notes_do_not_make_a_node_unhealthy() -> None:
    health = Health(Clock())
    health.report("breakpoint", "flushed", serious=False)
    assert health.ok
    assert len(health.problems()) == 1


def test_health_shows_a_user_his_own_jobs_only() -> None:
    """P13."""
    health = Health(Clock())
    health.report("no_memory", "2000/bert does not fit", job=THEIRS)
    assert health.seems_ok(Sight(uid=1000))
    assert not health.seems_ok(Sight(uid=2000))
    assert health.to_dict(Sight(uid=1000))["problems"] == []
    health.forget(THEIRS)
    assert health.ok


def test_problems_are_bounded() -> None:
    health = Health(Clock())
    for number in range(PROBLEMS_MAX + 10):
        health.report("peer", str(number), which=str(number))
    assert len(health.problems()) == PROBLEMS_MAX


# --- log ------------------------------------------------------------------------------------------------------------
def logged(form: str, **extra: object) -> str:
    stream = io.StringIO()
    log.setup("info", form, node="n0", stream=stream)
    logging.getLogger("ckptd.test").debug("not shown")
    logging.getLogger("ckptd.test").info("sealed %d", 7, extra=extra)
    return stream.getvalue()


def test_text_lines_are_key_value() -> None:
    line = logged("text", job=MINE, why='a "b" c', none="")
    assert re.search(rf'INFO ckptd.test sealed 7 node=n0 job={MINE} why="a \\"b\\" c"\n$', line)
    assert line.count("\n") == 1


def test_a_line_break_in_a_value_stays_one_line() -> None:
    assert logged("text", why="a\nINFO forged").count("\n") == 1


def test_what_others_say_is_one_line_of_what_can_be_printed() -> None:
    """A segment's name wrote whole lines of its own (D20)."""
    stream = io.StringIO()
    log.setup("info", "text", node="n1", stream=stream)
    logging.getLogger("ckptd.x").info("said %s", "a\nERROR all is lost\x1b[31m" + "b" * 9000)
    assert stream.getvalue().count("\n") == 1
    assert "a?ERROR all is lost?[31mb" in stream.getvalue()
    assert len(stream.getvalue()) < 5000


def test_json_lines() -> None:
    line = json.loads(logged("json", job=MINE, path=Path("/x")))
    assert line["text"] == "sealed 7"
    assert line["level"] == "info"
    assert (line["job"], line["path"], line["node"]) == (MINE, "/x", "n0")


@contextmanager
def a_reader_that_sleeps() -> Iterator[tuple[int, IO[str]]]:
    """The two ends of a pipe that takes nothing more."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    stream = os.fdopen(writing, "w")
    try:
        yield reading, stream
    finally:
        os.close(reading)  # first: it wakes who waits
        with contextlib.suppress(OSError):
            stream.close()


def done_in_time(call: Callable[[], None]) -> bool:
    """In a thread that is left behind when it waits."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5.0)
    return not thread.is_alive()


@pytest.mark.parametrize("form", log.FORMATS)
def test_whoever_reads_the_log_and_stops_does_not_stop_the_daemon(form: str) -> None:
    """P5: a container's log driver, a launcher that reads until "ready", Ctrl-S: all jobs of the machine stood still."""
    said = logging.getLogger("ckptd.test")
    with a_reader_that_sleeps() as (reading, stream):
        log.setup("info", form, stream=stream)
        assert done_in_time(lambda: said.info("nobody reads"))
        assert done_in_time(lambda: said.info("nor this"))
        os.read(reading, 1 << 20)
        said.info("somebody does")
        first, second = os.read(reading, 1 << 20).decode().splitlines()
        assert "2 lines before this one are lost" in first and "somebody does" in second
        os.set_blocking(reading, False)
        assert done_in_time(lambda: said.info("trace", exc_info=ValueError("x" * (1 << 20)))), "longer than a pipe"


def test_whoever_reads_the_log_and_stops_does_not_stop_the_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: it had said that the daemon ended before it started it again."""
    with a_reader_that_sleeps() as (_, stream):
        monkeypatch.setattr(keeper.sys, "stderr", stream)
        assert done_in_time(lambda: keeper.say("the daemon ended"))


# --- the page -------------------------------------------------------------------------------------------------------
async def nothing(sight: Sight) -> Mapping[str, Any]:
    return {"everything": sight.everything, "uid": sight.uid}


async def refuses(sight: Sight) -> Mapping[str, Any]:
    raise CkptdError("storage is gone", where="/mnt", hint="mount it")


@asynccontextmanager
async def page(health: Health | None = None, **options: Any) -> AsyncIterator[HttpServer]:
    told, metrics = health or Health(), Metrics("n0", "1")
    routes = Routes(metrics.render, lambda sight: told.to_dict(sight), nothing, options.pop("ls", nothing))
    server = HttpServer("127.0.0.1", 0, routes, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def get(server: HttpServer, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


async def ask(server: HttpServer, path: str, **headers: str) -> tuple[int, bytes]:
    return await asyncio.to_thread(get, server, path, **headers)


async def test_metrics_are_prometheus_text() -> None:
    async with page() as server:
        status, body = await ask(server, "/metrics")
    assert status == 200
    assert 'ckptd_info{node="n0",version="1"} 1.0' in body.decode()


async def test_healthz_says_503_and_why() -> None:
    health = Health()
    async with page(health) as server:
        assert (await ask(server, "/healthz"))[0] == 200
        health.report("storage", "disk full")
        status, body = await ask(server, "/healthz")
    assert status == 503
    assert json.loads(body)["problems"][0]["text"] == "disk full"


async def test_the_caller_is_known_by_his_uid() -> None:
    async with page() as server:
        status, body = await ask(server, "/status")
    assert status == 200
    assert json.loads(body) == {"everything": True, "uid": os.geteuid()}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user")
async def test_another_user_sees_no_more_than_his_own() -> None:
    """P13, with a real process of another user."""
    get = "urllib.request.urlopen(sys.argv[1]).read().decode()"  # once as root: loads all that it imports
    script = f"import os, sys, urllib.request; {get}; os.setuid(int(sys.argv[2])); print({get})"
    async with page(trusted=(1,)) as server:
        url = "http://{}:{}/status".format(*server.address)
        for uid, everything in ((65534, False), (1, True)):
            command = [sys.executable, "-S", "-c", script, url, str(uid)]
            run = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, check=True, env={}, timeout=200
            )
            assert json.loads(run.stdout) == {"everything": everything, "uid": uid}


async def test_errors_are_told_as_errors() -> None:
    async with page(ls=refuses) as server:
        status, body = await ask(server, "/ls")
    assert status == 500
    assert json.loads(body) == {"error": "storage is gone", "where": "/mnt", "hint": "mount it"}


async def test_other_paths_methods_and_host_names_are_refused() -> None:
    async with page() as server:
        assert (await ask(server, "/secret"))[0] == 404
        assert (await ask(server, "/status", Host="evil.example"))[0] == 400


async def test_garbage_leaves_the_page_alive() -> None:
    def throw() -> bytes:
        with socket.create_connection(server.address, timeout=10) as link:
            link.sendall(b"\x00\xff" * 1000 + b"\r\n\r\n")
            return link.recv(100)

    async with page() as server:
        assert b"400" in await asyncio.to_thread(throw)
        assert (await ask(server, "/healthz"))[0] == 200


async def test_requests_that_are_never_ended_keep_nobody_from_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 of them did, for as long as they were held (D20)."""
    monkeypatch.setattr(observed, "REQUEST_S", 0.2)
    monkeypatch.setattr(observed, "CONNECTIONS_MAX", 8)
    async with page() as server:
        held = [socket.create_connection(server.address, timeout=10) for _ in range(8)]
        for link in held:
            link.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        for link in held:
            assert await asyncio.to_thread(link.recv, 100) == b"", "its end"
            link.close()
        assert (await ask(server, "/healthz"))[0] == 200


async def test_the_address_is_announced_while_it_holds(tmp_path: Path) -> None:
    announce = tmp_path / "ckptd.http"
    async with page(announce=announce) as server:
        assert announce.read_text() == "{}:{}\n".format(*server.address)
        assert announce.stat().st_mode & 0o777 == 0o644
    assert not announce.exists()


async def test_a_full_disk_keeps_no_daemon_from_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: where the socket lay on a full disk no daemon came back to the memory that its keeper had, for these 16 bytes."""
    announce, written, room = tmp_path / "ckptd.http", Path.write_text, asyncio.Event()

    def writes(path: Path, text: str) -> int:
        path.touch()
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, text)

    monkeypatch.setattr(Path, "write_text", writes)
    monkeypatch.setattr(observed, "REQUEST_S", 0.05)
    async with page(announce=announce) as server:
        assert (await ask(server, "/healthz"))[0] == 200
        assert os.listdir(tmp_path) == []
        room.set()
        await eventually(announce.exists)
        assert announce.read_text() == "{}:{}\n".format(*server.address)


async def test_a_taken_port_is_named() -> None:
    async with page() as server:
        second = HttpServer(
            "127.0.0.1", server.address[1], Routes(Metrics("n", "1").render, dict, nothing, nothing)
        )
        with pytest.raises(CkptdError, match="cannot bind") as caught:
            await second.start()
    assert str(server.address[1]) in caught.value.where


def test_only_loopback_is_served() -> None:
    with pytest.raises(CkptdError, match="loopback"):
        HttpServer("0.0.0.0", 0, Routes(Metrics("n", "1").render, dict, nothing, nothing))


async def test_the_daemons_signal_handlers_stay() -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    async with page():
        assert signal.getsignal(signal.SIGTERM) is before


def test_the_uid_is_read_from_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F90 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 1 1\n"
        "   1: 0100007F:C001 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 2 1\n"
    )
    assert caller_uid(("127.0.0.1", 0xC001), ("127.0.0.1", 0x1F90), table) == 1000
    assert caller_uid(("127.0.0.1", 0xC002), ("127.0.0.1", 0x1F90), table) is None
