"""What a run would do, before it: rows, lengths, what is stored already, time and cost.

No model is loaded and no model library imported. What is counted is the stored prompts; where a
partition has none yet, its rows are counted, and the plan says so.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bulk_pipeline.engine.adapter_files import found_fingerprints
from bulk_pipeline.engine.model_files import device_extras, find_model, model_fingerprint
from bulk_pipeline.engine.request import READY
from bulk_pipeline.estimate import Estimate, Rate, estimate, find_last_run
from bulk_pipeline.lengths import Lengths
from bulk_pipeline.spec import PAGE_TOKENS, BulkInferenceSpec, FilesSource, GeneratorSettings
from bulk_pipeline.stages.journal import read_failures, run_alone_note, suspects
from bulk_pipeline.stages.partitions import NoFilesError, Slice, plan_partitions
from bulk_pipeline.stages.prefixes import later_turn_tokens, shared_prefixes
from bulk_pipeline.stages.sampling_changes import differences, stored_changes
from bulk_pipeline.stages.sources import FilesReader
from bulk_pipeline.stages.staleness import SOURCE_CHANGED, find_missing_or_stale
from bulk_pipeline.stages.stored import StoredAnswers, reasons, rows_with_answers
from bulk_pipeline.stages.wanted import WantedRequests
from bulk_pipeline.storage.manifest import Manifest
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.schemas import COMPLETIONS, PROMPTS, RAW_DATASET
from bulk_pipeline.storage.store import Store

READ_ROWS = 4096
MAX_EXAMPLES = 10  # rows that cannot run, named of each partition
AUTO = "auto"
PROMPTS_STALE = (SOURCE_CHANGED, "settings changed", f"{PROMPTS} is older")  # start a reason
TRIES = 3  # at reading completions that a run is writing


@dataclass(slots=True)
class PartitionPlan:
    """What a run over a partition would do.

    Attributes
    ----------
    state
        Why a run would change something, as `partitions status` says it; None if it would not.
    rows
        Input rows; None where they cannot be counted without reading the source.
    has_prompts
        Whether the numbers below were counted; else only `rows` is known.
    requests, not_ready
        Rows times samples times turns, and those of them that cannot run.
    duplicates
        Requests that ask the same as another one, and run with it.
    answered, in_others
        Requests with a stored answer, in this partition or only in another one.
    to_run
        Requests that the model has to answer, equal ones once.
    later_turns
        Those of them that are asked after an answer to the same row.
    run_prompt_tokens, shared_prefix_tokens
        Of those to run: tokens of their prompts, and how many of them stand in leading pages that
        an earlier one of them has too. Of a later turn, what follows the answer before it.
    most_new_tokens
        Their limits, added up.
    changed_sampling
        What differs from the dataset's sampling, until it is reset: see `sampling_changes`.
    adapters
        Requests that can run, by their adapter; empty where none asks for one.
    """

    partition: str
    state: str | None = None
    rows: int | None = None
    has_prompts: bool = False
    statuses: dict[str, int] = field(default_factory=dict)
    cannot_run: list[dict[str, Any]] = field(default_factory=list)
    lengths: Lengths = field(default_factory=Lengths)
    longest_request: int = 0
    requests: int = 0
    not_ready: int = 0
    duplicates: int = 0
    answered: int = 0
    in_others: int = 0
    to_run: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    later_turns: int = 0
    run_prompt_tokens: int = 0
    shared_prefix_tokens: int = 0
    most_new_tokens: int = 0
    changed_sampling: dict[str, dict[str, Any]] = field(default_factory=dict)
    adapters: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """What a run over some partitions of a dataset would do."""

    dataset: str
    partitions: list[PartitionPlan]
    engine: dict[str, Any]
    last_run: dict[str, Any] | None
    rate: Rate | None
    price_per_hour: float | None
    estimate: Estimate
    id_column: str | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        """The sum of a number over the partitions."""
        return sum(getattr(partition, name) or 0 for partition in self.partitions)

    def counts(self, name: str) -> dict[str, int]:
        """The sum of counts over the partitions."""
        total: Counter[str] = Counter()
        for partition in self.partitions:
            total.update(getattr(partition, name))
        return dict(sorted(total.items()))

    @property
    def lengths(self) -> Lengths:
        """Prompt lengths of all partitions."""
        lengths = Lengths()
        for partition in self.partitions:
            lengths.merge(partition.lengths.counts)
        return lengths


def plan_dataset(
    spec: BulkInferenceSpec,
    store: Store,
    settings: GeneratorSettings,
    keys: Sequence[str] = (),
    tokens_per_second: float | None = None,
    price_per_hour: float | None = None,
    max_examples: int | None = MAX_EXAMPLES,
) -> Plan:
    """Find out what a run would do.

    Parameters
    ----------
    settings
        The model.
    keys
        Partitions; all that the source or the tables have by default.
    tokens_per_second
        A rate, in place of the one that was measured last.
    price_per_hour
        Of the machine, in any currency; `output.price_per_hour` by default.
    max_examples
        Rows that cannot run, named of each partition; None names all.

    Raises
    ------
    KeyError
        If there is no such partition; one line that names those there are.
    ValueError
        If a table is damaged.
    """
    slices, notes = _slices(spec, store)
    known = [*slices, *sorted(set(store.partition_keys(RAW_DATASET)) - set(slices))]
    if unknown := [key for key in keys if key not in known]:
        raise KeyError(
            f"--partition: {spec.name} has no {', '.join(unknown)}; there are "
            f"{', '.join(known) or 'none'}"
        )
    fingerprint, adapters = current_fingerprint(settings), found_fingerprints(settings)
    notes += [
        f"the adapter {where} (generator.adapters.{name}) is not on this machine: every request "
        "for it counts as one to run"
        for name, where in settings.adapters.items()
        if name not in adapters
    ]
    if fingerprint is None:
        notes.append(
            f"the model {settings.model} is not on this machine, so that stored answers cannot be "
            "compared: every request counts as one to run"
        )
    wanted = {key: slices[key] for key in keys or known if key in slices}
    states = find_missing_or_stale(spec, store, settings, wanted) if wanted else {}
    partitions = []
    for key in keys or known:
        plan = plan_partition(
            spec, store, key, fingerprint, adapters=adapters, max_examples=max_examples
        )
        plan.state = states.get(key)
        if not plan.has_prompts and plan.rows is None and key in slices:
            plan.rows = _count_source_rows(spec, slices[key])
        _note_stale(plan)
        partitions.append(plan)
    last = find_last_run(store, fingerprint)
    rate = last.rate() if last else None
    if tokens_per_second is not None:
        rate = Rate(tokens_per_second, "given", rate.tokens_per_request if rate else None)
    price = spec.output.price_per_hour if price_per_hour is None else price_per_hour
    return Plan(
        dataset=spec.name,
        partitions=partitions,
        engine=engine_outlook(settings, partitions),
        last_run=last.record if last else None,
        rate=rate,
        price_per_hour=price,
        estimate=_estimate(spec, partitions, rate, price),
        id_column=spec.source.id_column,
        problems=_problems(settings, partitions),
        notes=notes,
    )


def plan_partition(
    spec: BulkInferenceSpec,
    store: Store,
    key: str,
    fingerprint: str | None,
    look_elsewhere: bool = True,
    adapters: Mapping[str, str] | None = None,
    max_examples: int | None = MAX_EXAMPLES,
) -> PartitionPlan:
    """What a run over one partition would do, as far as its stored tables tell.

    Parameters
    ----------
    fingerprint
        The model's; None where it is not known: then nothing counts as answered.
    look_elsewhere
        Whether to look for answers in the dataset's other partitions.
    adapters
        The fingerprints of the adapters that are on this machine, by name.
    max_examples
        Rows that cannot run, to be named; None names all.
    """
    plan = PartitionPlan(key)
    raw = _complete_manifest(store.partition(RAW_DATASET, key))
    plan.rows = raw.num_rows if raw else None
    prompts = store.partition(PROMPTS, key)
    changes = stored_changes(prompts.sound_manifest())
    plan.changed_sampling = differences(spec.sampling, changes)
    manifest = _complete_manifest(prompts)
    if manifest is None:
        plan.notes.append("no prompts yet, only rows are counted; materialise prompts to know more")
        return plan
    plan.has_prompts, plan.rows = True, manifest.num_rows
    plan.longest_request = manifest.meta.get("max_request_tokens", 0)
    _count_prompts(plan, prompts)
    if plan.statuses.keys() - {READY}:
        examples = _cannot_run(prompts, show_text=spec.output.preview)
        plan.cannot_run = list(islice(examples, max_examples))
    wanted = WantedRequests(prompts, fingerprint or "", adapters)
    plan.adapters = wanted.count_by_adapter()
    now = {"model": fingerprint, "sampling": manifest.inputs.get("sampling")}
    if used := wanted.adapter_fingerprints:
        now["adapters"] = used
    _count_requests(plan, store, prompts, now, wanted, fingerprint, look_elsewhere)
    return plan


def current_fingerprint(settings: GeneratorSettings) -> str | None:
    """The fingerprint of the model as it would run here; None where it is not on this machine."""
    folder = find_model(settings)
    if folder is None:
        return None
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and not _has_gpu())
    return model_fingerprint(folder, device_extras(settings, on_cpu))


def engine_outlook(
    settings: GeneratorSettings, partitions: Sequence[PartitionPlan]
) -> dict[str, Any]:
    """What the engine is set to, beside what the prompts ask of it."""
    longest = max((plan.longest_request for plan in partitions), default=0)
    longest_pages = -(-longest // PAGE_TOKENS) * PAGE_TOKENS
    batch = settings.max_batch_size
    return {
        "model": settings.model,
        "device": settings.device,
        "max_batch_size": AUTO if batch is None else batch,
        "cache_tokens": AUTO if settings.cache_tokens is None else settings.cache_tokens,
        "cache_type": settings.cache_type,
        "max_seq_len": AUTO if settings.max_seq_len is None else settings.max_seq_len,
        "longest_request": longest,
        "cache_tokens_of_longest": longest_pages,
        "most_cache_tokens_used": None if batch is None else longest_pages * batch,
    }


def add_sizes(plan: Plan, settings: GeneratorSettings) -> None:
    """Add what ``auto`` stands for on this machine: the batch, the cache, how weights are held.

    Looks at the machine and at the model's files, which imports PyTorch; no weights are loaded.
    """
    from bulk_pipeline.engine.doctor import examine

    report = examine(settings)
    longest = plan.engine["cache_tokens_of_longest"]
    plan.engine["sizes"] = {
        "device": report.device,
        "max_batch_size": report.batch_size,
        "cache_tokens": report.cache_tokens,
        "weights_held": report.weights_held,
        "longest_requests_at_once": (
            report.cache_tokens // longest if report.cache_tokens and longest else None
        ),
    }
    plan.problems += [problem.text for problem in report.problems if problem.stops]


def _complete_manifest(partition: Partition) -> Manifest | None:
    manifest = partition.sound_manifest()
    return manifest if manifest is not None and manifest.complete else None


def _slices(spec: BulkInferenceSpec, store: Store) -> tuple[dict[str, Slice], list[str]]:
    """The source's partitions; none, with a note, where it has no files."""
    try:
        return plan_partitions(spec, store), []
    except NoFilesError as error:
        return {}, [f"{error}; the plan is of what is stored"]


