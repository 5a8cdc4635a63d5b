"""Which requests are in the engine, so that one that makes every run fail is found out.

A request is noted before the engine gets it and crossed out when it is done. What a process left
in the journal without closing it was in flight when the process died, and where the model failed
the stage says what was: each such failure counts against the request, and is forgotten once the
engine has answered it, even if a kill takes the answer. An orderly end, an interrupt or another
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
from collections.abc import Iterable, Mapping
from typing import IO

from bulk_pipeline.storage.atomic_files import disk_errors
from bulk_pipeline.storage.faults import fault_point
from bulk_pipeline.storage.partition import Partition

JOURNAL = "in_flight.journal"
ISOLATE_AFTER = 2  # failures, a request runs alone
GIVE_UP_AFTER = 5  # it does not run any more: two kills of a request alone may be by chance
REMOTE_AHEAD = 256  # requests noted at once where each note is a whole object
MAX_BYTES = 1 << 20  # the file is written afresh when it is longer

log = logging.getLogger(__name__)


class Journal:
    """The journal of one partition; its writer alone may open it.

    Attributes
    ----------
    failures
        How many runs failed with a request in flight, by request key.
    ahead
        How many requests to note at once.
    """

    def __init__(self, partition: Partition):
        self._store, self._folder = partition.store, partition.path
        name = JOURNAL if self._store.is_local else f"{uuid.uuid4().hex}.{JOURNAL}"
        self._path = f"{self._folder}/{name}"
        self._left = _read_journals(partition)  # failures by journal
        self.ahead = 1 if self._store.is_local else REMOTE_AHEAD
        self._in_flight: set[str] = set()
        self._file: IO[bytes] | None = None
        self._bytes = 0  # of the file on a disk
        self._is_begun = False  # on object storage, whether there may be a journal of its own
        self.failures = sum(self._left.values(), Counter[str]())
        if self.failures and self._store.is_local:
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

    def blame(self, keys: Iterable[str]) -> None:
        """Count a failure against requests, which are in flight no longer."""
        failed = Counter(set(keys))
        self._in_flight.difference_update(failed)
        self.failures += failed
        self._left[self._path] = self._left.get(self._path, Counter[str]()) + failed

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the failures of requests that were answered, or that start over."""
        known = self.failures.keys() & set(keys)
        for key in known:
            del self.failures[key]
        if self._store.is_local:
            if known:
                self._rewrite()
            return
        for path, failures in self._left.items():
            if failures.keys() & known:
                self._left[path] = Counter({k: n for k, n in failures.items() if k not in known})
                self._put_or_delete(path, _lines(self._left[path]))

    def close(self) -> None:
        """End in order: nothing is in flight, only failures are kept."""
        try:
            self._end()
        except Exception:
            raise
        except BaseException:  # an interrupt, which must count against none here too
            self._end()
            raise

    def _end(self) -> None:
        self._in_flight.clear()
        if not self._store.is_local:
            if self._is_begun:
                self._put_or_delete(self._path, _lines(self._left.get(self._path, {})))
            return
        try:
            if self.failures:
                self._rewrite()
                return
        except OSError:  # better no journal than one that blames a full disk on a request
            log.warning("%s cannot be written; failures so far are forgotten", self._path)
        finally:
            self._close_file()
        if self._store.fs.exists(self._path):
            fault_point("journal delete")
            with disk_errors(self._path):
                self._store.fs.rm_file(self._path)

    def _note(self, lines: str, is_start: bool = False) -> None:
        if not self._store.is_local:
            if is_start:
                self._is_begun = True  # also where this breaks off: it may have arrived
                left = _lines(self._left.get(self._path, {}), self._in_flight)
                self._put_or_delete(self._path, left)
            return
        if self._file is None or self._bytes > MAX_BYTES:
            self._rewrite()  # holds what is in flight
            return
        fault_point("journal append")
        with disk_errors(self._path):
            self._file.write(lines.encode())
        self._bytes += len(lines)

    def _rewrite(self) -> None:
        """Replace the file on a disk: failures so far, and what is in flight now."""
        self._close_file()
        with self._store.open_atomic(self._path) as file:
            file.write("".join(_lines(self.failures, self._in_flight)).encode())
        with disk_errors(self._path):
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._bytes = os.path.getsize(self._path)

    def _put_or_delete(self, path: str, lines: list[str]) -> None:
        """Replace a journal on object storage; one that would say nothing goes."""
        data = "".join(lines).encode()
        if data:
            fault_point(f"{JOURNAL} upload")
            self._store.fs.pipe_file(path, data)
            fault_point(f"{JOURNAL} uploaded")
            return
        fault_point("journal delete")
        try:
            self._store.fs.rm_file(path)
        except FileNotFoundError:
            pass

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def run_alone_note(num_requests: int) -> str:
    """What a run does with requests that it found in the journal, as logs and plans say it."""
    return (
        f"{num_requests} of the requests were in generation in {ISOLATE_AFTER} failed runs or "
        f"more: they run last, one at a time"
    )


def suspects(failures: Mapping[str, int]) -> list[str]:
    """The requests that run alone: in generation in failed runs, and not given up."""
    return [key for key, count in failures.items() if ISOLATE_AFTER <= count < GIVE_UP_AFTER]


def given_up(failures: Mapping[str, int]) -> list[str]:
    """The requests that run no more."""
    return [key for key, count in failures.items() if count >= GIVE_UP_AFTER]


def read_failures(partition: Partition) -> Counter[str]:
    """How many runs failed with a request in flight, by key, while no run is going."""
    return sum(_read_journals(partition).values(), Counter[str]())


def _read_journals(partition: Partition) -> dict[str, Counter[str]]:
    """The failures in a partition's journal; on object storage in all that processes left."""
    store = partition.store

    def read(path: str) -> bytes | None:
        try:
            return store.fs.cat_file(path)
        except FileNotFoundError:  # its process has just ended in order
            return None

    paths = [f"{partition.path}/{JOURNAL}"]
    if not store.is_local:
        paths = [f"{partition.path}/{n}" for n in partition.file_sizes() if n.endswith(JOURNAL)]
    found = zip(paths, store.read_many(read, paths), strict=True)
    return {path: _count_failures(data) for path, data in found if data is not None}


def _lines(failures: Mapping[str, int], in_flight: Iterable[str] = ()) -> list[str]:
    return [
        *(f"x{key} {count}\n" for key, count in failures.items()),
        *(f"+{key}\n" for key in sorted(in_flight)),
    ]


def _count_failures(data: bytes) -> Counter[str]:
    """The failures that a journal tells of, and one more for each request left in flight."""
    failures: Counter[str] = Counter()
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
            failures[key] = int(line[34:] or 1)
    failures.update(in_flight)
    return failures
