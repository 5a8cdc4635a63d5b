"""Which requests are in the engine, so that one that kills the process is found out.

A request is noted before the engine gets it and crossed out when it is done. What a process left
in the journal without closing it was in flight when the process died: each such death counts
against the request, and is forgotten once it is answered. An orderly end, an interrupt or an
exception counts against none.

On a local disk a note is a line appended: enough for a process that dies, and cheap (no sync;
when the whole machine dies, the last notes may be lost). Object storage has no append: there
requests are noted `REMOTE_AHEAD` at a time, and the journal is put whole. Each process has a
journal of its own there, which stays when it dies: one whose partition was taken over by another
process still ends in order, and then counts against no request.
"""

import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterable
from typing import IO

from bulk_pipeline.store import Partition, disk_errors, fault_point

JOURNAL = "in_flight.journal"
ISOLATE_DEATHS = 2  # after so many deaths a request runs alone
MAX_DEATHS = 3  # after so many it is given up
REMOTE_AHEAD = 256  # requests noted at once where each note is a whole object
MAX_BYTES = 1 << 20  # the file is written afresh when it is longer

log = logging.getLogger(__name__)


class Journal:
    """The journal of one partition; its writer alone may open it.

    Attributes
    ----------
    deaths
        How many processes died with a request in flight, by request key.
    ahead
        How many requests to note at once.
    """

    def __init__(self, partition: Partition):
        self._store, self._folder = partition.store, partition.path
        name = JOURNAL if self._store.is_local else f"{uuid.uuid4().hex}.{JOURNAL}"
        self._path = f"{self._folder}/{name}"
        self._left: dict[str, Counter[str]] = {}  # deaths by journal, of dead processes
        self.ahead = 1 if self._store.is_local else REMOTE_AHEAD
        self._in_flight: set[str] = set()
        self._file: IO[bytes] | None = None
        self._bytes = 0
        self.deaths = self._read() if self._store.is_local else self._read_others()
        if self.deaths and self._store.is_local:
            self._rewrite()

    def start(self, keys: Iterable[str]) -> None:
        """Note requests that the engine is about to get."""
        keys = list(keys)
        self._in_flight.update(keys)
        self._note("".join(f"+{key}\n" for key in keys), is_start=True)

    def finish(self, key: str) -> None:
        """Cross out a request that the engine is done with."""
        self._in_flight.discard(key)
        self._note(f"-{key}\n")

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the deaths of requests whose answer is stored, or that start over."""
        known = self.deaths.keys() & set(keys)
        for key in known:
            del self.deaths[key]
        if known and self._store.is_local:
            self._rewrite()
        for path, deaths in self._left.items():
            if deaths.keys() & known:
                self._left[path] = Counter({k: n for k, n in deaths.items() if k not in known})
                self._put_or_delete(path, _death_lines(self._left[path]))

    def close(self) -> None:
        """End in order: nothing is in flight, only earlier deaths are kept."""
        self._in_flight.clear()
        if not self._store.is_local:
            if self._bytes:
                self._put_or_delete(self._path, [])
            return
        try:
            if self.deaths:
                self._rewrite()
                return
        except OSError:  # better no journal than one that blames a full disk on a request
            log.warning("%s cannot be written; deaths so far are forgotten", self._path)
        finally:
            self._close_file()
        if self._store.fs.exists(self._path):
            fault_point("journal delete")
            self._store.fs.rm_file(self._path)

    def _read(self) -> Counter[str]:
        """Deaths of before, and one more for each request that was left in flight."""
        try:
            return _count_deaths(self._store.fs.cat_file(self._path))
        except FileNotFoundError:
            return Counter()

    def _read_others(self) -> Counter[str]:
        """The deaths in all journals that other processes left, or have not closed yet."""
        try:
            names = self._store.fs.ls(self._folder, detail=False)
        except FileNotFoundError:
            names = []
        paths = [name for name in names if name.endswith(JOURNAL)]
        for path, data in zip(paths, self._store.read_many(self._cat, paths), strict=True):
            if data is not None:
                self._left[path] = _count_deaths(data)
        return sum(self._left.values(), Counter[str]())

    def _cat(self, path: str) -> bytes | None:
        try:
            return self._store.fs.cat_file(path)
        except FileNotFoundError:  # its process has just ended in order
            return None

    def _note(self, lines: str, is_start: bool = False) -> None:
        if not self._store.is_local:
            if is_start:
                in_flight = [f"+{key}\n" for key in sorted(self._in_flight)]
                self._bytes = self._put_or_delete(self._path, in_flight)
            return
        if self._file is None or self._bytes > MAX_BYTES:
            self._rewrite()  # holds what is in flight
            return
        fault_point("journal append")
        with disk_errors(self._path):
            self._file.write(lines.encode())
        self._bytes += len(lines)

    def _rewrite(self) -> None:
        """Replace the file on a disk: deaths so far, and what is in flight now."""
        self._close_file()
        lines = _death_lines(self.deaths) + [f"+{key}\n" for key in sorted(self._in_flight)]
        with self._store.open_atomic(self._path) as file:
            file.write("".join(lines).encode())
        with disk_errors(self._path):
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._bytes = os.path.getsize(self._path)

    def _put_or_delete(self, path: str, lines: list[str]) -> int:
        """Replace a journal on object storage; one that would say nothing goes. Its bytes."""
        data = "".join(lines).encode()
        if data:
            fault_point(f"{JOURNAL} upload")
            self._store.fs.pipe_file(path, data)
            fault_point(f"{JOURNAL} uploaded")
            return len(data)
        fault_point("journal delete")
        try:
            self._store.fs.rm_file(path)
        except FileNotFoundError:
            pass
        return 0

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _death_lines(deaths: Counter[str]) -> list[str]:
    return [f"x{key} {count}\n" for key, count in deaths.items()]


def _count_deaths(data: bytes) -> Counter[str]:
    """The deaths that a journal tells of, and one more for each request that it left in flight."""
    deaths: Counter[str] = Counter()
    in_flight: set[str] = set()
    for line in data.decode("ascii", "replace").splitlines():
        mark, key = line[:1], line[1:33]
        if len(key) < 32:  # the last line, torn
            continue
        if mark == "+":
            in_flight.add(key)
        elif mark == "-":
            in_flight.discard(key)
        elif mark == "x":
            deaths[key] = int(line[34:] or 1)
    deaths.update(in_flight)
    return deaths