def _count_source_rows(spec: BulkInferenceSpec, slice_: Slice) -> int | None:
    """The rows of a slice, as far as files tell them; None for a whole Hugging Face dataset."""
    if not isinstance(spec.source, FilesSource):
        rows = None if slice_.stop is None else slice_.stop - slice_.start
    else:
        reader = FilesReader(spec.source, ())
        rows = sum(
            reader.num_rows(file) if file.stop is None else file.stop - file.start
            for file in slice_.files
        )
    limit = spec.source.limit
    return rows if limit is None or rows is None else min(rows, limit)


def _has_gpu() -> bool:
    """Whether the driver shows a GPU that this process may use; asks no library."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def _note_stale(plan: PartitionPlan) -> None:
    """Say where the stored prompts are not those that a run would use."""
    if plan.has_prompts and plan.state and plan.state.startswith(PROMPTS_STALE):
        plan.notes.append(
            f"{plan.state}: a run makes the prompts anew, the numbers are of the stored ones"
        )


def _count_prompts(plan: PartitionPlan, prompts: Partition) -> None:
    statuses: Counter[str] = Counter()
    for batch in prompts.read(["status", "prompt_tokens"], READ_ROWS):
        status = np.array(batch.column("status").to_pylist(), object)
        statuses.update(status.tolist())
        tokens = batch.column("prompt_tokens").fill_null(0).to_numpy()
        plan.lengths.add(tokens[status == READY] if len(status) else tokens)
    plan.statuses = dict(sorted(statuses.items()))


def _cannot_run(prompts: Partition, show_text: bool) -> Iterator[dict[str, Any]]:
    """The rows that cannot run, and why."""
    names = ["row_index", "row_id", "status", "prompt_tokens", "error"]
    for batch in prompts.read(names, READ_ROWS):
        for row in batch.to_pylist() if set(batch.column("status").to_pylist()) != {READY} else ():
            if row["status"] == READY:
                continue
            yield row if show_text else {name: row[name] for name in names if name != "row_id"}


def _count_requests(
    plan: PartitionPlan,
    store: Store,
    prompts: Partition,
    now: dict[str, Any],
    wanted: WantedRequests,
    fingerprint: str | None,
    look_elsewhere: bool,
) -> None:
    plan.requests = len(wanted)
    plan.not_ready = len(wanted) - int(wanted.ready.sum())
    plan.duplicates = int(wanted.ready.sum()) - len(wanted.first_of_each(wanted.ready))
    partition = store.partition(COMPLETIONS, plan.partition)
    answers, stored = StoredAnswers(wanted), None
    if fingerprint is not None:
        answers, stored = _stored_answers(partition, wanted)
    missing = answers.missing()
    plan.answered = int((wanted.ready & ~missing).sum())
    if look_elsewhere and missing.any() and fingerprint is not None:
        found = _answered_elsewhere(store, plan.partition, wanted, answers)
        plan.in_others, missing = int(found.sum()), missing & ~found
    leaders = wanted.first_of_each(missing)
    plan.to_run = len(leaders)
    plan.most_new_tokens = int(wanted.limits[leaders].sum())
    parts = stored.stored if stored else []

    def has_row(numbers: np.ndarray) -> np.ndarray:
        rows, turns = wanted.row_index[numbers], wanted.turn[numbers]
        return rows_with_answers(prompts, partition, parts, rows, turns)

    alone = wanted.numbers_of(suspects(read_failures(partition)))
    if num_alone := len(np.intersect1d(leaders, alone)):
        plan.notes.append(run_alone_note(num_alone))
    made_with = stored.meta.get("made_with", {}) if stored else {}
    plan.reasons = reasons(leaders, answers, has_row, made_with, now)
    is_first = wanted.turn[leaders] == 0
    plan.later_turns = int((~is_first).sum())
    plan.run_prompt_tokens, plan.shared_prefix_tokens = shared_prefixes(
        prompts, wanted.row_index[leaders[is_first]]
    )
    later = leaders[~is_first]
    plan.run_prompt_tokens += later_turn_tokens(
        prompts, wanted.row_index[later], wanted.turn[later]
    )


def _stored_answers(
    partition: Partition, wanted: WantedRequests, known: StoredAnswers | None = None
) -> tuple[StoredAnswers, Manifest | None]:
    """Look through a partition; where a run replaces its parts meanwhile, once more."""
    for attempt in range(TRIES):
        answers, manifest = StoredAnswers(wanted, known), partition.sound_manifest()
        try:
            answers.look_into(partition, manifest.stored if manifest else [])
            break
        except (FileNotFoundError, ValueError):
            if attempt == TRIES - 1 or partition.sound_manifest() == manifest:
                raise
    return answers, manifest


def _answered_elsewhere(
    store: Store, own: str, wanted: WantedRequests, known: StoredAnswers
) -> np.ndarray:
    """Which of the requests without an answer have one in another partition, to be copied."""
    missing = known.missing()
    found = np.zeros_like(missing)
    for key in store.partition_keys(COMPLETIONS):
        if key == own or not (missing & ~found).any():
            continue
        try:
            answers, _ = _stored_answers(store.partition(COMPLETIONS, key), wanted, known)
        except (FileNotFoundError, ValueError):  # it is being written, or is damaged
            continue
        found |= missing & answers.is_answered
        known = answers
    return found


def _problems(settings: GeneratorSettings, partitions: Iterable[PartitionPlan]) -> list[str]:
    """What would stop a run before it begins."""
    cache = settings.cache_tokens
    return [
        f"{plan.partition}: generator.cache_tokens must hold the longest request, prompt and "
        f"completion together ({plan.longest_request} tokens), got {cache}; raise it, or lower "
        f"sampling.max_new_tokens or generator.max_seq_len"
        for plan in partitions
        if cache is not None and plan.longest_request > cache
    ]


def _estimate(
    spec: BulkInferenceSpec,
    partitions: Sequence[PartitionPlan],
    rate: Rate | None,
    price_per_hour: float | None,
) -> Estimate:
    """Rows without prompts count as one turn, with the longest answer."""
    uncounted = sum(
        (plan.rows or 0) * spec.sampling.num_samples for plan in partitions if not plan.has_prompts
    )
    requests = sum(plan.to_run for plan in partitions) + uncounted
    most = sum(plan.most_new_tokens for plan in partitions)
    most += uncounted * spec.sampling.max_new_tokens
    return estimate(requests, most, rate, price_per_hour)
