"""The command line in a process of its own, which may be killed, stopped and gone on with: forked, so that a test with several does
not wait for as many imports of torch. That a user's own process does the same is in tests/node/test_run.py and test_readme.py."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from typing import Any

from tests.cluster.forked import ForkedCommand

RUN_TIMEOUT_S = 300.0
SMALL_PARTS = "tests.node.small_parts"


class Started(ForkedCommand):
    """``ckptd ARGUMENTS``. ``part_bytes``: of each part that it writes; it dies before the report of part ``dies_at``."""

    def __init__(self, *arguments: object, failpoint: str = "", part_bytes: int = 0, dies_at: int = -1) -> None:
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        env = {**os.environ, "PART_BYTES": str(part_bytes), "DIES_AT": str(dies_at), "CKPTD_FAILPOINT": failpoint}
        super().__init__([*map(str, arguments)], env, *self._files, before=SMALL_PARTS if part_bytes else "")

    def communicate(self) -> tuple[str, str]:
        """What it has said when it has ended."""
        self.wait(RUN_TIMEOUT_S)
        said = []
        for file in self._files:
            file.seek(0)
            said.append(file.read().decode())
            file.close()
        return said[0], said[1]

    def report(self) -> dict[str, Any]:
        """Of ``--json``, when it has done what it was to do."""
        out, err = self.communicate()
        assert self.returncode == 0, err
        report: dict[str, Any] = json.loads(out)
        return report

    def killed(self) -> None:
        said = self.communicate()
        assert self.returncode == -signal.SIGKILL, said
