"""The reports of an import's parts, beside the files that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from ckptd.core.errors import CkptdError
from ckptd.persist import report as r
from ckptd.persist.names import PART
from ckptd.persist.ranges import StoredChunk
from ckptd.persist.storage.base import NotFound, Storage, StorageError, read_file
from ckptd.persist.sums import SUM_BYTES, FileDamage, block_count, digest

REPORT = ".report"
BUFFER_BYTES = 8 << 20


class Reports:
    """``found``: by part, of those whose files are there as they were written. A report appears whole, once; one whose files are
    not there makes room for one of the next number."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage, self.directory = storage, directory
        self.found: dict[str, bytes] = {}
        self._numbers: dict[str, int] = {}  # part -> of its next report
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def find(self, part: str) -> bool:
        """Reads back all that the part has. Raises StorageError."""
        if part in self.found:
            return True
        entries = {entry.name.removesuffix(PART): entry.size for entry in self._storage.list(self.directory)}
        mine = sorted((number, name) for name in entries for of, number in [_numbered(name)] if of == part)
        for number, name in mine:
            said = self._said(name, entries)
            if said is not None:
                self.found[part] = said
                return True
            self._numbers[part] = number + 1
        return False

    def add(self, part: str, report: bytes) -> None:
        """Its files are durable. Another process may have been faster: then its report stands for this one, too."""
        while not self.find(part):
            name = f"{part}-{self._numbers.get(part, 0):04d}{REPORT}"
            if self._storage.put_if_absent(f"{self.directory}/{name}", digest(report) + report):
                self.found[part] = report

    def _said(self, name: str, entries: Mapping[str, int]) -> bytes | None:
        try:
            data = read_file(self._storage, f"{self.directory}/{name}", r.REPORT_BYTES_MAX)
            said = data[SUM_BYTES:]
            if digest(said) != data[:SUM_BYTES]:
                return None
            report = r.decode(said)
            sides = {report.side.path: report.side.size} if report.side is not None else {}
            if (sides | {file.path: file.size for file in report.files}).items() <= entries.items():
                self._read_back(report)
                return said
        except CkptdError as error:
            if isinstance(error, StorageError) and not isinstance(error, NotFound):
                raise
        return None

    def _read_back(self, report: r.Report) -> None:
        """Raises FileDamage, StorageError."""
        if report.side is None:
            return
        with closing(self._storage.open(f"{self.directory}/{report.side.path}")) as side:
            whole = memoryview(bytearray(side.size))
            side.read_into(0, whole)
        if digest(whole[:-SUM_BYTES]) != report.side.sum or whole[-SUM_BYTES:] != report.side.sum:
            raise FileDamage("damaged side file", where=self._storage.locate(self.directory))
        for file in report.files:
            self._read_file(file, whole[file.sums_at : file.sums_at + file.blocks * SUM_BYTES])

    def _read_file(self, file: r.WrittenFile, sums: memoryview) -> None:
        path = f"{self.directory}/{file.path}"
        with closing(self._storage.open(path)) as reader:
            head = memoryview(bytearray(file.data_start))
            reader.read_into(0, head)
            if digest(head) != file.header_sum:
                raise FileDamage("damaged header", where=self._storage.locate(path))
            for row in file.chunks:
                its = bytes(sums[row.block * SUM_BYTES : (row.block + block_count(row.nbytes)) * SUM_BYTES])
                place = self._storage.locate(path), row.name, row.at, row.nbytes, its, ""
                stored = StoredChunk(reader, lambda: self._storage.open(path), *place)
                for at in range(0, row.nbytes, BUFFER_BYTES):
                    stored.read(at, self._buffer[: min(BUFFER_BYTES, row.nbytes - at)])


def _numbered(name: str) -> tuple[str, int]:
    """(part, number of its report); ("", 0): it is no report."""
    part, _, number = name.removesuffix(REPORT).rpartition("-")
    return (part, int(number)) if name.endswith(REPORT) and number.isdecimal() else ("", 0)
