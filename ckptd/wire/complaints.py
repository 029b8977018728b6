"""What strangers do wrong, in the log once and then counted: whoever may connect must not be able to fill it (P13)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("ckptd.wire")

PERIOD_S = 60.0  # between two lines about the same one
WHO_MAX = 256  # told apart; user namespaces have uids by the thousand
TEXT_CHARS_MAX = 200  # of what they sent, as far as it shows in the line
OTHERS = "others"

CallLater = Callable[[float, Callable[[str], None], str], Any]


@dataclass
class _Said:
    timer: Any
    more: int = 0
    last: str = ""


class Complaints:
    """In the event loop's thread. ``call_later``: of the running loop, unless given. ``to``: the log that hears them."""

    def __init__(
        self, call_later: CallLater | None = None, *, to: logging.Logger = log, period_s: float = PERIOD_S
    ) -> None:
        self._later, self._log, self._period_s = call_later, to, period_s
        self._said: dict[str, _Said] = {}

    def say(self, who: str, text: str, fault: BaseException | None = None) -> None:
        """One line now if ``who`` was quiet for PERIOD_S, else part of the next count. ``fault``: of our own, told with its
        trace."""
        if who not in self._said and len(self._said) >= WHO_MAX:
            who = OTHERS
        text = _plain(text)
        said = self._said.get(who)
        if said is None:
            self._log.log(logging.ERROR if fault else logging.WARNING, "%s: %s", who, text, exc_info=fault)
            self._said[who] = _Said(self._start(who))
        else:
            said.more, said.last = said.more + 1, text

    def close(self) -> None:
        """Says what is still counted."""
        for who, said in self._said.items():
            said.timer.cancel()
            self._count(who, said)
        self._said.clear()

    def _start(self, who: str) -> Any:
        later = self._later or asyncio.get_running_loop().call_later
        return later(self._period_s, self._passed, who)

    def _passed(self, who: str) -> None:
        said = self._said.pop(who)
        if said.more:
            self._count(who, said)
            self._said[who] = _Said(self._start(who))

    def _count(self, who: str, said: _Said) -> None:
        if said.more:
            self._log.warning("%s: %d more within %.0f s, the last: %s", who, said.more, self._period_s, said.last)


def _plain(text: str) -> str:
    """One line, whatever it was made of."""
    return "".join(c if c.isprintable() else "?" for c in text[:TEXT_CHARS_MAX].replace("\n", " "))
