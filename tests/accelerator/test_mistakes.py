"""One mistake per rule of the accelerator path (design D16), and the test that catches it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ckptd_client
import pytest

from tests.accelerator import device

ROOT = Path(__file__).resolve().parents[2]
CLIENT = Path(ckptd_client.__file__).parent
TEST_S = 120.0

pytestmark = [device.NEEDED, pytest.mark.chaos]


@dataclass(frozen=True)
class Mistake:
    """``old`` is once in the client's file, and ``new`` in its place; ``caught``: by whom, below tests/node/."""

    name: str
    path: str
    old: str
    new: str
    caught: str


RULES, RESTORES, GRAPHS = "test_client_device_rules.py", "test_client_device_restore.py", "test_client_graphs.py"
MISTAKES = (
    Mistake(
        "the current device is not set in our threads",
        "accelerator.py", "            if ours and torch", "            if False and torch",
        f"{RULES}::test_every_thread_of_ours_is_on_the_ranks_device",
    ),
    Mistake(
        "a registration's result is not checked",
        "accelerator.py", "                return str(error)\n", '                return ""\n',
        f"{RULES}::test_where_memory_cannot_be_registered_copies_go_through_a_ring",
    ),
    Mistake(
        "the error that a failed registration leaves stays",
        "accelerator.py", "            torch.zeros(1, device=self.device)\n", "            pass\n",
        f"{RULES}::test_where_memory_cannot_be_registered_copies_go_through_a_ring",
    ),
    Mistake(
        "a grant comes before its slot is registered",
        "cold.py", "        if grant.slot not in self._waiting:", "        if True:",
        f"{RULES}::test_memory_is_registered_by_the_capture_thread_and_no_grant_comes_before_it_is",
    ),
    Mistake(
        "a copy lies across two registered pieces",
        "segments.py", "return REGISTERED_BYTES - (address - self.address) % REGISTERED_BYTES", "return self.nbytes",
        f"{RULES}::test_a_segment_is_registered_in_pieces_and_no_copy_lies_across_two",
    ),
    Mistake(
        "everything is cloned on the device, however large",
        "device.py", "if copy.nbytes <= CLONE_BYTES_MAX]", "if True]",
        f"{RULES}::test_nothing_large_is_cloned_on_the_device",
    ),
    Mistake(
        "training does not wait for a large copy",
        "device.py", "            self._accelerator.hold_back(self._done)\n            after", "            after",
        f"{RULES}::test_nothing_large_is_cloned_on_the_device",
    ),
    Mistake(
        "what was enqueued before a failure has no event",
        "device.py", "                self._done.record(side)  # also", "                pass  # also",
        f"{RULES}::test_a_capture_that_fails_half_way_keeps_its_slot_until_its_copies_are_over",
    ),
    Mistake(
        "all is enqueued at once",
        "device.py", "for _, nbytes in self._sent) < WINDOW_BYTES", "for _, nbytes in self._sent) < 1 << 60",
        f"{RULES}::test_little_is_on_its_way_at_once_and_a_fences_timeout_calls_back_the_rest",
    ),
    Mistake(
        "what is large is copied once, whoever writes it",
        "device.py", "            if not written:", "            if True:",
        f"{RULES}::test_what_is_too_large_to_be_cloned_is_copied_again_where_another_thread_writes_it",
    ),
    Mistake(
        "all threads make the same object of a stream current",
        "accelerator.py", "with self._aside() as side:", "with self._side as side:",
        f"{RULES}::test_who_was_aside_beside_another_thread_comes_back_to_its_own_stream",
    ),
    Mistake(
        "events are asked on whatever device is current",
        "accelerator.py", "while may and here and", "while may and",
        f"{RULES}::test_a_thread_of_the_programs_that_fences_asks_its_own_device_nothing",
    ),
    Mistake(
        "training waits for what is void",
        "capture.py", "job.enqueued and not job.stop:", "(job.enqueued or job.stop):",
        "test_client_snapshot.py::test_the_fence_gives_up_at_its_timeout_and_training_goes_on",
    ),
    Mistake(
        "what alone lies on the device is compared at once",
        "gather.py", "late if job.audit else (), unproven)", "late if job.audit else ())",
        f"{RULES}::test_what_alone_lies_on_the_device_is_compared_behind_what_training_asked_for",
    ),
    Mistake(
        "the side stream does not wait for training",
        "device.py", "            side.wait_event(self._ready)\n        yield", "            pass\n        yield",
        f"{RULES}::test_an_audit_digests_on_the_side_stream_and_cries_no_wolf",
    ),
    Mistake(
        "training does not wait for the copies",
        "accelerator.py", "        training.wait_event(copies)\n", "        pass\n",
        "test_client_accelerator.py::test_the_host_never_waits_for_the_device",
    ),
    Mistake(
        "a piece of the ring is used again before it has arrived",
        "bounce.py", "        self.land()\n        self.full.synchronize()\n", "        self.land()\n",
        f"{RESTORES}::test_slow_copies_bring_what_was_saved",
    ),
    Mistake(
        "a piece of the ring has its event on the stream of another device",
        "bounce.py", "        self.full.record(torch.accelerator.current_stream(place.device))\n", "        pass\n",
        f"{RESTORES}::test_slow_copies_bring_what_was_saved",
    ),
    Mistake(
        "a restore writes beside what still reads",
        "accelerator.py",
        "        torch.accelerator.synchronize(self.device)\n        ring = self.ring()\n", "        ring = self.ring()\n",
        f"{RESTORES}::test_streams_that_still_use_the_tensors_end_first",
    ),
    Mistake(
        "a restore returns before its bytes are there",
        "accelerator.py",
        "dest.copy_(source)\n        torch.accelerator.synchronize(self.device)\n", "dest.copy_(source)\n",
        f"{RESTORES}::test_whatever_stream_comes_next_sees_what_was_restored",
    ),
    Mistake(
        "segments are let go of under the session's lock",
        "session.py", "            self.segments.let_go()  # not", "                self.segments.let_go()  # not",
        f"{RULES}::test_the_device_is_let_go_of_without_the_sessions_lock",
    ),
    Mistake(
        "several devices are taken for one",
        "accelerator.py", "    if len(found) > 1:", "    if False:",
        f"{RULES}::test_kinds_and_numbers_of_devices_are_refused_in_words",
    ),
    Mistake(
        "an audit compares beside what training still writes",
        "device.py", "                side.wait_event(now)\n", "                pass\n",
        f"{RULES}::test_an_audit_digests_on_the_side_stream_and_cries_no_wolf",
    ),
    Mistake(
        "our threads look at events while a graph is captured",
        "graphs.py", "        if captured_s() is not None:\n            return", "        if False:\n            return",
        f"{GRAPHS}::test_a_graph_is_captured_while_a_snapshot_is_on_its_way",
    ),
    Mistake(
        "a capture begins while a thread of ours is at the device",
        "graphs.py", "lambda: _known.inside == 0", "lambda: True",
        f"{GRAPHS}::test_a_capture_waits_for_what_our_threads_have_begun",
    ),
    Mistake(
        "a capture that is over keeps our threads away",
        "graphs.py", "capture = _known.captures.pop(graph, None)\n", "capture = _known.captures.get(graph)\n",
        f"{GRAPHS}::test_a_capture_that_is_given_up_keeps_our_threads_away_no_longer",
    ),
    Mistake(
        "a replay does not wait for the copies",
        "graphs.py", "            fence()\n", "            pass\n",
        f"{GRAPHS}::test_a_replay_right_behind_the_first_snapshot_tears_nothing",
    ),
    Mistake(
        "a replay is no step",
        "graphs.py", "            _known.replays += 1\n", "            pass\n",
        f"{GRAPHS}::test_each_replay_of_a_whole_step_is_a_step_and_tears_nothing",
    ),
    Mistake(
        "every replay waits for the copies",
        "graphs.py", "            _known.harmless.add(graph)\n", "            pass\n",
        f"{GRAPHS}::test_a_graph_of_forward_and_backward_pass_is_held_back_by_no_capture",
    ),
    Mistake(
        "what a graph writes without an optimizer is not seen",
        "graphs.py", " and capture.counters == counters:", ":",
        f"{GRAPHS}::test_a_graph_that_writes_without_an_optimizer_is_known_by_its_counters",
    ),
    Mistake(
        "our threads stay away from captures that they cannot break",
        "graphs.py", "_mode(self, *args, **kwargs) not in ALONE", "True",
        f"{GRAPHS}::test_snapshots_end_beside_a_capture_that_other_threads_cannot_break",
    ),
)  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_is_caught(mistake: Mistake, tmp_path: Path) -> None:
    shutil.copytree(CLIENT, tmp_path / "ckptd_client", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "ckptd_client" / mistake.path
    source = file.read_text(encoding="utf-8")
    assert source.count(mistake.old) == 1, "the source has changed"
    file.write_text(source.replace(mistake.old, mistake.new), encoding="utf-8")
    test = f"{ROOT}/tests/node/{mistake.caught}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", test]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environ = os.environ | {"PYTHONPATH": path}
    try:
        ended = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TEST_S)
        status, said = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:  # the mistake may keep a thread of ours, and with it the process, from its end
        status, said = 1, error.stdout or b""
    told = b" failed" in said or b"ERROR at teardown" in said  # where the races are told
    ended_in_freed_memory = status in (-signal.SIGSEGV, -signal.SIGBUS)  # a copy went on into a slot that had been given back
    assert (status == 1 and told) or ended_in_freed_memory, f"{mistake.caught} passes all the same:\n{said.decode()[-2000:]}"
