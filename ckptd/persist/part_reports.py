"""The reports of parts that one checkpoint is written in. They lie beside the attempt and not in it: whoever commits it deletes
first what is no part of the checkpoint, and who then found no report there would write the part anew, and commit that."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from ckptd.core.errors import CkptdError
from ckptd.persist import report as r
from ckptd.persist.commit import check_report
from ckptd.persist.names import PART
from ckptd.persist.ranges import StoredChunk
from ckptd.persist.storage.base import NotFound, Storage, StorageError, read_file
from ckptd.persist.sums import SUM_BYTES, block_count, digest

REPORT = ".report"
BESIDE = "-reports"  # at the end of the attempt's name
BUFFER_BYTES = 8 << 20


class Reports:
    """``found``: by part, of those whose files are there as they were written. A report appears whole, once; one whose files are
    not there makes room for one of the next number."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage, self.directory = storage, directory
        self._place = f"{directory.removesuffix(PART)}{BESIDE}{PART}"
        self.found: dict[str, bytes] = {}
        self._numbers: dict[str, int] = {}  # part -> of its next report
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def find(self, part: str) -> bool:
        """Reads back all that the part has. Raises StorageError."""
        if part in self.found:
            return True
        numbered = [(*_numbered(entry.name), entry.name) for entry in self._storage.list(self._place)]
        for _, number, name in sorted(row for row in numbered if row[0] == part):
            said = self._said(f"{self._place}/{name}")
            if said is not None:
                self.found[part] = said
                break
            self._numbers[part] = number + 1
        return part in self.found

    def add(self, part: str, report: bytes) -> None:
        """Its files are durable. Another process may have been faster: then its report stands for this one, too."""
        self._storage.begin(self._place)
        while not self.find(part):
            name = f"{part}-{self._numbers.get(part, 0):04d}{REPORT}"
            if self._storage.put_if_absent(f"{self._place}/{name}", digest(report) + report):
                self.found[part] = report

    def forget(self) -> None:
        """The checkpoint is committed."""
        self._storage.discard(self._place)

    def _said(self, path: str) -> bytes | None:
        try:
            data = read_file(self._storage, path, r.REPORT_BYTES_MAX)
            said = data[SUM_BYTES:]
            if digest(said) == data[:SUM_BYTES]:
                self._read_back(r.decode(said))
                return said
        except CkptdError as error:
            if isinstance(error, StorageError) and not isinstance(error, NotFound):
                raise
        return None

    def _read_back(self, report: r.Report) -> None:
        """Raises FileDamage, StorageError."""
        check_report(self._storage, self.directory, report)
        if report.side is None:
            return
        side = read_file(self._storage, f"{self.directory}/{report.side.path}", report.side.size)
        for file in report.files:
            path = f"{self.directory}/{file.path}"
            anew, where = partial(self._storage.open, path), self._storage.locate(path)
            with closing(anew()) as reader:
                for row in file.chunks:
                    at = file.sums_at + row.block * SUM_BYTES
                    sums = side[at : at + block_count(row.nbytes) * SUM_BYTES]
                    self._read_chunk(StoredChunk(reader, anew, where, row.name, row.at, row.nbytes, sums, ""))

    def _read_chunk(self, stored: StoredChunk) -> None:
        for at in range(0, stored.nbytes, BUFFER_BYTES):
            stored.read(at, self._buffer[: min(BUFFER_BYTES, stored.nbytes - at)])


def _numbered(name: str) -> tuple[str, int]:
    """(part, number of its report); ("", 0): it is no report."""
    part, _, number = name.removesuffix(REPORT).rpartition("-")
    return (part, int(number)) if name.endswith(REPORT) and number.isdecimal() else ("", 0)
