"""Which requests are in the engine, so that one that kills the process is found out.

A request is noted before the engine gets it and crossed out when it is done. What a process left
in the journal without closing it was in flight when the process died: each such death counts
against the request, and is forgotten once it is answered. An orderly end, an interrupt or an
exception counts against none.

On a local disk a note is a line appended: enough for a process that dies, and cheap (no sync;
when the whole machine dies, the last notes may be lost). Object storage has no append: there
requests are noted `REMOTE_AHEAD` at a time, and the journal is put whole.
"""

import logging
import os
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
        self._store, self._path = partition.store, f"{partition.path}/{JOURNAL}"
        self.ahead = 1 if self._store.is_local else REMOTE_AHEAD
        self._in_flight: set[str] = set()
        self._file: IO[bytes] | None = None
        self._bytes = 0
        self.deaths = self._read()
        if self.deaths:
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
        if known:
            self._rewrite()

    def close(self) -> None:
        """End in order: nothing is in flight, only earlier deaths are kept."""
        self._in_flight.clear()
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
            lines = self._store.fs.cat_file(self._path).decode("ascii", "replace").splitlines()
        except FileNotFoundError:
            return Counter()
        deaths: Counter[str] = Counter()
        in_flight: set[str] = set()
        for line in lines:
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

    def _note(self, lines: str, is_start: bool = False) -> None:
        if not self._store.is_local:
            if is_start:
                self._rewrite()
            return
        if self._file is None or self._bytes > MAX_BYTES:
            self._rewrite()  # holds what is in flight
            return
        fault_point("journal append")
        with disk_errors(self._path):
            self._file.write(lines.encode())
        self._bytes += len(lines)

    def _rewrite(self) -> None:
        """Replace the file: deaths so far, and what is in flight now."""
        self._close_file()
        lines = [f"x{key} {count}\n" for key, count in self.deaths.items()]
        lines += [f"+{key}\n" for key in sorted(self._in_flight)]
        text = "".join(lines).encode()
        with self._store.open_atomic(self._path) as file:
            file.write(text)
        if self._store.is_local:
            with disk_errors(self._path):
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._bytes = os.path.getsize(self._path) if self._store.is_local else 0

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
