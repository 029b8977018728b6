"""The demo's parts without the demo: a demo whose checks cannot fail would prove nothing."""

from __future__ import annotations

import io
import json
import math
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.distributed import TCPStore

from ckptd.config import FIRST_PORT
from ckptd.core.errors import CkptdError
from ckptd.demo import claims, plot, processes
from ckptd.demo.claims import Chapter
from ckptd.demo.cluster import TEMPORARY, Sample, short_temp
from ckptd.demo.event_process import missing
from ckptd.demo.job import PORT_MIN, free_port
from ckptd.demo.loader import Loader
from ckptd.demo.main import run
from ckptd.demo.model import CharGPT, Shape
from ckptd.demo.node import Node
from ckptd.demo.notebook import Notebook, Pages
from ckptd.demo.reaper import clean
from ckptd.demo.record import digest, digest_plain, rows_of
from ckptd.demo.report import Report
from ckptd.demo.text import UNKNOWN, load_text, read_text, source_files
from ckptd.demo.train import GLOBAL_BATCH, schedule
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


# --- text and loader --------------------------------------------------------------------------------------------
def test_the_text_is_the_library_and_the_same_each_time() -> None:
    first, second = load_text(limit=200_000), load_text(limit=200_000)
    assert torch.equal(first.tokens, second.tokens)
    assert first.vocabulary == second.vocabulary
    assert len(first.tokens) == 200_000
    read_back = "".join(first.vocabulary[t] for t in first.tokens[:2000].tolist())
    assert "import" in read_back
    assert int(first.tokens.max()) < first.size <= 96


