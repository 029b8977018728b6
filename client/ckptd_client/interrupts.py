"""What a user's signal handler raises is the program's, wherever in our code the signal came (P5): it is not ours to swallow."""

from __future__ import annotations

from types import TracebackType


def by_a_signal(error: BaseException) -> bool:
    """Did a signal handler raise it? Python calls it with the frame that it interrupts, and nothing else with its caller's."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        for value in trace.tb_frame.f_locals.values():
            if any(each is interrupted for each in (value if type(value) is tuple else (value,))):  # of def handler(*args)
                return True
    return False
