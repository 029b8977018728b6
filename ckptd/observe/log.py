"""The daemon's log on stderr: one line per event, ``key=value`` for people or JSON for machines.

Any room logs with the standard library: ``logging.getLogger("ckptd.arena").info("sealed", extra={"job": job, "step": 7})``;
whatever is in ``extra`` becomes a field.
"""

from __future__ import annotations

import json
import logging
import select
import sys
from datetime import datetime, timezone
from typing import IO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
TEXT_CHARS_MAX = 4000  # of one line
PIECE_CHARS = 1024  # written at once: in UTF-8 no more than what a pipe takes without waiting when it says that it takes something
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")


def _quoted(value: object) -> str:
    text = str(value)
    plain = text and all(c.isprintable() and c not in ' "=' for c in text)
    return text if plain else json.dumps(text)


def _line(text: str) -> str:
    """What others say ends up in it: one line of what can be printed."""
    return "".join(c if c.isprintable() else "?" for c in text[:TEXT_CHARS_MAX])


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000+00:00 INFO ckptd.arena sealed job=0/gpt step=7``"""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        pairs = {"node": self._node, **_fields(record)}
        words = [_when(record), record.levelname, record.name, _line(record.getMessage())]
        words += [f"{key}={_quoted(value)}" for key, value in pairs.items() if value != ""]
        if record.exc_info:
            words.append("\n" + self.formatException(record.exc_info))
        return " ".join(words)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, text, node and the fields."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
            "node": self._node,
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PatientReader(logging.StreamHandler[IO[str]]):
    """Never waits for whoever reads the log: a full pipe, or a terminal that was stopped, would stop the daemon for all its jobs.
    What it does not take is lost, and counted with the next line that it takes."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self._lost = 0
        self._poller: select.poll | None = select.poll()
        try:
            self._poller.register(stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # memory, which always takes it
            self._poller = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._takes():
                self._lost += 1
                return
            lost, self._lost = self._lost, 0
            if lost:
                text = f"{lost} lines before this one are lost: whoever reads the log did not take them"
                gap = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
                self._write(self.format(logging.makeLogRecord(gap)))
            self._write(self.format(record))
        except Exception:
            self.handleError(record)

    def _write(self, text: str) -> None:
        line = text + self.terminator
        for at in range(0, len(line), PIECE_CHARS):
            if not self._takes():
                self._lost += 1
                return
            self.stream.write(line[at : at + PIECE_CHARS])
            self.stream.flush()

    def _takes(self) -> bool:
        return self._poller is None or bool(self._poller.poll(0))


def setup(level: str = "info", form: str = "text", *, node: str = "", stream: IO[str] | None = None) -> None:
    """Send the logger ``ckptd`` (and all below it) to ``stream`` (stderr), replacing what an earlier call set up."""
    assert level in LEVELS and form in FORMATS, (level, form)
    handler = PatientReader(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(node) if form == "json" else TextFormatter(node))
    root = logging.getLogger("ckptd")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
