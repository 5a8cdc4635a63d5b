"""How far a dataset's partitions are, from what is on disk: for another shell than the run's."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bulk_pipeline.plan_view import format_seconds, text_table
from bulk_pipeline.spec import SamplingSpec
from bulk_pipeline.stages.journal import read_failures, run_alone_note, suspects
from bulk_pipeline.stages.progress import add_up, is_alive, read_progress, seconds_left
from bulk_pipeline.stages.sampling_changes import describe, differences, stored_changes
from bulk_pipeline.storage.manifest import Manifest
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.partition_writer import SET_ASIDE
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS, SLICES, TABLES
from bulk_pipeline.storage.store import Store
from bulk_pipeline.wording import counted

FINISHED, RUNNING, STOPPED, WAITING = "finished", "running", "stopped", "unfinished"
STATES = (RUNNING, STOPPED, WAITING, FINISHED)
BAR_WIDTH = 20


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """How far a partition is.

    Attributes
    ----------
    state
        ``finished``; ``running``; ``stopped``: a run has died or was interrupted in it; or
        ``unfinished``: not all of its tables are there.
    table
        The first table that is not complete; None where all are.
    progress
        Of its requests, where they run or a run left them: see `stages.progress`.
    changed_sampling
        What differs from the dataset's sampling: see `stages.sampling_changes`.
    requests_alone
        Where no run is going: requests that the next one takes last, one at a time, since they
        were in generation in failed runs.
    """

    partition: str
    state: str
    table: str | None = None
    progress: dict[str, Any] | None = None
    changed_sampling: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests_alone: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values; the progress with its rates."""
        value: dict[str, Any] = {
            "partition": self.partition,
            "state": self.state,
            "table": self.table,
            "changed_sampling": self.changed_sampling,
            "requests_alone": self.requests_alone,
        }
        if self.progress is None:
            return value
        names = (
            "requests", "done", "completion_tokens", "seconds", "mean_batch", "cache_use",
            "drafted_tokens", "accepted_tokens", "adapter",
            "updated",
        )  # fmt: skip
        return value | {
            **{name: self.progress.get(name) for name in names},
            "tokens_per_second": self.tokens_per_second,
            "seconds_left": self.seconds_left,
        }

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens a second so far."""
        progress = self.progress or {"completion_tokens": 0, "seconds": 0}
        return progress["completion_tokens"] / max(progress["seconds"], 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Seconds to go, see `stages.progress.seconds_left`."""
        if (progress := self.progress) is None:
            return None
        return seconds_left(
            progress["requests"],
            progress["done"],
            progress["seconds"],
            progress["mean_batch"],
            progress.get("points", ()),
        )


def read_status(
    store: Store, sampling: SamplingSpec | None = None, until: str = OUTPUT
) -> list[PartitionStatus]:
    """How far each partition is that was begun, by key.

    Parameters
    ----------
    sampling
        The dataset's; without it, no partition's sampling is compared with it.
    until
        The last table that counts: a partition is finished once it and those before it are.
    """
    keys = sorted({key for table in TABLES for key in store.partition_keys(table)})
    sliced = set(store.partition_keys(SLICES))
    found = store.read_many(lambda key: _status(store, key, key in sliced, until), keys)
    if sampling is None:
        return found
    prompts = (store.partition(PROMPTS, key) for key in keys)
    manifests = store.read_many(Partition.sound_manifest, prompts)
    changed = (differences(sampling, stored_changes(manifest)) for manifest in manifests)
    return [
        replace(each, changed_sampling=changes)
        for each, changes in zip(found, changed, strict=True)
    ]


def _status(store: Store, key: str, is_sliced: bool, until: str) -> PartitionStatus:
    tables = TABLES[: TABLES.index(until) + 1]
    answering = _answering(store, key, is_sliced) if COMPLETIONS in tables else None
    status = answering or _first_incomplete(store, key, tables)
    if status.state != STOPPED or status.table != COMPLETIONS:
        return status
    stopped = [store.partition(COMPLETIONS, key), *(store.slices(key) if is_sliced else [])]
    return replace(
        status, requests_alone=sum(len(suspects(read_failures(each))) for each in stopped)
    )


