"""How the generation of a partition goes: counted while it runs, and kept with what it made.

While requests run, `progress.json` beside the completions tells other processes how far they are;
it is written every few seconds, without waiting for the disk. Once the partition is finished the
same record is the last of `runs` in the manifest, and the file is gone. What a run left behind
that did not finish is taken over by the next one, so that its time is not forgotten.
"""

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bulk_pipeline.engine.request import Completion
from bulk_pipeline.storage.atomic_files import TEMPORARY
from bulk_pipeline.storage.partition import Partition

PROGRESS_FILE = "progress.json"
REMOTE_SECONDS = 30.0  # between two writes to object storage
STALE_SECONDS = 180.0  # a record of another machine that is older is of a run that died
MAX_POINTS = 120  # of a run's curve; beyond it, every other one goes
MAX_RUNS = 20  # kept in a manifest
LEAST_DONE = 5  # requests, for a rate
SETTINGS_SHOWN = (  # of an engine's provenance
    "model",
    "device",
    "quantization",
    "attention",
    "cache_type",
    "cache_tokens",
    "max_batch_size",
    "max_chunk_size",
    "draft_model",
    "speculative",
)
SUMMED = (
    "seconds",
    "load_seconds",
    "done",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "busy_seconds",
    "drafted_tokens",
    "accepted_tokens",
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """How far the requests of a partition are.

    Attributes
    ----------
    requests, done
        How many are to run, and how many of them are finished.
    prompt_tokens, cached_tokens, completion_tokens
        Of the finished ones; cached tokens are those of the prompt found in the cache.
    busy_seconds
        Seconds that the finished ones spent in generation, added up.
    began
        When the partition's run began, in seconds since 1970.
    load_seconds
        Until the model was there.
    started, ended
        When generation began and ended, on the monotonic clock; None before.
    settings
        What the engine says of itself.
    adapter
        The adapter of the request that finished last.
    points
        The curve so far: seconds, requests done, completion tokens, and the mean size of a batch
        since the point before.
    """

    partition: str
    requests: int
    done: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    busy_seconds: float = 0.0
    began: float = field(default_factory=time.time)
    load_seconds: float = 0.0
    started: float | None = None
    ended: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    points: list[list[float]] = field(default_factory=list)
    _opened: float = field(default_factory=time.monotonic)
    _spacing: float = 0.0
    _stats: Any = None  # the engine's counters, and what they were when generation began
    _first: tuple[int, int] = (0, 0)
    _first_drafts: tuple[int, int] = (0, 0)
    _marked: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Seconds of generation so far."""
        if self.started is None:
            return 0.0
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens a second so far."""
        return self.completion_tokens / max(self.seconds, 1e-9) if self.started is not None else 0.0

    @property
    def mean_batch(self) -> float:
        """How many requests were in generation at once, on average."""
        rows, steps = self._batches()
        return rows / steps if steps else 0.0

    @property
    def cache_use(self) -> float | None:
        """Share of the cache that the requests in generation hold; None where it is not known."""
        return getattr(self._stats, "cache_use", None)

    @property
    def drafts(self) -> tuple[int, int]:
        """Tokens that were drafted, and those of them that were right."""
        drafted, accepted = _drafts_of(self._stats)
        return drafted - self._first_drafts[0], accepted - self._first_drafts[1]

    @property
    def draft_acceptance(self) -> float | None:
        """Share of the drafted tokens that were right; None where none were drafted."""
        drafted, accepted = self.drafts
        return accepted / drafted if drafted else None

    def _batches(self) -> tuple[float, float]:
        """Rows of all batches and the number of batches.

        Of an engine that does not count them: what finished was in generation for so many seconds
        of so many.
        """
        if self._stats is None:
            return self.busy_seconds, self.seconds
        return self._stats.rows - self._first[0], self._stats.steps - self._first[1]

    @property
    def seconds_left(self) -> float | None:
        """Seconds to go, see `seconds_left`."""
        return seconds_left(self.requests, self.done, self.seconds, self.mean_batch, self.points)

    def rates(self) -> dict[str, float]:
        """How fast the run is, under the names that the UI plots."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "generation_seconds": self.seconds,
            "mean_batch": self.mean_batch,
            "cached_token_share": self.cached_tokens / max(self.prompt_tokens, 1),
            **(
                {} if self.draft_acceptance is None else {"draft_acceptance": self.draft_acceptance}
            ),
        }

    def start(self, provenance: dict[str, Any], stats: Any = None) -> None:
        """Generation begins: the model is loaded.

        Parameters
        ----------
        provenance
            What the engine says of itself.
        stats
            Its counters, where it has any: `steps`, and `rows` of them all; `drafted_tokens` and
            `accepted_tokens` where it drafts.
        """
        if stats is not None:
            self._stats, self._first = stats, (stats.rows, stats.steps)
            self._first_drafts = _drafts_of(stats)
        self.started = time.monotonic()
        self.load_seconds = self.started - self._opened
        self.settings = {
            name: provenance[name] for name in SETTINGS_SHOWN if provenance.get(name) is not None
        }

    def add(self, completion: Completion) -> None:
        """Count a finished request."""
        self.done += 1
        self.prompt_tokens += completion.prompt_tokens
        self.cached_tokens += completion.cached_tokens
        self.completion_tokens += len(completion.token_ids)
        self.busy_seconds += completion.prefill_seconds + completion.generate_seconds

    def mark(self) -> None:
        """Add the present state to the curve, unless the last point is near."""
        if self.started is None or (
            self.points and self.ended is None and self.seconds < self.points[-1][0] + self._spacing
        ):
            return
        rows, steps = (now - then for now, then in zip(self._batches(), self._marked, strict=True))
        self._marked = self._batches()
        batch = rows / steps if steps > 0 else 0.0
        self.points.append(
            [round(self.seconds, 3), self.done, self.completion_tokens, round(batch, 2)]
        )
        if len(self.points) > MAX_POINTS:
            del self.points[:-1:2]
            self._spacing = 2 * self.seconds / MAX_POINTS

    def stop(self) -> None:
        """Generation has ended, whatever the reason."""
        self.ended = time.monotonic()
        self.mark()

    def record(self) -> dict[str, Any]:
        """What is kept of the run."""
        return {
            "began": self.began,
            "seconds": self.seconds,
            "load_seconds": self.load_seconds,
            "requests": self.requests,
            "done": self.done,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "busy_seconds": self.busy_seconds,
            "mean_batch": self.mean_batch,
            "cache_use": self.cache_use,
            "drafted_tokens": self.drafts[0],
            "accepted_tokens": self.drafts[1],
            "settings": self.settings,
            **({"adapter": self.adapter} if self.adapter is not None else {}),
            "points": self.points,
        }

    def __str__(self) -> str:
        if self.started is None:
            return f"{self.partition}: {self.requests} requests, loading the model"
        left = self.seconds_left
        cache = "" if self.cache_use is None else f"{self.cache_use:.0%} of the cache in use, "
        share = self.draft_acceptance
        drafts = "" if share is None else f"{share:.0%} of drafted tokens right, "
        return (
            f"{self.partition}: {self.done} of {self.requests} requests, "
            f"{self.tokens_per_second:.1f} tokens/s, {self.mean_batch:.1f} at once, {cache}{drafts}"
            f"{'no estimate yet' if left is None else f'{left:.0f} s left'}"
        )


def _drafts_of(stats: Any) -> tuple[int, int]:
    return getattr(stats, "drafted_tokens", 0), getattr(stats, "accepted_tokens", 0)


class ProgressFile:
    """The record of a partition's run, for other processes."""

    def __init__(self, partition: Partition):
        self._store, self._folder = partition.store, partition.path
        self._path = f"{partition.path}/{PROGRESS_FILE}"
        self._written = float("-inf")

    def take_over(self, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What an earlier run left behind that did not finish and is not `known`: one or none."""
        left = read_progress_file(self._store, self._path)
        if not left or not left.get("seconds") or left["began"] in [run["began"] for run in known]:
            return []
        return [{name: left[name] for name in Progress("", 0).record() if name in left}]

    def write(self, progress: Progress, is_last: bool = False) -> None:
        """Replace the file; a failure is only logged, since nothing depends on it."""
        now = time.monotonic()
        if not self._store.is_local and not is_last and now - self._written < REMOTE_SECONDS:
            return
        self._written = now
        record = progress.record() | {
            "partition": progress.partition,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "updated": time.time(),
        }
        try:
            self._replace(json.dumps(record).encode())
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error)

    def delete(self) -> None:
        """The run is finished, and its record is in the manifest."""
        try:
            self._store.fs.rm_file(self._path)
        except OSError:
            pass

    def _replace(self, data: bytes) -> None:
        if not self._store.is_local:
            self._store.fs.pipe_file(self._path, data)
            return
        # Not synced to the disk: after a crash of the machine the file says nothing anyway.
        temporary = f"{self._folder}/{TEMPORARY}{uuid.uuid4().hex}-{PROGRESS_FILE}"
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, self._path)


def read_progress(partition: Partition) -> dict[str, Any] | None:
    """The record of the run that works on a partition, or that left it unfinished; or None."""
    return read_progress_file(partition.store, f"{partition.path}/{PROGRESS_FILE}")


def read_progress_file(store: Any, path: str) -> dict[str, Any] | None:
    """The record in a file; None where there is none, or no whole one."""
    try:
        record = json.loads(store.fs.cat_file(path))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def is_alive(record: dict[str, Any]) -> bool:
    """Whether the process that wrote a record still runs, as far as can be told from here."""
    import psutil  # type: ignore[import-untyped]

    if record.get("host") != socket.gethostname():
        return time.time() - record.get("updated", 0) < STALE_SECONDS
    try:
        # A process that started later has the number, but is another.
        return psutil.Process(record["pid"]).create_time() <= record["updated"]
    except (psutil.Error, KeyError):
        return False


def add_up(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The records of slices of one partition, which are answered at the same time, as one."""
    together = {name: sum(record.get(name, 0) for record in records) for name in SUMMED}
    return together | {
        "requests": sum(record["requests"] for record in records),
        "seconds": max(record["seconds"] for record in records),
        "mean_batch": sum(record["mean_batch"] for record in records),
        "updated": max(record["updated"] for record in records),
    }


def seconds_left(
    requests: int, done: int, seconds: float, mean_batch: float, points: Sequence[Sequence[float]]
) -> float | None:
    """Seconds to go at the steady rate of requests; None until there is one.

    The rate is that since a first batch was through: until then kernels are compiled, all places
    of the batch read their prompts at once, and the shortest answers are the only finished ones.
    It rests on at least another batch.
    """
    if done >= requests:
        return 0.0
    batch = max(mean_batch, LEAST_DONE)
    began, before = next(((at, had) for at, had, *_ in points if had >= batch), (0.0, 0))
    if done < 2 * batch or done - before < batch:
        return None
    return (seconds - began) / (done - before) * (requests - done)


def merge_runs(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers of several runs, added up."""
    return {name: sum(run.get(name, 0) for run in runs) for name in SUMMED}


Watcher = Callable[[Progress], None]
_watchers: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Show a watcher in this process how far its runs are, at each look at the clock."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def tell_watchers(progress: Progress) -> None:
    """Call the watchers of this process."""
    for watcher in _watchers:
        watcher(progress)
