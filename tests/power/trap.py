"""Where the power may go: every failpoint that is passed, every acknowledgement, before and after every system call that
changes the file system. Counts them all, and cuts at one of them or after a time."""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from ckptd.core import failpoint
from ckptd.persist.names import DATA, MANIFEST, SIDE
from tests.power.disk import shut_down

CUT = 77  # exit status of a child that cut the power
END = "the end"
CALLS = ("fsync", "link", "unlink", "rename", "replace", "mkdir", "rmdir", "ftruncate")
Log = Callable[[str], None]


class Trap:
    """``point``: cut when it is passed for the ``nth`` time; "": not."""

    def __init__(self, mount: str, log: Log, point: str, nth: int, flags: int) -> None:
        self.counts: Counter[str] = Counter()
        self.dark = False
        self._mount, self._log, self._point, self._nth, self._flags = mount, log, point, nth, flags
        self._lock, self._cut = threading.Lock(), threading.Lock()

    def passes(self, name: str) -> None:
        if self._due(name):
            self.cut(name)

    def cut(self, name: str) -> NoReturn:
        """The other threads get no further than the system call they are in; nor does another that cuts at its end."""
        if not self._cut.acquire(blocking=False):
            threading.Event().wait()
        self.dark = True
        self._log(name)
        shut_down(self._mount, self._flags)
        os._exit(CUT)

    def cut_after(self, delay_s: float) -> None:
        def wait() -> None:
            threading.Event().wait(delay_s)
            self.cut("some time")

        threading.Thread(target=wait, daemon=True).start()

    def _due(self, name: str) -> bool:
        with self._lock:
            self.counts[name] += 1
            return name == self._point and self.counts[name] == self._nth

    # --- hooks --------------------------------------------------------------------------------------------------
    def install(self) -> None:
        failpoint._armed = _Passed(self)
        for call in CALLS:
            self._around(call, getattr(os, call))
        self._in_the_middle(os.pwrite)
        self._after_creation(os.open)

    def _around(self, call: str, real: Callable[..., Any]) -> None:
        def hooked(*args: Any, **options: Any) -> Any:
            last = args[1] if len(args) > 1 and call in ("link", "rename", "replace") else args[0]
            at = options.get("dst_dir_fd", options.get("dir_fd"))
            what = f"{call} {self._place(last, at)}"
            self.passes(f"before {what}")
            done = real(*args, **options)
            self.passes(f"after {what}")
            return done

        setattr(os, call, hooked)

    def _in_the_middle(self, real: Callable[..., int]) -> None:
        def pwrite(fd: int, data: memoryview, at: int) -> int:
            what = f"half of a write to {self._place(fd)}"
            if self._due(what):
                real(fd, data[: len(data) // 2 // 4096 * 4096], at)  # O_DIRECT takes whole sectors
                self.cut(what)
            return real(fd, data, at)

        os.pwrite = pwrite  # type: ignore[assignment]

    def _after_creation(self, real: Callable[..., int]) -> None:
        def hooked(path: Any, flags: int, *args: Any, **options: Any) -> int:
            fd = real(path, flags, *args, **options)
            if flags & os.O_CREAT:
                self.passes(f"after create {self._place(fd)}")
            return fd

        os.open = hooked

    def _place(self, what: Any, dir_fd: int | None = None) -> str:
        """The kind of file a descriptor or a path stands for."""
        fd = what if isinstance(what, int) else dir_fd
        path = os.readlink(f"/proc/self/fd/{fd}") if fd is not None else ""
        if not isinstance(what, int):
            path = os.path.join(path, os.fspath(what))
        if "/state" in path:
            return "state"
        name = os.path.basename(path)
        if isinstance(what, int) and stat.S_ISDIR(os.fstat(what).st_mode):
            return "a directory"
        for part, place in ((MANIFEST, "manifest"), (DATA, "data"), (SIDE, "side"), ("epoch-", "epoch")):
            if part in name:
                return place
        return "checkpoint directory" if name.startswith("step-") else "marker"


class _Passed(dict[str, str]):
    """Stands in for the armed failpoints: each one asks it."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self._trap = trap

    def get(self, name: str, default: Any = None) -> Any:
        self._trap.passes(name)
        return default