def _answering(store: Store, key: str, is_sliced: bool) -> PartitionStatus | None:
    """How far the completions are, where a run works on them or left them unfinished."""
    progress = read_progress(store.partition(COMPLETIONS, key))
    if progress is None and is_sliced:
        records = [record for each in store.slices(key) if (record := read_progress(each))]
        if records:
            state = RUNNING if any(map(is_alive, records)) else STOPPED
            return PartitionStatus(key, state, COMPLETIONS, add_up(records))
    if progress is not None:
        state = RUNNING if is_alive(progress) else STOPPED
        return PartitionStatus(key, state, COMPLETIONS, progress)
    return None


def _first_incomplete(store: Store, key: str, tables: Sequence[str]) -> PartitionStatus:
    """How far a partition is by what its tables' manifests say."""
    for table in tables:
        manifest = store.partition(table, key).sound_manifest()
        if manifest is None or not manifest.complete:
            return PartitionStatus(key, _unfinished_state(manifest), table)
    return PartitionStatus(key, FINISHED)


def _unfinished_state(manifest: Manifest | None) -> str:
    """Whether a run is writing a table that is not complete."""
    writer = manifest and manifest.writer
    if not writer:
        return WAITING
    record = {"host": writer.host, "pid": writer.pid, "updated": writer.started}
    return RUNNING if is_alive(record) else STOPPED


def to_text(dataset: str, statuses: list[PartitionStatus], until: str = OUTPUT) -> str:
    """A line of counts, and one for each partition that is not finished.

    `until` is the last table that counted for the statuses.
    """
    counts = {state: sum(each.state == state for each in statuses) for state in STATES}
    listed = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    what = "" if until == OUTPUT else f" up to {until}"
    count = counted(len(statuses), "partition")
    head = f"{dataset}: {count}{what}{f': {listed}' if listed else ''}"
    rows = [_row(each) for each in statuses if each.state != FINISHED]
    table = [text_table(("partition", "state", "at", "how far", ""), rows)] if rows else []
    changed = [
        f"sampling changed for {each.partition}: {describe(each.changed_sampling)}"
        for each in statuses
        if each.changed_sampling
    ]
    alone = [
        f"{each.partition}: {run_alone_note(each.requests_alone)}"
        for each in statuses
        if each.requests_alone
    ]
    return "\n".join([head, *table, *changed, *alone])


def set_aside_text(dataset: str, store: Store) -> str | None:
    """A line on files that were found torn or foreign, which nothing reads; None without any."""
    sizes = store.set_aside_sizes()
    if not sizes:
        return None
    return (
        f"{dataset}: {len(sizes)} files set aside, {sum(sizes) / 1e6:,.1f} MB, in folders "
        f"{SET_ASIDE}; nothing reads them, delete them when you like"
    )


def _row(status: PartitionStatus) -> tuple[str, str, str, str, str]:
    where = (status.partition, status.state, status.table or OUTPUT)
    progress = status.progress
    if progress is None:
        return (*where, "", "")
    done, requests = progress["done"], progress["requests"]
    filled = BAR_WIDTH * done // max(requests, 1)
    bar = "#" * filled + "." * (BAR_WIDTH - filled)
    if not progress["seconds"]:
        return (*where, f"[{bar}] 0 of {requests}", "loading the model")
    left = status.seconds_left
    numbers = f"{status.tokens_per_second:,.1f} tokens/s, {progress['mean_batch']:.1f} at once"
    if status.state == RUNNING and progress.get("cache_use") is not None:
        numbers += f", {progress['cache_use']:.0%} of the cache"
    if drafted := progress.get("drafted_tokens"):
        numbers += f", {progress['accepted_tokens'] / drafted:.0%} of drafted tokens right"
    if status.state == RUNNING and progress.get("adapter") is not None:
        numbers += f", adapter {progress['adapter']}"
    if status.state == RUNNING:
        numbers += f", {'no estimate yet' if left is None else f'{format_seconds(left)} left'}"
    return (*where, f"[{bar}] {done} of {requests}", numbers)
