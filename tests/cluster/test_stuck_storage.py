"""Storage whose system calls do not return, as on a hard NFS mount: the thread hangs, the daemon does not (P5)."""

from __future__ import annotations

import signal

from tests.cluster.nodes import Cluster
from tests.waiting import until

JOB = "stuck"


def test_a_daemon_whose_threads_hang_in_storage_answers_restores_and_ends(nodes: Cluster) -> None:
    root = nodes.root / "storage"
    root.mkdir()
    node = nodes.node(replicas=0, storage_root=root, start=False)
    node.start(failpoint="persist.write.begin:sleep=600")
    (trainer,) = nodes.world([node], JOB)
    assert trainer.do("restore") is None
    trainer.do("train", steps=2)
    trainer.do("snapshot", must=True)
    trainer.do("wait", level="sealed")
    trainer.do("wait", level="durable", timeout=0.5)  # its flush hangs from here on
    trainer.kill()
    (again,) = nodes.world([node], JOB)
    assert again.do("restore") == 2
    assert node.get("/ls")["rows"]
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    assert until(
        lambda: node.process is not None and node.process.poll() is not None, 15, "the daemon to end"
    )
    assert node.process.returncode == 0
