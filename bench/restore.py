"""Restore from own memory, next to a warm memcpy of the same state in the same run. (From a peer: bench.protect, fetch;
from durable storage: bench.persist, read.)

    python -m bench.restore --json out.json
"""

from __future__ import annotations

import os

import torch
from ckptd_client import Client

from bench.common import Report, Row, arguments, interleave
from bench.rig import daemon, room
from bench.stall import GRANT_WAIT_S
from bench.training import Copies, Training

OWN_FLOOR = 0.6


def main() -> int:
    args = arguments(__doc__ or "", threads={"type": int, "default": max(1, (os.cpu_count() or 2) - 1)})
    torch.set_num_threads(args.threads)
    report = Report("restore: from own memory")
    training = Training(args.bytes)
    memcpy, nbytes = Copies(training), training.nbytes
    with daemon(memory_budget=room(nbytes)) as node:
        client = Client.connect(job="bench", socket=str(node.socket), required=True)
        client.register(model=training.model, optimizer=training.optimizer)
        assert client.restore() is None
        training.optimize()
        handle = client.snapshot(training.step, must=True)
        assert not handle.status.startswith("skipped"), handle.status
        client.wait(level="sealed", timeout=GRANT_WAIT_S)
        phases: dict[str, list[float]] = {}
        digests = training.digests()

        def restore() -> None:
            assert client.restore() == training.step
            assert client.last_restore is not None
            assert client.last_restore["bytes"]["own"] >= nbytes
            for name, seconds in client.last_restore["seconds"].items():
                phases.setdefault(name, []).append(float(seconds))

        training.spoil()
        restore()
        assert training.digests() == digests, "restored is not what was captured"
        taken = interleave({"memcpy": memcpy, "restore": restore}, args.repeats)
        phases = {name: seconds[-args.repeats :] for name, seconds in phases.items()}
        limit = report.add(Row("memcpy, warm", taken["memcpy"], nbytes))
        report.add(Row("load: slots into tensors", phases["load"], nbytes, floor=OWN_FLOOR), limit)
        report.add(Row("transfer: plan and verify every block", phases["transfer"], nbytes), limit)
        report.add(Row("decide: inventory, epoch, catalogue", phases["decide"], kind="time"))
        report.add(Row("restore() as a whole", taken["restore"], nbytes), limit)
        client.close()
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