def test_the_text_is_bounded_ordered_and_ascii(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("b = 'é'\n", encoding="utf-8")
    (tmp_path / "a.py").write_text("a\tb\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "c.py").write_text("c")
    assert [p.name for p in source_files(tmp_path)] == ["a.py", "b.py"]
    assert read_text(tmp_path, limit=5) == "a\tb\nb"
    text = load_text(tmp_path)
    assert "".join(text.vocabulary[t] for t in text.tokens.tolist()) == f"a{UNKNOWN}b\nb = '{UNKNOWN}'\n"


def loader(rank: int = 0, world: int = 1, batch: int = 12, characters: int = 1000) -> Loader:
    tokens = (torch.arange(characters) % 251).to(torch.uint8)
    return Loader(tokens, context=8, batch=batch, seed=3, rank=rank, world=world)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_world_sees_the_same_global_batch(world: int) -> None:
    parts = [loader(rank, world) for rank in range(world)]
    whole = loader()
    for _ in range(30):  # more than one lap: the permutation changes on the way
        expected, expected_targets = whole.next()
        dealt = [part.next() for part in parts]
        assert torch.equal(torch.cat([tokens for tokens, _ in dealt]), expected)
        assert torch.equal(torch.cat([targets for _, targets in dealt]), expected_targets)
    assert len({json.dumps(part.state_dict()) for part in (*parts, whole)}) == 1


@pytest.mark.parametrize("stop", [0, 1, 9, 10, 11, 25])
def test_the_loader_resumes_exactly_into_another_world(stop: int) -> None:
    first = loader()
    for _ in range(stop):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    parts = [loader(rank, 3) for rank in range(3)]
    for part in parts:
        part.next()  # it has already been used: what it had is forgotten
        part.load_state_dict(state)
    for _ in range(15):
        dealt = torch.cat([part.next()[0] for part in parts])
        assert torch.equal(dealt, first.next()[0])


def test_a_lap_sees_each_window_at_most_once() -> None:
    one = loader()
    seen = torch.cat([one.next_windows() for _ in range(124 // 12)])
    assert len(set(seen.tolist())) == len(seen)


def test_the_loader_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="does not divide over 5"):
        loader(world=5)
    with pytest.raises(ValueError, match="windows"):
        loader(characters=50)
    assert all(GLOBAL_BATCH % world == 0 for world in (1, 2, 3, 4))


# --- model and record -------------------------------------------------------------------------------------------
def test_the_model_is_small_tied_and_starts_near_chance() -> None:
    torch.manual_seed(0)
    model = CharGPT(Shape(vocabulary=96))
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 2_000_000
    assert model.head.weight is model.characters.weight
    tokens = torch.randint(0, 96, (3, 64))
    losses = model(tokens, tokens.roll(-1, 1))
    assert losses.shape == (3,)
    assert losses.mean().item() == pytest.approx(math.log(96), rel=0.1)


def test_the_schedule_warms_up_and_decays() -> None:
    values = [schedule(step) for step in range(200)]
    assert values[0] < values[10] < values[19]
    assert values[30] > values[100] > values[199] > 0


def test_digests_see_one_bit_the_shape_and_one_ulp() -> None:
    value = torch.arange(12, dtype=torch.float32)
    flipped = value.clone()
    flipped.view(torch.int32)[5] ^= 1
    assert digest(value) == digest(value.clone())
    assert digest(value) != digest(flipped)
    assert digest(value) != digest(value.view(3, 4))
    assert digest_plain({"lr": 0.1}) != digest_plain({"lr": math.nextafter(0.1, 1)})


@pytest.mark.parametrize(("rows", "world"), [(98, 4), (128, 3), (2, 4), (1, 3), (7, 7)])
def test_rows_follow_torch_chunk(rows: int, world: int) -> None:
    chunks = [len(part) for part in torch.zeros(rows).chunk(world)]
    assert [rows_of(rows, rank, world) for rank in range(world)] == chunks + [0] * (world - len(chunks))


@pytest.mark.chaos
def test_the_record_gathers_what_full_tensor_gives_and_a_plain_save_resumes_bit_exactly(
    tmp_path: Path,
) -> None:
    port = free_port()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).with_name("gather_worker.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "3", str(port), str(tmp_path)],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], "\n".join(errors)


# --- notebook ---------------------------------------------------------------------------------------------------
def test_notebooks_are_read_as_they_grow_and_half_lines_wait(tmp_path: Path) -> None:
    book, pages = Notebook(tmp_path, "three", 0), Pages(tmp_path, "three")
    Notebook(tmp_path, "three", 1).write("step", step=9, loss=0.0)
    Notebook(tmp_path, "three-again", 0).write("step", step=77, loss=0.0)  # another run
    book.write("step", step=1, loss=4.5)
    book.write("digests", step=1, digests={"model.a": "00"})
    with (tmp_path / "three.0.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
        file.flush()
        assert pages.refresh().losses() == {1: 4.5}
        file.write('ep": 2, "loss": 4.25, "time": 0}\n')
    assert pages.refresh().losses() == {1: 4.5, 2: 4.25}
    assert (pages.last_step(), pages.last(0), pages.last(5)) == (9, 2, 0)
    assert pages.digests_at(1) == {"model.a": "00"}
    assert pages.digests_at(2) is None


# --- claims: each holds for the truth and fails for a lie -------------------------------------------------------
TRUE = {"model.a": "11", "optimizer.a.exp_avg": "22", "loader": "33"}


@pytest.mark.parametrize(
    "restored",
    [None, {}, TRUE | {"loader": "34"}, {"model.a": "11"}, TRUE | {"model.b": "44"}],
    ids=["nothing", "empty", "one differs", "missing", "too many"],
)
def test_digests_claim(restored: dict[str, str] | None) -> None:
    assert claims.digests_equal(TRUE, dict(TRUE)).ok
    assert not claims.digests_equal(TRUE, restored).ok
    assert not claims.digests_equal(restored, TRUE).ok


def test_bit_equal_claim_sees_one_ulp_and_missing_steps() -> None:
    ours = {step: 4.0 / step for step in range(1, 11)}
    steps = list(ours)
    assert claims.losses_bit_equal("x", ours, dict(ours), steps).ok
    lie = ours | {7: math.nextafter(ours[7], 9)}
    found = claims.losses_bit_equal("x", ours, lie, steps)
    assert not found.ok
    assert "step 7" in found.evidence
    assert not claims.losses_bit_equal("x", ours, {s: v for s, v in ours.items() if s != 3}, steps).ok
    assert not claims.losses_bit_equal("x", ours, ours, []).ok


def test_close_claim_has_its_limit_where_it_says() -> None:
    unbroken = {1: 4.0, 2: 3.0}
    assert claims.losses_close("x", {1: 4.0 * (1 + 0.9e-5), 2: 3.0}, unbroken, [1, 2]).ok
    assert not claims.losses_close("x", {1: 4.0, 2: 3.0 * (1 - 1.1e-5)}, unbroken, [1, 2]).ok
    assert not claims.losses_close("x", {1: math.nan, 2: 3.0}, unbroken, [1, 2]).ok
    assert not claims.losses_close("x", {}, unbroken, [1, 2]).ok
    assert not claims.losses_close("x", unbroken, unbroken, []).ok


def test_source_claim() -> None:
    memory = ("own", "peer")
    assert claims.only_from(memory, {"own": 5, "peer": 1, "durable": 0}).ok
    assert not claims.only_from(memory, {"own": 5, "peer": 1, "durable": 1}).ok
    assert not claims.only_from(memory, {"own": 5, "parity": 2}).ok
    assert not claims.only_from(memory, {"own": 0, "peer": 0, "durable": 0}).ok
    assert not claims.only_from(("durable",), {}).ok


def test_one_step_claim() -> None:
    assert claims.one_step({0: 7, 1: 7, 2: 7}, 3).ok
    assert not claims.one_step({0: 7, 1: 7}, 3).ok
    assert not claims.one_step({0: 7, 1: 8, 2: 7}, 3).ok
    assert not claims.one_step({0: 0, 1: 0}, 2).ok


def test_gaps_are_found() -> None:
    assert missing([3, 4, 5]) == []
    assert missing([3, 5, 6]) == [3]
    assert missing([3, 4, 4]) == [4]


# --- processes --------------------------------------------------------------------------------------------------
def test_a_memfd_is_found_open_or_mapped_until_nobody_holds_it(tmp_path: Path) -> None:
    """The proof of event 1 must see what it looks for: an open memfd, and one that is only mapped."""
    program = (
        "import mmap, os, sys\n"
        "kept = os.memfd_create('kept'); gone = os.memfd_create('gone'); os.ftruncate(gone, 4096)\n"
        "mapping = mmap.mmap(gone, 4096, trackfd=False) if sys.version_info >= (3, 13) else mmap.mmap(gone, 4096)\n"
        "os.close(gone); print('ready', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdout.readline()
        inodes = processes.memfds(child.pid)
        assert len(inodes) == 2
        assert set(processes.holders(inodes)[0]) == {child.pid}
        assert not claims.no_holder(inodes, processes.holders(inodes)[0], 0).ok
        assert processes.kill([child.pid]) == []
        child.wait()
        assert claims.no_holder(inodes, *processes.holders(inodes)).ok
        assert not claims.no_holder((), {}, 0).ok, "nothing recorded proves nothing"
    finally:
        child.kill()
        child.stdin.close()
        child.stdout.close()


def test_the_reaper_finds_children_of_children_and_leaves_others_alone(tmp_path: Path) -> None:
    mark = f"parts-{os.getpid()}"
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    nested = f"import subprocess, sys; subprocess.Popen({sleeper!r}, start_new_session=True).wait()"
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE) as other:
        with subprocess.Popen(
            [sys.executable, "-c", nested],
            stdin=subprocess.PIPE,
            env=os.environ | {processes.MARK: f"{mark}.n0.daemon"},
        ) as parent:
            until(lambda: len(processes.find(mark + ".")) == 2, what="parent and child are marked")
            folder = tmp_path / "temporary"
            folder.mkdir()
            clean(mark, folder)
            parent.wait(10)
        assert processes.find(mark + ".") == []
        assert not folder.exists()
        assert other.poll() is None
        assert processes.alive(other.pid)


def test_sockets_fit_even_when_the_temporary_directory_is_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    assert short_temp() == "/tmp"


def test_what_runs_on_a_node_writes_its_temporary_files_into_the_nodes_folder(tmp_path: Path) -> None:
    """A torchrun that is killed removes none of its own."""
    node = Node(3, root=tmp_path, logs=tmp_path, storage=tmp_path, key=tmp_path / "key", run="parts")
    program = "import os, tempfile; print(tempfile.mkdtemp()); os.kill(os.getpid(), 9)"
    ran = subprocess.run([sys.executable, "-uc", program], env=node.environ("job.x."), capture_output=True, text=True, check=False)
    assert ran.returncode == -9
    assert Path(ran.stdout.strip()).parent == node.folder


# --- report and picture -----------------------------------------------------------------------------------------
def chapters() -> list[Chapter]:
    first = Chapter(
        1, "a whole node dies", died="node-0", at=1002.0, back=1009.0, trained_step=24, restored_step=23
    )
    first.world = 3
    first.bytes = {"own": 3 << 20, "peer": 1 << 20, "durable": 0}
    first.seconds = {"detect": 0.5, "launch": 6.0, "decide": 0.1, "transfer": 0.02, "load": 0.01}
    first.claim("restored from own and peer alone", True, "bytes: [own] 3")
    second = Chapter(2, "training goes on", died="nothing", at=1010.0)
    second.claim("losses are bit-equal", True, "50 steps")
    return [second, first]


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=140)
    report.show(console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_report_is_written_and_shown(tmp_path: Path) -> None:
    report = Report(chapters(), 123.4, samples=[Sample(1000.0, 1, 1, 0, -1)], files={"logs": "x"})
    assert report.ok
    report.write(tmp_path / "report.json")
    body = json.loads((tmp_path / "report.json").read_text())
    assert body["ok"] is True
    assert [event["number"] for event in body["events"]] == [1, 2]
    assert body["events"][0]["steps_lost"] == 1
    assert body["timeline"][0]["trained"] == 1
    text = shown(report)
    assert "every claim holds: 2 of the 2 claims that were looked at hold" in text
    assert "steps lost" in text
    assert "peer 1.00 MiB" in text
    assert "[own] 3" in text, "evidence is text, not markup"


def test_one_false_claim_fails_the_demo() -> None:
    told = chapters()
    told[0].claim("a lie", False, "seen to be false")
    report = Report(told, 10.0)
    assert not report.ok
    assert "the demo FAILED: 2 of the 3 claims that were looked at hold" in shown(report)


def test_a_story_without_events_claims_or_end_fails() -> None:
    assert not Report([], 1.0).ok
    assert not Report([*chapters(), Chapter(3, "nothing was checked")], 1.0).ok
    broken = Report(chapters(), 1.0, failure="a daemon did not answer")
    assert not broken.ok
    assert "a daemon did not answer" in shown(broken)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = [{"time": 1000.0 + i, "step": i, "loss": 4.0 - i / 10} for i in range(10)]
    runs = [("4 nodes", plot.points_of(steps)), ("3 nodes", [])]
    samples = [Sample(1000.0 + i, i, i, i - 1, -1) for i in range(10)]
    plot.draw(tmp_path / "timeline.png", runs, chapters(), samples)
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG_MAGIC)
    assert "from own 75%, peer 25%" in plot.label(chapters()[1])


def test_the_plot_leaves_a_gap_where_the_job_was_down() -> None:
    samples = [Sample(10.0, 1, 1, -1, -1), Sample(11.0, 2, 2, 1, -1), Sample(30.0, 0, 2, 1, -1), Sample(31.0, 3, 3, 3, -1)]
    times, steps = plot.level_line(samples, "trained", 10.0)
    assert times == [0.0, 1.0, 21.0, 21.0]
    assert steps[:2] == [1.0, 2.0]
    assert math.isnan(steps[2])
    assert steps[3] == 3.0
    assert plot.level_line(samples, "durable", 10.0) == ([], [])


# --- the whole, cut short ---------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.chaos
def test_a_demo_without_time_fails_says_so_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real daemons are started and found gone afterwards, with their sockets and their storage."""
    assert run(tmp_path, seconds_max=2.0, json=True) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] is False
    assert "time is over" in body["failure"]
    assert body == json.loads((tmp_path / "report.json").read_text())
    assert any((tmp_path / "logs").iterdir())
    assert processes.find(f"demo-{os.getpid()}-") == []
    assert not list(Path(short_temp()).glob(f"{TEMPORARY}*{os.getpid()}*"))


def test_a_demo_that_cannot_write_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CkptdError, match="cannot write its report"):
        run(tmp_path / "file")


def test_a_port_is_one_that_the_system_gives_to_no_connection() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(40)]
    assert all(PORT_MIN <= port < min(low, FIRST_PORT) for port in ports), "nor one that a daemon chooses itself"


def test_a_port_is_given_once_and_is_free_for_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five workers and their daemons draw ports at the same time: the CI met EADDRINUSE in a trainer."""
    mine = free_port()
    monkeypatch.setattr("ckptd.demo.job.random.SystemRandom.randint", lambda *_: mine)
    with pytest.raises(OSError, match="is free"):
        free_port()
    code = f"""if True:
        import socket
        try:
            socket.socket().bind(("", {mine}))
        except OSError:
            print("held")
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "held\n"
    TCPStore("127.0.0.1", mine, 1, is_master=True).set("key", "value")


def test_a_port_that_somebody_listens_on_at_another_address_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's store listens at all of them."""
    numbers = iter([taken := PORT_MIN + 1, taken + 1])
    monkeypatch.setattr("ckptd.demo.job.random.SystemRandom.randint", lambda *_: next(numbers))
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.7", taken))
        other.listen()
        assert free_port() == taken + 1
