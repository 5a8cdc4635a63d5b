"""prompts → completions: one row for every turn of every sample a prompt asks for, run or reused.

The way of a partition, each step with a module of its own:

- `job`: the requests wanted (`wanted`) are compared by key with the completions stored for the
  partition, finished or not, and for the dataset's other partitions (`stored`). What is missing
  runs, equal requests once.
- `generation`: it goes through the engine, each request once it can run (`unanswered`); what the
  engine has (`in_flight`) is in the journal.
- `sink`: finished completions are committed every few rows or seconds.
- `finished`: the stored completions are dealt out to the requests that want them, sorted
  (`dealing`), and committed as the finished table.

What was answered stays stored, wherever that breaks off.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Any, Literal

from bulk_pipeline.engine.request import Status
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.stages.finished import finish_table, num_failed
from bulk_pipeline.stages.generation import run_requests
from bulk_pipeline.stages.generator_protocol import Generator
from bulk_pipeline.stages.job import Job
from bulk_pipeline.stages.journal import Journal
from bulk_pipeline.stages.progress import MAX_RUNS, Progress, ProgressFile
from bulk_pipeline.stages.sampling_changes import changes_metadata
from bulk_pipeline.stages.sink import PartSink
from bulk_pipeline.stages.stage_report import StageReport
from bulk_pipeline.stages.stored import begin_redo, drop_slices, other_partitions, slice_sources
from bulk_pipeline.stages.wanted import WantedRequests
from bulk_pipeline.storage.partition_writer import PartitionWriter
from bulk_pipeline.storage.schemas import COMPLETIONS, PROMPTS
from bulk_pipeline.storage.store import Store

log = logging.getLogger(__name__)


def complete_partition(
    spec: BulkInferenceSpec,
    store: Store,
    key: str,
    get_generator: Callable[[], Generator],
    model_fingerprint: str,
    cache_tokens: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: log.info("%s", progress),
    redo: Literal["none", "all"] | Collection[str] = "none",
    adapters: Mapping[str, str] | None = None,
) -> StageReport:
    """Answer every prompt of a partition and commit the completions.

    Parameters
    ----------
    get_generator
        Gives the engine; called only when something has to run.
    model_fingerprint
        What `request_key` hashes for the model.
    cache_tokens
        Size of the KV cache where it is set, to find prompts that cannot fit before loading.
    redo
        Stored completions that are to be made anew: all, or those of these statuses. A redo that
        was interrupted goes on in the next run, whatever that asks for.
    adapters
        What `request_key` hashes for each adapter that prompts may name.

    Raises
    ------
    ValueError
        If the prompts are missing, the cache is too small for the longest of them, or more
        requests than `output.max_error_rate` ended without an answer. What was answered stays.
    GenerationError
        If the model failed. What was answered stays; see `stages.journal` for the others.
    RuntimeError
        If another run is writing the partition.
    """
    prompts = store.partition(PROMPTS, key)
    prompts_manifest = prompts.complete_manifest()
    _check_cache(prompts_manifest.meta, cache_tokens)
    started = time.monotonic()
    partition = store.partition(COMPLETIONS, key)
    with partition.writer() as writer, closing(Journal(partition)) as journal:
        job = Job(prompts, prompts_manifest, writer, journal, model_fingerprint, adapters)
        _check_error_rate(spec, key, job.num_not_ready, job.num_requests)
        job.begin(redo)
        job.take_from_slices()
        job.plan(other_partitions(store, key) if not job.is_redo else [])
        progress = Progress(key, requests=job.num_to_run)
        sink = PartSink(spec.output, writer, progress, ProgressFile(partition), on_progress)
        runs = _run(job, sink, get_generator)
        if not job.is_finished():
            finish_table(job, spec.output.max_error_rate, runs)
        sink.file.delete()
        drop_slices(store, key)
        counts = writer.manifest.meta["status_counts"]
    _warn_of_losses(writer)
    _check_error_rate(spec, key, num_failed(counts), job.num_requests)
    return StageReport(
        partition=key,
        rows=job.num_requests,
        path=partition.path,
        metadata={
            "requests": job.num_requests,
            "requests_run": progress.done,
            **{f"requests_run_{reason}": count for reason, count in job.reasons.items()},
            "requests_reused": job.num_reused,
            "requests_copied": job.num_copied,
            **({"requests_from_slices": job.num_sliced} if job.num_sliced else {}),
            **({"requests_run_alone": len(job.alone)} if len(job.alone) else {}),
            "requests_shared": job.num_fan_out,
            "completion_tokens": progress.completion_tokens,
            **(progress.rates() if job.num_to_run else {}),  # nothing would plot as 0
            "seconds": time.monotonic() - started,
            **({"parts_lost": writer.lost} if writer.lost else {}),
            **({"files_set_aside": writer.set_aside} if writer.set_aside else {}),
            **changes_metadata(spec.sampling, job.changed_sampling),
            **_adapters_metadata(job.wanted),
            **{f"status_{status}": counts.get(status, 0) for status in sorted(Status)},
        },
    )


def complete_slice(
    spec: BulkInferenceSpec,
    store: Store,
    key: str,
    number: int,
    of: int,
    get_generator: Callable[[], Generator],
    model_fingerprint: str,
    cache_tokens: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: log.info("%s", progress),
    adapters: Mapping[str, str] | None = None,
) -> StageReport:
    """Answer one of `of` slices of a partition's requests, beside the completions.

    Slices may be answered at the same time, by any processes. `complete_partition` takes over what
    they answered, answers what is left, and commits the table.

    Parameters
    ----------
    number
        Of the slice, counted from 1.
    """
    prompts = store.partition(PROMPTS, key)
    prompts_manifest = prompts.complete_manifest()
    _check_cache(prompts_manifest.meta, cache_tokens)
    started = time.monotonic()
    partition = store.slice(key, number, of)
    with partition.writer() as writer, closing(Journal(partition)) as journal:
        job = Job(prompts, prompts_manifest, writer, journal, model_fingerprint, adapters)
        job.wanted.keep_slice(number, of)
        job.plan(slice_sources(writer))
        label = f"{key}, slice {number} of {of}"
        progress = Progress(label, requests=job.num_to_run)
        sink = PartSink(spec.output, writer, progress, ProgressFile(partition), on_progress)
        runs = _run(job, sink, get_generator)
        writer.commit(writer.manifest.parts, True, inputs=job.inputs, meta={"runs": runs})
    return StageReport(
        partition=key,
        rows=writer.manifest.num_rows,
        path=partition.path,
        metadata={
            "requests": int(job.wanted.ready.sum()),
            "requests_run": progress.done,
            "requests_copied": job.num_copied,
            "completion_tokens": progress.completion_tokens,
            **(progress.rates() if job.num_to_run else {}),
            "seconds": time.monotonic() - started,
        },
    )


def begin_slices(store: Store, key: str, redo: Literal["none", "all"] | Collection[str]) -> None:
    """Begin a redo of a partition before its slices are answered, which then know of it."""
    if set(redo if not isinstance(redo, str) else [redo]) <= {"none"}:
        return
    partition = store.partition(COMPLETIONS, key)
    with partition.writer() as writer, closing(Journal(partition)) as journal:
        begin_redo(writer, journal, redo)


def _run(job: Job, sink: PartSink, get_generator: Callable[[], Generator]) -> list[dict[str, Any]]:
    """Run what has to run; the records of this run and those before it."""
    runs = _runs_so_far(job.writer, sink.file)
    if job.num_to_run:
        label = sink.progress.partition
        log.info("%s: %d requests to run: %s", label, job.num_to_run, job.reasons)
        run_requests(job, sink, get_generator)
        runs.append(sink.progress.record())
    return runs[-MAX_RUNS:]


def _warn_of_losses(writer: PartitionWriter) -> None:
    for problem in writer.lost:
        log.warning("%s; the requests that it answered run again", problem)
    if writer.set_aside:
        log.warning("set aside files that were not as committed: %s", ", ".join(writer.set_aside))


def _runs_so_far(writer: PartitionWriter, file: ProgressFile) -> list[dict[str, Any]]:
    """The records of earlier runs, and of those of the slices."""
    runs = list(writer.manifest.meta.get("runs", []))
    runs += file.take_over(runs)
    if not writer.partition.slice_name:
        for each in writer.partition.store.slices(writer.partition.key):
            manifest = each.sound_manifest()
            runs += manifest.meta.get("runs", []) if manifest else []
            runs += ProgressFile(each).take_over(runs)
    return list({run["began"]: run for run in runs}.values())


def _check_cache(meta: dict[str, Any], cache_tokens: int | None) -> None:
    longest = meta.get("max_request_tokens", 0)
    if cache_tokens is not None and longest > cache_tokens:
        raise ValueError(
            f"generator.cache_tokens must hold the longest request, prompt and completion "
            f"together ({longest} tokens), got {cache_tokens}; raise it, or lower "
            f"sampling.max_new_tokens or generator.max_seq_len"
        )


def _adapters_metadata(wanted: WantedRequests) -> dict[str, Any]:
    """How many requests each adapter has; nothing where none is asked for."""
    counts = wanted.count_by_adapter()
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return {"requests_by_adapter": listed} if counts else {}


def _check_error_rate(spec: BulkInferenceSpec, key: str, failed: int, total: int) -> None:
    allowed = spec.output.max_error_rate
    if total and failed / total > allowed:
        raise ValueError(
            f"partition {key}: {failed} of {total} requests have no answer "
            f"({failed / total:.1%}), output.max_error_rate allows {allowed:.1%}; see the "
            f"status and error columns, repair the rows or raise it"
        )
