"""`ckptd drain` with real daemons and kills: what was drained is lost, and another node with it (P2, P3)."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cluster.nodes import REPO, Cluster, Node, together
from tests.waiting import until

JOB = "drain"
NODES = 4


@pytest.mark.parametrize("redundancy", ["replicas=1", pytest.param("xor(3)", marks=pytest.mark.chaos)])
def test_the_drained_node_and_any_other_may_go(nodes: Cluster, redundancy: str) -> None:
    """Without the drain these two are all that holds something: a pair of copies, a group of parity of two."""
    made, world, digests = nodes.protected(JOB, NODES, redundancy)
    done = made[1].cli("drain", "--deadline", "60s")
    assert done.returncode == 0, (done.stdout, done.stderr, made[0].log.read_text()[-2000:])
    assert "needed any more" in done.stdout
    for lost in (1, 3 if redundancy == "xor(3)" else 0):  # its partner in the parity set; in the group of copies
        made[lost].kill()
        world[lost].kill()
    left = [at for at in range(NODES) if made[at].process is not None]
    again = nodes.again(world, on=[made[at] for at in left])
    assert together(again, "restore") == [3] * len(left)
    assert together(again, "digest") == digests[: len(left)]


@pytest.mark.chaos
def test_from_another_node_as_json_and_called_off(nodes: Cluster) -> None:
    made, _, _ = nodes.protected(JOB, 3, "replicas=1")
    done = made[0].cli("drain", made[2].name, "--deadline", "1m", "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["node"], said["done"], said["draining"]) == (0, made[2].name, True, True), done.stderr
    stays = made[2].cli("drain", "--cancel", "--json")
    said = json.loads(stays.stdout)
    assert (stays.returncode, said["draining"]) == (0, False), stays.stderr
    assert said["done"] == all(job["done"] for job in said["jobs"]), said
    assert made[0].cli("drain", "nobody").returncode != 0
    assert "no answer" in made[0].cli("drain", "nobody").stderr


def test_with_nowhere_to_go_it_says_what_would_fall(nodes: Cluster) -> None:
    made, _, _ = nodes.protected(JOB, 2, "replicas=1")
    done = made[1].cli("drain", "--deadline", "60s")
    assert done.returncode == 1, done.stderr
    assert "no failure domain is left" in done.stdout and "step 3 of epoch 1 would survive the loss of 0 more" in done.stdout


def test_sigterm_drains_first(nodes: Cluster) -> None:
    made, world, digests = nodes.protected(JOB, 3, "replicas=1", drain_on_stop_s=60)
    assert made[1].process is not None
    made[1].process.send_signal(signal.SIGTERM)
    made[1].process.wait(60)
    assert "drained: nothing on this node is needed any more" in made[1].log.read_text()
    made[0].kill()
    again = nodes.again(world, on=made[2:])
    assert together(again, "restore") == [3]
    assert together(again, "digest") == digests[:1]


def test_only_the_daemons_user_and_root_may(nodes: Cluster) -> None:
    made, _, _ = nodes.protected(JOB, 2, "replicas=1")
    refused = as_nobody(made[0])
    assert "only root and the daemon's own user" in refused
    until(lambda: "draining" not in made[0].log.read_text(), 5, "nothing to be drained")


def as_nobody(node: Node) -> str:
    """What the daemon answers to another user's DrainAsk."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    script = (
        "import os, sys; from ckptd.wire import rank; from ckptd.wire.seqpacket import RankSocket\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "link = RankSocket.connect(sys.argv[1], (rank.DrainState, rank.Refused))\n"
        "link.send(rank.DrainAsk('on')); print(link.recv(10)[0])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, str(node.socket)], capture_output=True, text=True, timeout=200, check=True
    )
    return answer.stdout


class Notice(http.server.BaseHTTPRequestHandler):
    """Google's metadata service: TRUE from the third question on."""

    asked = 0

    def do_GET(self) -> None:
        known = self.path == "/computeMetadata/v1/instance/preempted" and self.headers["Metadata-Flavor"] == "Google"
        type(self).asked += known
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(b"TRUE" if type(self).asked >= 3 else b"FALSE")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("curl") is None, reason="the script asks through curl")
def test_the_clouds_notice_drains(nodes: Cluster) -> None:
    made, _, _ = nodes.protected(JOB, 3, "replicas=1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Notice) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CKPTD_SOCKET": str(made[2].socket),
            "CKPTD_NOTICE_POLL_S": "0.2", "CKPTD_NOTICE_URL": f"http://127.0.0.1:{server.server_port}",
        }  # fmt: skip
        script = REPO / "deploy" / "notices" / "watch.sh"
        ended = subprocess.run([script, "gcp"], env=env, capture_output=True, text=True, timeout=90, check=False)
        server.shutdown()
    assert ended.returncode == 0 and "needed any more" in ended.stdout, (ended.stdout, ended.stderr)
    assert Notice.asked >= 3
