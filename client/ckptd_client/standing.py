"""Where a thread of this process stands in its program, and whether it may still be in the very call that it was in.

torch moves a tensor's counter when a write is over. So a counter that stands still proves nothing while the thread that may write
is in one long call, as a busy machine makes them: that it has come out of it does. Nor does it work there alone: torch splits a
large operation among threads of its own, and who called it sleeps until the last of them is done.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

BUSY_MIN = 0.05  # of the time, on a processor: a thread that waits or sleeps in a call uses next to nothing, one that writes more
OBSERVED_MIN_S = 0.2  # before that no difference is seen: others may have the processor
TASKS = Path("/proc/self/task")
ASLEEP = b"SZX"  # or ended, in the kernel's words. Who gets no processor, as its host has given that to others, is running there


class Standing(NamedTuple):
    thread: int
    frame: int
    instruction: int
    cpu_s: float
    at_s: float


def standing(thread: int) -> Standing | None:
    """None: the thread has ended. ``thread``: as threading.get_ident() told it."""
    frame = sys._current_frames().get(thread)  # under the GIL until the clock is read, so that it does not end meanwhile
    if frame is None:
        return None
    cpu_s = time.clock_gettime(time.pthread_getcpuclockid(thread))
    return Standing(thread, id(frame), frame.f_lasti, cpu_s, time.monotonic())


def may_be_in_the_same_call(then: Standing) -> bool:
    now = standing(then.thread)
    if now is None or now[:3] != then[:3]:
        return False
    seconds = now.at_s - then.at_s
    return seconds < OBSERVED_MIN_S or now.cpu_s - then.cpu_s >= BUSY_MIN * seconds or _works(then.thread)


def _works(thread: int) -> bool:
    """Does it, or a thread that Python knows nothing of and that may work for it? Python's others have calls of their own."""
    others = {str(known.native_id) for known in threading.enumerate() if known.ident != thread}
    return any(_runs(task) for task in TASKS.iterdir() if task.name not in others)


def _runs(task: Path) -> bool:
    try:
        return (task / "stat").read_bytes().rpartition(b") ")[2][:1] not in ASLEEP
    except OSError:
        return False  # it has ended
